#include "reads.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <vector>

#include "../runtime/sim_cuda.h"
#include "count.h"
#include "line.h"

namespace sim_values {
namespace {

constexpr size_t kListed = 20;
constexpr long kAgain = 1000;

thread_local const char* called = nullptr;
thread_local int depth = 0;

struct Line {
  std::string place, called;
  auto operator<=>(const Line&) const = default;
};

struct Reads {
  std::mutex mutex;
  std::map<Line, long> times;
};

Reads& reads() {
  static auto* all = new Reads;
  return *all;
}

void note_read() {
  const Line line{line_of_python(), called == nullptr ? "a copy" : called};
  Reads& all = reads();
  const std::lock_guard lock(all.mutex);
  if (++all.times[line] == kAgain) {
    std::fprintf(stderr,
                 "simulated CUDA: a value that is not known was read %ld times at %s (%s): a loop "
                 "that it is to end "
                 "does not end here; give it a number of steps\n",
                 kAgain, line.place.c_str(), line.called.c_str());
  }
}

int answer(void* to, const void* /*from*/, size_t bytes) {
  const bool is_count = answer_count(to, bytes);
  if (!is_count || count_is_unknown()) {
    try {
      note_read();
    } catch (const std::exception&) {  // no reason for a program to end
    }
  }
  return is_count ? 1 : 0;
}

std::string quoted(const std::string& text) {
  std::string all = "\"";
  for (const char letter : text) {
    if (letter == '"' || letter == '\\') {
      all += '\\';
    }
    all += static_cast<unsigned char>(letter) < ' ' ? ' ' : letter;
  }
  return all + '"';
}

void write_report(const char* path) {
  std::string line = "{\"pid\": " + std::to_string(getpid()) + ", \"peak_bytes\": [";
  for (int i = 0; i < sim_cuda_machine_devices(); ++i) {
    line += (i == 0 ? "" : ", ") + std::to_string(sim_cuda_peak_bytes(i));
  }
  line += "], \"unknown_reads\": [";
  const char* between = "";
  for (const auto& [at, times] : reads().times) {
    line += between + ("{\"line\": " + quoted(at.place)) + ", \"operator\": " + quoted(at.called) +
            ", \"times\": " + std::to_string(times) + '}';
    between = ", ";
  }
  std::ofstream(path, std::ios::app) << line + "]}\n";
}

void report() {
  const std::lock_guard lock(reads().mutex);
  if (const char* path = std::getenv("SIM_CUDA_REPORT"); path != nullptr && *path != 0) {
    write_report(path);
  }
  if (reads().times.empty()) {
    return;
  }
  std::fprintf(stderr,
               "simulated CUDA: values that are not known were read: they are zeros, and counts of "
               "them the %s that "
               "can be\n",
               sim_cuda_unknown() == kMost ? "most" : "least");
  size_t listed = 0;
  std::vector<std::pair<Line, long>> most_first(reads().times.begin(), reads().times.end());
  std::ranges::stable_sort(most_first, std::greater(), &std::pair<Line, long>::second);
  for (const auto& [at, times] : most_first) {
    if (++listed > kListed) {
      std::fprintf(stderr, "  and %zu more lines\n", most_first.size() - kListed);
      break;
    }
    std::fprintf(stderr, "  %ld x %s (%s)\n", times, at.place.c_str(), at.called.c_str());
  }
}

}  // namespace

void Called::enter(const char* name) {
  if (depth++ == 0) {
    called = name;
  }
}

void Called::leave() {
  if (--depth == 0) {
    called = nullptr;
  }
}

void watch_reads() {
  sim_cuda_answer_unknown(&answer);
  std::atexit(&report);
}

}  // namespace sim_values
