// The operators: views and allocations on the host, copies, and all others by the CPU's kernels on the second mapping.
#include "memory.h"
#include "runtime.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <map>

namespace emulated {

namespace {

using Stack = torch::jit::Stack;

bool is_on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

at::Tensor with_flags_of(const at::Tensor& source, const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  if (source.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (source.is_conj()) impl->_set_conj(true);
  if (source.is_neg()) impl->_set_neg(true);
  return tensor;
}

// A CPU tensor over the memory of a tensor of the device. It does not keep that memory allocated, as a kernel on a GPU
// does not. A CPU tensor is an argument by value, copied at the call.
at::Tensor kernel_view(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (!is_on_device(tensor)) return with_flags_of(tensor, tensor.resolve_conj().resolve_neg().clone());
  return with_flags_of(tensor, at::from_blob(kernel_address(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                                             tensor.options().device(at::kCPU)));
}

at::Tensor meta_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  return with_flags_of(
      tensor, at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).pinned_memory(false)));
}

template <class Function>
c10::IValue map_tensors(const c10::IValue& value, Function function) {
  if (value.isTensor()) return function(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> tensors;
    for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(function(tensor));
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      tensors.push_back(tensor.has_value() ? std::optional(function(*tensor)) : std::nullopt);
    return tensors;
  }
  return value;
}

template <class Function>
void for_each_tensor(const c10::IValue& value, Function function) {
  map_tensors(value, [&](const at::Tensor& tensor) {
    if (tensor.defined()) function(tensor);
    return tensor;
  });
}

bool is_tensors(const c10::Type& type) {
  if (auto list = type.cast<c10::ListType>()) return list->getElementType()->kind() == c10::TypeKind::TensorType;
  return type.kind() == c10::TypeKind::TensorType;
}

bool is_generator(const c10::Type& type) {
  auto optional = type.cast<c10::OptionalType>();
  return optional != nullptr && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

Stack run(const c10::OperatorHandle& op, Stack arguments, c10::DispatchKey key) {
  at::AutoDispatchBelowADInplaceOrView without_autograd;
  op.redispatchBoxed(c10::DispatchKeySet(key), &arguments);
  return arguments;
}

void copy_results(const c10::IValue& results, const c10::IValue& targets) {
  std::vector<at::Tensor> tensors;
  for_each_tensor(results, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  size_t index = 0;
  for_each_tensor(targets, [&](const at::Tensor& target) {
    const auto& tensor = tensors.at(index++);
    TORCH_CHECK(tensor.sizes() == target.sizes(), "the kernel of the CPU returned a tensor of shape ", tensor.sizes(),
                ", that of the meta device one of shape ", target.sizes());
    target.copy_(tensor);
  });
}

// A call of an operator without a kernel of its own.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack arguments) : op_(op), arguments_(std::move(arguments)) {
    int device = -1;
    for (size_t index = 0; index < arguments_.size(); ++index) {
      const auto& argument = arguments_[index];
      if (argument.isDevice() && argument.toDevice().has_index()) device = argument.toDevice().index();
      for_each_tensor(argument, [&](const at::Tensor& tensor) {
        if (is_on_device(tensor)) {
          TORCH_CHECK(device == -1 || device == tensor.device().index(), "Expected all tensors to be on the same device, "
                      "but found at least two devices, emulated:", device, " and ", tensor.device(), "! (", name(), ")");
          device = tensor.device().index();
        } else {
          TORCH_CHECK(tensor.dim() == 0 || argument.isOptionalTensorList(), "Expected all tensors to be on the same "
                      "device, but found a tensor on the CPU! (", name(), ")");
        }
      });
    }
    device_ = {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(device == -1 ? current_device() : device)};
  }

  // The kernel runs later if the shapes of its results are known now, from the kernel of the meta device.
  Stack run_on_stream() {
    TORCH_CHECK_NOT_IMPLEMENTED(op_.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), "emulated: ", name(),
                                " has no kernel for the CPU, which the emulated device would run");
    c10::OptionalDeviceGuard guard(device_);
    seed_generators();
    const bool has_meta = op_.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta);
    if (returns_tensors_only() && (has_meta || !has_new_results())) {
      auto results = has_meta ? meta_results() : arguments_with_alias();
      if (results.has_value()) return enqueue(std::move(*results));
    }
    return run_now();
  }

 private:
  const std::string& name() const { return op_.schema().name(); }

  const c10::Argument& argument(size_t index) const { return op_.schema().arguments()[index]; }

  bool returns_tensors_only() const {
    const auto& returns = op_.schema().returns();
    return std::all_of(returns.begin(), returns.end(), [](auto& result) { return is_tensors(*result.type()); });
  }

  bool has_new_results() const {
    const auto& returns = op_.schema().returns();
    return std::any_of(returns.begin(), returns.end(), [](auto& result) { return result.alias_info() == nullptr; });
  }

  void seed_generators() {
    for (size_t index = 0; index < arguments_.size(); ++index) {
      if (!is_generator(*argument(index).type())) continue;
      auto generator = arguments_[index].isNone() ? default_generator(device_.index()) : arguments_[index].toGenerator();
      arguments_[index] = at::detail::createCPUGenerator(next_seed(generator));
    }
  }

  // The argument that is returned as this result; -1 if the result is new.
  int64_t returned_argument(size_t result) const {
    const auto* alias = op_.schema().returns()[result].alias_info();
    if (alias == nullptr) return -1;
    TORCH_CHECK_NOT_IMPLEMENTED(alias->isWrite(), "emulated: the view ", name(), " has no kernel");
    for (size_t index = 0; index < arguments_.size(); ++index)
      if (argument(index).alias_info() != nullptr && *argument(index).alias_info() == *alias) return index;
    TORCH_CHECK_NOT_IMPLEMENTED(false, "emulated: ", name(), " returns an unknown alias");
  }

  std::optional<Stack> arguments_with_alias() const {
    Stack results;
    for (size_t result = 0; result < op_.schema().returns().size(); ++result)
      results.push_back(arguments_[returned_argument(result)]);
    return results;
  }

  // Returns the results, without contents; nothing if the meta device does not know their shapes, or raises an error,
  // which then the CPU's kernel raises.
  std::optional<Stack> meta_results() {
    Stack arguments, results;
    for (const auto& argument : arguments_) {
      if (argument.isDevice()) {
        arguments.emplace_back(c10::Device(c10::kMeta));
      } else if (argument.isGenerator()) {
        arguments.emplace_back();
      } else {
        arguments.push_back(map_tensors(argument, meta_of));
      }
    }
    const auto outputs = replace_outputs(arguments);
    try {
      results = run(op_, std::move(arguments), c10::DispatchKey::Meta);
    } catch (const std::exception&) {
      return std::nullopt;
    }
    for (auto& [index, output] : outputs) resize(arguments_[index].toTensor(), output);
    for (size_t result = 0; result < results.size(); ++result) {
      const auto index = returned_argument(result);
      results[result] = index >= 0 ? arguments_[index] : map_tensors(results[result], [&](auto& meta) { return like(meta); });
    }
    return results;
  }

  // Replaces the tensors `out=` by empty ones: some kernels resize them twice.
  std::map<size_t, at::Tensor> replace_outputs(Stack& arguments) const {
    std::map<size_t, at::Tensor> outputs;
    for (size_t index = 0; index < arguments.size(); ++index)
      if (argument(index).is_out() && arguments[index].isTensor())
        arguments[index] = outputs[index] = at::empty({0}, arguments[index].toTensor().options());
    return outputs;
  }

  static void resize(const at::Tensor& tensor, const at::Tensor& shape) {
    if (tensor.sizes() != shape.sizes()) tensor.resize_(shape.sizes());
  }

  at::Tensor like(const at::Tensor& tensor) const {
    if (!tensor.defined()) return tensor;
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device_).pinned_memory(false));
  }

  Stack kernel_arguments() const {
    Stack arguments;
    for (const auto& argument : arguments_)
      arguments.push_back(argument.isDevice() ? c10::IValue(c10::Device(c10::kCPU)) : map_tensors(argument, kernel_view));
    return arguments;
  }

  Stack enqueue(Stack results) const {
    Stack targets;
    for (size_t result = 0; result < results.size(); ++result)
      targets.push_back(returned_argument(result) >= 0 ? c10::IValue() : map_tensors(results[result], kernel_view));
    auto arguments = kernel_arguments();
    const auto views = arguments;
    auto work = [op = op_, outputs = replace_outputs(arguments), arguments, views, targets = std::move(targets)] {
      const auto values = run(op, arguments, c10::DispatchKey::CPU);
      for (auto& [index, output] : outputs) copy_results(output, views[index]);
      for (size_t result = 0; result < targets.size(); ++result)
        if (!targets[result].isNone()) copy_results(values[result], targets[result]);
    };
    Scheduler::instance().enqueue(current_stream(device_.index()), {name(), std::move(work)});
    return results;
  }

  // Waits for the kernel, whose results are numbers, or of a shape that depends on data.
  Stack run_now() const {
    auto arguments = kernel_arguments();
    const auto outputs = replace_outputs(arguments);
    Stack values;
    std::exception_ptr error;
    auto work = [&, op = op_] {
      try {
        values = run(op, std::move(arguments), c10::DispatchKey::CPU);
      } catch (...) {
        error = std::current_exception();
      }
    };
    const auto stream = current_stream(device_.index());
    wait(Scheduler::instance().enqueue(stream, {name(), work}), device_.index());
    if (error) std::rethrow_exception(error);
    for (auto& [index, output] : outputs) {
      resize(arguments_[index].toTensor(), output);
      upload(output, arguments_[index].toTensor());
    }
    for (size_t result = 0; result < values.size(); ++result) {
      if (!is_tensors(*op_.schema().returns()[result].type())) continue;
      const auto index = returned_argument(result);
      values[result] = index >= 0 ? arguments_[index] : map_tensors(values[result], [&](const at::Tensor& value) {
        auto tensor = like(value);
        if (tensor.defined()) upload(value, tensor);
        return tensor;
      });
    }
    return values;
  }

  void upload(const at::Tensor& value, const at::Tensor& tensor) const {
    Scheduler::instance().enqueue(current_stream(device_.index()), {name(), [value, target = kernel_view(tensor)] {
      at::AutoDispatchBelowADInplaceOrView without_autograd;
      target.copy_(value);
    }});
  }

  c10::OperatorHandle op_;
  Stack arguments_;
  c10::Device device_{c10::kPrivateUse1};
};

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  check_process();
  auto arguments = torch::jit::pop(*stack, op.schema().arguments().size());
  auto target = op;
  if (op.schema().name() == "aten::convolution_overrideable") {
    target = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  } else if (op.schema().name() == "aten::convolution_backward_overrideable") {
    target = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
    const bool is_transposed = arguments[6].toBool();
    const auto weight = arguments[2].toTensor();
    const auto channels = is_transposed ? weight.size(1) * arguments[8].toInt() : weight.size(0);
    arguments.insert(arguments.begin() + 3, std::vector<int64_t>{channels});  // bias_sizes
  }
  for (auto& result : Call(target, std::move(arguments)).run_on_stream()) stack->push_back(std::move(result));
}

