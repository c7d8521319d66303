// A c10d::Backend whose methods are those of a Python object: the vendor library of the emulated accelerator.
//
// Before torch 2.14 Python cannot subclass Backend. From 2.14 on, torch forwards only wait() and get_future() of a Work
// that such a subclass returns; this class passes the Work itself on.

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

namespace {

using c10d::Backend;
using c10d::Work;
using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;
using Sizes = std::vector<int64_t>;
using WorkPtr = c10::intrusive_ptr<Work>;

// As NCCL's: a group keeps the object that it was given, and torch writes into it.
struct RecordingOptions : Backend::Options {
  RecordingOptions() : Options("recording") {}
#if TORCH_VERSION_MINOR < 9
  std::string group_name;
  std::vector<uint64_t> global_ranks_in_group;
#endif
};
using OptionsPtr = c10::intrusive_ptr<RecordingOptions>;

class RecordingBackend : public Backend {
 public:
  RecordingBackend(py::object target, int rank, int size, OptionsPtr options)
      : Backend(rank, size), options(std::move(options)), target_(std::move(target)) {}

  ~RecordingBackend() override {
    py::gil_scoped_acquire gil;
    target_ = py::object();
  }

  const std::string getBackendName() const override { return "recording"; }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  void startCoalescing() override { tell("start_coalescing"); }
  void abort() override { tell("abort"); }
  void shutdown() override { tell("shutdown"); }
  void setTimeout(std::chrono::milliseconds timeout) override { tell("set_timeout", timeout); }
  void eagerConnectSingleDevice(at::Device device) override { tell("connect", device.str()); }
  void setGroupUid(const std::string& name) override {
    Backend::setGroupUid(name);
    tell("set_name", name);
  }
  uint64_t getSequenceNumberForGroup() override {
    py::gil_scoped_acquire gil;
    return call("sequence_number").cast<uint64_t>();
  }

#define OPERATION(method, parameters, ...) \
  WorkPtr method parameters override { return run(#method, __VA_ARGS__); }

  OPERATION(broadcast, (Tensors & tensors, const c10d::BroadcastOptions& options), tensors, options)
  OPERATION(allreduce, (Tensors & tensors, const c10d::AllreduceOptions& options), tensors, options)
  OPERATION(allreduce_coalesced, (Tensors & tensors, const c10d::AllreduceCoalescedOptions& options), tensors, options)
  OPERATION(reduce, (Tensors & tensors, const c10d::ReduceOptions& options), tensors, options)
  OPERATION(allgather, (Lists & outputs, Tensors& inputs, const c10d::AllgatherOptions& options),
            outputs, inputs, options)
  OPERATION(_allgather_base, (at::Tensor & output, at::Tensor& input, const c10d::AllgatherOptions& options),
            output, input, options)
  OPERATION(allgather_into_tensor_coalesced,
            (Tensors & outputs, Tensors& inputs, const c10d::AllgatherOptions& options), outputs, inputs, options)
  OPERATION(gather, (Lists & outputs, Tensors& inputs, const c10d::GatherOptions& options), outputs, inputs, options)
  OPERATION(scatter, (Tensors & outputs, Lists& inputs, const c10d::ScatterOptions& options), outputs, inputs, options)
  OPERATION(reduce_scatter, (Tensors & outputs, Lists& inputs, const c10d::ReduceScatterOptions& options),
            outputs, inputs, options)
  OPERATION(_reduce_scatter_base, (at::Tensor & output, at::Tensor& input, const c10d::ReduceScatterOptions& options),
            output, input, options)
  OPERATION(reduce_scatter_tensor_coalesced,
            (Tensors & outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options), outputs, inputs, options)
  OPERATION(alltoall_base,
            (at::Tensor & output, at::Tensor& input, Sizes& output_sizes, Sizes& input_sizes,
             const c10d::AllToAllOptions& options),
            output, input, output_sizes, input_sizes, options)
  OPERATION(alltoall, (Tensors & outputs, Tensors& inputs, const c10d::AllToAllOptions& options),
            outputs, inputs, options)
  OPERATION(send, (Tensors & tensors, int rank, int tag), tensors, rank, tag)
  OPERATION(recv, (Tensors & tensors, int rank, int tag), tensors, rank, tag)
  OPERATION(recvAnysource, (Tensors & tensors, int tag), tensors, tag)
  OPERATION(barrier, (const c10d::BarrierOptions& options), options)
  WorkPtr endCoalescing() override { return run("end_coalescing"); }

#if TORCH_VERSION_MINOR >= 9
  c10::intrusive_ptr<Options> getBackendOptions() override { return options; }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& given) override {
    auto own = c10::dynamic_intrusive_pointer_cast<RecordingOptions>(given);
    TORCH_CHECK(own != nullptr, "opts not a recording.Options");
    std::vector<uint64_t> global_ranks;
    for (auto rank : ranks) global_ranks.push_back(options->global_ranks_in_group.at(rank));
    own->global_ranks_in_group = global_ranks;
    py::gil_scoped_acquire gil;
    py::object part = call("split", store, ranks, own);
    return part.is_none() ? nullptr : part.cast<c10::intrusive_ptr<Backend>>();
  }
#endif

  const OptionsPtr options;

 private:
  // The GIL must be held, also when the result is destroyed.
  template <class... Arguments>
  py::object call(const char* method, const Arguments&... arguments) {
    return target_.attr(method)(arguments...);
  }

  template <class... Arguments>
  void tell(const char* method, const Arguments&... arguments) {
    py::gil_scoped_acquire gil;
    call(method, arguments...);
  }

  template <class... Arguments>
  WorkPtr run(const char* method, const Arguments&... arguments) {
    py::gil_scoped_acquire gil;
    py::object work = call(method, arguments...);
    return work.is_none() ? nullptr : work.cast<WorkPtr>();
  }

  py::object target_;
};

}  // namespace

PYBIND11_MODULE(recording_backend, module) {
  py::class_<RecordingOptions, OptionsPtr, Backend::Options>(module, "Options")
      .def(py::init([] { return c10::make_intrusive<RecordingOptions>(); }))
      .def_readwrite("group_name", &RecordingOptions::group_name)
      .def_readwrite("global_ranks_in_group", &RecordingOptions::global_ranks_in_group)
      .def("__deepcopy__", [](const RecordingOptions& options, py::dict) {
        auto copy = c10::make_intrusive<RecordingOptions>();
        copy->timeout = options.timeout;
        copy->group_name = options.group_name;
        copy->global_ranks_in_group = options.global_ranks_in_group;
        return copy;
      });
  py::class_<RecordingBackend, c10::intrusive_ptr<RecordingBackend>, Backend>(module, "RecordingBackend")
      .def(py::init([](py::object target, int rank, int size, OptionsPtr options) {
        return c10::make_intrusive<RecordingBackend>(std::move(target), rank, size, std::move(options));
      }))
      .def_readonly("options", &RecordingBackend::options);
}
