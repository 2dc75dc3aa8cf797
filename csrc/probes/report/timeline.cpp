#include "probes/report/timeline.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include "memory/most_bytes_first.h"

namespace brimful::probes {
namespace {

using memory::Category;
using memory::CategoryBytes;
using memory::DeviceRecording;
using memory::EventKind;
using memory::RecordedEvent;

constexpr uint32_t kNoTop = kTopSites;

/// What is in use, event by event.
class State {
 public:
  explicit State(const DeviceRecording& device)
      : device_(device),
        category_(device.blocks.size(), Category::other),
        lives_(device.blocks.size(), false),
        bytes_(device.labelled),
        step_(device.first_step) {
    for (const int64_t known : device.labelled) {
      of(Category::other) -= known;
    }
    set_untracked(device.untracked_bytes);
    for (uint32_t block = 0; block < device.standing_blocks; ++block) {
      add(block);
    }
  }

  /// `moved(block, bytes)` gets what the event added or took.
  template <typename Moved>
  void apply(const RecordedEvent& event, const Moved& moved) {
    set_untracked(event.untracked_bytes);
    if (event.kind == EventKind::step) {
      begin_step(event.block);
      return;
    }
    const int64_t bytes = device_.blocks[event.block].bytes;
    if (event.kind == EventKind::birth) {
      add(event.block);
      phase_ = device_.blocks[event.block].phase;
      moved(event.block, bytes);
    } else {
      lives_[event.block] = false;
      of(category_[event.block]) -= bytes;
      used_bytes_ -= bytes;
      moved(event.block, -bytes);
    }
  }
  void apply(const RecordedEvent& event) {
    apply(event, [](uint32_t, int64_t) {});
  }

  int64_t used_bytes() const { return used_bytes_; }
  int64_t step() const { return step_; }
  memory::Phase phase() const { return phase_; }
  const CategoryBytes& by_category() const { return bytes_; }
  Category category(uint32_t block) const { return category_[block]; }
  bool lives(uint32_t block) const { return lives_[block]; }

 private:
  int64_t& of(Category category) { return bytes_[static_cast<size_t>(category)]; }

  void set_untracked(int64_t untracked_bytes) {
    used_bytes_ += untracked_bytes - untracked_bytes_;
    of(Category::other) += untracked_bytes - untracked_bytes_;
    untracked_bytes_ = untracked_bytes;
  }

  void add(uint32_t block) {
    const auto& added = device_.blocks[block];
    Category category = added.category;
    if (category == Category::activations) {
      if (added.step < step_) {
        category = Category::other;
      } else {
        activations_.push_back(block);
      }
    }
    category_[block] = category;
    lives_[block] = true;
    of(category) += added.bytes;
    used_bytes_ += added.bytes;
  }

  /// What a forward left behind is no activation of the next step.
  void begin_step(int64_t step) {
    step_ = step;
    for (const uint32_t block : activations_) {
      if (lives_[block]) {
        category_[block] = Category::other;
        of(Category::activations) -= device_.blocks[block].bytes;
        of(Category::other) += device_.blocks[block].bytes;
      }
    }
    activations_.clear();
  }

