#include "base/chrome_trace.h"
#include "base/json.h"

namespace brimful {

std::ostringstream& ChromeTrace::event(const char* kind, int process, const std::string& name) {
  text_.precision(15);  // microseconds of the clock, to the last one
  text_ << (text_.tellp() > 0 ? ",\n" : "") << "{\"ph\":\"" << kind << "\",\"pid\":" << process
        << ",\"name\":" << json_string(name);
  return text_;
}

void ChromeTrace::name_process(int process, const std::string& name) {
  event("M", process, "process_name") << ",\"args\":{\"name\":" << json_string(name) << "}}";
}

void ChromeTrace::name_thread(int process, int thread, const std::string& name) {
  event("M", process, "thread_name")
      << ",\"tid\":" << thread << ",\"args\":{\"name\":" << json_string(name) << "}}";
}

void ChromeTrace::slice(int process, int thread, const std::string& name, const char* category,
                        double begin_us, double length_us, Values values) {
  auto& out = event("X", process, name);
  out << ",\"tid\":" << thread << ",\"cat\":\"" << category << "\",\"ts\":" << begin_us
      << ",\"dur\":" << length_us << ",\"args\":{";
  const char* separator = "";
  for (const auto& [key, value] : values) {
    out << separator << "\"" << key << "\":" << value;
    separator = ",";
  }
  out << "}}";
}

void ChromeTrace::mark(int process, const std::string& name, double time_us) {
  event("i", process, name) << ",\"s\":\"p\",\"ts\":" << time_us << "}";
}

void ChromeTrace::counter(int process, const std::string& name, double time_us,
                          const std::string& values) {
  event("C", process, name) << ",\"ts\":" << time_us << ",\"args\":" << values << "}";
}

std::string ChromeTrace::json() const {
  return "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[" + text_.str() + "]}";
}

}  // namespace brimful
