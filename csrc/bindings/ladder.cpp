#include <brimful/ladder/activation_checkpoint.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/callbacks.h"
#include "bindings/device.h"
#include "bindings/sizer_parts.h"
#include "ladder/aside.h"
#include "ladder/choose.h"
#include "ladder/put_aside.h"
#include "step/behind_error.h"

namespace brimful {

using namespace ladder;
namespace {

/// What takes the tensor's place, or the tensor.
py::object put(Aside& aside, const py::object& tensor) {
  auto saved = aside.put(THPVariable_Unpack(tensor.ptr()));
  return saved ? py::cast(std::move(saved)) : tensor;
}

py::object get(const py::object& packed) {
  if (THPVariable_Check(packed.ptr())) {
    return packed;
  }
  const auto saved = packed.cast<std::shared_ptr<SavedAside>>();
  at::Tensor tensor;
  {
    const py::gil_scoped_release no_gil;
    tensor = saved->get();
  }
  return py::cast(std::move(tensor));
}

/// Dense as `like` is: its strides hold.
at::Tensor scratch_zeros_like(const at::Tensor& like) {
  TORCH_CHECK_VALUE(like.is_non_overlapping_and_dense() && like.numel() > 0,
                    "a file holds dense tensors that are not empty (shape: ", like.sizes(),
                    ", strides: ", like.strides(), ")");
  auto data = ScratchFile::zeros(static_cast<int64_t>(like.nbytes()));
  const c10::Storage storage(c10::Storage::use_byte_size_t(), like.nbytes(), std::move(data));
  const auto options = at::TensorOptions().dtype(like.dtype()).device(at::kCPU);
  return at::empty({0}, options).set_(storage, 0, like.sizes(), like.strides());
}

/// Modules of Python's torch.nn, which an object of brimful.sizer._ladder runs with rungs.
class PythonModules final : public Modules {
 public:
  explicit PythonModules(py::object modules) : modules_(shared_object(std::move(modules))) {}

  std::vector<std::string> names() const override { return ask<std::vector<std::string>>("names"); }
  Allowed allowed() const override {
    using Each = std::vector<bool>;
    auto [recompute, offload, whole] = ask<std::tuple<Each, Each, Each>>("allowed");
    return {std::move(recompute), std::move(offload), std::move(whole)};
  }
  std::vector<int32_t> coarse() const override { return ask<std::vector<int32_t>>("coarse"); }
  std::vector<at::Tensor> standing() const override {
    return ask<std::vector<at::Tensor>>("standing");
  }
  void begin(const Rungs& rungs, std::shared_ptr<Aside> aside,
             std::shared_ptr<StepEventRecorder> recorder) override {
    call_python([&] { modules_->attr("begin")(rungs, std::move(aside), std::move(recorder)); });
  }
  void begin_forward() override {
    call_python([&] { modules_->attr("begin_forward")(); });
  }
  void end_forward() noexcept override { quietly("end_forward"); }
  void end() noexcept override { quietly("end"); }
  std::string rejected() const override { return ask<std::string>("rejected"); }

 private:
  template <typename T>
  T ask(const char* method) const {
    return call_python([&] { return modules_->attr(method)().template cast<T>(); });
  }
  void quietly(const char* method) noexcept {
    behind_error([&] { call_python([&] { modules_->attr(method)(); }); });
  }

  std::shared_ptr<py::object> modules_;
};

/// Hooks of Python for what is saved, on this thread.
class PythonAsideScope {
 public:
  explicit PythonAsideScope(std::shared_ptr<Aside> aside) {
    call_python([&] {
      const py::object given = py::cast(std::move(aside));
      hooks("_push_saved_tensors_default_hooks")(given.attr("put"), given.attr("get"));
    });
  }
  ~PythonAsideScope() {
    behind_error([&] { call_python([] { hooks("_pop_saved_tensors_default_hooks")(); }); });
  }
  PythonAsideScope(const PythonAsideScope&) = delete;
  PythonAsideScope& operator=(const PythonAsideScope&) = delete;

