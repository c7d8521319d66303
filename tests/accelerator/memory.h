// Memory of the devices: a file mapped twice, once without access (the addresses that tensors carry), once with access
// (for the device's own kernels). Pinned memory: host memory that this module has allocated.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstddef>

namespace emulated {

// Both read the environment at the first call: EMULATED_DEVICES, EMULATED_VISIBLE_DEVICES, EMULATED_MEMORY.
const std::vector<int>& visible_devices();  // their numbers on this node
size_t capacity();                          // bytes of a device

void* kernel_address(const void* device_address);
int device_of(const void* device_address);  // -1: not memory of a device
bool is_pinned(const void* address);

c10::DeviceAllocator* device_allocator();
at::HostAllocator* pinned_allocator();
std::pair<size_t, size_t> memory_info(int device);  // free and total bytes
void set_memory_limit(int device, size_t bytes);

}  // namespace emulated
