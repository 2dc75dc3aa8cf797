#pragma once
#include <brimful/export.h>
#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <string>
#include <utility>

namespace brimful {

/// A trace in Chrome's format, which Perfetto reads. A process is a group of rows, a thread one row; names may be any
/// text, keys and categories are plain words. Times are microseconds.
class BRIMFUL_API ChromeTrace {
 public:
  using Values = std::initializer_list<std::pair<const char*, double>>;

  void name_process(int process, const std::string& name);
  void name_thread(int process, int thread, const std::string& name);
  void slice(int process, int thread, const std::string& name, const char* category,
             double begin_us, double length_us, Values values = {});
  /// A moment, marked across the process's rows.
  void mark(int process, const std::string& name, double time_us);
  /// `values`: a JSON object of numbers, drawn one upon the other.
  void counter(int process, const std::string& name, double time_us, const std::string& values);
  std::string json() const;

 private:
  std::ostringstream& event(const char* kind, int process, const std::string& name);
  std::ostringstream text_;
};

}  // namespace brimful
