#include <brimful/pipeline/keywords.h>
#include <brimful/pipeline/pipeline.h>
#include <brimful/pipeline/schedule_text.h>
#include <brimful/pipeline/skip.h>
#include <brimful/reducer/reducer.h>
#include <brimful/sizer/grad_scaler.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/format.h"
#include "base/text_stream.h"
#include "base/thrown_by.h"
#include "bindings/batch.h"
#include "bindings/callbacks.h"
#include "bindings/fields.h"
#include "bindings/module_entries.h"
#include "bindings/pipeline_schedule.h"
#include "bindings/pipeline_threads.h"
#include "bindings/pipeline_value.h"
#include "bindings/sizer_parts.h"
#include "pipeline/executor/stage_rung.h"
#include "pipeline/transport/peers.h"

namespace brimful {
namespace {

using pipeline::Pipeline;
using pipeline::Stage;
using pipeline::Value;

/// Names of keywords that a stage takes; nothing: any.
using KeywordNames = std::optional<std::vector<std::string>>;

/// Name, callable, parameters, what names in its modules stand for, BatchNorms with their names, and keywords.
using PythonStage =
    std::tuple<std::string, py::object, std::vector<at::Tensor>, std::shared_ptr<ModuleEntries>,
               std::vector<std::pair<std::string, py::object>>, KeywordNames>;

py::dict keywords_of(const KeywordNames& names) {
  py::dict keywords;
  for (const auto& name : names ? *names : pipeline::keyword_names()) {
    if (pipeline::has_keyword(name)) {
      keywords[py::str(name)] = as_object(pipeline::keyword_value(name));
    }
  }
  return keywords;
}

Stage stage_of(const PythonStage& parts) {
  Stage stage;
  stage.name = std::get<0>(parts);
  stage.forward = [forward = shared_object(std::get<1>(parts)),
                   names = std::get<5>(parts)](const Value& input) {
    return call_python([&] {
      const auto keywords = keywords_of(names);
      return as_value(call_or_stop_at_exit(*forward, py::make_tuple(as_object(input)), keywords));
    });
  };
  stage.parameters = std::get<2>(parts);
  stage.names = std::get<3>(parts);
  stage.buffers = stage.names->now()->buffers;
  stage.batch_norms = batch_norms_of(std::get<4>(parts));
  return stage;
}

/// Pipeline with batches, stages and losses of Python.
class PythonPipeline {
 public:
  using ScalerTensors = std::pair<at::Tensor, at::Tensor>;

  PythonPipeline(std::vector<Stage> stages, pipeline::PipelineOptions options,
                 const std::optional<ScalerTensors>& scaler, std::shared_ptr<Splitter> splitter)
      : scaler_(scaler ? std::make_unique<GradScaler>(scaler->first, scaler->second) : nullptr),
        splitter_(std::move(splitter)),
        peers_(options.peers) {
    options.scaler = scaler_.get();
    options.translate = translated;
    options.interrupt = [threads = threads_] { call_python([&] { threads->check_signals(); }); };
    options.thread_scope = [threads = threads_] { return std::make_shared<PythonThread>(threads); };
    const py::gil_scoped_release no_gil;  // the threads start with it
    pipeline_ = std::make_unique<Pipeline>(std::move(stages), std::move(options));
  }
  ~PythonPipeline() {
    const py::gil_scoped_release no_gil;  // the threads end with it
    pipeline_.reset();
  }
  PythonPipeline(const PythonPipeline&) = delete;
  PythonPipeline& operator=(const PythonPipeline&) = delete;

  /// Of a step, by name, and how they are split; nothing: there are none.
  using KeywordBatch = std::optional<std::pair<py::dict, std::shared_ptr<Splitter>>>;

