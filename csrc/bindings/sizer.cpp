#include <brimful/reducer/reducer.h>
#include <brimful/reducer/torch_ddp_adapter.h>
#include <brimful/sharded/sharded_model.h>
#include <brimful/sizer/batch_sizer.h>
#include <brimful/sizer/grad_scaler.h>
#include <brimful/sizer/rule_vote.h>
#include <brimful/step/oom.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/python_variable.h>

#include "bindings/batch.h"
#include "bindings/by_length.h"
#include "bindings/callbacks.h"
#include "bindings/module_entries.h"
#include "bindings/piece_note.h"
#include "bindings/sizer_parts.h"

namespace brimful {

PieceLoss as_piece_loss(const py::object& result, double weight) {
  py::object loss = result;
  at::Tensor late_weight;
  if (py::isinstance<py::tuple>(result) && py::hasattr(result, "_fields") &&
      py::hasattr(result, "loss")) {  // a namedtuple, such as AdaptiveLogSoftmaxWithLoss returns
    loss = result.attr("loss");
  } else if (py::isinstance<py::tuple>(result)) {
    const auto pair = result.cast<py::tuple>();
    TORCH_CHECK_TYPE(pair.size() == 2, "the loss function returned a tuple (length: ", pair.size(),
                     "); return (mean loss, weight)");
    loss = pair[0];
    if (THPVariable_Check(pair[1].ptr()) && THPVariable_Unpack(pair[1].ptr()).is_cuda()) {
      late_weight = THPVariable_Unpack(pair[1].ptr());
      weight = 0;
    } else {
      weight = py::float_(pair[1]).cast<double>();
    }
  }
  TORCH_CHECK_TYPE(THPVariable_Check(loss.ptr()), "the loss function returned no tensor (type: ",
                   py::str(py::type::handle_of(loss)).cast<std::string>(),
                   "); return the mean loss, or (mean loss, weight)");
  return {THPVariable_Unpack(loss.ptr()), weight, late_weight};
}

Transaction::Keeper keeper_of(py::function capture, py::function restore) {
  struct Python {
    py::function capture;
    py::function restore;
    py::object state;
  };
  const auto kept = shared_object(Python{std::move(capture), std::move(restore), py::none()});
  return {[kept] { call_python([&] { kept->state = kept->capture(); }); },
          [kept] { call_python([&] { kept->restore(kept->state); }); }};
}

void run_python_backward(const at::Tensor& loss, const at::Tensor& gradient) {
  with_python_errors([&] { torch::autograd::backward({loss}, {gradient}); });
}

namespace {

std::exception_ptr as_exception(const py::object& error) {
  try {
    PyErr_SetObject(py::type::handle_of(error).ptr(), error.ptr());
    throw py::error_already_set();
  } catch (...) {
    return std::current_exception();
  }
}

std::vector<at::Tensor> differentiate(const at::Tensor& loss, const at::Tensor& seed,
                                      const std::vector<at::Tensor>& inputs) {
  return with_python_errors([&] {
    return torch::autograd::grad({loss}, inputs, {seed}, /*retain_graph=*/false,
                                 /*create_graph=*/false, /*allow_unused=*/true);
  });
}

std::vector<std::shared_ptr<Participant>> participants_of(
    const std::vector<std::shared_ptr<Reducer>>& reducers,
    const std::vector<std::shared_ptr<TorchDdpAdapter>>& adapters,
    const std::shared_ptr<ShardedModel>& sharded) {
  std::vector<std::shared_ptr<Participant>> all(reducers.begin(), reducers.end());
  all.insert(all.end(), adapters.begin(), adapters.end());
  if (sharded) {
    all.push_back(sharded);
  }
  return all;
}

using Tensors = std::vector<at::Tensor>;

/// `tensors`: parameters, buffers, and the optimizer's state or None.
StandingBytes standing_of(const py::object& tensors, c10::Device device) {
  const auto [parameters, buffers, states] =
      tensors.cast<std::tuple<Tensors, Tensors, std::optional<Tensors>>>();
  auto standing = standing_bytes(parameters, buffers, device);
  if (states) {
    standing.optimizer_state = standing_bytes(*states, {}, device).parameters;
  }
  return standing;
}

std::function<int64_t()> bytes_of(const py::function& function) {
  return [function] { return call_python([&] { return function().cast<int64_t>(); }); };
}

struct Source {
  py::object batch;
  int64_t rows = 0;
};

/// BatchSizer with batches and losses of Python.
class PythonSizer {
 public:
  /// The scale and the growth tracker of torch's scaler.
  using ScalerTensors = std::pair<at::Tensor, at::Tensor>;

