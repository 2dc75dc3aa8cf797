// A step as attempts: one stands, is repeated with more microbatches, or fails the step with nothing left of it.
#include <ATen/ATen.h>
#include <brimful/error.h>
#include <brimful/log.h>
#include <brimful/memory/stats.h>
#include <brimful/sizer/grad_scaler.h>
#include <brimful/sizer/pieces.h>

#include <algorithm>
#include <numeric>
#include <sstream>

#include "base/format.h"
#include "pipeline/failure.h"
#include "pipeline/pipeline_state.h"
#include "pipeline/report.h"

namespace brimful::pipeline {
namespace {

/// The peak of each device while it lives.
class Peaks {
 public:
  explicit Peaks(const std::vector<c10::Device>& devices) : devices_(distinct(devices)) {
    for (const auto device : devices_) {
      scopes_.push_back(std::make_unique<memory::PeakScope>(device));
    }
  }
  std::vector<std::pair<c10::Device, int64_t>> bytes() const {
    std::vector<std::pair<c10::Device, int64_t>> result;
    for (size_t i = 0; i < devices_.size(); ++i) {
      result.emplace_back(devices_[i], scopes_[i]->peak_bytes());
    }
    return result;
  }

 private:
  std::vector<c10::Device> devices_;
  std::vector<std::unique_ptr<memory::PeakScope>> scopes_;
};

/// What BatchNorms have changed for a step's microbatches is undone at its end.
class NormsScope {
 public:
  NormsScope(std::vector<std::shared_ptr<StageNorms>>& norms, int64_t pieces) : norms_(norms) {
    for (const auto& each : norms_) {
      each->next = 0;
      each->pieces = pieces;
    }
  }
  ~NormsScope() {
    for (const auto& each : norms_) {
      each->pieces = 0;
      each->norms.after_step();
    }
  }
  NormsScope(const NormsScope&) = delete;
  NormsScope& operator=(const NormsScope&) = delete;

