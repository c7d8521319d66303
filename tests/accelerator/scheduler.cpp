#include "scheduler.h"

#include <Python.h>
#include <pthread.h>

#include <algorithm>
#include <exception>

namespace emulated {

namespace {
constexpr size_t kLongestQueue = 1000;      // as CUDA: then a launch blocks
constexpr size_t kLongestLog = 1'000'000;   // entries
constexpr size_t kMeasuredCopy = 1 << 20;   // bytes
constexpr size_t kAll = 1'000'000;          // steps
}  // namespace

WithoutGil::WithoutGil() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}

WithoutGil::~WithoutGil() {
  if (state_ != nullptr) PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
}

Scheduler& Scheduler::instance() {
  static auto* scheduler = new Scheduler;  // never destroyed: tensors may outlive static objects
  return *scheduler;
}

Scheduler::Scheduler() {
  pthread_atfork(
      [] { instance().mutex_.lock(); },
      [] { instance().mutex_.unlock(); },
      [] {
        auto& scheduler = instance();
        scheduler.forked_ = scheduler.stopped_ = scheduler.thread_.joinable();
        new (&scheduler.thread_) std::thread;  // the device's thread does not exist in the child
        scheduler.mutex_.unlock();
      });
}

void Scheduler::configure(uint64_t seed, Durations durations) {
  std::lock_guard lock(mutex_);
  random_.seed(seed);
  durations_ = durations;
  work_.notify_all();
}

int64_t Scheduler::new_stream() {
  std::lock_guard lock(mutex_);
  return ++streams_made_;
}

CompletionPtr Scheduler::enqueue(StreamKey key, Operation operation, HostWait host_wait) {
  auto completion = operation.completion;
  const bool may_wait = host_wait == HostWait::allowed && !is_device_thread();
  std::unique_lock lock(mutex_);
  if (stopped_) return completion;
  start();
  auto& stream = streams_[key];
  stream.push_back(std::move(operation));
  work_.notify_all();
  if (!may_wait) return completion;
  if (stream.size() > kLongestQueue) {
    progress(lock, kAll);
  } else if (!durations_.any()) {
    const auto drawn = random_() % 8;  // an early operation finds other faults than a late one
    if (drawn < 2) progress(lock, drawn == 0 ? kAll : 1);
  }
  return completion;
}

CompletionPtr Scheduler::last(StreamKey key) {
  std::lock_guard lock(mutex_);
  auto& stream = streams_[key];
  return stream.empty() ? nullptr : stream.back().completion;
}

void Scheduler::wait(const CompletionPtr& completion) {
  if (completion == nullptr) return;
  WithoutGil without_gil;
  std::unique_lock lock(mutex_);
  if (completion->done) return;
  awaited_.push_back(completion);
  work_.notify_all();
  progress_.wait(lock, [&] { return completion->done || stopped_; });
}

void Scheduler::wait_for_device(int device) {
  std::vector<CompletionPtr> completions;
  {
    std::lock_guard lock(mutex_);
    for (auto& [key, stream] : streams_)
      if (key.device == device && !stream.empty()) completions.push_back(stream.back().completion);
  }
  for (auto& completion : completions) wait(completion);
}

bool Scheduler::query(const CompletionPtr& completion) {
  if (completion == nullptr) return true;
  WithoutGil without_gil;
  std::unique_lock lock(mutex_);
  if (!completion->done && !durations_.any()) progress(lock, 1);
  return completion->done;
}

bool Scheduler::is_done(const CompletionPtr& completion) {
  std::lock_guard lock(mutex_);
  return completion->done;
}

// Lets the device run some operations while this thread waits.
void Scheduler::progress(std::unique_lock<std::mutex>& lock, size_t steps) {
  lock.unlock();
  WithoutGil without_gil;
  lock.lock();
  steps_ += steps;
  work_.notify_all();
  progress_.wait(lock, [&] { return steps_ == 0 || stopped_; });
}

