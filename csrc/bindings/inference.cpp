#include <brimful/sizer/map_batches.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/batch.h"
#include "bindings/callbacks.h"
#include "bindings/module_entries.h"
#include "bindings/piece_note.h"
#include "bindings/sizer_parts.h"

namespace brimful {
namespace {

bool is_sequence(const py::handle& object) {
  return py::isinstance<py::tuple>(object) || py::isinstance<py::list>(object);
}

/// Appends the tensors of a result and returns its form as text, which is alike for results of the same form.
std::string take_tensors(const py::handle& result, std::vector<at::Tensor>& tensors) {
  if (THPVariable_Check(result.ptr())) {
    tensors.push_back(THPVariable_Unpack(result.ptr()));
    return "tensor";
  }
  if (result.is_none()) {
    return "None";
  }
  const auto name = py::type::handle_of(result).attr("__name__").cast<std::string>();
  std::string form = name + "(";
  if (py::isinstance<py::dict>(result)) {
    for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(result)) {
      form += py::repr(key).cast<std::string>() + ": " + take_tensors(value, tensors) + ", ";
    }
  } else {
    TORCH_CHECK_TYPE(is_sequence(result), "fn returned no tensor (type: ", name,
                     "); return a tensor, or a tuple, list, dict or namedtuple of tensors");
    for (const auto& value : py::reinterpret_borrow<py::sequence>(result)) {
      form += take_tensors(value, tensors) + ", ";
    }
  }
  return form + ")";
}

/// A result of the same form with the next of `whole` in the place of each tensor.
py::object with_tensors(const py::handle& result, std::vector<at::Tensor>::const_iterator& whole) {
  if (THPVariable_Check(result.ptr())) {
    return py::cast(*whole++);
  }
  if (result.is_none()) {
    return py::none();
  }
  if (py::isinstance<py::dict>(result)) {
    py::object copy = result.attr("copy")();
    for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(result)) {
      copy[key] = with_tensors(value, whole);
    }
    return copy;
  }
  py::list items;
  for (const auto& value : py::reinterpret_borrow<py::sequence>(result)) {
    items.append(with_tensors(value, whole));
  }
  if (py::isinstance<py::list>(result)) {
    return items;
  }
  if (PyTuple_CheckExact(result.ptr())) {
    return py::tuple(items);
  }
  // A namedtuple, or one of torch's (torch.return_types.max), which is made of a sequence.
  return py::hasattr(result, "_make") ? result.attr("_make")(items)
                                      : py::type::handle_of(result)(items);
}

/// Parameters and buffers.
using ModelTensors = std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>>;

class PythonMapping {
 public:
  PythonMapping(py::object fn, py::object batch, const Splitter& splitter)
      : fn_(std::move(fn)),
        batch_(std::move(batch)),
        splitter_(splitter),
        rows_(splitter.rows_of(batch_)) {}

  py::object run(const MapOptions& options, size_t function) {
    RowKind of_batch;
    for_each_tensor(batch_, [&](const at::Tensor& tensor) { of_batch.add(tensor, std::nullopt); });
    const detail::MapKind kind{
        function, std::move(of_batch.form),
        std::max<int64_t>(of_batch.elements / std::max<int64_t>(rows_, 1), 1)};
    std::vector<at::Tensor> whole;
    {
      const py::gil_scoped_release no_gil;
      whole = detail::map_rows(
          rows_, [&](int64_t begin, int64_t end) { return piece(begin, end); },
          [&](int64_t begin, int64_t end) { return tensors(begin, end); }, options, kind);
    }
    auto next = whole.cbegin();
    return with_tensors(last_, next);
  }

 private:
  /// Of the piece that comes next, which is made for both.
  std::vector<NamedTensor> tensors(int64_t begin, int64_t end) {
    return call_python([&] {
      next_ = splitter_.slice(batch_, rows_, begin, end);
      return named_tensors(next_, "batch");
    });
  }

  std::vector<at::Tensor> piece(int64_t begin, int64_t end) {
    return call_python([&] {
      last_ = py::none();  // it holds memory
      const char* const whole = tried_ ? "run whole before" : "never run whole";
      tried_ = tried_ || (begin == 0 && end == rows_);
      py::object result = PieceNote::with([&] { return fn_(std::exchange(next_, py::none())); },
                                          [&] { return PieceNote::of(begin, end, rows_, whole); });
      std::vector<at::Tensor> tensors;
      const auto form = take_tensors(result, tensors);
      if (begin == 0) {
        form_ = form;
      }
      TORCH_CHECK_VALUE(form == form_, "fn returned another structure for rows ", begin, " to ",
                        end, " than for those before (structure: ", form, " and ", form_,
                        "); return the same for every piece");
      last_ = std::move(result);
      return tensors;
    });
  }

  py::object fn_;
  py::object batch_;
  const Splitter& splitter_;
  int64_t rows_;
  bool tried_ = false;  ///< the batch in one piece
  std::string form_;
  py::object next_ = py::none();  ///< piece
  py::object last_ = py::none();  ///< result
};

}  // namespace

void bind_inference(py::module_& m) {
  m.def(
      "_map_batches",
      [](py::object fn, py::object batch, size_t function, const Splitter& splitter, int64_t pieces,
         int64_t max_retries, c10::Device device,
         const std::vector<std::pair<py::function, py::function>>& keepers, int rank,
         int world_size, const std::optional<ModelTensors>& model,
         std::shared_ptr<ModuleEntries> names) {
        MapOptions options;
        options.pieces = pieces;
        options.max_retries = max_retries;
        options.device = device;
        options.rank = rank;
        options.world_size = world_size;
        options.names = std::move(names);
        if (model) {
          options.standing_bytes = [&] {
            return standing_bytes(model->first, model->second, device);
          };
        }
        for (const auto& [capture, restore] : keepers) {
          options.keepers.push_back(keeper_of(capture, restore));
        }
        return PythonMapping(std::move(fn), std::move(batch), splitter).run(options, function);
      },
      py::arg("fn"), py::arg("batch"), py::arg("function"), py::arg("splitter"), py::arg("pieces"),
      py::arg("max_retries"), py::arg("device"), py::arg("keepers"), py::arg("rank"),
      py::arg("world_size"), py::arg("model"), py::arg("names").none(true));
  m.def("_forget_map_sizes", &detail::forget_map_sizes);
}

}  // namespace brimful
