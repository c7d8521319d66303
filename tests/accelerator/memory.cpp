#include "memory.h"

#include "runtime.h"
#include "scheduler.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <sstream>

namespace emulated {

namespace {

constexpr int kFreed = 0xCB;              // the byte that fills memory without contents
constexpr size_t kGranularity = 512;      // bytes, as in the allocator of CUDA
constexpr size_t kDefaultCapacity = size_t{8} << 30;
constexpr int kDefaultDevices = 2;

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

struct Mappings {
  char* tensors;
  char* kernels;
  size_t bytes;
};

const Mappings& mappings() {
  static const Mappings mapped = [] {
    const size_t bytes = capacity() * visible_devices().size();
    const int file = memfd_create("emulated-device", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, bytes) == 0, "memfd_create: ", std::strerror(errno));
    auto map = [&](int protection) {
      void* address = mmap(nullptr, bytes, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
      TORCH_CHECK(address != MAP_FAILED, "mmap of ", bytes, " bytes: ", std::strerror(errno));
      madvise(address, bytes, MADV_DONTFORK);
      return static_cast<char*>(address);
    };
    Mappings result{map(PROT_NONE), map(PROT_READ | PROT_WRITE), bytes};
    close(file);
    return result;
  }();
  return mapped;
}

struct Block {
  size_t offset, bytes;
  StreamKey stream;                // that it was allocated for
  std::set<StreamKey> other_uses;  // by record_stream
};

// The rules of torch's caching allocators: a freed block is reused at once on its stream, because the stream runs in
// order; never on another stream; and after record_stream() once the operations on that stream are complete.
class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t requested) override {
    check_process();
    const auto stream = current_stream();
    const c10::Device device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(stream.device));
    if (requested == 0) return {nullptr, device};
    const size_t bytes = (requested + kGranularity - 1) / kGranularity * kGranularity;
    auto* block = find(stream, bytes);
    if (block == nullptr) {
      Scheduler::instance().wait_for_device(stream.device);
      release_cached(stream.device);
      block = find(stream, bytes);
    }
    std::lock_guard lock(mutex_);
    auto& state = states_[stream.device];
    TORCH_CHECK_WITH(OutOfMemoryError, block != nullptr, "emulated:", stream.device, " is out of memory. Tried to allocate ",
                     requested, " bytes; ", state.stats.allocated_bytes[0].current, " of ", state.limit,
                     " bytes are allocated.");
    state.stats.allocated_bytes[0].increase(block->bytes);
    state.stats.active_bytes[0].increase(block->bytes);
    state.stats.requested_bytes[0].increase(block->bytes);
    state.stats.allocation[0].increase(1);
    state.stats.active[0].increase(1);
    return {mappings().tensors + block->offset, block, [](void* context) { memory().free(context); }, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void* target, const void* source, size_t bytes) const override {
    auto& scheduler = Scheduler::instance();
    scheduler.wait(scheduler.enqueue(current_stream(), {"copy_data", [=] {
      std::memcpy(kernel_address(target), kernel_address(source), bytes);
    }}));
  }

  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t /*pool*/ = {0, 0}) override {
    for (size_t device = 0; device < visible_devices().size(); ++device) {
      Scheduler::instance().wait_for_device(device);
      release_cached(device);
    }
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    auto* block = static_cast<Block*>(pointer.get_context());
    std::lock_guard lock(mutex_);
    const StreamKey key{stream.device_index(), stream.id()};
    if (block != nullptr && key != block->stream) block->other_uses.insert(key);
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex_);
    return states_[device].stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex_);
    for (auto* stat : sums(device)) stat->reset_accumulated();
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex_);
    for (auto* stat : sums(device)) stat->reset_peak();
  }

  // Not `override`: torch 2.8 does not declare it.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) {
    std::lock_guard lock(mutex_);
    auto& state = states_[device];
    return {state.limit - state.stats.reserved_bytes[0].current, state.limit};
  }

  void set_limit(int device, size_t bytes) {
    std::lock_guard lock(mutex_);
    states_[device].limit = std::min(bytes, capacity());
  }

  static DeviceMemory& memory() {
    static auto* memory = new DeviceMemory;
    return *memory;
  }

 private:
  struct FreedBlock {
    Block* block;
    std::vector<CompletionPtr> other_uses;
  };

  struct State {
    size_t limit = capacity();
    std::map<size_t, size_t> extents;                             // free bytes by offset
    std::map<StreamKey, std::multimap<size_t, Block*>> cached;    // by size, in the order of their release
    std::list<FreedBlock> in_use;                                 // freed, but in use on another stream
    c10::CachingDeviceAllocator::DeviceStats stats;
  };

  DeviceMemory() : states_(visible_devices().size()) {
    for (size_t device = 0; device < states_.size(); ++device)
      states_[device].extents[device * capacity()] = capacity();
  }

  std::vector<c10::CachingAllocator::Stat*> sums(int device) {
    auto& stats = states_[device].stats;
    return {&stats.allocated_bytes[0], &stats.active_bytes[0], &stats.reserved_bytes[0],
            &stats.requested_bytes[0], &stats.allocation[0],   &stats.active[0]};
  }

  Block* find(StreamKey stream, size_t bytes) {
    std::lock_guard lock(mutex_);
    auto& state = states_[stream.device];
    end_uses(state);
    auto& cached = state.cached[stream];
    auto smallest = cached.lower_bound(bytes);
    if (smallest != cached.end() && smallest->first <= 2 * bytes) {
      auto newest = std::prev(cached.upper_bound(smallest->first));
      auto* block = newest->second;
      cached.erase(newest);
      return block;
    }
    if (state.stats.reserved_bytes[0].current + bytes > state.limit) return nullptr;
    for (auto [offset, free_bytes] : state.extents) {
      if (free_bytes < bytes) continue;
      state.extents.erase(offset);
      if (free_bytes > bytes) state.extents[offset + bytes] = free_bytes - bytes;
      state.stats.reserved_bytes[0].increase(bytes);
      auto* block = new Block{offset, bytes, stream, {}};
      fill(*block, "fill new memory");
      return block;
    }
    return nullptr;
  }

  void free(void* context) {
    if (Scheduler::instance().is_forked()) return;
    auto* block = static_cast<Block*>(context);
    std::lock_guard lock(mutex_);
    auto& state = states_[block->stream.device];
    state.stats.allocated_bytes[0].decrease(block->bytes);
    state.stats.active_bytes[0].decrease(block->bytes);
    state.stats.requested_bytes[0].decrease(block->bytes);
    state.stats.allocation[0].decrease(1);
    state.stats.active[0].decrease(1);
    FreedBlock freed{block, {}};
    for (const auto& stream : std::exchange(block->other_uses, {}))
      freed.other_uses.push_back(Scheduler::instance().enqueue(stream, {"record", {}}, HostWait::forbidden));
    state.in_use.push_back(std::move(freed));
    end_uses(state);
  }

  // Fills the blocks that no stream uses any more, and makes them available to their stream.
  void end_uses(State& state) {
    state.in_use.remove_if([&](FreedBlock& freed) {
      for (auto& use : freed.other_uses)
        if (!Scheduler::instance().is_done(use)) return false;
      fill(*freed.block, "fill freed memory");
      state.cached[freed.block->stream].emplace(freed.block->bytes, freed.block);
      return true;
    });
  }

  void fill(const Block& block, const char* name) {
    char* address = mappings().kernels + block.offset;
    Scheduler::instance().enqueue(
        block.stream, {name, [address, bytes = block.bytes] { std::memset(address, kFreed, bytes); }}, HostWait::forbidden);
  }

  void release_cached(int device) {
    std::lock_guard lock(mutex_);
    auto& state = states_[device];
    end_uses(state);
    for (auto& [stream, blocks] : std::exchange(state.cached, {})) {
      for (auto& [bytes, block] : blocks) {
        // Its last filling may be queued: the pages are released in the order of the stream, too.
        Scheduler::instance().enqueue(stream, {"release memory", [address = mappings().kernels + block->offset, bytes] {
          madvise(address, bytes, MADV_REMOVE);
        }}, HostWait::forbidden);
        add_extent(state.extents, block->offset, bytes);
        state.stats.reserved_bytes[0].decrease(bytes);
        delete block;
      }
    }
  }

  static void add_extent(std::map<size_t, size_t>& extents, size_t offset, size_t bytes) {
    auto next = extents.lower_bound(offset);
    if (next != extents.end() && next->first == offset + bytes) {
      bytes += next->second;
      next = extents.erase(next);
    }
    if (next != extents.begin()) {
      auto previous = std::prev(next);
      if (previous->first + previous->second == offset) {
        previous->second += bytes;
        return;
      }
    }
    extents[offset] = bytes;
  }

  std::mutex mutex_;
  std::vector<State> states_;
};