// A copy to or from pinned memory runs later, if it is contiguous and asked for; all other copies of the host block.
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  check_process();
  if (target.numel() == 0) return target;
  auto view = [](const at::Tensor& tensor) { return is_on_device(tensor) ? kernel_view(tensor) : tensor.detach(); };
  auto work = [from = view(source), to = view(target)] {
    at::AutoDispatchBelowADInplaceOrView without_autograd;
    to.copy_(from);
  };
  auto& scheduler = Scheduler::instance();
  const auto bytes = target.numel() * std::max(source.element_size(), target.element_size());
  if (is_on_device(source) && is_on_device(target)) {
    const auto stream = current_stream(source.device().index()), other = current_stream(target.device().index());
    const bool is_one_device = stream.device == other.device;
    if (!is_one_device) scheduler.enqueue(stream, {"wait", {}, 0, scheduler.enqueue(other, {"record", {}})});
    auto end = scheduler.enqueue(stream, {"copy on device", std::move(work), is_one_device ? 0 : static_cast<size_t>(bytes)});
    if (!is_one_device) scheduler.enqueue(other, {"wait", {}, 0, end});
    return target;
  }
  const bool to_host = is_on_device(source);
  const auto& host = to_host ? target : source;
  const auto device = (to_host ? source : target).device().index();
  const bool runs_later = non_blocking && is_pinned(host.const_data_ptr()) && host.is_contiguous() &&
                          (to_host || source.dtype() == target.dtype());
  auto end = scheduler.enqueue(current_stream(device), {to_host ? "copy to host" : "copy to device", std::move(work),
                                                        static_cast<size_t>(bytes)});
  if (!runs_later) wait(end, device);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> /*layout*/,
                 std::optional<c10::Device> device, std::optional<bool> pin_memory,
                 std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout> /*layout*/, std::optional<c10::Device> device,
                         std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

