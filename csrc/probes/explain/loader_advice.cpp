#include <brimful/probes/loader_advice.h>
#include <c10/util/Exception.h>
#include <algorithm>
#include <cmath>
#include "base/format.h"

namespace brimful::probes {
namespace {

constexpr int64_t kEnoughSteps = 5;
constexpr int64_t kRuleOfThumb = 4;
constexpr double kNoticeable = 0.05;   // of a step
constexpr double kShortest_ms = 0.01;  // of a step's work, to divide by
constexpr int64_t kGrowthBytes = int64_t{32} << 20;
constexpr int64_t kGrowthOfStep = int64_t{64} << 10;

std::string percent(double share) {
  return std::to_string(std::lround(share * 100)) + " %";
}

/// Workers that find a CPU beside the training process.
int64_t room_for_workers(const LoaderFacts& facts) {
  const auto share = static_cast<int64_t>(facts.cpus / static_cast<double>(facts.processes));
  return std::max<int64_t>(1, share - 1);
}

std::string of_cpus(const LoaderFacts& facts) {
  const auto tenths = std::lround(facts.cpus * 10);
  return std::to_string(tenths / 10) + (tenths % 10 == 0 ? "" : "." + std::to_string(tenths % 10)) +
         " usable CPUs" +
         (facts.processes > 1 ? " shared by " + std::to_string(facts.processes) + " ranks" : "");
}

/// Batches come every (wait + work) while the loop waits for them, so each worker takes that long times their number.
double batch_ms(const LoaderFacts& facts) {
  return facts.num_workers == 0
             ? facts.wait_ms
             : static_cast<double>(facts.num_workers) * (facts.wait_ms + facts.work_ms);
}

/// Few steps wait, and long: the workers are enough and not even. Batches of workers that began together come together,
/// so that one step of `num_workers` waits where they are not enough.
bool is_uneven(const LoaderFacts& facts) {
  return facts.num_workers > 0 && facts.late_steps &&
         *facts.late_steps * 2 * facts.num_workers < facts.steps;
}

void advise_workers(const LoaderFacts& facts, LoaderAdvice& out) {
  const auto room = room_for_workers(facts);
  const double needed = std::ceil(batch_ms(facts) / std::max(facts.work_ms, kShortest_ms));
  const auto wanted = static_cast<int64_t>(std::clamp(needed, 1.0, 1e6));
  out.num_workers = std::min(wanted, room);
  const auto waits = percent(out.wait_share) + " of the time is spent waiting for data: ";
  if (is_uneven(facts) && facts.num_workers <= room) {
    out.num_workers = facts.num_workers;
    out.prefetch_factor = std::max<int64_t>(4, 2 * facts.prefetch_factor.value_or(2));
    out.reasons.push_back(waits + "the workers are enough and late at times; prefetch_factor " +
                          std::to_string(*out.prefetch_factor) + " evens that out");
    return;
  }
  out.reasons.push_back(waits + "num_workers " + std::to_string(out.num_workers));
  if (wanted > room) {
    out.reasons.push_back("keeping up would take " + std::to_string(wanted) +
                          " workers, and there are " + of_cpus(facts) +
                          ": make the dataset's work cheaper (smaller images, work "
                          "done ahead of time) or get more CPUs");
  }
  if (facts.num_workers == 0 && !facts.prefetch_factor) {
    out.prefetch_factor = 2;
  }
}

void advise_rest(const LoaderFacts& facts, LoaderAdvice& out) {
  const double step_ms = facts.wait_ms + facts.work_ms;
  if (facts.cuda && !facts.pin_memory && facts.copy_ms.value_or(step_ms) >= kNoticeable * step_ms) {
    out.pin_memory = true;
    out.reasons.emplace_back(
        "pin_memory=True, and .to(device, non_blocking=True): copies of batches then run beside "
        "the GPU's work");
  }
  if (out.num_workers > 0 && !facts.persistent_workers && facts.epochs > 1 &&
      facts.first_wait_ms > 10 * std::max(facts.work_ms, kShortest_ms)) {
    out.persistent_workers = true;
    out.reasons.emplace_back("persistent_workers=True: each epoch begins with starting workers");
  }
  const auto growth = facts.worker_growth_bytes.value_or(0);
  if (growth > kGrowthBytes && growth / std::max<int64_t>(facts.steps, 1) > kGrowthOfStep) {
    out.reasons.push_back(
        "a worker's private memory grew by " + format_bytes(growth) +
        ": a dataset that holds lists of Python objects is copied page by page as it is read; hold "
        "NumPy arrays or tensors, and no cache that grows");
  }
}

void check(const LoaderFacts& facts) {
  const bool fine = facts.steps >= 0 && facts.wait_ms >= 0 && facts.work_ms >= 0 &&
                    facts.num_workers >= 0 && facts.processes >= 1 && facts.cpus > 0;
  TORCH_CHECK_VALUE(fine, "a loader's facts must not be negative (steps: ", facts.steps,
                    ", wait_ms: ", facts.wait_ms, ", work_ms: ", facts.work_ms,
                    ", num_workers: ", facts.num_workers, ", processes: ", facts.processes,
                    ", cpus: ", facts.cpus, ")");
}

}  // namespace

LoaderAdvice advise_loader(const LoaderFacts& facts) {
  check(facts);
  LoaderAdvice out;
  out.num_workers = facts.num_workers;
  out.prefetch_factor = facts.prefetch_factor;
  out.pin_memory = facts.pin_memory;
  out.persistent_workers = facts.persistent_workers;
  const auto room = room_for_workers(facts);
  if (facts.steps < kEnoughSteps) {
    out.num_workers = std::min(kRuleOfThumb, room);
    out.reasons.push_back("too few steps were measured (" + std::to_string(facts.steps) +
                          "): start with " + std::to_string(out.num_workers) +
                          " workers, and measure");
    return out;
  }
  const double step_ms = facts.wait_ms + facts.work_ms;
  out.wait_share = step_ms > 0 ? facts.wait_ms / step_ms : 0;
  if (out.wait_share >= kNoticeable) {
    advise_workers(facts, out);
  } else if (facts.num_workers > room) {
    out.num_workers = room;
    out.reasons.push_back("num_workers " + std::to_string(room) +
                          ": more compete with training for " + of_cpus(facts));
  }
  advise_rest(facts, out);
  if (out.reasons.empty()) {
    out.reasons.push_back(percent(out.wait_share) +
                          " of the time is spent waiting for data: nothing to gain");
  }
  return out;
}

}  // namespace brimful::probes
