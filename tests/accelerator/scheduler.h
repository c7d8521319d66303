// The streams of all devices of this process, and the thread that runs their operations.
//
// By default the device runs only while a host thread waits for it, and at random moments when the host enqueues. It
// chooses the stream of the next operation by a seed, so a run of the same calls repeats the same order, and any order
// that streams and events allow can occur. If copies or kernels have a duration, the device runs by the clock instead.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
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

// The end of one operation: events and host threads wait for it.
struct Completion {
  bool done = false;
  Clock::time_point time;
};
using CompletionPtr = std::shared_ptr<Completion>;

struct StreamKey {
  int device;
  int64_t id;
  auto operator<=>(const StreamKey&) const = default;
};

struct Operation {
  std::string name;
  std::function<void()> run;  // may be empty
  size_t copied_bytes = 0;    // between host and device, or two devices
  CompletionPtr dependency;   // of another stream
  CompletionPtr completion = std::make_shared<Completion>();
  bool has_begun = false;
  Clock::time_point end;
};

struct Durations {
  double copy_rate = 0;  // bytes per second; 0: unlimited
  double copy_seconds = 0;
  double kernel_seconds = 0;
  bool any() const { return copy_rate > 0 || copy_seconds > 0 || kernel_seconds > 0; }
};

enum class HostWait { allowed, forbidden };  // forbidden: in destructors, which may hold the GIL

class Scheduler {
 public:
  static Scheduler& instance();

  void configure(uint64_t seed, Durations durations);
  CompletionPtr enqueue(StreamKey stream, Operation operation, HostWait host_wait = HostWait::allowed);
  CompletionPtr last(StreamKey stream);
  void wait(const CompletionPtr& completion);
  void wait_for_device(int device);
  bool query(const CompletionPtr& completion);          // lets the device run an operation
  bool is_done(const CompletionPtr& completion);
  int64_t new_stream();

  // Returns the message of the first operation that failed since the last call, "" if none did.
  std::string take_error(int device);
  std::vector<std::string> take_log();
  void stop();
  bool is_device_thread() const;
  bool is_forked() const { return forked_; }  // this process is a child of the one that used the device

 private:
  Scheduler();
  void start();
  void loop();
  void run_next(std::unique_lock<std::mutex>& lock, std::deque<Operation>& stream);
  bool must_run();
  std::vector<StreamKey> runnable();
  void progress(std::unique_lock<std::mutex>& lock, size_t steps);
  double duration(const Operation& operation) const;

  std::mutex mutex_;
  std::condition_variable work_, progress_;
  std::map<StreamKey, std::deque<Operation>> streams_;
  std::list<CompletionPtr> awaited_;  // by host threads
  size_t steps_ = 0;                  // that a host thread has granted
  std::map<int, std::string> errors_;
  std::vector<std::string> log_;
  Durations durations_;
  std::mt19937_64 random_{0};
  std::thread thread_;
  bool stopped_ = false;
  bool forked_ = false;
  int64_t streams_made_ = 0;
  double memcpy_rate_ = 5e9;  // bytes per second, as last measured: a timed copy begins earlier by this
};

// Releases the GIL, if this thread holds it: an operation may need it.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();

 private:
  void* state_;
};

}  // namespace emulated