 private:
  std::vector<std::shared_ptr<StageNorms>>& norms_;
};

void require_rows(int64_t rows, int64_t microbatches) {
  TORCH_CHECK_VALUE(rows > 0, "the batch is empty (rows: 0)");
  TORCH_CHECK_VALUE(rows >= microbatches,
                    "there are more microbatches than rows in the batch (microbatches: ",
                    microbatches, ", rows: ", rows, "); ask for fewer");
}

int64_t total_bytes(const std::vector<std::pair<c10::Device, int64_t>>& peaks) {
  return std::accumulate(peaks.begin(), peaks.end(), int64_t{0},
                         [](int64_t sum, const auto& peak) { return sum + peak.second; });
}
}  // namespace

int64_t Pipeline::State::microbatches_for(int64_t rows) const {
  return std::max(options.microbatches,
                  microbatch_rows > 0 ? pieces_for(rows, microbatch_rows) : 1);
}

StepResult Pipeline::State::attempt(const Schedule& schedule, const std::vector<int64_t>& split,
                                    const PipelineWork& work, std::exception_ptr refused) {
  StepWork actions;
  actions.refused = std::move(refused);
  if (work.begin && !actions.refused) {
    actions.refused = refusal_of([&] { work.begin(split); });
  }
  std::vector<int64_t> begins{0};
  for (const auto rows : split) {
    begins.push_back(begins.back() + rows);
  }
  actions.ref = static_cast<double>(begins.back());
  actions.input = [&](int i) { return work.input(i, begins[i], begins[i + 1]); };
  if (work.loss) {
    actions.loss = [&](int i, const Value& output) {
      return work.loss(i, begins[i], begins[i + 1], output);
    };
  }
  if (options.scaler != nullptr && options.scaler->enabled()) {
    actions.seed = [&](const at::Tensor& share) { return options.scaler->scale(share); };
  }
  return executor->run(schedule, actions);
}

PeerVerdict Pipeline::State::agree(const StepResult& result, int64_t rows) {
  PeerVerdict own;
  own.rows = rows;
  own.may_split =
      std::all_of(norms.begin(), norms.end(), [](const auto& n) { return n->norms.may_split(); });
  if (result.failure) {
    own.kind =
        result.failure->out_of_memory ? PeerVerdict::Kind::out_of_memory : PeerVerdict::Kind::error;
    own.rank = result.failure->rank;
    own.text = result.failure->text + " (in the " + pipeline::describe(*result.failure) + ")";
  } else {
    const memory::Unlimited unlimited;
    for (const auto& [loss, weight] : result.losses) {
      if (weight > 0) {
        own.weight += weight;
        own.loss_sum += loss.item<double>() * weight;
      }
    }
  }
  return options.peers ? options.peers->agree(own) : own;
}

void Pipeline::State::stand(StepResult result, const PeerVerdict& verdict, PipelineOutcome& outcome,
                            KeptGradients& kept) {
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  const auto ref = static_cast<double>(verdict.rows);
  const double sum = verdict.loss_sum;
  outcome.weight = verdict.weight;
  outcome.loss = outcome.weight > 0 ? sum / outcome.weight : 0;
  const double scale = outcome.weight > 0 ? ref / outcome.weight : 1;
  for (const auto& parameter : parameters) {
    auto& gradient = parameter.mutable_grad();
    if (scale != 1 && gradient.defined()) {
      gradient.mul_(scale);
    }
  }
  kept.add();
  outcome.total_ms = static_cast<double>(result.end_ns - result.begin_ns) / 1e6;
  outcome.stages = notes_of(result);
  last_result = std::move(result);
}

void Pipeline::State::undo() {
  for (const auto& parameter : parameters) {
    parameter.mutable_grad().reset();
  }
  transaction.restore();
}

int64_t Pipeline::State::refine(const Failure& failure, int64_t rows, int64_t microbatches,
                                int64_t retries, std::vector<TriedSplit>& tried, int64_t peak_bytes,
                                bool may_split) {
  tried.push_back({microbatches, (rows + microbatches - 1) / microbatches, peak_bytes});
  const bool last = retries >= options.max_retries || microbatches >= rows || !may_split;
  if (last && failure.elsewhere) {
    brimful::detail::throw_rank_failed(failure.rank, -1, FailureKind::out_of_memory,
                                       "the pipeline's step ran out of memory on rank " +
                                           std::to_string(failure.rank) +
                                           " with any number of microbatches: " + failure.text);
  }
  if (last) {
    throw too_large(failure, rows, std::move(tried), options.max_retries,
                    options.devices[options.peers ? 0 : failure.rank]);
  }
  const auto next = finer(rows, microbatches);
  microbatch_rows = (rows + next - 1) / next;
  const auto where = failure.elsewhere ? " on rank " + std::to_string(failure.rank)
                                       : " in the " + pipeline::describe(failure);
  log(LogLevel::warning, "memory ran out" + where + ": the step is repeated with " +
                             std::to_string(next) + " microbatches instead of " +
                             std::to_string(microbatches));
  return next;
}

Failure Pipeline::State::settle(StepResult& result, const PeerVerdict& verdict) {
  undo();
  const bool memory = verdict.kind == PeerVerdict::Kind::out_of_memory;
  if (result.failure && result.failure->out_of_memory == memory) {
    last_failure = result.failure;
    last_failure->error = nullptr;  // pins what its frames hold
    if (!memory) {
      rethrow(std::move(*result.failure));
    }
    return *last_failure;
  }
  if (!memory) {
    brimful::detail::throw_rank_failed(
        static_cast<int>(verdict.rank), -1, FailureKind::error,
        "the pipeline's step failed on rank " + std::to_string(verdict.rank) + ": " + verdict.text);
  }
  Failure theirs;
  theirs.rank = static_cast<int>(verdict.rank);
  theirs.text = verdict.text;
  theirs.out_of_memory = theirs.elsewhere = true;
  return theirs;
}

PipelineOutcome Pipeline::State::step(int64_t rows, const PipelineWork& work) {
  const OneCall::Entered entered(calls, "step");
  last_failure.reset();
  parameters = trained_of(executor->stages());  // some may have been frozen, or unfrozen
  auto microbatches = microbatches_for(rows);
  const Peaks peaks(options.devices);
  KeptGradients kept;
  const KeptGradients::Scope give_back(kept);
  const auto refused = refusal_of([&] {
    require_rows(rows, options.microbatches);
    for (const auto& each : norms) {
      each->norms.require_whole(microbatches);
    }
    kept.take(parameters);
  });
  transaction.capture();
  PipelineOutcome outcome;
  std::vector<TriedSplit> tried;
  while (true) {
    outcome.split = refused ? std::vector<int64_t>(microbatches) : split_rows(rows, microbatches);
    auto order = schedule(microbatches, true);
    auto [result, verdict] = undone_if_thrown([&] {
      const NormsScope scope(norms, microbatches);
      auto ran = attempt(order, outcome.split, work, refused);
      const auto end = agree(ran, rows);
      return std::pair(std::move(ran), end);
    });
    if (verdict.kind == PeerVerdict::Kind::ok) {
      stand(std::move(result), verdict, outcome, kept);
      last_schedule = std::move(order);
      outcome.microbatches = microbatches;
      outcome.peak_bytes = peaks.bytes();
      return outcome;
    }
    const auto failure = settle(result, verdict);
    microbatches = refine(failure, rows, microbatches, outcome.retries, tried,
                          total_bytes(peaks.bytes()), verdict.may_split);
    ++outcome.retries;
  }
}

Value Pipeline::State::forward(int64_t rows, const PipelineWork& work) {
  const OneCall::Entered entered(calls, "forward");
  const at::NoGradGuard no_grad;
  last_failure.reset();
  require_rows(rows, 1);
  auto microbatches = std::min(rows, microbatches_for(rows));
  parameters.clear();  // no gradient is this call's to undo
  transaction.capture();
  auto inference = work;
  inference.loss = nullptr;
  std::vector<TriedSplit> tried;
  for (int64_t retries = 0;; ++retries) {
    const memory::PeakScope peak(options.devices[0]);
    auto [result, verdict] = undone_if_thrown([&] {
      auto ran = attempt(schedule(microbatches, false), split_rows(rows, microbatches), inference,
                         nullptr);
      const auto end = agree(ran, rows);
      return std::pair(std::move(ran), end);
    });
    if (verdict.kind == PeerVerdict::Kind::ok) {
      return joined(result.outputs);
    }
    const auto failure = settle(result, verdict);
    result.outputs.clear();
    microbatches =
        refine(failure, rows, microbatches, retries, tried, peak.peak_bytes(), verdict.may_split);
  }
}

Pipeline::Pipeline(std::vector<Stage> stages, PipelineOptions options)
    : state_(std::make_unique<State>(std::move(stages), std::move(options))) {}
Pipeline::~Pipeline() = default;
Pipeline::Pipeline(Pipeline&&) noexcept = default;

PipelineOutcome Pipeline::step(int64_t rows, const PipelineWork& work) {
  TORCH_CHECK_VALUE(work.loss, "a step needs a loss function (loss_fn: none)");
  return state_->step(rows, work);
}
Value Pipeline::forward(int64_t rows, const PipelineWork& work) {
  return state_->forward(rows, work);
}
Schedule Pipeline::schedule(int64_t microbatches) const {
  return state_->schedule(microbatches, true);
}
const std::vector<Stage>& Pipeline::stages() const {
  return state_->executor->stages();
}
const std::vector<c10::Device>& Pipeline::devices() const {
  return state_->options.devices;
}
int64_t Pipeline::microbatches() const {
  return state_->options.microbatches;
}
const std::optional<Failure>& Pipeline::last_failure() const {
  return state_->last_failure;
}
std::string Pipeline::trace() const {
  return state_->last_result.times.empty() ? ""
                                           : trace_json(state_->last_schedule, state_->last_result);
}
std::string Pipeline::to_string() const {
  return described(*state_->executor, state_->last_schedule, state_->last_result);
}

}  // namespace brimful::pipeline