  const DeviceRecording& device_;
  std::vector<Category> category_;
  std::vector<bool> lives_;
  std::vector<uint32_t> activations_;  // of this step, dead ones too
  CategoryBytes bytes_;
  int64_t untracked_bytes_ = 0;
  int64_t used_bytes_ = 0;
  int64_t step_ = 0;
  memory::Phase phase_ = memory::Phase::other;
};

int64_t time_of(const DeviceRecording& device, size_t events) {
  return events == 0 ? 0 : device.events[events - 1].time_ns;
}

/// The number of events after which the most was in use; 0: before the first one.
size_t events_to_peak(const DeviceRecording& device) {
  State state(device);
  int64_t most = state.used_bytes();
  size_t best = 0;
  for (size_t i = 0; i < device.events.size(); ++i) {
    state.apply(device.events[i]);
    if (state.used_bytes() > most) {
      most = state.used_bytes();
      best = i + 1;
    }
  }
  return best;
}

memory::Peak peak_of(const DeviceRecording& device, size_t events) {
  State state(device);
  for (size_t i = 0; i < events; ++i) {
    state.apply(device.events[i]);
  }
  memory::Peak peak;
  peak.bytes = state.used_bytes();
  peak.step = state.step();
  peak.phase = state.phase();
  peak.by_category = state.by_category();
  peak.before_bytes =
      events == 0 ? device.untracked_bytes : device.events[events - 1].untracked_bytes;
  std::map<std::tuple<uint32_t, uint32_t, Category>, memory::PeakSite> sites;
  std::map<uint32_t, memory::PeakModule> modules;
  for (uint32_t k = 0; k < device.blocks.size(); ++k) {
    if (state.lives(k)) {
      const auto& block = device.blocks[k];
      const Category category = state.category(k);
      memory::PeakSite& site = sites[{block.site, block.module, category}];
      site = {block.site, block.module, category, site.bytes + block.bytes, site.blocks + 1};
      memory::PeakModule& module = modules[block.module];
      module.module = block.module;
      module.bytes += block.bytes;
      module.by_category[static_cast<size_t>(category)] += block.bytes;
    }
  }
  peak.by_site = memory::most_bytes_first(sites);
  peak.by_module = memory::most_bytes_first(modules);
  return peak;
}

/// By site, the bytes in use before the first event.
std::vector<int64_t> bytes_of_sites(const DeviceRecording& device) {
  uint32_t last = 0;
  for (const auto& block : device.blocks) {
    last = std::max(last, block.site);
  }
  std::vector<int64_t> bytes(size_t{last} + 1, 0);
  for (size_t k = 0; k < device.standing_blocks; ++k) {
    bytes[device.blocks[k].site] += device.blocks[k].bytes;
  }
  return bytes;
}

std::vector<uint32_t> top_sites(const DeviceRecording& device) {
  auto bytes = bytes_of_sites(device);
  auto most = bytes;
  for (const RecordedEvent& event : device.events) {
    if (event.kind != EventKind::step) {
      const auto& block = device.blocks[event.block];
      bytes[block.site] += event.kind == EventKind::birth ? block.bytes : -block.bytes;
      most[block.site] = std::max(most[block.site], bytes[block.site]);
    }
  }
  std::vector<uint32_t> sites(most.size());
  std::iota(sites.begin(), sites.end(), 0);
  std::erase_if(sites, [&](uint32_t site) { return most[site] == 0; });
  std::stable_sort(sites.begin(), sites.end(),
                   [&](uint32_t a, uint32_t b) { return most[a] > most[b]; });
  sites.resize(std::min(sites.size(), kTopSites));
  return sites;
}

class Columns {
 public:
  Columns(const DeviceRecording& device, const std::vector<uint32_t>& sites)
      : device_(device), state_(device), top_(bytes_of_sites(device).size(), kNoTop) {
    const auto standing = bytes_of_sites(device);
    for (uint32_t k = 0; k < sites.size(); ++k) {
      top_[sites[k]] = k;
      by_site_[k] = standing[sites[k]];
    }
    begin_column(0);
  }

  std::vector<TimelineColumn> group(size_t events_of_column) {
    for (size_t i = 0; i < device_.events.size(); ++i) {
      if (i % events_of_column == 0) {
        begin_column(device_.events[i].time_ns);
      }
      state_.apply(device_.events[i], [this](uint32_t block, int64_t bytes) {
        if (const uint32_t top = top_[device_.blocks[block].site]; top != kNoTop) {
          by_site_[top] += bytes;
        }
      });
      if (i % events_of_column == 0 || state_.used_bytes() > most_) {
        note();
      }
    }
    return std::move(columns_);
  }

 private:
  void begin_column(int64_t time_ns) {
    columns_.emplace_back().time_ns = time_ns;
    note();
  }
  void note() {
    TimelineColumn& column = columns_.back();
    most_ = state_.used_bytes();
    column.step = state_.step();
    column.phase = state_.phase();
    column.by_category = state_.by_category();
    column.by_site = by_site_;
  }

  const DeviceRecording& device_;
  State state_;
  std::vector<uint32_t> top_;
  std::array<int64_t, kTopSites> by_site_{};
  std::vector<TimelineColumn> columns_;
  int64_t most_ = 0;
};

}  // namespace

int64_t TimelineColumn::used_bytes() const {
  return std::accumulate(by_category.begin(), by_category.end(), int64_t{0});
}

Timeline timeline_of(const DeviceRecording& device, size_t columns) {
  Timeline timeline;
  const size_t at_peak = events_to_peak(device);
  timeline.peak = peak_of(device, at_peak);
  timeline.peak_ns = time_of(device, at_peak);
  timeline.sites = top_sites(device);
  const size_t of_column = std::max<size_t>(1, (device.events.size() + columns - 1) / columns);
  timeline.columns = Columns(device, timeline.sites).group(of_column);
  return timeline;
}

}  // namespace brimful::probes
