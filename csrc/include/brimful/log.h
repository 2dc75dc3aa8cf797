#pragma once
#include <brimful/export.h>

#include <functional>
#include <string>

namespace brimful {

enum class LogLevel : int { debug, info, warning, error, off };

/// Receives every line that passes the level; called from any thread, at the same time from several.
using LogSink = std::function<void(LogLevel, const std::string&)>;

/// Replaces the sink (default: stderr). Thread-safe.
BRIMFUL_API void set_log_sink(LogSink sink);
/// Lines below `level` are dropped. The first level comes from BRIMFUL_LOG (debug, info, warning, error, off), else warning.
BRIMFUL_API void set_log_level(LogLevel level);
BRIMFUL_API LogLevel log_level();
BRIMFUL_API void log(LogLevel level, const std::string& line);

}  // namespace brimful