std::string Scheduler::take_error(int device) {
  std::lock_guard lock(mutex_);
  return std::exchange(errors_[device], "");
}

std::vector<std::string> Scheduler::take_log() {
  std::lock_guard lock(mutex_);
  return std::exchange(log_, {});
}

bool Scheduler::is_device_thread() const { return std::this_thread::get_id() == thread_.get_id(); }

void Scheduler::start() {
  if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
}

void Scheduler::stop() {
  WithoutGil without_gil;
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
    work_.notify_all();
    progress_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

bool Scheduler::must_run() {
  awaited_.remove_if([](auto& completion) { return completion->done; });
  return durations_.any() || steps_ > 0 || !awaited_.empty();
}

double Scheduler::duration(const Operation& operation) const {
  if (!operation.run) return 0;
  if (operation.copied_bytes == 0) return durations_.kernel_seconds;
  if (durations_.copy_rate <= 0) return durations_.copy_seconds;
  const auto bytes = static_cast<double>(operation.copied_bytes);
  return durations_.copy_seconds + std::max(0.0, bytes / durations_.copy_rate - bytes / memcpy_rate_);
}

// Begins the operations whose dependencies are complete, and returns the streams whose operation can end now.
std::vector<StreamKey> Scheduler::runnable() {
  const auto now = Clock::now();
  std::vector<StreamKey> keys;
  for (auto& [key, stream] : streams_) {
    if (stream.empty()) continue;
    auto& operation = stream.front();
    if (operation.dependency != nullptr && !operation.dependency->done) continue;
    if (!operation.has_begun) {
      operation.has_begun = true;
      operation.end = now + std::chrono::duration_cast<Clock::duration>(
                                std::chrono::duration<double>(duration(operation)));
    }
    if (operation.end <= now) keys.push_back(key);
  }
  return keys;
}

void Scheduler::loop() {
  std::unique_lock lock(mutex_);
  while (!stopped_) {
    if (!must_run()) {
      work_.wait(lock);
      continue;
    }
    const auto keys = runnable();
    if (!keys.empty()) {
      run_next(lock, streams_[keys[random_() % keys.size()]]);
      if (steps_ > 0) --steps_;
    } else {
      auto next = Clock::time_point::max();
      for (auto& [key, stream] : streams_)
        if (!stream.empty() && stream.front().has_begun) next = std::min(next, stream.front().end);
      if (next == Clock::time_point::max()) {
        steps_ = 0;  // nothing can run
        progress_.notify_all();
        work_.wait(lock);
      } else {
        work_.wait_until(lock, next);
      }
    }
    progress_.notify_all();
  }
}

// Only this thread removes operations, so the first one of the stream stays valid without the lock.
void Scheduler::run_next(std::unique_lock<std::mutex>& lock, std::deque<Operation>& stream) {
  auto& operation = stream.front();
  const auto key = std::find_if(streams_.begin(), streams_.end(), [&](auto& s) { return &s.second == &stream; })->first;
  lock.unlock();
  std::string error;
  const auto start = Clock::now();
  try {
    if (operation.run) operation.run();
  } catch (const std::exception& exception) {
    error = operation.name + ": " + exception.what();
    error.resize(std::min(error.size(), error.find("\nException raised from")));  // the frames of a c10::Error
  }
  const std::chrono::duration<double> seconds = Clock::now() - start;
  operation.run = nullptr;  // frees what it holds, before the host sees the end
  lock.lock();
  if (operation.copied_bytes >= kMeasuredCopy) memcpy_rate_ = static_cast<double>(operation.copied_bytes) / seconds.count();
  if (!error.empty() && errors_[key.device].empty()) errors_[key.device] = error;
  if (log_.size() < kLongestLog)
    log_.push_back(std::to_string(key.device) + ":" + std::to_string(key.id) + " " + operation.name);
  operation.completion->time = Clock::now();
  operation.completion->done = true;
  stream.pop_front();
}

}  // namespace emulated
