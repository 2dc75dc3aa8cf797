#include <brimful/sizer/verify_split.h>
#include <torch/csrc/autograd/python_variable.h>

#include "base/text_stream.h"
#include "bindings/around_work.h"
#include "bindings/batch.h"
#include "bindings/callbacks.h"
#include "bindings/fields.h"
#include "bindings/module_entries.h"
#include "bindings/piece_note.h"
#include "bindings/sizer_parts.h"
#include "sizer/call_log.h"

namespace brimful {
namespace {
using detail::CallLog;

std::vector<at::Tensor> tensors_of(const py::handle& object) {
  std::vector<at::Tensor> tensors;
  for_each_tensor(object, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

SplitCheck verify(const py::object& batch, const py::function& loss_fn, const py::object& around,
                  const detail::NamedTensors& parameters,
                  const std::shared_ptr<ModuleEntries>& entries, c10::Device device,
                  const std::vector<std::pair<py::function, py::function>>& keepers,
                  const Splitter& splitter, int64_t pieces, std::optional<double> rtol,
                  CallLog& log) {
  Transaction transaction({}, {device});
  transaction.follow(entries);
  for (const auto& [capture, restore] : keepers) {
    transaction.add(keeper_of(capture, restore));
  }
  const auto rows = splitter.rows_of(batch);
  const auto forward = [&](int64_t begin, int64_t end) {
    const With with(around);
    return call_python([&] {
      const py::object piece = splitter.slice(batch, rows, begin, end);
      return PieceNote::with([&] { return as_piece_loss(loss_fn(piece), end - begin); },
                             [&] { return PieceNote::of(begin, end, rows, "run whole before"); });
    });
  };
  const auto gradients = [&](const at::Tensor& loss, const at::Tensor& seed,
                             const std::vector<at::Tensor>& inputs) {
    return gradients_within(around, loss, seed, inputs);
  };
  const auto tensors = [&](int64_t begin, int64_t end) {
    return call_python([&] { return splitter.tensors(batch, rows, begin, end); });
  };
  const py::gil_scoped_release no_gil;
  return detail::verify_split(rows, parameters, transaction, {forward, gradients, tensors},
                              {pieces, rtol, device}, &log);
}

std::string split_check_repr(const SplitCheck& check) {
  const auto list = [](const std::vector<std::string>& names) {
    std::string text = "[";
    for (const auto& name : names) {
      text += (text.size() == 1 ? "'" : ", '") + name + "'";
    }
    return text + "]";
  };
  TextStream out;
  out << "SplitCheck(equal=" << (check.equal ? "True" : "False")
      << ", loss_difference=" << check.loss_difference
      << ", gradient_difference=" << check.gradient_difference << ", worst_parameter='"
      << check.worst_parameter << "', coupled=" << list(check.coupled)
      << ", loss_coupled=" << (check.loss_coupled ? "True" : "False")
      << ", random=" << list(check.random) << ", rtol=" << check.rtol << ")";
  return out.str();
}
}  // namespace

void bind_verify_split(py::module_& m) {
  py::class_<SplitCheck>(m, "SplitCheck",
                         "How a batch that was split compares with the same one unsplit; see "
                         "verify_split.")
      .BRIMFUL_FIELDS(def_readonly, SplitCheck, equal, rtol, loss_difference, gradient_difference,
                      worst_parameter, coupled, loss_coupled, random)
      .def("__repr__", &split_check_repr);
  py::class_<CallLog>(m, "_CallLog")
      .def(py::init<>())
      .def(
          "enter",
          [](CallLog& log, const std::string& name, const py::object& inputs) {
            log.enter(name, tensors_of(inputs));
          },
          py::arg("name"), py::arg("inputs"))
      .def(
          "leave",
          [](CallLog& log, const std::string& name, const py::object& outputs) {
            log.leave(name, tensors_of(outputs));
          },
          py::arg("name"), py::arg("outputs"))
      .def("drew", &CallLog::drew, py::arg("given_again"))
      .def("drew_places", &CallLog::drew_places)
      .def_property_readonly("run", [](const CallLog& log) { return log.runs() - 1; })
      .def_property_readonly(
          "rows", [](const CallLog& log) { return std::pair(log.rows().begin, log.rows().end); })
      .def_property_readonly("recording", &CallLog::recording)
      .def_property_readonly("current", &CallLog::current);
  m.def("_verify_split", &verify, py::kw_only(), py::arg("batch"), py::arg("loss_fn"),
        py::arg("around"), py::arg("parameters"), py::arg("entries"), py::arg("device"),
        py::arg("keepers"), py::arg("splitter"), py::arg("pieces"), py::arg("rtol"),
        py::arg("log"));
}

}  // namespace brimful
