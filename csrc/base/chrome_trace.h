#pragma once
#include <initializer_list>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>

namespace brimful {

/// A trace in Chrome's format, which Perfetto reads. A process is a group of rows, a thread one row. Times are
/// microseconds.
class ChromeTrace {
 public:
  using Values = std::initializer_list<std::pair<const char*, double>>;

  ChromeTrace();
  ~ChromeTrace();
  void name_process(int process, const std::string& name);
  void name_thread(int process, int thread, const std::string& name);
  void slice(int process, int thread, const std::string& name, const char* category,
             double begin_us, double length_us, Values values = {});
  /// A moment, marked across the process's rows.
  void mark(int process, const std::string& name, double time_us);
  /// `values`: an object of numbers, drawn one upon the other.
  void counter(int process, const std::string& name, double time_us, nlohmann::ordered_json values);
  std::string json() const;

 private:
  void add(nlohmann::ordered_json event);
  std::unique_ptr<nlohmann::ordered_json> trace_;
};

}  // namespace brimful
