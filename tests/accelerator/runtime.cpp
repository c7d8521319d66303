#include "runtime.h"

#include "memory.h"

#include <ATen/Utils.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <unistd.h>

#include <cstring>
#include <fstream>

namespace emulated {

namespace {

constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;
thread_local int this_device = 0;
thread_local std::map<int, int64_t> this_streams;  // the current stream of each device

int device_count() { return static_cast<int>(visible_devices().size()); }

void set_device(int device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "invalid device emulated:", device, "; ", device_count(),
              " devices are visible");
  this_device = device;
}

void raise_late_error(int device) {
  const auto error = Scheduler::instance().take_error(device);
  TORCH_CHECK(error.empty(), "emulated:", device, ": an earlier operation failed. ", error);
}

StreamKey key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

c10::Stream stream_of(StreamKey key) {
  return c10::Stream(c10::Stream::UNSAFE, {kDeviceType, static_cast<c10::DeviceIndex>(key.device)}, key.id);
}

using Event = CompletionPtr;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDeviceType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto previous = getDevice();
    setDevice(device);
    return previous;
  }
  c10::Device getDevice() const override { return {kDeviceType, static_cast<c10::DeviceIndex>(this_device)}; }
  void setDevice(c10::Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { this_device = device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    return stream_of(current_stream(device.has_index() ? device.index() : this_device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of({device.has_index() ? device.index() : this_device, 0});
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high_priority*/) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return stream_of({device.has_index() ? device.index() : this_device, Scheduler::instance().new_stream()});
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto previous = getStream(stream.device());
    this_streams[stream.device_index()] = stream.id();
    return previous;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const { return reinterpret_cast<void*>(stream.id()); }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }

  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex device, c10::EventFlag /*flag*/) const override {
    check_process();
    TORCH_CHECK(device == -1 || device == stream.device_index(), "the event belongs to emulated:", device,
                ", the stream to emulated:", stream.device_index());
    if (*event == nullptr) *event = new Event;
    *static_cast<Event*>(*event) = Scheduler::instance().enqueue(key_of(stream), {"record", {}});
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr)
      Scheduler::instance().enqueue(key_of(stream), {"wait", {}, 0, *static_cast<Event*>(event)});
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || Scheduler::instance().query(*static_cast<Event*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    Scheduler::instance().wait(*static_cast<Event*>(event));
    for (int device = 0; device < device_count(); ++device) raise_late_error(device);
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex /*device*/) const override {
    const auto &begin = *static_cast<Event*>(first), &end = *static_cast<Event*>(second);
    TORCH_CHECK(Scheduler::instance().is_done(begin) && Scheduler::instance().is_done(end), "an event is not complete");
    return std::chrono::duration<double, std::milli>(end->time - begin->time).count();
  }
  bool queryStream(const c10::Stream& stream) const override {
    return Scheduler::instance().query(Scheduler::instance().last(key_of(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait(Scheduler::instance().last(key_of(stream)), stream.device_index());
  }
  void synchronizeDevice(const c10::DeviceIndex device) const {
    check_process();
    Scheduler::instance().wait_for_device(device);
    raise_late_error(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    device_allocator()->recordStream(pointer, stream);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// As of CUDA, its state is a seed and the number of random operations since.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex device)
      : GeneratorImpl({kDeviceType, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    TORCH_CHECK(state.numel() == kStateBytes, "expected a state of ", kStateBytes, " bytes, got ", state.numel());
    std::memcpy(&seed_, state.data(), sizeof seed_);
    std::memcpy(&offset_, static_cast<const char*>(state.data()) + sizeof seed_, sizeof offset_);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({kStateBytes}, at::kByte);
    std::memcpy(state.mutable_data_ptr(), &seed_, sizeof seed_);
    std::memcpy(static_cast<char*>(state.mutable_data_ptr()) + sizeof seed_, &offset_, sizeof offset_);
    return state.getIntrusivePtr();
  }
  static c10::DeviceType device_type() { return kDeviceType; }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }
  static constexpr int64_t kStateBytes = 2 * sizeof(uint64_t);
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(this_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto previous = getCurrentDevice();
    set_device(device);
    return previous;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  at::Device getDeviceFromPtr(void* data) const override {
    return {kDeviceType, static_cast<c10::DeviceIndex>(device_of(data))};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? getCurrentDevice() : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetAllocator(kDeviceType, device_allocator());
  at::setHostAllocator(kDeviceType, pinned_allocator());
  return true;
}();

TORCH_LIBRARY(emulated, m) {
  m.def("configure",
        [](int64_t seed, double copy_rate, double copy_seconds, double kernel_seconds) {
          Scheduler::instance().configure(seed, {copy_rate, copy_seconds, kernel_seconds});
        });
  m.def("take_log", [] { return Scheduler::instance().take_log(); });
  m.def("stop", [] { Scheduler::instance().stop(); });
  m.def("is_forked", [] { return Scheduler::instance().is_forked(); });
  m.def("device_count", [] { return int64_t{device_count()}; });
  m.def("capacity", [] { return static_cast<int64_t>(capacity()); });
  m.def("uuid", [](int64_t device) { return uuid_of(visible_devices().at(device)); });
  m.def("set_memory_limit",
        [](int64_t device, int64_t bytes) { set_memory_limit(static_cast<int>(device), bytes); });
  m.def("memory", [](int64_t device) {
    const auto stats = device_allocator()->getDeviceStats(static_cast<c10::DeviceIndex>(device));
    const auto &allocated = stats.allocated_bytes[0], &reserved = stats.reserved_bytes[0];
    return std::vector<int64_t>{allocated.current, allocated.peak, reserved.current, reserved.peak};
  });
  m.def("memory_info", [](int64_t device) {
    const auto [free, total] = memory_info(static_cast<int>(device));
    return std::vector<int64_t>{static_cast<int64_t>(free), static_cast<int64_t>(total)};
  });
  m.def("reset_peak_memory", [](int64_t device) {
    device_allocator()->resetPeakStats(static_cast<c10::DeviceIndex>(device));
  });
  m.def("empty_cache", [] { device_allocator()->emptyCache(); });
  m.def("default_generator",
        [](int64_t device) { return default_generator(static_cast<int>(device)); });
}

}  // namespace

int current_device() { return this_device; }
StreamKey current_stream(int device) { return {device, this_streams[device]}; }
StreamKey current_stream() { return current_stream(this_device); }

void check_process() {
  TORCH_CHECK(!Scheduler::instance().is_forked(), "Cannot re-initialize emulated in forked subprocess. Use the 'spawn' "
              "start method of multiprocessing.");
}

void wait(const CompletionPtr& completion, int device) {
  check_process();
  Scheduler::instance().wait(completion);
  raise_late_error(device);
}

const at::Generator& default_generator(int device) {
  static const auto* generators = [] {
    auto* all = new std::vector<at::Generator>;
    for (int number = 0; number < device_count(); ++number)
      all->push_back(at::make_generator<Generator>(static_cast<c10::DeviceIndex>(number)));
    return all;
  }();
  return generators->at(device < 0 ? this_device : device);
}

uint64_t next_seed(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == kDeviceType, "Expected a 'emulated' device type for generator but found '",
              generator.device(), "'");
  auto* state = generator.unsafeGetGeneratorImpl();
  std::lock_guard lock(state->mutex_);
  std::seed_seq sequence{state->current_seed(), state->current_seed() >> 32, state->get_offset()};
  state->set_offset(state->get_offset() + 1);
  std::mt19937_64 random(sequence);
  return random();
}

std::string uuid_of(int device_on_node) {
  std::string boot, host(256, '\0');
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  gethostname(host.data(), host.size());
  boot += host.c_str() + std::to_string(device_on_node);
  std::seed_seq sequence(boot.begin(), boot.end());
  std::mt19937_64 random(sequence);
  char text[40];
  const uint64_t high = random(), low = random();
  std::snprintf(text, sizeof text, "%08x-%04x-%04x-%04x-%012llx", static_cast<unsigned>(high >> 32),
                static_cast<unsigned>(high >> 16 & 0xFFFF), static_cast<unsigned>(high & 0xFFFF),
                static_cast<unsigned>(low >> 48), static_cast<unsigned long long>(low & 0xFFFFFFFFFFFF));
  return text;
}

}  // namespace emulated