// A freed block is reused once the copies that use it are complete; the newest first.
class PinnedMemory final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t requested) override {
    if (requested == 0) return {nullptr, c10::kCPU};
    const size_t page = sysconf(_SC_PAGESIZE);
    const size_t bytes = (requested + page - 1) / page * page;
    std::lock_guard lock(mutex_);
    auto free_block = std::find_if(free_.rbegin(), free_.rend(), [&](void* address) {
      return blocks_.at(address).bytes == bytes && !is_used(blocks_.at(address));
    });
    void* address;
    if (free_block != free_.rend()) {
      address = *free_block;
      free_.erase(std::next(free_block).base());
    } else {
      address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      TORCH_CHECK(address != MAP_FAILED, "mmap of ", bytes, " bytes: ", std::strerror(errno));
      blocks_[address] = {bytes, {}};
    }
    std::memset(address, kFreed, bytes);
    return {address, address, [](void* context) { memory().free(context); }, c10::kCPU};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* context) { memory().free(context); };
  }

  void copy_data(void* target, const void* source, size_t bytes) const override { default_copy_data(target, source, bytes); }

  bool record_event(void* /*address*/, void* context, c10::Stream stream) override {
    std::lock_guard lock(mutex_);
    auto block = blocks_.find(context);
    if (block == blocks_.end()) return false;
    block->second.uses.push_back(Scheduler::instance().enqueue(
        {stream.device_index(), stream.id()}, {"record", {}}, HostWait::forbidden));
    return true;
  }

  void empty_cache() override {
    std::lock_guard lock(mutex_);
    std::erase_if(free_, [&](void* address) {
      if (is_used(blocks_.at(address))) return false;
      munmap(address, blocks_.at(address).bytes);
      blocks_.erase(address);
      return true;
    });
  }

  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  bool contains(const void* address) {
    std::lock_guard lock(mutex_);
    auto next = blocks_.upper_bound(const_cast<void*>(address));
    if (next == blocks_.begin()) return false;
    auto& [begin, block] = *std::prev(next);
    return address < static_cast<char*>(begin) + block.bytes;
  }

  static PinnedMemory& memory() {
    static auto* memory = new PinnedMemory;
    return *memory;
  }

 private:
  struct PinnedBlock {
    size_t bytes;
    std::vector<CompletionPtr> uses;
  };

  void free(void* address) {
    std::lock_guard lock(mutex_);
    auto& block = blocks_.at(address);
    if (!is_used(block)) std::memset(address, kFreed, block.bytes);
    free_.push_back(address);
  }

  static bool is_used(PinnedBlock& block) {
    std::erase_if(block.uses, [](auto& use) { return Scheduler::instance().is_done(use); });
    return !block.uses.empty();
  }

  std::mutex mutex_;
  std::map<void*, PinnedBlock> blocks_;
  std::vector<void*> free_;
};

}  // namespace

