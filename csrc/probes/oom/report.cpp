#include <brimful/log.h>
#include <brimful/memory/live_table.h>
#include <brimful/memory/stats.h>
#include <brimful/probes/gpus.h>
#include <brimful/probes/oom_report.h>
#include <brimful/probes/processes.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

#include "base/environment.h"
#include "base/whole_file.h"
#include "memory/cuda.h"
#include "memory/moment.h"
#include "memory/oom_observer.h"
#include "memory/others.h"
#include "probes/oom/attention_line.h"
#include "probes/oom/blocks.h"
#include "probes/oom/program.h"

namespace brimful::probes {
namespace {

constexpr size_t kProcesses = 5;

struct Watch {
  std::mutex mutex;
  std::optional<OomFacts> last;
  std::optional<std::string> path;
  bool pending = false;
  std::atomic<OomProgramReader> reader{nullptr};
  Watch() {
    if (auto given = environment("BRIMFUL_OOM_REPORT"); !given.empty()) {
      path = std::move(given);
    }
  }
};

Watch& watch() {
  static auto* const the_watch = new Watch;  // for ever, as allocators
  return *the_watch;
}

void read_moment(OomFacts& facts) {
  const auto moment = memory::moment_of_birth();
  facts.step = moment.step;
  facts.phase = moment.phase;
  facts.place = memory::to_string(memory::site(moment.site));
  facts.attention = is_attention(memory::site(moment.site));
  facts.grad_enabled = c10::GradMode::is_enabled();
  if (const auto node = torch::autograd::get_current_node()) {
    facts.node = node->name();
  }
}

void read_device(OomFacts& facts, c10::Device device) {
  const auto stats = memory::stats(device);
  facts.device = device.str();
  facts.used_bytes = stats.used_bytes;
  facts.limit_bytes = stats.limit_bytes;
  if (!device.is_cuda()) {
    if (stats.limit_bytes) {
      facts.largest_bytes = std::max<int64_t>(0, *stats.limit_bytes - stats.used_bytes);
    }
    return;
  }
  const auto driver = memory::cuda_memory(device.index());
  if (!facts.limit_bytes) {
    facts.limit_bytes = driver.total_bytes;
  }
  std::vector<ArenaSegment> segments;
  for (const auto& segment : memory::cuda_segments(device.index())) {
    segments.push_back({{}, segment.expandable});
    for (const auto& block : segment.blocks) {
      segments.back().blocks.push_back({block.bytes, block.live, block.data});
    }
  }
  facts.fragmentation = fragmentation(segments, facts.request_bytes);
  const auto left_bytes = std::min(
      driver.free_bytes, stats.limit_bytes.value_or(driver.total_bytes) - stats.reserved_bytes);
  facts.largest_bytes = std::max(facts.fragmentation->largest_free_bytes, left_bytes);
  facts.expandable_segments = facts.fragmentation->expandable;
  for (const char* const name : {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}) {
    facts.expandable_segments |=
        environment(name).find("expandable_segments:True") != std::string::npos;
  }
}

void read_beside(OomFacts& facts, c10::Device device) {
  facts.others_bytes = memory::held_by_others(device).others_bytes;
  facts.context_bytes = context_bytes(device);
  if (facts.others_bytes) {
    *facts.others_bytes =
        std::max<int64_t>(0, *facts.others_bytes - facts.context_bytes.value_or(0));
  }
  for (const Process& process : read_descendants(::getpid())) {
    facts.processes.push_back(
        {process.name, process.pid, process.uss_bytes.value_or(process.rss_bytes.value_or(0))});
  }
  std::stable_sort(facts.processes.begin(), facts.processes.end(),
                   [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
  facts.processes.resize(std::min(facts.processes.size(), kProcesses));
}

void write_report(const std::string& path, const OomFacts& facts) {
  try {
    write_file(path, to_html(facts));
  } catch (const std::exception& error) {  // the program has another error to report
    static std::once_flag once;
    std::call_once(once, [&] {
      log(LogLevel::warning, std::string("the out-of-memory report cannot be written: ") +
                                 error.what() +
                                 "; give track(report=...) or BRIMFUL_OOM_REPORT a file in a "
                                 "folder that exists");
    });
  }
}

std::string observe(c10::Device device, int64_t request_bytes, bool retried) {
  OomFacts facts;
  facts.origin = memory::origin_now();
  facts.request_bytes = request_bytes;
  read_moment(facts);
  read_device(facts, device);
  if (!retried) {
    if (const auto reader = watch().reader.load(std::memory_order_acquire)) {
      facts.program = reader();
    }
    read_beside(facts, device);
  }
  read_blocks(facts, memory::live_blocks(device));
  facts.by_category = memory::live_by_category(
      device, facts.program ? facts.program->labels : std::vector<memory::Label>{});
  auto text = to_short_string(facts);
  std::optional<std::string> path;
  {
    const std::lock_guard lock(watch().mutex);
    watch().last = facts;
    watch().pending = retried;
    path = retried ? std::nullopt : watch().path;
  }
  if (path) {
    write_report(*path, facts);
  }
  return text;
}

}  // namespace

void set_oom_program_reader(OomProgramReader reader) noexcept {
  watch().reader.store(reader, std::memory_order_release);
}

void watch_ooms() {
  watch();
  memory::set_oom_observer(&observe);
}

std::optional<OomFacts> last_oom() {
  const std::lock_guard lock(watch().mutex);
  return watch().last;
}

void set_oom_report_path(std::optional<std::string> path) {
  const std::lock_guard lock(watch().mutex);
  watch().path = std::move(path);
}

void write_pending_oom_report() {
  std::optional<OomFacts> facts;
  std::optional<std::string> path;
  {
    const std::lock_guard lock(watch().mutex);
    if (std::exchange(watch().pending, false)) {
      facts = watch().last;
      path = watch().path;
    }
  }
  if (facts && path) {
    write_report(*path, *facts);
  }
}

}  // namespace brimful::probes