  PythonSizer(const std::vector<std::shared_ptr<Reducer>>& reducers,
              const std::vector<std::shared_ptr<TorchDdpAdapter>>& adapters,
              const std::shared_ptr<ShardedModel>& sharded, std::vector<at::Tensor> outside,
              const std::shared_ptr<ModuleEntries>& entries,
              const std::vector<c10::Device>& devices,
              const std::vector<std::pair<py::function, py::function>>& keepers,
              std::optional<py::function> weight_fn, std::shared_ptr<Splitter> splitter,
              const std::optional<ScalerTensors>& scaler, const BatchSizerOptions& options)
      : scaler_(scaler ? std::make_unique<GradScaler>(scaler->first, scaler->second) : nullptr),
        weight_fn_(std::move(weight_fn)),
        splitter_(std::move(splitter)),
        sizer_(StepGroup(participants_of(reducers, adapters, sharded), std::move(outside)),
               Transaction({}, devices), with_scaler(options, scaler_.get())),
        lockstep_(options.lockstep),
        has_ghosts_(sharded != nullptr) {
    sizer_.transaction().follow(entries);
    for (const auto& [capture, restore] : keepers) {
      sizer_.transaction().add(keeper_of(capture, restore));
    }
  }

  Outcome step(const std::optional<py::object>& batch, const py::object& loss_fn,
               const py::object& model, std::optional<std::vector<int64_t>> split,
               std::optional<StepRungs> rungs, const std::optional<py::object>& error,
               bool accumulate, const std::optional<py::object>& by_length,
               std::shared_ptr<RuleVote> vote, bool whole) {
    StepInput input = input_of(batch);
    input.accumulate = accumulate;
    input.vote = std::move(vote);
    input.whole = whole;
    if (error) {
      input.error = as_exception(*error);
    }
    input.split = std::move(split);
    if (whole && input.rows.value_or(0) > 0) {
      input.split = {*input.rows};
    }
    input.rungs = std::move(rungs);
    const bool has_rows = batch && input.rows.value_or(0) > 0;
    const auto source = has_rows ? Source{*batch, *input.rows} : last_;
    if (lockstep_) {
      last_ = source;
    }
    const auto work = by_length && !input.error ? put_lengths(input, *by_length, loss_fn, model)
                                                : work_of(source, loss_fn, model);
    const py::gil_scoped_release no_gil;
    return sizer_.step(input, work);
  }

  /// `embed_fn(model, piece)` and `pair_loss(towers, begin, end)` return lists of tensors.
  Outcome step_pairs(const std::optional<py::object>& batch, const py::object& embed_fn,
                     const py::object& pair_loss, const py::object& model,
                     std::optional<std::vector<int64_t>> split, std::optional<StepRungs> rungs,
                     const std::optional<py::object>& error, bool accumulate, bool own,
                     bool gathered_gradient) {
    StepInput input = input_of(batch);
    if (error) {
      input.error = as_exception(*error);
    }
    input.split = std::move(split);
    input.rungs = std::move(rungs);
    const Source source{batch.value_or(py::none()), input.rows.value_or(0)};
    PairWork work;
    work.embed = [&](int64_t begin, int64_t end) {
      return call_python([&] {
        return embed_fn(model, splitter_->slice(source.batch, source.rows, begin, end))
            .cast<Towers>();
      });
    };
    work.loss = [&](const Towers& all, OwnRows own) {
      return call_python([&] { return pair_loss(all, own.begin, own.end).cast<Towers>(); });
    };
    work.backward = run_python_backward;
    work.differentiate = differentiate;
    work.tensors = work_of(source, embed_fn, model).tensors;
    work.options = {accumulate, own, gathered_gradient};
    const py::gil_scoped_release no_gil;
    return sizer_.step_pairs(input, work);
  }

  std::optional<Plan> plan(const py::object& batch, const py::object& loss_fn,
                           const py::object& model, bool accumulate,
                           const std::optional<py::object>& by_length) {
    auto input = input_of(batch, true);
    input.accumulate = accumulate;
    const Source source{batch, input.rows.value_or(0)};
    const auto work = by_length && !input.error ? put_lengths(input, *by_length, loss_fn, model)
                                                : work_of(source, loss_fn, model);
    const py::gil_scoped_release no_gil;
    return sizer_.plan(input, work);
  }

  bool begin_loop(const std::optional<py::object>& first) {
    const auto input = input_of(first);
    const py::gil_scoped_release no_gil;
    return sizer_.begin_loop(first ? Next::yes : Next::no, input);
  }

