#include "bindings/pipeline_schedule.h"

#include <brimful/pipeline/balance.h>
#include <brimful/pipeline/checker.h>
#include <brimful/pipeline/picture.h>
#include <brimful/pipeline/pipeline.h>
#include <brimful/pipeline/schedule_text.h>
#include <brimful/pipeline/schedules.h>

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include "bindings/callbacks.h"
#include "bindings/fields.h"

namespace brimful {

void set_schedule(const py::object& schedule, pipeline::PipelineOptions& options) {
  if (py::isinstance<py::str>(schedule)) {
    options.schedule = schedule.cast<std::string>();
  } else if (py::isinstance<pipeline::Schedule>(schedule)) {
    options.fixed_schedule = schedule.cast<pipeline::Schedule>();
  } else {
    TORCH_CHECK_TYPE(PyCallable_Check(schedule.ptr()) != 0,
                     "a schedule is a name, a Schedule, or a function of a number of microbatches "
                     "(type: ",
                     py::str(py::type::handle_of(schedule)).cast<std::string>(), ")");
    options.schedule_for = [make = shared_object(schedule)](int microbatches) {
      return call_python([&] { return (*make)(microbatches).cast<pipeline::Schedule>(); });
    };
  }
}

namespace {
using namespace pipeline;

using Cost = std::variant<double, std::vector<double>>;

std::vector<double> values_of(const Cost& cost) {
  const auto* value = std::get_if<double>(&cost);
  return value != nullptr ? std::vector<double>{*value} : std::get<std::vector<double>>(cost);
}

std::vector<std::vector<std::string>> texts_of(const Schedule& schedule) {
  std::vector<std::vector<std::string>> texts;
  for (const auto& actions : schedule.ranks) {
    auto& rank = texts.emplace_back();
    for (const auto& action : actions) {
      rank.push_back(to_string(action));
    }
  }
  return texts;
}

Schedule communicating(const Schedule& schedule, const std::string& receives) {
  const bool early = receives == "when_sent";
  TORCH_CHECK_VALUE(early || receives == "before_use",
                    "receives must be 'before_use' or 'when_sent' (receives: '", receives, "')");
  return with_communication(schedule, early ? ReceivePlace::when_sent : ReceivePlace::before_use);
}

CheckResult checked(const Schedule& schedule, std::optional<int64_t> channel_capacity,
                    const std::string& channels) {
  const std::map<std::string, ChannelKind> kinds{{"by_rank", ChannelKind::by_rank},
                                                 {"by_stage", ChannelKind::by_stage},
                                                 {"by_message", ChannelKind::by_message}};
  const auto kind = kinds.find(channels);
  TORCH_CHECK_VALUE(kind != kinds.end(),
                    "channels must be 'by_rank', 'by_stage' or 'by_message' (channels: '", channels,
                    "')");
  return check(schedule, {channel_capacity, kind->second});
}

std::string schedule_repr(const Schedule& schedule) {
  return "Schedule('" + schedule.name + "', ranks=" + std::to_string(schedule.ranks.size()) +
         ", stages=" + std::to_string(schedule.stages) +
         ", microbatches=" + std::to_string(schedule.microbatches) + ")";
}

/// A picture where the schedule can be run, else its actions and why it cannot.
std::string str_of(const Schedule& schedule) {
  const auto result = check(schedule, {std::nullopt, ChannelKind::by_message});
  return result.ok() ? to_picture_text(simulate(schedule))
                     : schedule.name + ": " + result.to_string() + "\n" + to_csv(schedule);
}

std::vector<std::vector<std::tuple<std::string, double, double>>> times_of(
    const Timeline& timeline) {
  std::vector<std::vector<std::tuple<std::string, double, double>>> times;
  for (const auto& actions : timeline.ranks) {
    auto& rank = times.emplace_back();
    for (const auto& [action, start, end] : actions) {
      rank.emplace_back(to_string(action), start, end);
    }
  }
  return times;
}

std::vector<double> bubbles_of(const Timeline& timeline) {
  std::vector<double> bubbles;
  bubbles.reserve(timeline.ranks.size());
  for (size_t rank = 0; rank < timeline.ranks.size(); ++rank) {
    bubbles.push_back(timeline.bubble(static_cast<int>(rank)));
  }
  return bubbles;
}

/// Those beyond an int are clipped to its ends, and refused as too large, or too small.
int whole_number(const char* name, const py::object& value) {
  TORCH_CHECK_TYPE(PyIndex_Check(value.ptr()), name, " must be a whole number (", name, ": ",
                   py::repr(value).cast<std::string>(), "); pass an int");
  const Py_ssize_t number = PyNumber_AsSsize_t(value.ptr(), nullptr);
  constexpr Py_ssize_t kMost = std::numeric_limits<int>::max();
  return static_cast<int>(std::clamp(number, -kMost, kMost));
}

Schedule named(const py::object& name, const py::object& ranks, const py::object& microbatches,
               const py::object& stages_per_rank) {
  TORCH_CHECK_TYPE(PyUnicode_Check(name.ptr()),
                   "a schedule's name is a string (name: ", py::repr(name).cast<std::string>(),
                   ")");
  return make_schedule(name.cast<std::string>(), whole_number("ranks", ranks),
                       whole_number("stages_per_rank", stages_per_rank),
                       whole_number("microbatches", microbatches));
}

void bind_schedule(py::module_& m) {
  py::class_<Schedule>(m, "Schedule",
                       "What each rank of a pipeline does in a step; see brimful.schedule.")
      .def(py::init(&named), py::arg("name"), py::arg("ranks"), py::arg("microbatches"),
           py::kw_only(), py::arg("stages_per_rank") = 1)
      .def_static("from_csv", &from_csv, py::arg("text"), py::arg("name") = "csv")
      .def_static("names", &schedule_names)
      .def("to_csv", &to_csv)
      .BRIMFUL_FIELDS(def_readonly, Schedule, name, stages, microbatches, ignored)
      .def_property_readonly("ranks",
                             [](const Schedule& schedule) { return schedule.ranks.size(); })
      .def_property_readonly("actions", &texts_of)
      .def_property_readonly("rank_of_stage", &rank_of_stage)
      .def_property_readonly("has_communication", &has_communication)
      .def("with_communication", &communicating, py::kw_only(), py::arg("receives") = "before_use")
      .def("check", &checked, py::kw_only(), py::arg("channel_capacity") = py::none(),
           py::arg("channels") = "by_rank")
      .def(
          "simulate",
          [](const Schedule& schedule, const Cost& forward, const Cost& backward_input,
             const Cost& backward_weight, const std::optional<Cost>& backward, double hop,
             const Cost& activation, double input_share, bool receives_wait) {
            return simulate(schedule, {values_of(forward), values_of(backward_input),
                                       values_of(backward_weight),
                                       backward ? values_of(*backward) : std::vector<double>(), hop,
                                       values_of(activation), input_share, receives_wait});
          },
          py::kw_only(), py::arg("forward") = 1.0, py::arg("backward_input") = 1.0,
          py::arg("backward_weight") = 1.0, py::arg("backward") = py::none(), py::arg("hop") = 0.0,
          py::arg("activation") = 1.0, py::arg("input_share") = 0.0,
          py::arg("receives_wait") = true)
      .def("svg", [](const Schedule& schedule) { return to_picture_svg(simulate(schedule)); })
      .def(
          "__eq__",
          [](const Schedule& one, const Schedule& other) {
            return one.stages == other.stages && one.microbatches == other.microbatches &&
                   one.ranks == other.ranks;
          },
          py::is_operator())
      .def("__repr__", &schedule_repr)
      .def("__str__", &str_of);
}

std::vector<c10::Device> devices_of_stages(const std::vector<std::vector<at::Tensor>>& parameters,
                                           const std::vector<c10::Device>& devices,
                                           const py::object& schedule, int64_t microbatches) {
  pipeline::PipelineOptions options;
  options.devices = devices;
  options.microbatches = microbatches;
  set_schedule(schedule, options);
  return pipeline::stage_devices(options, parameters);
}
}  // namespace

void bind_pipeline_schedule(py::module_& m) {
  m.def("_stage_devices", &devices_of_stages, py::kw_only(), py::arg("parameters"),
        py::arg("devices"), py::arg("schedule"), py::arg("microbatches"));
  bind_schedule(m);
  m.def("_balanced", &balanced, py::arg("costs"), py::arg("stages"));
  py::class_<CheckResult>(m, "ScheduleCheck", "What is wrong with a schedule; see Schedule.check.")
      .def_property_readonly("ok", &CheckResult::ok)
      .def_readonly("problems", &CheckResult::problems)
      .def_readonly("cycle", &CheckResult::cycle)
      .def("__bool__", &CheckResult::ok)
      .def("__str__", &CheckResult::to_string)
      .def("__repr__",
           [](const CheckResult& result) { return "ScheduleCheck(" + result.to_string() + ")"; });
  py::class_<Timeline>(m, "Timeline", "A schedule with its times; see Schedule.simulate.")
      .BRIMFUL_FIELDS(def_readonly, Timeline, name, makespan, period, busy, peak_live, peak_bytes)
      .def_property_readonly("bubble", [](const Timeline& timeline) { return timeline.bubble(); })
      .def_property_readonly("bubbles", &bubbles_of)
      .def_property_readonly("actions", &times_of)
      .def("svg", py::overload_cast<const Timeline&>(&to_picture_svg))
      .def("text", &to_picture_text, py::kw_only(), py::arg("columns") = 0)
      .def("__repr__",
           [](const Timeline& timeline) {
             const auto text = to_picture_text(timeline, 1);
             return "Timeline(" + text.substr(0, text.find('\n')) + ")";
           })
      .def("__str__", [](const Timeline& timeline) { return to_picture_text(timeline); });
}

}  // namespace brimful