// A number, or the UUID of a device, as in CUDA_VISIBLE_DEVICES; the first entry that is neither ends the list.
const std::vector<int>& visible_devices() {
  static const std::vector<int> devices = [] {
    const auto number = environment("EMULATED_DEVICES");
    const int count = number.empty() ? kDefaultDevices : std::stoi(number);
    std::vector<int> all;
    for (int device = 0; device < count; ++device) all.push_back(device);
    if (std::getenv("EMULATED_VISIBLE_DEVICES") == nullptr) return all;
    std::vector<int> visible;
    std::istringstream entries(environment("EMULATED_VISIBLE_DEVICES"));
    for (std::string entry; std::getline(entries, entry, ',');) {
      auto device = std::find_if(all.begin(), all.end(), [&](int number) {
        return entry == std::to_string(number) || entry == uuid_of(number);
      });
      if (device == all.end()) break;
      visible.push_back(*device);
    }
    return visible;
  }();
  return devices;
}

size_t capacity() {
  static const size_t bytes = [] {
    const auto limit = environment("EMULATED_MEMORY");
    return limit.empty() ? kDefaultCapacity : (std::stoull(limit) + kGranularity - 1) / kGranularity * kGranularity;
  }();
  return bytes;
}

void* kernel_address(const void* device_address) {
  if (device_address == nullptr) return nullptr;
  return mappings().kernels + (static_cast<const char*>(device_address) - mappings().tensors);
}

int device_of(const void* device_address) {
  const auto offset = static_cast<const char*>(device_address) - mappings().tensors;
  return offset < 0 || static_cast<size_t>(offset) >= mappings().bytes ? -1 : static_cast<int>(offset / capacity());
}

bool is_pinned(const void* address) { return PinnedMemory::memory().contains(address); }
c10::DeviceAllocator* device_allocator() { return &DeviceMemory::memory(); }
at::HostAllocator* pinned_allocator() { return &PinnedMemory::memory(); }
std::pair<size_t, size_t> memory_info(int device) { return DeviceMemory::memory().getMemoryInfo(device); }
void set_memory_limit(int device, size_t bytes) { DeviceMemory::memory().set_limit(device, bytes); }

}  // namespace emulated
