#include <brimful/probes/oom_report.h>

#include <algorithm>
#include <cmath>

#include "base/format.h"
#include "base/text_stream.h"
#include "memory/most_bytes_first.h"

namespace brimful::probes {
namespace {

constexpr size_t kShortSites = 4;
constexpr size_t kShortAdvice = 3;

std::string categories(const OomFacts& facts) {
  std::string text;
  for (const auto category : memory::most_bytes_first(facts.by_category)) {
    text += (text.empty() ? "" : ", ") + std::string(memory::name_of(category)) + " " +
            format_bytes(facts.by_category[static_cast<size_t>(category)]);
  }
  return text;
}

void write_sites(std::ostream& out, const OomFacts& facts, size_t count) {
  for (size_t k = 0; k < std::min(count, facts.sites.size()); ++k) {
    const OomSite& site = facts.sites[k];
    out << "\n  " << format_bytes(site.bytes) << " at " << site.place << ", "
        << memory::name_of(site.phase) << ", " << site.blocks
        << (site.blocks == 1 ? " tensor" : " tensors");
  }
}

void write_room(std::ostream& out, const OomFacts& facts) {
  out << "\nAsked for " << format_bytes(facts.request_bytes) << " at " << facts.place << " ("
      << memory::name_of(facts.phase) << ", step " << facts.step
      << (facts.node.empty() ? "" : ", " + facts.node) << ")";
  if (facts.largest_bytes) {
    out << "; the largest request that fits: " << format_bytes(*facts.largest_bytes);
    if (*facts.largest_bytes < facts.request_bytes) {
      out << ", short by " << format_bytes(facts.request_bytes - *facts.largest_bytes);
    }
  }
  if (const auto& arena = facts.fragmentation) {
    out << "; " << std::lround(arena->share * 100) << " % of " << format_bytes(arena->free_bytes)
        << " free in segments lie outside the largest piece";
    if (arena->splitter) {
      const std::string& place = arena->splitter->place;
      out << ", and " << format_bytes(arena->splitter->block.bytes)
          << (place.empty() ? ", alive since before tracking was on," : " alive of " + place)
          << " split " << format_bytes(arena->splitter->room_bytes);
    }
  }
}

std::string numbered_advice(const std::vector<OomFinding>& causes, size_t count) {
  std::vector<std::string> advice;
  for (size_t k = 0; k < std::min(count, causes.size()); ++k) {
    advice.push_back(causes[k].advice);
  }
  return format_numbered(advice);
}

}  // namespace

std::string to_short_string(const OomFacts& facts) {
  TextStream out;
  const auto causes = findings(facts);
  if (!causes.empty()) {
    out << "\nLikely cause: " << causes.front().text
        << ".\nTry next: " << numbered_advice(causes, kShortAdvice) << ".";
  }
  write_room(out, facts);
  out << "\nIn use: " << categories(facts) << "; by line:";
  write_sites(out, facts, kShortSites);
  return out.str();
}

std::string to_string(const OomFacts& facts) {
  TextStream out;
  out << "Out of memory on " << facts.device << ": " << format_bytes(facts.request_bytes)
      << " were asked for, " << format_bytes(facts.used_bytes) << " were in use";
  if (facts.limit_bytes) {
    out << " of " << format_bytes(*facts.limit_bytes);
  }
  write_room(out, facts);
  out << "\n\nCauses, the most likely first:";
  for (const OomFinding& finding : findings(facts)) {
    out << "\n- " << finding.text << ".\n  Try: " << finding.advice << ".";
  }
  out << "\n\nIn use, by category: " << categories(facts) << "\nBy line:";
  write_sites(out, facts, facts.sites.size());
  if (facts.used_bytes > facts.tracked_bytes) {
    out << "\n  " << format_bytes(facts.used_bytes - facts.tracked_bytes)
        << " from before tracking was on";
  }
  if (!facts.growing.empty()) {
    out << "\n\nGrows from step to step:";
    for (const OomGrowth& line : facts.growing) {
      out << "\n  " << format_bytes(line.bytes / std::max<int64_t>(1, line.steps)) << " a step at "
          << line.place << ", for " << line.steps << " steps";
    }
  }
  if (facts.context_bytes) {
    out << "\n\nBeside the allocator this process holds " << format_bytes(*facts.context_bytes)
        << " (CUDA's context and libraries)";
  }
  if (facts.others_bytes) {
    out << "\n\nOther processes hold " << format_bytes(*facts.others_bytes);
  }
  for (const OomProcess& process : facts.processes) {
    out << "\n  " << process.name << " (child, pid " << process.pid
        << "): " << format_bytes(process.bytes);
  }
  return out.str();
}

}  // namespace brimful::probes
