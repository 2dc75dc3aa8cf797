#include <brimful/step/report.h>

#include <iomanip>

#include "base/format.h"
#include "base/text_stream.h"

namespace brimful {
namespace {
std::string percent(double share) {
  TextStream text;
  text << std::fixed << std::setprecision(1) << 100 * share << "%";
  return text.str();
}
}  // namespace

std::string to_string(const Report& report) {
  TextStream text;
  text << std::fixed << std::setprecision(1);
  text << "steps: " << report.steps << " (failed: " << report.failed
       << ", retries: " << report.retries << ", out of memory here: " << report.ooms
       << ", cache released: " << report.cache_releases
       << ", garbage collected: " << report.garbage_collections << ")\nrows of a piece that fits: "
       << (report.piece_rows > 0 ? std::to_string(report.piece_rows) : "not needed yet")
       << "\npeak of the last step: " << format_peak(report.peak_bytes)
       << " (limit: " << (report.limit_bytes ? format_bytes(*report.limit_bytes) : "none") << ")";
  if (report.mean_fill) {
    text << "\npeak / limit: " << (report.last_fill ? percent(*report.last_fill) : "none")
         << " in the last step, " << percent(*report.mean_fill) << " on average, "
         << percent(*report.most_fill) << " at most";
  }
  if (!report.rungs.empty()) {
    text << "\nto fit single rows: " << to_string(report.rungs);
  }
  if (report.trial_runs > 0) {
    text << "\nrule of the loss: " << (report.loss_rule.empty() ? "not known" : report.loss_rule)
         << " (found in " << report.trial_ms
         << " ms, forwards and backwards of a few rows: " << report.trial_runs << ")";
  }
  text << "\ntime in steps: " << report.total_ms
       << " ms, lost to repeated attempts: " << report.lost_ms << " ms";
  if (report.total_ms > 0) {
    text << " (" << percent(report.lost_ms / report.total_ms) << ")";
  }
  return text.str();
}

}  // namespace brimful