  Outcome step(const py::object& batch, const py::object& target, const py::object& loss_fn,
               const KeywordBatch& keywords) {
    pipeline::PipelineWork work;
    int64_t rows = 0;
    const bool has_target = !target.is_none();
    std::vector<py::object> targets;
    refusing(work, [&] {
      rows = splitter_->rows_of(batch);
      const auto target_rows = has_target ? splitter_->rows_of(target, rows) : rows;
      TORCH_CHECK_VALUE(rows == target_rows, "batch and target disagree in size (rows: ", rows,
                        " and ", target_rows, "); give both the same number");
      TORCH_CHECK_TYPE(!loss_fn.is_none(),
                       "step needs a loss function (loss_fn: None); give one to Pipeline");
    });
    set_inputs(work, batch, rows, keywords);
    add_tensors(work, target, "target");
    work.begin = [&, slice_inputs = work.begin](const std::vector<int64_t>& split) {
      slice_inputs(split);
      call_python([&] {
        targets = has_target ? slices_of(*splitter_, target, rows, split)
                             : std::vector<py::object>(split.size(), py::none());
      });
    };
    work.loss = [&](int i, int64_t begin, int64_t end, const Value& output) {
      return call_python([&] {
        const auto call = py::make_tuple(as_object(output), targets[i]);
        return as_piece_loss(call_or_stop_at_exit(loss_fn, call), end - begin);
      });
    };
    return noted([&] {
      const py::gil_scoped_release no_gil;
      return pipeline_->step(rows, work);
    });
  }

  Outcome step_without_data() {
    return noted([&] {
      const py::gil_scoped_release no_gil;
      return pipeline_->step_without_data();
    });
  }

  bool begin_loop(const std::optional<py::object>& first) {
    const auto rows = rows_if_known(first);
    const py::gil_scoped_release no_gil;
    return pipeline_->begin_loop(first ? Next::yes : Next::no, rows);
  }

  void announce_next(const std::optional<py::object>& next) {
    pipeline_->announce_next(next ? Next::yes : Next::no, rows_if_known(next));
  }

  py::object forward(const py::object& batch, const KeywordBatch& keywords) {
    pipeline::PipelineWork work;
    int64_t rows = 0;
    refusing(work, [&] { rows = splitter_->rows_of(batch); });
    set_inputs(work, batch, rows, keywords);
    const auto whole = noted([&] {
      const py::gil_scoped_release no_gil;
      return pipeline_->forward(rows, work);
    });
    const bool elsewhere = whole.tensors.empty() && whole.form == nullptr;
    return elsewhere ? py::none() : as_object(whole);
  }

  Pipeline& pipeline() { return *pipeline_; }
  /// Verdicts that this rank has sent to others.
  int64_t messages() const { return peers_ ? peers_->messages() : 0; }

 private:
  static std::vector<py::object> slices_of(const Splitter& splitter, const py::object& batch,
                                           int64_t rows, const std::vector<int64_t>& split) {
    std::vector<py::object> slices;
    int64_t begin = 0;
    for (const auto count : split) {
      slices.push_back(splitter.slice(batch, rows, begin, begin + count));
      begin += count;
    }
    return slices;
  }

  /// What is wrong with a batch is its step's to say.
  std::optional<int64_t> rows_if_known(const std::optional<py::object>& batch) const {
    std::optional<int64_t> rows;
    if (batch) {
      thrown_by([&] { call_python([&] { rows = splitter_->rows_of(*batch); }); });
    }
    return rows;
  }

  /// A step's microbatches, cut before it begins.
  struct Cut {
    std::vector<Value> inputs;
    std::vector<pipeline::Keywords> keywords;
  };

  /// What is wrong with a batch is the step's to raise, so that no other process waits for it.
  template <typename Fn>
  static void refusing(pipeline::PipelineWork& work, const Fn& fn) {
    try {
      call_python(fn);
    } catch (...) {
      work.refused = std::current_exception();
    }
  }

  /// For a step that is repeated; what is wrong with the part, cutting it says.
  static void add_tensors(pipeline::PipelineWork& work, const py::handle& part,
                          const std::string& name) {
    if (!work.refused) {
      refusing(work, [&] {
        for (auto& named : named_tensors(part, name)) {
          work.reused.push_back(std::move(named));
        }
      });
    }
  }

