#include <brimful/log.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string_view>

namespace brimful {
namespace {
constexpr std::array<std::string_view, 5> kNames{"debug", "info", "warning", "error", "off"};

LogLevel level_from_environment() {
  if (const char* wanted = std::getenv("BRIMFUL_LOG")) {
    for (size_t i = 0; i < kNames.size(); ++i) {
      if (kNames[i] == wanted) {
        return static_cast<LogLevel>(i);
      }
    }
    std::fprintf(stderr,
                 "brimful: BRIMFUL_LOG is none of debug, info, warning, error, off (value: %s)\n",
                 wanted);
  }
  return LogLevel::warning;
}

std::atomic<LogLevel>& current_level() {
  static std::atomic<LogLevel> level{level_from_environment()};
  return level;
}

struct Sink {
  std::mutex mutex;
  LogSink write;
};

// Leaked: threads may log while the process ends.
Sink& sink() {
  static auto* instance = new Sink;
  return *instance;
}
}  // namespace

void set_log_sink(LogSink write) {
  const std::lock_guard<std::mutex> lock(sink().mutex);
  sink().write = std::move(write);
}

void set_log_level(LogLevel level) {
  current_level() = level;
}

LogLevel log_level() {
  return current_level();
}

void log(LogLevel level, const std::string& line) {
  if (level < current_level()) {
    return;
  }
  LogSink write;
  {
    const std::lock_guard<std::mutex> lock(sink().mutex);
    write = sink().write;
  }
  if (write) {
    write(level, line);
  } else {
    const auto name = kNames[static_cast<size_t>(level)];
    std::fprintf(stderr, "brimful %.*s: %s\n", static_cast<int>(name.size()), name.data(),
                 line.c_str());
  }
}

}  // namespace brimful
