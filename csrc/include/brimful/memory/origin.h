#pragma once
#include <brimful/export.h>

#include <cstdint>
#include <string>

namespace brimful::memory {

/// Where and when something was measured. Plain data.
struct Origin {
  std::string host;
  std::string command;  ///< the process's, as it was called
  int64_t pid = 0;
  int64_t unix_ns = 0;
};

/// Of this process, now. What the system does not report is empty. From any thread; does not throw but for memory.
BRIMFUL_API Origin origin_now();

/// "train.py --epochs 3 (pid 42) on host a, 2026-05-01 12:00:00 UTC"; empty where nothing is known.
BRIMFUL_API std::string to_string(const Origin& origin);

}  // namespace brimful::memory