  void set_inputs(pipeline::PipelineWork& work, const py::object& batch, int64_t rows,
                  const KeywordBatch& keywords) const {
    const auto cut = std::make_shared<Cut>();
    work.thread_scope = scope_of_callers_context();
    add_tensors(work, batch, "batch");
    if (keywords) {
      add_tensors(work, keywords->first, "keywords");
    }
    work.begin = [this, cut, &batch, &keywords, rows](const std::vector<int64_t>& split) {
      call_python([&] {
        cut->inputs.clear();
        for (const auto& piece : slices_of(*splitter_, batch, rows, split)) {
          cut->inputs.push_back(as_value(piece));
        }
        cut->keywords = keywords ? cut_keywords(*keywords, rows, split)
                                 : std::vector<pipeline::Keywords>(split.size());
      });
    };
    work.input = [cut](int i, int64_t, int64_t) { return cut->inputs.at(i); };
    if (keywords) {
      work.keywords = [cut](int i, int64_t, int64_t) { return cut->keywords.at(i); };
    }
  }

  static std::vector<pipeline::Keywords> cut_keywords(
      const std::pair<py::dict, std::shared_ptr<Splitter>>& keywords, int64_t rows,
      const std::vector<int64_t>& split) {
    const auto of_keywords = keywords.second->rows_if_any(keywords.first, "keywords", rows);
    TORCH_CHECK_VALUE(!of_keywords || *of_keywords == rows,
                      "batch and keywords disagree in size (rows: ", rows, " and ",
                      of_keywords.value_or(0),
                      "); give the same number, or say in kwargs_dim where rows are (None: all "
                      "microbatches share it)");
    std::vector<pipeline::Keywords> all;
    for (const auto& piece : slices_of(*keywords.second, keywords.first, rows, split)) {
      auto& named = all.emplace_back();
      for (const auto& [name, value] : py::cast<py::dict>(piece)) {
        named.emplace(py::cast<std::string>(name), as_value(value));
      }
    }
    return all;
  }

  /// Where an error of Python has come from is a note of it.
  template <typename Fn>
  std::invoke_result_t<Fn> noted(const Fn& fn) {
    const PythonThreads::Calm calm{*threads_, [&] { return pipeline_->is_usable(); }};
    try {
      return fn();
    } catch (py::error_already_set& error) {
      if (const auto& failure = pipeline_->last_failure()) {
        try {
          error.value().attr("add_note")("in the " + to_string(*failure));
        } catch (py::error_already_set&) {  // a class that refuses: its error is the one to raise
        }
      }
      throw;
    }
  }

