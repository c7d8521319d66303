// The emulated device: its streams (scheduler.h), memory (memory.cpp), operators (kernels.cpp), and what torch asks of
// every device (runtime.cpp).
#pragma once

#include "scheduler.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Generator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <torch/version.h>

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 9  // without an interface of the allocators of all devices
namespace c10 {
using MempoolId_t = std::pair<unsigned long long, unsigned long long>;
struct DeviceAllocator : Allocator {
  virtual bool initialized() = 0;
  virtual void emptyCache(MempoolId_t) = 0;
  virtual void recordStream(const DataPtr&, Stream) = 0;
  virtual CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) = 0;
  virtual void resetAccumulatedStats(DeviceIndex) = 0;
  virtual void resetPeakStats(DeviceIndex) = 0;
};
}  // namespace c10
#endif

namespace emulated {

constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;

void initialize(int devices, size_t bytes_of_each);
int device_count();
void* kernel_address(const void* device_address);
int64_t accessible_address(int64_t address);
c10::DeviceAllocator* device_allocator();
size_t memory_limit(int device);
void set_memory_limit(int device, size_t bytes);
at::HostAllocator* pinned_allocator();
bool is_pinned(const void* address);

int current_device();
StreamKey current_stream(int device);
void check_process();                                    // raises an error in a forked child
void wait(const CompletionPtr& completion, int device);  // and raises the error of an earlier operation
const at::Generator& default_generator(int device);
uint64_t next_seed(at::Generator generator);  // of its next random operation

void resize_storage(c10::StorageImpl* storage, size_t bytes);  // keeps the contents

}  // namespace emulated
