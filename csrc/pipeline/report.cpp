#include "pipeline/report.h"

#include <ATen/core/Tensor.h>
#include <brimful/pipeline/picture.h>
#include <brimful/pipeline/schedule_text.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "base/chrome_trace.h"
#include "base/format.h"
#include "base/text_stream.h"
#include "memory/tensor_bytes.h"
#include "pipeline/schedule/picture_parts.h"
#include "pipeline/transport/peers.h"

namespace brimful::pipeline {
namespace {

double ms(int64_t ns) {
  return static_cast<double>(ns) / 1e6;
}

/// Mean duration of a stage's actions of one kind.
double mean_ms(const StepResult& result, int stage, ActionKind kind) {
  double sum = 0;
  int count = 0;
  for (const auto& order : result.times) {
    for (const auto& time : order) {
      if (time.action.stage == stage && time.action.kind == kind) {
        sum += ms(time.end_ns - time.begin_ns);
        ++count;
      }
    }
  }
  return count > 0 ? sum / count : 0;
}

Costs costs_of(const Schedule& schedule, const StepResult& result) {
  Costs costs;
  costs.forward.clear();
  costs.backward_input.clear();
  costs.backward_weight.clear();
  for (int stage = 0; stage < schedule.stages; ++stage) {
    costs.forward.push_back(mean_ms(result, stage, ActionKind::forward));
    costs.backward_input.push_back(mean_ms(result, stage, ActionKind::backward_input));
    costs.backward_weight.push_back(mean_ms(result, stage, ActionKind::backward_weight));
    costs.backward.push_back(mean_ms(result, stage, ActionKind::backward));
  }
  return costs;
}

const char* category_of(ActionKind kind) {
  return kind == ActionKind::forward ? "forward" : is_compute(kind) ? "backward" : "transfer";
}

int64_t total_bytes_of(const std::vector<at::Tensor>& tensors) {
  return std::accumulate(
      tensors.begin(), tensors.end(), int64_t{0},
      [](int64_t sum, const auto& tensor) { return sum + memory::bytes_of(tensor); });
}

int64_t buffer_bytes(const Stage& stage) {
  return total_bytes_of(stage.names ? stage.names->now()->buffers : stage.buffers);
}

int64_t gradient_bytes(const Stage& stage) {
  return std::accumulate(
      stage.parameters.begin(), stage.parameters.end(), int64_t{0},
      [](int64_t sum, const auto& p) { return sum + memory::bytes_of(p.grad()); });
}

/// A step as it ran, in milliseconds from its beginning.
Timeline measured_of(const Schedule& schedule, const StepResult& result) {
  Timeline timeline;
  timeline.name = "measured, in ms: " + schedule.name;
  timeline.stages = schedule.stages;
  timeline.microbatches = schedule.microbatches;
  for (const auto& order : result.times) {
    auto& rank = timeline.ranks.emplace_back();
    auto& busy = timeline.busy.emplace_back();
    std::optional<double> first;
    double last = 0;
    for (const auto& time : order) {
      const auto begin = ms(time.begin_ns - result.begin_ns);
      const auto end = ms(time.end_ns - result.begin_ns);
      rank.push_back({time.action, begin, end});
      if (is_compute(time.action.kind)) {
        busy += end - begin;
        first = first.value_or(begin);
        last = end;
      }
    }
    timeline.makespan = std::max(timeline.makespan, last);
    timeline.period = std::max(timeline.period, last - first.value_or(last));
  }
  return timeline;
}

/// The schedule with the mean times of each stage's actions.
Timeline planned_of(const Schedule& schedule, const StepResult& result) {
  auto timeline = simulate(schedule, costs_of(schedule, result));
  timeline.name = "planned, in ms: " + schedule.name;
  return timeline;
}

/// Without the microbatches that had no rows.
void drop_empty(int64_t filled, Schedule& order, StepResult& result) {
  const auto is_empty = [&](const Action& action) { return action.microbatch >= filled; };
  order.microbatches = static_cast<int>(filled);
  for (auto& actions : order.ranks) {
    std::erase_if(actions, is_empty);
  }
  for (auto& times : result.times) {
    std::erase_if(times, [&](const ActionTime& time) { return is_empty(time.action); });
  }
}
}  // namespace

std::vector<int> stage_numbers(const Executor& executor, const Schedule& schedule) {
  std::vector<int> numbers;
  const auto& peers = executor.options().peers;
  const auto ranks = schedule.ranks.empty() ? std::vector<int>() : rank_of_stage(schedule);
  for (int stage = 0; stage < static_cast<int>(ranks.size()); ++stage) {
    if (!peers || ranks[stage] == peers->rank()) {
      numbers.push_back(stage);
    }
  }
  for (auto next = static_cast<int>(numbers.size()); numbers.size() < executor.stages().size();) {
    numbers.push_back(next++);
  }
  return numbers;
}

void LastStep::take(const Executor& executor, const Schedule& order, int64_t filled,
                    StepResult done) {
  schedule = order;
  result = std::move(done);
  if (filled < order.microbatches) {
    drop_empty(filled, schedule, result);
  }
  notes = notes_of(executor, schedule, result);
}

bool LastStep::has_times() const {
  return std::any_of(result.times.begin(), result.times.end(),
                     [](const auto& order) { return !order.empty(); });
}

std::vector<StageNote> notes_of(const Executor& executor, const Schedule& schedule,
                                const StepResult& result) {
  std::vector<StageNote> notes(result.peak_live.size());
  for (size_t i = 0; i < notes.size(); ++i) {
    notes[i].peak_live = result.peak_live[i];
    notes[i].peak_live_bytes = result.peak_live_bytes[i];
    notes[i].split_note = result.split_notes[i];
  }
  const auto numbers = stage_numbers(executor, schedule);
  for (size_t i = 0; i < executor.stages().size(); ++i) {
    const auto& stage = executor.stages()[i];
    auto& note = notes.at(numbers[i]);
    note.parameter_bytes = total_bytes_of(stage.parameters);
    note.gradient_bytes = gradient_bytes(stage);
    note.buffer_bytes = buffer_bytes(stage);
  }
  for (const auto& order : result.times) {
    for (const auto& time : order) {
      auto& note = notes[time.action.stage];
      note.wait_ms += ms(time.wait_ns);
      if (time.action.kind == ActionKind::forward) {
        note.forward_ms += ms(time.end_ns - time.begin_ns);
      } else if (is_compute(time.action.kind)) {
        note.backward_ms += ms(time.end_ns - time.begin_ns);
      }
    }
  }
  return notes;
}

std::string trace_json(const Schedule& schedule, const StepResult& result) {
  ChromeTrace trace;
  const auto timelines = {measured_of(schedule, result), planned_of(schedule, result)};
  int process = 0;
  for (const auto& timeline : timelines) {
    for (size_t rank = 0; rank < timeline.ranks.size(); ++rank) {
      const auto thread = static_cast<int>(rank);
      for (const auto& [action, start, end] : timeline.ranks[rank]) {
        if (process == 0 || is_compute(action.kind)) {
          trace.slice(process, thread, to_string(action), category_of(action.kind), start * 1e3,
                      (end - start) * 1e3);
        }
      }
      trace.name_thread(process, thread, "rank " + std::to_string(rank));
    }
    trace.name_process(process, std::string(process == 0 ? "measured: " : "planned: ") +
                                    schedule.name + ", " + percent_text(timeline.bubble()) +
                                    " idle");
    ++process;
  }
  return trace.json();
}

std::string trace_svg(const Schedule& schedule, const StepResult& result) {
  return to_picture_svg({measured_of(schedule, result), planned_of(schedule, result)});
}

std::string to_string(const Executor& executor, const Schedule& last_schedule,
                      const std::vector<StageNote>& last_notes) {
  double busy = 0;
  for (const auto& note : last_notes) {
    busy += note.forward_ms + note.backward_ms;
  }
  const auto& stages = executor.stages();
  TextStream text;
  text << "Pipeline of " << stages.size() << (stages.size() == 1 ? " stage on " : " stages on ")
       << executor.options().devices.size()
       << (executor.options().devices.size() == 1 ? " rank" : " ranks");
  if (!last_schedule.name.empty()) {
    text << " (last step: " << last_schedule.name << ", " << last_schedule.microbatches
         << " microbatches)";
  }
  const auto numbers = stage_numbers(executor, last_schedule);
  for (size_t i = 0; i < stages.size(); ++i) {
    int64_t count = 0;
    for (const auto& parameter : stages[i].parameters) {
      count += parameter.numel();
    }
    text << "\n  stage " << numbers[i]
         << (stages[i].name.empty() ? "" : " (" + stages[i].name + ")") << ": "
         << (stages[i].parameters.empty() ? std::string("no device of its own")
                                          : stages[i].parameters[0].device().str())
         << ", " << count << " parameters, " << format_bytes(total_bytes_of(stages[i].parameters));
    if (const auto buffers = buffer_bytes(stages[i]); buffers > 0) {
      text << ", buffers " << format_bytes(buffers);
    }
    if (last_notes.empty()) {
      continue;
    }
    const auto& note = last_notes.at(numbers[i]);
    text << ", gradients " << format_bytes(note.gradient_bytes);
    if (busy > 0) {
      text << ", " << std::lround((note.forward_ms + note.backward_ms) / busy * 100)
           << " % of the time, at most " << note.peak_live << " microbatches held ("
           << format_bytes(note.peak_live_bytes) << ")";
    }
    if (note.recomputed) {
      text << "\n    forward runs again in backward (recomputed)";
    }
    if (note.offloaded) {
      text << "\n    what it saves for backward is offloaded";
    }
    if (!note.split_note.empty()) {
      text << "\n    backward " << note.split_note;
    }
  }
  return text.str();
}

}  // namespace brimful::pipeline
