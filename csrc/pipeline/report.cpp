#include "pipeline/report.h"

#include <ATen/core/Tensor.h>
#include <brimful/pipeline/schedule_text.h>
#include <brimful/pipeline/simulate.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <sstream>

#include "base/format.h"
#include "base/json.h"

namespace brimful::pipeline {
namespace {

double ms(int64_t ns) {
  return static_cast<double>(ns) / 1e6;
}

/// Mean duration in microseconds of a stage's actions of one kind.
double mean_us(const StepResult& result, int stage, ActionKind kind) {
  double sum = 0;
  int count = 0;
  for (const auto& order : result.times) {
    for (const auto& time : order) {
      if (time.action.stage == stage && time.action.kind == kind) {
        sum += static_cast<double>(time.end_ns - time.begin_ns) / 1e3;
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
    costs.forward.push_back(mean_us(result, stage, ActionKind::forward));
    costs.backward_input.push_back(mean_us(result, stage, ActionKind::backward_input));
    costs.backward_weight.push_back(mean_us(result, stage, ActionKind::backward_weight));
    costs.backward.push_back(mean_us(result, stage, ActionKind::backward));
  }
  return costs;
}

class TraceEvents {
 public:
  void name(const char* what, int process, int thread, const std::string& name) {
    next() << "{\"name\":\"" << what << "\",\"ph\":\"M\",\"pid\":" << process
           << ",\"tid\":" << thread << ",\"args\":{\"name\":" << json_string(name) << "}}";
  }
  void slice(int process, int thread, const std::string& name, const char* category,
             double begin_us, double length_us) {
    next() << "{\"name\":" << json_string(name) << ",\"cat\":\"" << category
           << "\",\"ph\":\"X\",\"pid\":" << process << ",\"tid\":" << thread
           << ",\"ts\":" << begin_us << ",\"dur\":" << length_us << "}";
  }
  std::string json() const { return "{\"traceEvents\":[" + text_.str() + "]}"; }

 private:
  std::ostringstream& next() {
    text_ << (any_ ? ",\n" : "");
    any_ = true;
    return text_;
  }
  std::ostringstream text_ = [] {
    std::ostringstream out;
    out.setf(std::ios::fixed);
    out.precision(3);
    return out;
  }();
  bool any_ = false;
};

const char* category_of(ActionKind kind) {
  return kind == ActionKind::forward ? "forward" : is_compute(kind) ? "backward" : "transfer";
}
}  // namespace

std::vector<StageNote> notes_of(const StepResult& result) {
  std::vector<StageNote> notes(result.peak_live.size());
  for (size_t i = 0; i < notes.size(); ++i) {
    notes[i].peak_live = result.peak_live[i];
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
  constexpr int kMeasured = 0;
  constexpr int kPlanned = 1;
  TraceEvents events;
  double busy_ns = 0;
  int64_t last_ns = result.begin_ns;
  for (size_t rank = 0; rank < result.times.size(); ++rank) {
    for (const auto& time : result.times[rank]) {
      events.slice(kMeasured, static_cast<int>(rank), to_text(time.action),
                   category_of(time.action.kind),
                   static_cast<double>(time.begin_ns - result.begin_ns) / 1e3,
                   static_cast<double>(time.end_ns - time.begin_ns) / 1e3);
      busy_ns += static_cast<double>(time.end_ns - time.begin_ns);
      last_ns = std::max(last_ns, time.end_ns);
    }
  }
  const auto planned = simulate(schedule, costs_of(schedule, result));
  for (size_t rank = 0; rank < planned.ranks.size(); ++rank) {
    for (const auto& action : planned.ranks[rank]) {
      if (is_compute(action.action.kind)) {
        events.slice(kPlanned, static_cast<int>(rank), to_text(action.action),
                     category_of(action.action.kind), action.start, action.end - action.start);
      }
    }
  }
  const auto span = static_cast<double>(last_ns - result.begin_ns) *
                    static_cast<double>(std::max<size_t>(result.times.size(), 1));
  const auto share = [](double bubble) {
    std::array<char, 32> text{};
    std::snprintf(text.data(), text.size(), "%.1f %% idle", bubble * 100);
    return std::string(text.data());
  };
  events.name("process_name", kMeasured, 0,
              "measured: " + schedule.name + ", " + share(span > 0 ? 1 - busy_ns / span : 0));
  events.name("process_name", kPlanned, 0,
              "planned: " + schedule.name + ", " + share(planned.bubble()));
  for (size_t rank = 0; rank < result.times.size(); ++rank) {
    for (const int process : {kMeasured, kPlanned}) {
      events.name("thread_name", process, static_cast<int>(rank), "rank " + std::to_string(rank));
    }
  }
  return events.json();
}

std::string described(const Executor& executor, const Schedule& last_schedule,
                      const StepResult& last_result) {
  const auto notes = notes_of(last_result);
  double busy = 0;
  for (const auto& note : notes) {
    busy += note.forward_ms + note.backward_ms;
  }
  const auto& stages = executor.stages();
  std::ostringstream text;
  text << "Pipeline of " << stages.size() << (stages.size() == 1 ? " stage on " : " stages on ")
       << executor.options().devices.size()
       << (executor.options().devices.size() == 1 ? " rank" : " ranks");
  if (!last_schedule.name.empty()) {
    text << " (last step: " << last_schedule.name << ", " << last_schedule.microbatches
         << " microbatches)";
  }
  for (size_t i = 0; i < stages.size(); ++i) {
    int64_t count = 0;
    int64_t bytes = 0;
    for (const auto& parameter : stages[i].parameters) {
      count += parameter.numel();
      bytes += static_cast<int64_t>(parameter.nbytes());
    }
    text << "\n  stage " << i << (stages[i].name.empty() ? "" : " (" + stages[i].name + ")") << ": "
         << (stages[i].parameters.empty() ? std::string("no device of its own")
                                          : stages[i].parameters[0].device().str())
         << ", " << count << " parameters, " << format_bytes(bytes);
    if (i < notes.size() && busy > 0) {
      const auto own = notes[i].forward_ms + notes[i].backward_ms;
      text << ", " << static_cast<int>(own / busy * 100 + 0.5) << " % of the time, "
           << notes[i].peak_live << " microbatches held";
    }
  }
  return text.str();
}

}  // namespace brimful::pipeline
