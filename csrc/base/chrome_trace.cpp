#include "base/chrome_trace.h"
#include <nlohmann/json.hpp>
#include "base/json.h"

namespace brimful {
namespace {
using Json = nlohmann::ordered_json;
}  // namespace

ChromeTrace::ChromeTrace()
    : trace_(
          std::make_unique<Json>(Json{{"displayTimeUnit", "ms"}, {"traceEvents", Json::array()}})) {
}
ChromeTrace::~ChromeTrace() = default;

void ChromeTrace::add(Json event) {
  (*trace_)["traceEvents"].push_back(std::move(event));
}

void ChromeTrace::name_process(int process, const std::string& name) {
  add({{"ph", "M"}, {"pid", process}, {"name", "process_name"}, {"args", {{"name", name}}}});
}

void ChromeTrace::name_thread(int process, int thread, const std::string& name) {
  add({{"ph", "M"},
       {"pid", process},
       {"tid", thread},
       {"name", "thread_name"},
       {"args", {{"name", name}}}});
}

void ChromeTrace::slice(int process, int thread, const std::string& name, const char* category,
                        double begin_us, double length_us, Values values) {
  auto arguments = Json::object();
  for (const auto& [key, value] : values) {
    arguments[key] = value;
  }
  add({{"ph", "X"},
       {"pid", process},
       {"tid", thread},
       {"name", name},
       {"cat", category},
       {"ts", begin_us},
       {"dur", length_us},
       {"args", std::move(arguments)}});
}

void ChromeTrace::mark(int process, const std::string& name, double time_us) {
  add({{"ph", "i"}, {"pid", process}, {"name", name}, {"s", "p"}, {"ts", time_us}});
}

void ChromeTrace::counter(int process, const std::string& name, double time_us, Json values) {
  add({{"ph", "C"},
       {"pid", process},
       {"name", name},
       {"ts", time_us},
       {"args", std::move(values)}});
}

std::string ChromeTrace::json() const {
  return json_text(*trace_);
}

}  // namespace brimful
