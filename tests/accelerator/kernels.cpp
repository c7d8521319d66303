// The operators: views and allocations by the host, copies, and all others by the CPU's kernels on the second mapping.
#include "emulated.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

namespace emulated {

namespace {

using Stack = torch::jit::Stack;

at::Tensor with_bits_of(const at::Tensor& source, const at::Tensor& tensor) {
  tensor.unsafeGetTensorImpl()->_set_conj(source.is_conj());
  tensor.unsafeGetTensorImpl()->_set_neg(source.is_neg());
  return tensor;
}

// A CPU tensor over memory of the device. It does not keep that memory allocated: neither does a kernel on a GPU.
at::Tensor kernel_view(const at::Tensor& tensor) {
  return with_bits_of(tensor, at::from_blob(kernel_address(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                                             tensor.options().device(at::kCPU)));
}

// A CPU tensor, which is a number or a list of indices, is copied at the call.
at::Tensor kernel_argument(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
  return tensor.is_cpu() ? tensor.clone() : kernel_view(tensor);
}

at::Tensor meta_argument(const at::Tensor& tensor) {
  if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) return tensor;
  const auto options = tensor.options().device(at::kMeta).pinned_memory(false);
  return with_bits_of(tensor, at::empty_strided(tensor.sizes(), tensor.strides(), options));
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

std::vector<at::Tensor> tensors_of(const c10::IValue& value) {
  std::vector<at::Tensor> tensors;
  map_tensors(value, [&](const at::Tensor& tensor) {
    if (tensor.defined()) tensors.push_back(tensor);
    return tensor;
  });
  return tensors;
}

bool is_tensors(const c10::Type& type) {
  const auto list = type.cast<c10::ListType>();
  return (list ? list->getElementType()->kind() : type.kind()) == c10::TypeKind::TensorType;
}

bool is_generator(const c10::Type& type) {
  const auto optional = type.cast<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

Stack run_kernel(const c10::OperatorHandle& op, Stack arguments, c10::DispatchKey key) {
  at::AutoDispatchBelowADInplaceOrView without_autograd;
  op.redispatchBoxed(c10::DispatchKeySet(key), &arguments);
  return arguments;
}

c10::Device device_of(const c10::FunctionSchema& schema, const Stack& arguments) {
  int device = -1;
  for (const auto& argument : arguments) {
    if (argument.isDevice() && argument.toDevice().has_index()) device = argument.toDevice().index();
    for (const auto& tensor : tensors_of(argument)) {
      const bool is_here = tensor.is_privateuseone() && (device == -1 || device == tensor.device().index());
      const bool is_copied = tensor.is_cpu() && (tensor.dim() == 0 || argument.isOptionalTensorList());
      TORCH_CHECK(is_here || is_copied, "Expected all tensors to be on the same device, but found at least two ",
                  "devices, emulated:", std::max(device, 0), " and ", tensor.device(), "! (", schema.name(), ")");
      if (is_here) device = tensor.device().index();
    }
  }
  return {kDeviceType, static_cast<c10::DeviceIndex>(device == -1 ? current_device() : device)};
}

// A call of an operator without a kernel of its own: the CPU's kernel runs on the stream.
class Call {
 public:
  Call(const c10::OperatorHandle& op, const Stack& arguments, c10::Device device)
      : op_(op), schema_(op.schema()), arguments_(arguments), device_(device) {}

  // Returns the results, without contents yet; nothing if their shapes depend on data, or if the meta device has no
  // kernel or raises an error.
  std::optional<Stack> enqueue() {
    bool has_new_results = false;
    for (const auto& result : schema_.returns()) {
      if (!is_tensors(*result.type())) return std::nullopt;
      has_new_results |= result.alias_info() == nullptr;
    }
    const bool has_meta = op_.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta);
    if (!has_meta && has_new_results) return std::nullopt;
    auto shapes = arguments_for(c10::kMeta, meta_argument);
    const auto shapes_of_outputs = replace_outputs(shapes);
    try {
      shapes = has_meta ? run_kernel(op_, std::move(shapes), c10::DispatchKey::Meta) : Stack(schema_.returns().size());
    } catch (const std::exception&) { return std::nullopt; }
    auto arguments = arguments_for(c10::kCPU, kernel_argument);
    const auto outputs = replace_outputs(arguments);
    std::vector<std::pair<at::Tensor, at::Tensor>> stored;
    for (const auto& [index, output] : outputs) {
      const auto& tensor = arguments_[index].toTensor();
      const auto& sizes = shapes_of_outputs.at(index).sizes();
      if (tensor.sizes() != sizes) tensor.resize_(sizes);
      stored.emplace_back(output, kernel_view(tensor));
    }
    Stack results, views;
    for (size_t result = 0; result < shapes.size(); ++result) {
      const auto argument = returned_argument(result);
      const bool is_new = argument < 0;
      auto like = [&](const at::Tensor& shape) { return allocate_like(shape); };
      results.push_back(is_new ? map_tensors(shapes[result], like) : arguments_[argument]);
      views.push_back(is_new ? map_tensors(results.back(), kernel_argument) : c10::IValue());
    }
    auto work = [op = op_, arguments = std::move(arguments), stored = std::move(stored), views = std::move(views)] {
      const auto values = run_kernel(op, arguments, c10::DispatchKey::CPU);
      at::AutoDispatchBelowADInplaceOrView without_autograd;
      for (const auto& [value, view] : stored) view.copy_(value);
      for (size_t result = 0; result < views.size(); ++result)
        copy_tensors(tensors_of(values[result]), tensors_of(views[result]));
    };
    Scheduler::instance().enqueue(current_stream(device_.index()), {schema_.name(), std::move(work)});
    return results;
  }

 private:
  template <class Function>
  Stack arguments_for(c10::Device device, Function function) const {
    Stack arguments;
    for (const auto& argument : arguments_)
      arguments.push_back(argument.isDevice() ? c10::IValue(device) : map_tensors(argument, function));
    return arguments;
  }

  // Replaces the tensors `out=` by empty ones: some kernels resize them twice.
  std::map<size_t, at::Tensor> replace_outputs(Stack& arguments) const {
    std::map<size_t, at::Tensor> outputs;
    for (size_t index = 0; index < arguments.size(); ++index)
      if (schema_.arguments()[index].is_out() && arguments[index].isTensor())
        arguments[index] = outputs[index] = at::empty({0}, arguments[index].toTensor().options());
    return outputs;
  }

  at::Tensor allocate_like(const at::Tensor& shape) const {
    if (!shape.defined()) return shape;
    return at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(device_).pinned_memory(false));
  }

  // The argument that is returned as this result; -1 if the result is new.
  int64_t returned_argument(size_t result) const {
    const auto* alias = schema_.returns()[result].alias_info();
    if (alias == nullptr) return -1;
    for (size_t index = 0; index < arguments_.size() && alias->isWrite(); ++index) {
      const auto* other = schema_.arguments()[index].alias_info();
      if (other != nullptr && *other == *alias) return static_cast<int64_t>(index);
    }
    TORCH_CHECK_NOT_IMPLEMENTED(false, "emulated: ", schema_.name(), ", which returns a view, has no kernel");
  }

  static void copy_tensors(const std::vector<at::Tensor>& values, const std::vector<at::Tensor>& views) {
    for (size_t index = 0; index < views.size(); ++index) {
      // Results without meaning, empty or undefined on the CPU: batch_norm evaluating, or without weights.
      if (values.empty() || values.at(index).numel() == 0) continue;
      TORCH_CHECK(values.at(index).sizes() == views[index].sizes(), "the shape of the CPU's result, ",
                  values[index].sizes(), ", differs from that of the meta device, ", views[index].sizes());
      views[index].copy_(values[index]);
    }
  }

  c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  const Stack& arguments_;
  c10::Device device_;
};

// The host waits for operators that return numbers, or tensors whose shape depends on data.
void fallback(const c10::OperatorHandle& op, Stack* stack) {
  check_process();
  const auto& schema = op.schema();
  auto arguments = torch::jit::pop(*stack, schema.arguments().size());
  auto target = op;
  if (schema.name() == "aten::convolution_overrideable") {  // torch's name for convolutions of other devices
    target = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  } else if (schema.name() == "aten::convolution_backward_overrideable") {
    target = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
    const auto weight = arguments[2].toTensor();
    const auto channels = arguments[6].toBool() ? weight.size(1) * arguments[8].toInt() : weight.size(0);
    arguments.insert(arguments.begin() + 3, std::vector<int64_t>{channels});  // the size of the bias
  }
  const auto device = device_of(target.schema(), arguments);
  c10::OptionalDeviceGuard guard(device);
  for (size_t index = 0; index < arguments.size(); ++index) {
    if (!is_generator(*target.schema().arguments()[index].type())) continue;
    // Each operation gets a seed at the call, so the order of execution does not change its numbers.
    auto& generator = arguments[index];
    if (generator.isNone()) generator = default_generator(device.index());
    generator = at::detail::createCPUGenerator(next_seed(generator.toGenerator()));
  }
  if (auto results = Call(target, arguments, device).enqueue()) {
    for (auto& result : *results) stack->push_back(std::move(result));
  } else {
    for (auto& argument : arguments) stack->push_back(std::move(argument));
    at::native::cpu_fallback(target, stack);
  }
}

// A copy to or from pinned memory runs later, if it is contiguous and asked for; all other copies of the host block.
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  check_process();
  if (target.numel() == 0) return target;
  const bool from_device = source.is_privateuseone(), to_device = target.is_privateuseone();
  auto view = [](const at::Tensor& tensor) { return tensor.is_cpu() ? tensor.detach() : kernel_view(tensor); };
  auto work = [from = view(source), to = view(target)] {
    at::AutoDispatchBelowADInplaceOrView without_autograd;
    to.copy_(from);
  };
  auto& scheduler = Scheduler::instance();
  const size_t bytes = target.numel() * std::max(source.element_size(), target.element_size());
  const auto& on_device = from_device ? source : target;
  const auto stream = current_stream(on_device.device().index());
  if (from_device && to_device) {
    const auto other = current_stream(target.device().index());
    const bool is_one_device = stream.device == other.device;
    if (!is_one_device) scheduler.enqueue(stream, {"wait", {}, 0, scheduler.enqueue(other, {"record", {}})});
    auto end = scheduler.enqueue(stream, {"copy on device", std::move(work), is_one_device ? 0 : bytes});
    if (!is_one_device) scheduler.enqueue(other, {"wait", {}, 0, end});
    return target;
  }
  const auto& host = from_device ? target : source;
  const bool runs_later = non_blocking && is_pinned(host.const_data_ptr()) && host.is_contiguous() &&
                          (from_device || source.dtype() == target.dtype());
  auto end = scheduler.enqueue(stream, {from_device ? "copy to host" : "copy to device", std::move(work), bytes});
  if (!runs_later) wait(end, stream.device);
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

const at::Tensor& resize(const at::Tensor& tensor, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  auto* impl = tensor.unsafeGetTensorImpl();
  if (impl->sizes() != size) impl->set_sizes_contiguous(size);
  if (format.has_value()) impl->empty_tensor_restride(*format);
  const auto bytes = at::detail::computeStorageNbytes(size, impl->strides(), impl->itemsize(), impl->storage_offset());
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (impl->numel() > 0 && bytes > storage->nbytes()) resize_storage(storage, bytes);
  return tensor;
}

at::Tensor& set_empty(at::Tensor& tensor) {
  return at::native::set_(tensor, at::empty({0}, tensor.options()).storage());
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  device_allocator()->recordStream(tensor.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize);
  m.impl("set_", set_empty);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("view", at::native::view);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("record_stream", record_stream);
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
    Scheduler::instance().enqueue(current_stream(current_device()), {"resize", [=] { std::memcpy(to, from, copied); }});
  }
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(bytes);
}

}  // namespace emulated