 private:
  static py::object hooks(const char* name) {
    return py::module_::import("torch._C").attr("_autograd").attr(name);
  }
};

std::string rungs_repr(const Rungs& rungs) {
  const auto listed = [](const std::vector<int32_t>& modules) {
    return py::str(py::cast(modules)).cast<std::string>();
  };
  return "_Rungs(recomputed=" + listed(rungs.recomputed) +
         ", offloaded=" + listed(rungs.offloaded) +
         ", everything=" + (rungs.everything ? "True)" : "False)");
}
/// For tests, which compare it with torch's: programs of Python have torch.utils.checkpoint.
std::vector<at::Tensor> checkpoint_python(py::object function, std::vector<at::Tensor> inputs,
                                          bool preserve_rng) {
  const auto run = [fn = shared_object(std::move(function))](const std::vector<at::Tensor>& given) {
    return call_python([&] {
      const py::tuple arguments(py::cast(given));
      return call_or_stop_at_exit(*fn, arguments).cast<std::vector<at::Tensor>>();
    });
  };
  const py::gil_scoped_release released;
  return checkpoint(CheckpointOptions{preserve_rng}, run, std::move(inputs));
}
void bind_recorder(py::module_& m) {
  py::class_<StepEventRecorder, std::shared_ptr<StepEventRecorder>>(m, "_StepEventRecorder")
      .def(py::init([](py::handle device) {
             return std::make_shared<StepEventRecorder>(as_device(device));
           }),
           py::arg("device"))
      .def("enter", &StepEventRecorder::enter, py::arg("module"), py::arg("arguments"))
      .def("leave", &StepEventRecorder::leave)
      .def("leave_out", &StepEventRecorder::leave_out, py::arg("ms"))
      .def("note_copied", &StepEventRecorder::note_copied, py::arg("module"), py::arg("bytes"))
      .def("begin_forward", &StepEventRecorder::begin_forward)
      .def("begin_backward", &StepEventRecorder::begin_backward)
      .def("finish", &StepEventRecorder::finish)
      .def("stop", &StepEventRecorder::stop);
  py::class_<SavedAside, std::shared_ptr<SavedAside>>(m, "_SavedAside");
  py::class_<Aside, std::shared_ptr<Aside>>(m, "_Aside",
                                            "Puts tensors aside that a step saves for backward.")
      .def(py::init([](py::handle device, std::shared_ptr<StepEventRecorder> recorder,
                       bool fetch_ahead) {
             return std::make_shared<Aside>(as_device(device), std::move(recorder), fetch_ahead);
           }),
           py::arg("device"), py::arg("recorder") = nullptr, py::arg("fetch_ahead") = false)
      .def("keep", &Aside::keep, py::arg("tensors"))
      .def("put", &put, py::arg("tensor"))
      .def_static("get", &get, py::arg("packed"))
      .def_property_readonly("bytes", &Aside::bytes);
  m.def(
      "_scratch_zeros_like",
      [](const at::Tensor& like) {
        const py::gil_scoped_release no_gil;
        return scratch_zeros_like(like);
      },
      py::arg("like"), "On the CPU, in a file without a name: counts against no limit.");
  m.def("_set_scratch_rate", &ScratchFile::set_bytes_per_s, py::arg("bytes_per_s"),
        "As if the disk were no faster; 0: as it is. For measurements.");
}
}  // namespace

std::shared_ptr<Modules> ladder_modules_of(py::object modules) {
  return std::make_shared<PythonModules>(std::move(modules));
}

void bind_ladder(py::module_& m) {
  set_aside_scope([](std::shared_ptr<Aside> aside) -> std::shared_ptr<void> {
    return std::make_shared<PythonAsideScope>(std::move(aside));
  });
  py::class_<Rungs>(m, "_Rungs", "What a step does below one row, by the numbers of modules.")
      .def(py::init([](std::vector<int32_t> recomputed, std::vector<int32_t> offloaded,
                       bool everything, bool ahead) {
             return Rungs{std::move(recomputed), std::move(offloaded), everything, ahead};
           }),
           py::arg("recomputed") = std::vector<int32_t>(),
           py::arg("offloaded") = std::vector<int32_t>(), py::arg("everything") = false,
           py::arg("ahead") = false)
      .def_readonly("recomputed", &Rungs::recomputed)
      .def_readonly("offloaded", &Rungs::offloaded)
      .def_readonly("everything", &Rungs::everything)
      .def_readonly("ahead", &Rungs::ahead)
      .def("__repr__", &rungs_repr);
  py::class_<StepEvents>(m, "_StepEvents", "What a recorded step did with memory.")
      .def(
          "cost_of",
          [](const StepEvents& self, const Rungs& rungs, const std::vector<bool>& whole) {
            const auto cost = cost_of(self, rungs, whole);
            return std::make_pair(cost.peak_bytes, cost.more_ms);
          },
          py::arg("rungs"), py::arg("whole") = std::vector<bool>(),
          "(peak over what was in use, milliseconds more than without)")
      .def(
          "cheapest",
          [](const StepEvents& self, std::vector<bool> recompute, std::vector<bool> offload,
             int64_t room_bytes) {
            const auto choice =
                cheapest(self, {std::move(recompute), std::move(offload), {}}, room_bytes);
            return choice ? std::optional(choice->rungs) : std::nullopt;
          },
          py::arg("recompute"), py::arg("offload"), py::arg("room_bytes"))
      .def_property_readonly("calls", [](const StepEvents& self) {
        std::vector<std::tuple<int32_t, int64_t, double>> calls;
        calls.reserve(self.calls.size());
        for (const auto& call : self.calls) {
          calls.emplace_back(call.module, call.parent, call.forward_ms);
        }
        return calls;
      });
  bind_recorder(m);
  m.def("_checkpoint", &checkpoint_python, py::arg("function"), py::arg("inputs"),
        py::arg("preserve_rng") = true);
}

}  // namespace brimful
