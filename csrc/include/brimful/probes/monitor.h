#pragma once
#include <brimful/export.h>
#include <brimful/probes/sample.h>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace brimful::probes {

/// tensorboard's SummaryWriter.add_scalar: a tag such as "gpu/0/used_bytes", its value, the sample's number.
using AddScalar = std::function<void(const std::string& tag, double value, int64_t step)>;

struct MonitorOptions {
  int64_t interval_ms = 1000;
  std::string json_path;  ///< gets one JSON line a sample, after what is there; empty: none
  std::string
      prometheus_path;  ///< always holds the last sample, whole; for the node exporter's textfile collector
  AddScalar add_scalar;  ///< called from the monitor's thread
};

/// Takes a sample at once, then every interval, and a last one when it is stopped, in a thread of its own. What fails (a
/// full disk, a writer that throws) is left out from there on, after one warning in the log: the job goes on.
class BRIMFUL_API Monitor {
 public:
  /// @throws c10::ValueError if the interval is not positive
  explicit Monitor(const MonitorOptions& options);
  /// Stops. In a child of fork, which has no such thread, does nothing.
  ~Monitor();
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

  /// Waits for the last sample. Call it from any thread but the monitor's; again does nothing.
  void stop();
  /// Samples that have been taken and written.
  int64_t samples() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace brimful::probes
