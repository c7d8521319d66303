// What torch asks of every device: the current device and stream, events, generators; and the operators of the tests.
#include "emulated.h"

#include <ATen/Utils.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstring>

namespace emulated {

namespace {

thread_local int this_device = 0;
thread_local std::map<int, int64_t> this_streams;  // the current stream of each device

Scheduler& scheduler() { return Scheduler::instance(); }

c10::DeviceIndex set_device(int device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "invalid device emulated:", device, "; ", device_count(),
              " devices are visible");
  return static_cast<c10::DeviceIndex>(std::exchange(this_device, device));
}

void raise_late_error(int device) {
  const auto error = scheduler().take_error(device);
  TORCH_CHECK(error.empty(), "emulated:", device, ": an earlier operation failed. ", error);
}

int index_of(c10::Device device) { return device.has_index() ? device.index() : this_device; }
StreamKey key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

c10::Stream stream_of(StreamKey key) {
  return c10::Stream(c10::Stream::UNSAFE, {kDeviceType, static_cast<c10::DeviceIndex>(key.device)}, key.id);
}

// An event of torch is a pointer to the completion of its last record.
CompletionPtr& completion_of(void* event) { return *static_cast<CompletionPtr*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDeviceType; }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }
  c10::Device getDevice() const override { return {kDeviceType, static_cast<c10::DeviceIndex>(this_device)}; }
  void setDevice(c10::Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { this_device = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override { return {kDeviceType, set_device(device.index())}; }
  c10::Stream getStream(c10::Device device) const override { return stream_of(current_stream(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of({index_of(device), 0}); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    static std::atomic<int64_t> last_stream{0};
    return stream_of({index_of(device), ++last_stream});
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of({stream.device_index(), std::exchange(this_streams[stream.device_index()], stream.id())});
  }
  void* getStreamNativeHandle(const c10::Stream stream) const { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const c10::Stream& stream) const override {
    return scheduler().query(scheduler().last(key_of(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait(scheduler().last(key_of(stream)), stream.device_index());
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    check_process();
    scheduler().wait_for_device(device);
    raise_late_error(device);
  }

  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override { delete &completion_of(event); }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex device, c10::EventFlag) const override {
    check_process();
    TORCH_CHECK(device == -1 || device == stream.device_index(), "an event of emulated:", device,
                " cannot be recorded on a stream of emulated:", stream.device_index());
    if (*event == nullptr) *event = new CompletionPtr;
    completion_of(*event) = scheduler().enqueue(key_of(stream), {"record", {}});
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) scheduler().enqueue(key_of(stream), {"wait", {}, 0, completion_of(event)});
  }
  bool queryEvent(void* event) const override { return event == nullptr || scheduler().query(completion_of(event)); }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    scheduler().wait(completion_of(event));
    for (int device = 0; device < device_count(); ++device) raise_late_error(device);
  }
  double elapsedTime(void* begin, void* end, c10::DeviceIndex /*device*/) const override {
    TORCH_CHECK(scheduler().is_done(completion_of(begin)) && scheduler().is_done(completion_of(end)),
                "Both events must be completed before calculating elapsed time.");
    return std::chrono::duration<double, std::milli>(completion_of(end)->time - completion_of(begin)->time).count();
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
  void set_current_seed(uint64_t seed) override { state_[0] = seed, state_[1] = 0; }
  uint64_t current_seed() const override { return state_[0]; }
  void set_offset(uint64_t offset) override { state_[1] = offset; }
  uint64_t get_offset() const override { return state_[1]; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return state_[0];
  }
  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    TORCH_CHECK(state.numel() == sizeof state_, "expected a state of ", sizeof state_, " bytes, got ", state.numel());
    std::memcpy(state_, state.data(), sizeof state_);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const auto state = at::empty({sizeof state_}, at::kByte);
    std::memcpy(state.mutable_data_ptr(), state_, sizeof state_);
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    std::copy_n(state_, 2, copy->state_);
    return copy;
  }
  static c10::DeviceType device_type() { return kDeviceType; }
  uint64_t state_[2] = {c10::default_rng_seed_val, 0};
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(this_device); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return set_device(device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : set_device(device);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? getCurrentDevice() : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};

TORCH_LIBRARY(emulated, m) {
  m.def("initialize", [](int64_t devices, int64_t bytes_of_each) {
    initialize(static_cast<int>(devices), bytes_of_each);
    c10::SetAllocator(kDeviceType, device_allocator());
    at::setHostAllocator(kDeviceType, pinned_allocator());
    at::RegisterPrivateUse1HooksInterface(new Hooks);
  });
  m.def("configure", [](int64_t seed, double copy_rate, double copy_seconds, double kernel_seconds) {
    scheduler().configure(seed, {copy_rate, copy_seconds, kernel_seconds});
  });
  m.def("close_gate", [] { return scheduler().close_gate(current_stream(this_device)); });
  m.def("open_gate", [](int64_t number) { scheduler().open_gate(number); });
  m.def("take_log", [] { return scheduler().take_log(); });
  m.def("stop", [] { scheduler().stop(); });
  m.def("is_forked", [] { return scheduler().is_forked(); });
  m.def("device_count", [] { return int64_t{device_count()}; });
  m.def("set_memory_limit", [](int64_t device, int64_t bytes) { set_memory_limit(static_cast<int>(device), bytes); });
  m.def("memory_limit", [](int64_t device) { return static_cast<int64_t>(memory_limit(static_cast<int>(device))); });
  m.def("memory", [](int64_t device) {  // the allocated and the reserved bytes, and their peaks
    const auto stats = device_allocator()->getDeviceStats(static_cast<c10::DeviceIndex>(device));
    const auto &allocated = stats.allocated_bytes[0], &reserved = stats.reserved_bytes[0];
    return std::vector<int64_t>{allocated.current, reserved.current, allocated.peak, reserved.peak};
  });
  m.def("reset_peak_memory", [](int64_t device) {
    device_allocator()->resetPeakStats(static_cast<c10::DeviceIndex>(device));
  });
  m.def("accessible_address", accessible_address);
  m.def("empty_cache", [] { device_allocator()->emptyCache({0, 0}); });
  m.def("default_generator", [](int64_t device) { return default_generator(static_cast<int>(device)); });
}

}  // namespace

int current_device() { return this_device; }
StreamKey current_stream(int device) { return {device, this_streams[device]}; }

void check_process() {
  TORCH_CHECK(!scheduler().is_forked(), "Cannot re-initialize emulated in forked subprocess. To use emulated with "
              "multiprocessing, you must use the 'spawn' start method");
}

void wait(const CompletionPtr& completion, int device) {
  check_process();
  scheduler().wait(completion);
  raise_late_error(device);
}

const at::Generator& default_generator(int device) {
  static const auto* generators = [] {
    auto* all = new std::vector<at::Generator>;
    for (int index = 0; index < device_count(); ++index)
      all->push_back(at::make_generator<Generator>(static_cast<c10::DeviceIndex>(index)));
    return all;
  }();
  return generators->at(device < 0 ? this_device : device);
}

uint64_t next_seed(at::Generator generator) {
  TORCH_CHECK(generator.device().type() == kDeviceType, "Expected a 'emulated' device type for generator but found '",
              generator.device(), "'");
  std::lock_guard lock(generator.mutex());
  auto* state = generator.get<Generator>()->state_;
  std::seed_seq sequence{state[0], state[0] >> 32, state[1]++};
  return std::mt19937_64(sequence)();
}

}  // namespace emulated
