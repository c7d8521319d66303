#include "emulated.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <set>

namespace emulated {

namespace {

constexpr int kNoContents = 0xCB;               // the byte that fills new and freed memory
constexpr size_t kGranularity = 512;            // bytes, as in the caching allocator of CUDA
constexpr size_t kAddresses = size_t{1} << 40;  // bytes of address space of a device: released addresses do not return

char *tensor_addresses, *kernel_addresses;  // the same file, mapped without and with access

void* checked(void* address) {
  TORCH_CHECK(address != MAP_FAILED, "mmap: ", std::strerror(errno));
  return address;
}

// The rules of torch's caching allocators: a freed block is reused at once on its stream, which runs in order; never on
// another stream; after record_stream() not before the operations on that stream are complete.
class DeviceMemory final : public c10::DeviceAllocator {
 public:
  void initialize(int devices, size_t bytes_of_each) {
    const size_t bytes = kAddresses * std::max(devices, 1);
    const int file = memfd_create("emulated-device", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, bytes) == 0, "memfd_create: ", std::strerror(errno));
    auto map = [&](int access) {
      void* address = checked(mmap(nullptr, bytes, access, MAP_SHARED | MAP_NORESERVE, file, 0));
      madvise(address, bytes, MADV_DONTFORK);
      return static_cast<char*>(address);
    };
    tensor_addresses = map(PROT_NONE), kernel_addresses = map(PROT_READ | PROT_WRITE);
    close(file);
    states_ = std::vector<State>(devices);
    for (auto& state : states_) state.limit = bytes_of_each;
  }

  c10::DataPtr allocate(size_t requested) override {
    check_process();
    const auto stream = current_stream(current_device());
    const c10::Device device(kDeviceType, static_cast<c10::DeviceIndex>(stream.device));
    if (requested == 0) return {nullptr, device};
    const size_t bytes = (requested + kGranularity - 1) / kGranularity * kGranularity;
    auto* block = find(stream, bytes);
    if (block == nullptr) {
      release_cached(stream.device);
      block = find(stream, bytes);
    }
    std::lock_guard lock(mutex_);
    auto& stats = states_[stream.device].stats;
    TORCH_CHECK_WITH(OutOfMemoryError, block != nullptr, "emulated:", stream.device, " out of memory. Tried to ",
                     "allocate ", requested, " bytes; ", stats.allocated_bytes[0].current, " of ",
                     limit(stream.device).load(), " bytes are allocated");
    stats.allocated_bytes[0].increase(block->bytes);
    return {tensor_addresses + block->offset, block, [](void* context) { memory().free(context); }, device};
  }

  void copy_data(void* target, const void* source, size_t bytes) const override {
    Scheduler::instance().wait_for_device(current_device());
    std::memcpy(kernel_address(target), kernel_address(source), bytes);
  }

