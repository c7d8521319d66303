// The streams of all devices, and the thread that runs their operations.
#pragma once

#include <Python.h>
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace emulated {

using Clock = std::chrono::steady_clock;

struct StreamKey {
  int device;
  int64_t id;
  auto operator<=>(const StreamKey&) const = default;
};

// The end of one operation: events and host threads wait for it.
struct Completion {
  bool is_done = false;
  Clock::time_point time;
};
using CompletionPtr = std::shared_ptr<Completion>;

struct Operation {
  std::string name;
  std::function<void()> run;  // empty: an event, or a wait for one
  size_t copied_bytes = 0;    // between host and device, or two devices
  CompletionPtr dependency;   // on another stream
  CompletionPtr completion = std::make_shared<Completion>();
  bool has_begun = false;
  Clock::time_point end;
};

struct Durations {
  double copy_rate = 0, copy_seconds = 0, kernel_seconds = 0;  // copy_rate: bytes per second; 0: unlimited
  bool any() const { return copy_rate > 0 || copy_seconds > 0 || kernel_seconds > 0; }
};

// Releases the GIL if this thread holds it: an operation of the device may need it.
class WithoutGil {
 public:
  WithoutGil() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() { if (state_ != nullptr) PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

// By default the device runs only while a host thread waits for it, and at random moments when the host enqueues. It
// chooses the stream of the next operation by a seed: a run of the same calls repeats the same order, and each order
// that streams and events allow can occur. If operations have a duration, the device runs by the clock instead.
class Scheduler {
 public:
  static Scheduler& instance() {
    static auto* scheduler = new Scheduler;  // never destroyed: tensors may outlive static objects
    return *scheduler;
  }

  void configure(uint64_t seed, Durations durations) {
    std::lock_guard lock(mutex_);
    random_.seed(seed);
    durations_ = durations;
    work_.notify_all();
  }

  // In destructors, which may hold locks and the GIL, the host must not wait for the device.
  CompletionPtr enqueue(StreamKey key, Operation operation, bool in_destructor = false) {
    auto completion = operation.completion;
    size_t steps = 0;
    {
      std::lock_guard lock(mutex_);
      if (is_stopped_) return completion;
      if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
      auto& stream = streams_[key];
      stream.push_back(std::move(operation));
      work_.notify_all();
      if (in_destructor || std::this_thread::get_id() == thread_.get_id()) return completion;
      const auto drawn = durations_.any() ? 2 : random_() % 8;  // an early operation shows other faults than a late one
      if (drawn == 0 || stream.size() > kLongestQueue) steps = kAllSteps;
      if (drawn == 1) steps = 1;
    }
    if (steps > 0) let_run(steps);
    return completion;
  }

  // Blocks a stream until the host opens the gate, like a kernel that waits for another process.
  int64_t close_gate(StreamKey key) {
    const auto gate = std::make_shared<Completion>();
    enqueue(key, {"gate", {}, 0, gate});
    std::lock_guard lock(mutex_);
    gates_[++last_gate_] = gate;
    return last_gate_;
  }

  void open_gate(int64_t number) {
    std::lock_guard lock(mutex_);
    gates_.at(number)->is_done = true;
    gates_.erase(number);
    work_.notify_all();
  }

  CompletionPtr last(StreamKey key) {  // null if the stream is empty
    std::lock_guard lock(mutex_);
    const auto& stream = streams_[key];
    return stream.empty() ? nullptr : stream.back().completion;
  }

  void wait(const CompletionPtr& completion) {
    WithoutGil without_gil;
    std::unique_lock lock(mutex_);
    if (completion == nullptr || completion->is_done) return;
    awaited_.push_back(completion);
    work_.notify_all();
    progress_.wait(lock, [&] { return completion->is_done || is_stopped_; });
  }

  void wait_for_device(int device) {
    std::vector<CompletionPtr> completions;
    {
      std::lock_guard lock(mutex_);
      for (const auto& [key, stream] : streams_)
        if (key.device == device && !stream.empty()) completions.push_back(stream.back().completion);
    }
    for (const auto& completion : completions) wait(completion);
  }

  bool query(const CompletionPtr& completion) {  // a host that polls lets the device run
    if (completion == nullptr || is_done(completion)) return true;
    if (!durations_.any()) let_run(1);
    return is_done(completion);
  }

  bool is_done(const CompletionPtr& completion) {
    std::lock_guard lock(mutex_);
    return completion->is_done;
  }

  std::string take_error(int device) {  // of the first operation that failed since the last call; "" if none did
    std::lock_guard lock(mutex_);
    return std::exchange(errors_[device], "");
  }

  std::vector<std::string> take_log() {
    std::lock_guard lock(mutex_);
    return std::exchange(log_, {});
  }

  void stop() {
    WithoutGil without_gil;
    {
      std::lock_guard lock(mutex_);
      is_stopped_ = true;
      work_.notify_all();
      progress_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
  }

  bool is_forked() const { return is_forked_; }  // this process is a child of the one that used the device

 private:
  static constexpr size_t kLongestQueue = 1000;     // operations; as with CUDA, a launch then blocks
  static constexpr size_t kLongestLog = 1'000'000;  // operations
  static constexpr size_t kMeasuredCopy = 1 << 20;  // bytes from which a copy measures the rate of memcpy
  static constexpr size_t kAllSteps = 1'000'000;

  // A child has neither the thread nor the memory of the device, as with CUDA.
  Scheduler() {
    pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); }, [] {
      auto& scheduler = instance();
      scheduler.is_forked_ = scheduler.is_stopped_ = scheduler.thread_.joinable();
      new (&scheduler.thread_) std::thread;
      scheduler.mutex_.unlock();
    });
  }

  // Lets the device run some operations while this thread waits.
  void let_run(size_t steps) {
    WithoutGil without_gil;
    std::unique_lock lock(mutex_);
    steps_ += steps;
    work_.notify_all();
    progress_.wait(lock, [&] { return steps_ == 0 || is_stopped_; });
  }

  void loop() {
    std::unique_lock lock(mutex_);
    while (!is_stopped_) {
      awaited_.remove_if([](const auto& completion) { return completion->is_done; });
      const bool must_run = durations_.any() || steps_ > 0 || !awaited_.empty();
      const auto runnable = must_run ? begin_operations() : std::vector<StreamKey>{};
      if (runnable.empty()) {
        wait_for_work(lock, must_run);
      } else {
        run_first(lock, runnable[random_() % runnable.size()]);
        if (steps_ > 0) --steps_;
      }
      progress_.notify_all();
    }
  }

  // Begins the operations whose dependencies are complete, and returns the streams whose operation can run now.
  std::vector<StreamKey> begin_operations() {
    const auto now = Clock::now();
    std::vector<StreamKey> runnable;
    for (auto& [key, stream] : streams_) {
      if (stream.empty()) continue;
      auto& operation = stream.front();
      if (operation.dependency != nullptr && !operation.dependency->is_done) continue;
      if (!std::exchange(operation.has_begun, true)) operation.end = now + duration(operation);
      if (operation.end <= now) runnable.push_back(key);
    }
    return runnable;
  }

  Clock::duration duration(const Operation& operation) const {
    const auto bytes = static_cast<double>(operation.copied_bytes);
    double seconds = operation.run ? bytes > 0 ? durations_.copy_seconds : durations_.kernel_seconds : 0;
    // The copy itself, by memcpy, ends at the time that the rate asks for.
    if (durations_.copy_rate > 0) seconds += std::max(0.0, bytes / durations_.copy_rate - bytes / memcpy_rate_);
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  }

  void wait_for_work(std::unique_lock<std::mutex>& lock, bool must_run) {
    auto end = Clock::time_point::max();
    for (const auto& [key, stream] : streams_)
      if (!stream.empty() && stream.front().has_begun) end = std::min(end, stream.front().end);
    if (must_run && end != Clock::time_point::max()) {
      work_.wait_until(lock, end);
      return;
    }
    steps_ = 0;
    progress_.notify_all();
    work_.wait(lock);
  }

  // Only this thread removes operations, so the first one of the stream stays valid without the lock.
  void run_first(std::unique_lock<std::mutex>& lock, StreamKey key) {
    auto& operation = streams_[key].front();
    lock.unlock();
    std::string error;
    const auto start = Clock::now();
    try {
      if (operation.run) operation.run();
    } catch (const std::exception& exception) {
      error = operation.name + ": " + exception.what();
      error.resize(std::min(error.size(), error.find("\nException raised from")));  // the frames of a c10::Error
    }
    const std::chrono::duration<double> elapsed = Clock::now() - start;
    operation.run = nullptr;  // frees what it holds, before the host sees the end
    lock.lock();
    if (operation.copied_bytes >= kMeasuredCopy) memcpy_rate_ = operation.copied_bytes / elapsed.count();
    if (errors_[key.device].empty()) errors_[key.device] = error;
    if (log_.size() < kLongestLog)
      log_.push_back(std::to_string(key.device) + ":" + std::to_string(key.id) + " " + operation.name);
    operation.completion->time = Clock::now();
    operation.completion->is_done = true;
    streams_[key].pop_front();
  }

  std::mutex mutex_;
  std::condition_variable work_, progress_;
  std::map<StreamKey, std::deque<Operation>> streams_;
  std::list<CompletionPtr> awaited_;  // by host threads
  std::map<int64_t, CompletionPtr> gates_;  // closed ones
  int64_t last_gate_ = 0;
  size_t steps_ = 0;                  // that host threads allow
  std::map<int, std::string> errors_;
  std::vector<std::string> log_;
  Durations durations_;
  std::mt19937_64 random_{0};
  std::thread thread_;
  bool is_stopped_ = false, is_forked_ = false;
  double memcpy_rate_ = 5e9;  // bytes per second, as last measured
};

}  // namespace emulated