  void announce_next(const std::optional<py::object>& next) {
    sizer_.announce_next(next ? Next::yes : Next::no, input_of(next));
  }

  BatchSizer& sizer() { return sizer_; }

 private:
  static BatchSizerOptions with_scaler(BatchSizerOptions options, GradScaler* scaler) {
    options.scaler = scaler;
    return options;
  }

  PieceWork work_of(const Source& source, const py::object& loss_fn,
                    const py::object& model) const {
    const auto tried = std::make_shared<bool>(false);
    const auto forward = [&, tried](int64_t begin, int64_t end) {
      return call_python([&] {
        TORCH_CHECK_VALUE(source.batch,
                          "a rank without data cannot take part in the model's own collectives "
                          "(lockstep: true); give all ranks the same number of batches");
        const char* const whole = *tried ? "run whole before" : "never run whole";
        *tried = *tried || (begin == 0 && end == source.rows);
        if (has_ghosts_ && begin == end) {
          const auto few = std::min<int64_t>(2, source.rows);  // a BatchNorm takes no single one
          const py::object ghost = splitter_->slice(source.batch, source.rows, 0, few);
          return PieceLoss{as_piece_loss(loss_fn(model, ghost), 0.0).loss, 0};
        }
        const py::object piece = splitter_->slice(source.batch, source.rows, begin, end);
        return PieceNote::with([&] { return as_piece_loss(loss_fn(model, piece), end - begin); },
                               [&] { return PieceNote::of(begin, end, source.rows, whole); });
      });
    };
    const auto tensors = [&](int64_t begin, int64_t end) {
      return call_python([&] { return splitter_->tensors(source.batch, source.rows, begin, end); });
    };
    return {forward, run_python_backward, tensors};
  }

  StepInput input_of(const std::optional<py::object>& batch, bool forecast = false) const {
    StepInput input;
    if (!batch) {
      return input;
    }
    try {  // what is wrong here must fail the step, not this call: the other ranks wait
      input.rows = splitter_->rows_of(*batch);
      if ((forecast || sizer_.predicts()) && *input.rows > 0) {
        input.kind = kind_of_first_row(*batch, *input.rows);
      }
      input.ask_kind = [this, batch = *batch, rows = *input.rows] {
        return call_python([&] {
          return row_kind_of(splitter_->slice(batch, rows, 0, std::min<int64_t>(1, rows)));
        });
      };
      if (weight_fn_) {
        input.weight = py::float_((*weight_fn_)(*batch)).cast<double>();
      }
    } catch (...) {
      input.error = std::current_exception();
    }
    return input;
  }

  /// Unknown where a split that copies runs out of memory: not one row fits, and the pieces will say so.
  RowKind kind_of_first_row(const py::object& batch, int64_t rows) const {
    try {
      return row_kind_of(splitter_->slice(batch, rows, 0, 1));
    } catch (...) {
      if (!brimful::is_out_of_memory(std::current_exception())) {
        throw;
      }
    }
    RowKind unknown;
    unknown.uneven = true;
    return unknown;
  }