  void emptyCache(c10::MempoolId_t /*pool*/) override {
    for (int device = 0; device < device_count(); ++device) release_cached(device);
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    std::lock_guard lock(mutex_);
    auto* block = static_cast<Block*>(pointer.get_context());
    const StreamKey key{stream.device_index(), stream.id()};
    if (block != nullptr && key != block->stream) block->other_streams.insert(key);
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex_);
    return states_.at(device).stats;
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex_);
    states_.at(device).stats.allocated_bytes[0].reset_peak();
    states_.at(device).stats.reserved_bytes[0].reset_peak();
  }

  // Not `override`: older versions of torch do not declare it.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) {
    const size_t total = limit(device), reserved = getDeviceStats(device).reserved_bytes[0].current;
    return {total - std::min(total, reserved), total};
  }

  std::atomic<size_t>& limit(int device) { return states_.at(device).limit; }
  int devices() const { return static_cast<int>(states_.size()); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  bool initialized() override { return true; }
  void resetAccumulatedStats(c10::DeviceIndex /*device*/) override {}

  static DeviceMemory& memory() {
    static auto* memory = new DeviceMemory;
    return *memory;
  }

 private:
  struct Block {
    size_t offset, bytes;
    StreamKey stream;                   // that it was allocated for
    std::set<StreamKey> other_streams;  // by record_stream
  };

  struct FreedBlock {
    Block* block;
    std::vector<CompletionPtr> other_uses;
  };

  struct State {
    std::atomic<size_t> limit{0};
    size_t end = 0;                                             // of the addresses in use
    std::map<StreamKey, std::multimap<size_t, Block*>> cached;  // by size, in the order of their release
    std::list<FreedBlock> in_use;                               // freed, but in use on other streams
    c10::CachingDeviceAllocator::DeviceStats stats;
  };

  Block* find(StreamKey stream, size_t bytes) {
    std::lock_guard lock(mutex_);
    auto& state = states_[stream.device];
    cache_unused(state);
    auto& cached = state.cached[stream];
    const auto smallest = cached.lower_bound(bytes);
    if (smallest != cached.end() && smallest->first <= 2 * bytes) {
      const auto newest = std::prev(cached.upper_bound(smallest->first));
      auto* block = newest->second;
      cached.erase(newest);
      // Not at free(): a GPU writes nothing then, and FSDP2 frees gradients that another stream still reads, as its
      // reduce-scatter stream waits for that stream before it allocates again.
      fill(*block, "fill freed memory");
      return block;
    }
    if (state.stats.reserved_bytes[0].current + bytes > state.limit || state.end + bytes > kAddresses) return nullptr;
    const auto offset = stream.device * kAddresses + std::exchange(state.end, state.end + bytes);
    auto* block = new Block{offset, bytes, stream, {}};
    state.stats.reserved_bytes[0].increase(bytes);
    fill(*block, "fill new memory");
    return block;
  }

  void free(void* context) {
    if (Scheduler::instance().is_forked()) return;
    auto* block = static_cast<Block*>(context);
    std::lock_guard lock(mutex_);
    auto& state = states_[block->stream.device];
    state.stats.allocated_bytes[0].decrease(block->bytes);
    FreedBlock freed{block, {}};
    for (const auto& stream : std::exchange(block->other_streams, {}))
      freed.other_uses.push_back(Scheduler::instance().enqueue(stream, {"record", {}}, true));
    state.in_use.push_back(std::move(freed));
    cache_unused(state);
  }

  // Makes the freed blocks that no other stream uses any more available to their stream.
  void cache_unused(State& state) {
    auto is_done = [](const CompletionPtr& use) { return Scheduler::instance().is_done(use); };
    state.in_use.remove_if([&](FreedBlock& freed) {
      if (!std::all_of(freed.other_uses.begin(), freed.other_uses.end(), is_done)) return false;
      state.cached[freed.block->stream].emplace(freed.block->bytes, freed.block);
      return true;
    });
  }

  static void fill(const Block& block, const char* name) {
    auto* address = kernel_addresses + block.offset;
    auto work = [address, bytes = block.bytes] { std::memset(address, kNoContents, bytes); };
    Scheduler::instance().enqueue(block.stream, {name, work}, true);
  }

  void release_cached(int device) {
    Scheduler::instance().wait_for_device(device);
    std::lock_guard lock(mutex_);
    auto& state = states_[device];
    cache_unused(state);
    for (const auto& [stream, blocks] : std::exchange(state.cached, {})) {
      for (const auto& [bytes, block] : blocks) {
        madvise(kernel_addresses + block->offset, bytes, MADV_REMOVE);
        state.stats.reserved_bytes[0].decrease(bytes);
        delete block;
      }
    }
  }

  std::mutex mutex_;
  std::vector<State> states_;
};

// Freed memory leaves the address space, so that a later access is a SIGSEGV. A copy that is queued holds its tensor.
class PinnedMemory final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::kCPU};
    void* address = checked(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    std::memset(address, kNoContents, bytes);
    std::lock_guard lock(mutex_);
    blocks_[static_cast<char*>(address)] = bytes;
    return {address, address, raw_deleter(), c10::kCPU};
  }

  bool contains(const char* address) {
    std::lock_guard lock(mutex_);
    const auto next = blocks_.upper_bound(const_cast<char*>(address));
    return next != blocks_.begin() && address < std::prev(next)->first + std::prev(next)->second;
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* context) {
      std::lock_guard lock(memory().mutex_);
      munmap(context, memory().blocks_.extract(static_cast<char*>(context)).mapped());
    };
  }

  void copy_data(void* target, const void* source, size_t bytes) const override { std::memcpy(target, source, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }  // a queued copy holds its memory
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  static PinnedMemory& memory() {
    static auto* memory = new PinnedMemory;
    return *memory;
  }

 private:
  std::mutex mutex_;
  std::map<char*, size_t> blocks_;  // bytes by address
};

}  // namespace

void* kernel_address(const void* device_address) {
  if (device_address == nullptr) return nullptr;
  return kernel_addresses + (static_cast<const char*>(device_address) - tensor_addresses);
}

int64_t accessible_address(int64_t address) {
  const auto offset = static_cast<size_t>(address - reinterpret_cast<int64_t>(tensor_addresses));
  return offset < kAddresses * device_count() ? reinterpret_cast<int64_t>(kernel_addresses + offset) : address;
}

void initialize(int devices, size_t bytes_of_each) { DeviceMemory::memory().initialize(devices, bytes_of_each); }
int device_count() { return DeviceMemory::memory().devices(); }
c10::DeviceAllocator* device_allocator() { return &DeviceMemory::memory(); }
size_t memory_limit(int device) { return DeviceMemory::memory().limit(device); }
void set_memory_limit(int device, size_t bytes) { DeviceMemory::memory().limit(device) = bytes; }
at::HostAllocator* pinned_allocator() { return &PinnedMemory::memory(); }
bool is_pinned(const void* address) { return PinnedMemory::memory().contains(static_cast<const char*>(address)); }

}  // namespace emulated