  std::unique_ptr<GradScaler> scaler_;
  std::shared_ptr<Splitter> splitter_;
  std::shared_ptr<pipeline::Peers> peers_;
  const std::shared_ptr<PythonThreads> threads_ = std::make_shared<PythonThreads>();
  std::unique_ptr<Pipeline> pipeline_;
};

std::unique_ptr<PythonPipeline> make_pipeline(
    const std::vector<PythonStage>& stages, const std::vector<c10::Device>& devices,
    const py::object& schedule, int64_t microbatches, int64_t max_retries, int threads_per_rank,
    bool trace, const std::string& batch_norm,
    const std::optional<PythonPipeline::ScalerTensors>& scaler,
    const std::vector<std::pair<py::function, py::function>>& keepers,
    const std::optional<py::function>& before_action, double patience_s,
    std::shared_ptr<Splitter> splitter, const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const std::vector<std::shared_ptr<Reducer>>& reducers,
    const std::vector<std::pair<std::string, at::Tensor>>& tied, bool recompute, bool offload,
    const std::optional<std::vector<int>>& recomputed,
    const std::optional<py::function>& hidden_state) {
  pipeline::PipelineOptions options;
  options.reducers.assign(reducers.begin(), reducers.end());
  options.tied = tied;
  options.devices = devices;
  options.peers = group ? pipeline::peers_of(group) : nullptr;
  set_schedule(schedule, options);
  options.microbatches = microbatches;
  options.max_retries = max_retries;
  options.threads_per_rank = threads_per_rank;
  options.trace = trace;
  options.patience = std::chrono::milliseconds(static_cast<int64_t>(patience_s * 1e3));
  options.batch_norm = batch_norm_policy(batch_norm);
  options.recompute = recompute;
  options.offload = offload;
  options.recompute_all = !recomputed;
  options.recomputed = recomputed.value_or(std::vector<int>());
  if (hidden_state) {
    options.hidden_state = [call = shared_object(*hidden_state)] {
      return call_python([&] { return (*call)().cast<int64_t>(); });
    };
  }
  for (const auto& [capture, restore] : keepers) {
    options.keepers.push_back(keeper_of(capture, restore));
  }
  if (before_action) {
    options.before_action = [call = shared_object(*before_action)](int rank, int index,
                                                                   const pipeline::Action& action) {
      call_python([&] { (*call)(rank, index, pipeline::to_string(action)); });
    };
  }
  std::vector<Stage> made;
  made.reserve(stages.size());
  for (const auto& stage : stages) {
    made.push_back(stage_of(stage));
  }
  return std::make_unique<PythonPipeline>(std::move(made), std::move(options), scaler,
                                          std::move(splitter));
}

void bind_loop(py::class_<PythonPipeline>& bound) {
  bound.def("begin_loop", &PythonPipeline::begin_loop, py::arg("first"))
      .def("announce_next", &PythonPipeline::announce_next, py::arg("next"))
      .def(
          "report_failure",
          [](PythonPipeline& self, bool out_of_memory, const std::string& text) {
            const py::gil_scoped_release no_gil;
            self.pipeline().report_failure(
                out_of_memory ? std::make_exception_ptr(c10::OutOfMemoryError({}, text))
                              : std::make_exception_ptr(std::runtime_error(text)));
          },
          py::arg("out_of_memory"), py::arg("text"))
      .def_property_readonly("expects_step",
                             [](PythonPipeline& self) { return self.pipeline().expects_step(); })
      .def_property_readonly("steps", [](PythonPipeline& self) { return self.pipeline().steps(); })
      .def_property_readonly("at_end",
                             [](PythonPipeline& self) { return self.pipeline().at_end(); });
}
}  // namespace

void bind_pipeline(py::module_& m) {
  take_forms();
  py::class_<PythonPipeline> bound(m, "Pipeline");
  bind_loop(bound);
  bound
      .def(py::init(&make_pipeline), py::kw_only(), py::arg("stages"), py::arg("devices"),
           py::arg("schedule"), py::arg("microbatches"), py::arg("max_retries"),
           py::arg("threads_per_rank"), py::arg("trace"), py::arg("batch_norm"), py::arg("scaler"),
           py::arg("keepers"), py::arg("before_action"), py::arg("patience_s"), py::arg("splitter"),
           py::arg("group").none(true), py::arg("reducers"), py::arg("tied"), py::arg("recompute"),
           py::arg("offload") = false, py::arg("recomputed").none(true),
           py::arg("hidden_state").none(true))
      .def("step", &PythonPipeline::step, py::arg("batch"), py::arg("target"), py::arg("loss_fn"),
           py::arg("keywords"))
      .def("step_without_data", &PythonPipeline::step_without_data)
      .def("forward", &PythonPipeline::forward, py::arg("batch"), py::arg("keywords"))
      .def(
          "cancel", [](PythonPipeline& self) { self.pipeline().cancel(); },
          py::call_guard<py::gil_scoped_release>())
      .def("report", [](PythonPipeline& self) { return self.pipeline().report(); })
      .def("trace", [](PythonPipeline& self) { return self.pipeline().trace(); })
      .def("trace_svg", [](PythonPipeline& self) { return self.pipeline().trace_svg(); })
      .def("schedule",
           [](PythonPipeline& self) {
             return self.pipeline().schedule(self.pipeline().microbatches());
           })
      .def(
          "progress",
          [](PythonPipeline& self) { return pipeline::to_string(self.pipeline().progress()); },
          py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("is_broken",
                             [](PythonPipeline& self) { return self.pipeline().is_broken(); })
      .def(
          "regrouped",
          [](PythonPipeline& self, int64_t progress) { self.pipeline().regrouped(progress); },
          py::arg("progress"))
      .def_property_readonly("messages", &PythonPipeline::messages)
      .def("__str__", [](PythonPipeline& self) { return self.pipeline().to_string(); });
  m.def(
      "_stash",
      [](const std::string& name, const std::optional<at::Tensor>& tensor) {
        pipeline::stash(name, tensor.value_or(at::Tensor()));
      },
      py::arg("name"), py::arg("tensor").none(true), py::call_guard<py::gil_scoped_release>());
  m.def("_runs_again", &pipeline::runs_again,
        "Whether a stage's forward runs once more in its backward, on this thread.");
  m.def("_pop", &pipeline::pop, py::arg("name"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace brimful