  std::unique_ptr<GradScaler> scaler_;
  std::optional<py::function> weight_fn_;
  std::shared_ptr<Splitter> splitter_;
  BatchSizer sizer_;
  bool lockstep_;
  bool has_ghosts_;  ///< an empty piece is rows that do not count, since few models take none
  Source last_;      ///< in lockstep: gives empty pieces to a step without data
};

std::unique_ptr<PythonSizer> make_sizer(
    const std::vector<std::shared_ptr<Reducer>>& reducers,
    const std::vector<std::shared_ptr<TorchDdpAdapter>>& adapters,
    const std::shared_ptr<ShardedModel>& sharded, std::vector<at::Tensor> outside,
    const std::shared_ptr<ModuleEntries>& entries, const std::vector<c10::Device>& devices,
    const std::vector<std::pair<py::function, py::function>>& keepers,
    const py::function& standing_tensors, const py::function& optimizer_bytes,
    std::optional<py::function> weight_fn, std::shared_ptr<Splitter> splitter, int64_t max_retries,
    int64_t pieces, std::optional<int64_t> piece_rows, bool local, bool lockstep, bool predict,
    bool equal_pieces, const std::string& batch_norm,
    const std::vector<std::pair<std::string, py::object>>& batch_norms,
    const std::optional<PythonSizer::ScalerTensors>& scaler,
    const std::optional<py::object>& ladder, bool recompute, bool offload, bool state_may_leave,
    bool finds_rule) {
  BatchSizerOptions options;
  options.max_retries = max_retries;
  options.pieces = pieces;
  options.piece_rows = piece_rows;
  options.local = local;
  options.lockstep = lockstep;
  options.predict = predict;
  options.equal_pieces = equal_pieces;
  options.device = devices.at(0);
  options.optimizer_bytes = bytes_of(optimizer_bytes);
  options.standing_bytes = [standing_tensors, device = devices.at(0)] {
    return call_python([&] { return standing_of(standing_tensors(), device); });
  };
  options.batch_norm = batch_norm_policy(batch_norm);
  options.batch_norms = batch_norms_of(batch_norms);
  options.ladder = ladder ? ladder_modules_of(*ladder) : nullptr;
  options.recompute = recompute;
  options.offload = offload;
  options.state_may_leave = state_may_leave;
  options.finds_rule = finds_rule;
  return std::make_unique<PythonSizer>(reducers, adapters, sharded, std::move(outside), entries,
                                       devices, keepers, std::move(weight_fn), std::move(splitter),
                                       scaler, std::move(options));
}
}  // namespace

void bind_sizer(py::module_& m) {
  bind_sizer_values(m);
  bind_module_entries(m);
  py::class_<PythonSizer>(m, "BatchSizer")
      .def(py::init(&make_sizer), py::kw_only(), py::arg("reducers"), py::arg("adapters"),
           py::arg("sharded"), py::arg("outside"), py::arg("entries"), py::arg("devices"),
           py::arg("keepers"), py::arg("standing_tensors"), py::arg("optimizer_bytes"),
           py::arg("weight_fn"), py::arg("splitter"), py::arg("max_retries"), py::arg("pieces"),
           py::arg("piece_rows"), py::arg("local"), py::arg("lockstep"), py::arg("predict"),
           py::arg("equal_pieces"), py::arg("batch_norm"), py::arg("batch_norms"),
           py::arg("scaler"), py::arg("ladder"), py::arg("recompute"), py::arg("offload"),
           py::arg("state_may_leave"), py::arg("finds_rule") = false)
      .def("plan", &PythonSizer::plan, py::arg("batch"), py::arg("loss_fn"), py::arg("model"),
           py::arg("accumulate"), py::arg("by_length"))
      .def("step", &PythonSizer::step, py::arg("batch"), py::arg("loss_fn"), py::arg("model"),
           py::arg("split"), py::arg("rungs"), py::arg("error"), py::arg("accumulate"),
           py::arg("by_length"), py::arg("vote"), py::arg("whole"))
      .def("step_pairs", &PythonSizer::step_pairs, py::arg("batch"), py::arg("embed_fn"),
           py::arg("pair_loss"), py::arg("model"), py::arg("split"), py::arg("rungs"),
           py::arg("error"), py::arg("accumulate"), py::arg("own"), py::arg("gathered_gradient"))
      .def("begin_loop", &PythonSizer::begin_loop, py::arg("first"))
      .def("announce_next", &PythonSizer::announce_next, py::arg("next"))
      .def(
          "report_failure",
          [](PythonSizer& self, bool out_of_memory, const std::string& text) {
            const py::gil_scoped_release no_gil;
            self.sizer().report_failure(out_of_memory ? Status::out_of_memory : Status::error,
                                        text);
          },
          py::arg("out_of_memory"), py::arg("text"))
      .def(
          "fail_optimizer",
          [](PythonSizer& self, const std::string& text) {
            const py::gil_scoped_release no_gil;
            self.sizer().fail_optimizer(text);
          },
          py::arg("text"))
      .def_property_readonly("expects_step",
                             [](PythonSizer& self) { return self.sizer().expects_step(); })
      .def_property_readonly("steps", [](PythonSizer& self) { return self.sizer().steps(); })
      .def_property_readonly("calls", [](PythonSizer& self) { return self.sizer().calls(); })
      .def_property_readonly("at_end", [](PythonSizer& self) { return self.sizer().at_end(); })
      .def_property_readonly("world_size",
                             [](PythonSizer& self) { return self.sizer().world_size(); })
      .def("regrouped", [](PythonSizer& self) { self.sizer().regrouped(); })
      .def("report", [](PythonSizer& self) { return self.sizer().report(); })
      .def("state", [](PythonSizer& self) { return self.sizer().state(); })
      .def(
          "load_state",
          [](PythonSizer& self, const std::map<std::string, double>& state) {
            self.sizer().load_state(state);
          },
          py::arg("state"));
}

}  // namespace brimful
