// What torch asks of a device: current device and stream, events, generators.
#pragma once

#include "scheduler.h"

#include <ATen/core/Generator.h>

#include <string>

namespace emulated {

int current_device();
StreamKey current_stream();            // of the current device
StreamKey current_stream(int device);
std::string uuid_of(int device_on_node);

void check_process();                  // raises an error in a forked child
void wait(const CompletionPtr& end, int device);  // and raises the error of an earlier operation, if one failed

// Returns the seed of the next random operation of a generator of a device, and advances it.
uint64_t next_seed(const at::Generator& generator);
const at::Generator& default_generator(int device);

void resize_storage(c10::StorageImpl* storage, size_t bytes);  // keeps the contents

}  // namespace emulated