void grow_storage(c10::TensorImpl* tensor) {
  const auto bytes = at::detail::computeStorageNbytes(tensor->sizes(), tensor->strides(), tensor->itemsize(),
                                                      tensor->storage_offset());
  auto* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
  if (tensor->numel() > 0 && bytes > storage->nbytes()) resize_storage(storage, bytes);
}

const at::Tensor& resize(const at::Tensor& tensor, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  auto* impl = tensor.unsafeGetTensorImpl();
  if (impl->sizes() != size) impl->set_sizes_contiguous(size);
  if (format.has_value()) impl->empty_tensor_restride(*format);
  grow_storage(impl);
  return tensor;
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  TORCH_CHECK(storage.device() == tensor.device(), "Attempted to set the storage of a tensor on device ",
              tensor.device(), " to a storage on different device ", storage.device());
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  grow_storage(impl);
  return tensor;
}

at::Tensor& set_empty(at::Tensor& tensor) {
  return set_storage(tensor, at::empty({0}, tensor.options()).storage(), 0, {0}, {});
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  device_allocator()->recordStream(tensor.storage().data_ptr(), stream);
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || input.numel() == 0) return {input.clone(), at::ones_like(input, at::kBool)};
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input * mask * (p < 1 ? 1 / (1 - p) : 0), mask};
}

// 0: by matrix products, whose kernels the fallback has.
int64_t fused_sdp_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                         double, bool, std::optional<double>, bool) {
  return 0;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize);
  m.impl("set_", set_empty);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("view", at::native::view);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("record_stream", record_stream);
  m.impl("native_dropout", native_dropout);
  m.impl("_fused_sdp_choice", fused_sdp_choice);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Otherwise torch resolves the bit by a copy, whose copy resolves the bit.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at;
  using namespace at::autocast;
#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FLOAT32_RESULT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FLOAT32_RESULT)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(WIDEST)
  KERNEL_PRIVATEUSEONE(cat, promote)
  KERNEL_PRIVATEUSEONE(stack, promote)
}

}  // namespace

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  c10::DeviceGuard guard(storage->device());
  auto memory = device_allocator()->allocate(bytes);
  const auto copied = std::min(bytes, storage->nbytes());
  if (copied > 0) {
    auto *from = kernel_address(storage->data_ptr().get()), *to = kernel_address(memory.get());
    Scheduler::instance().enqueue(current_stream(), {"resize", [=] { std::memcpy(to, from, copied); }});
  }
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(bytes);
}

}  // namespace emulated
