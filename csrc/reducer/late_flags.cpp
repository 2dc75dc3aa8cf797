#include "reducer/late_flags.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "memory/host_tensor.h"
#include "reducer/updates.h"

namespace brimful {
namespace {
constexpr size_t kParameters = std::tuple_size_v<decltype(ControlRecord::updated)>;
constexpr size_t kFlagsAByte = 4;
constexpr int kFlagBits = 2;
constexpr uint8_t kFlagMask = 3;

/// Of a step that is `ago` steps before the record's, from 1.
size_t byte_of(int64_t ago, size_t parameter) {
  return static_cast<size_t>(ago - 1) * (kParameters / kFlagsAByte) + parameter / kFlagsAByte;
}

int shift_of(size_t parameter) {
  return static_cast<int>(parameter % kFlagsAByte) * kFlagBits;
}

std::vector<ControlRecord> of_step(const std::vector<ControlRecord>& records, int64_t ago) {
  auto found = records;
  for (size_t rank = 0; rank < records.size(); ++rank) {
    for (size_t i = 0; i < kParameters; ++i) {
      found[rank].updated[i] = (records[rank].updated[byte_of(ago, i)] >> shift_of(i)) & kFlagMask;
    }
  }
  return found;
}

bool are_here(const std::vector<ControlRecord>& records) {
  return std::all_of(records.begin(), records.end(), [](const auto& record) {
    return std::find(record.updated.begin(), record.updated.end(), kUpdateNotCompared) ==
           record.updated.end();
  });
}
}  // namespace

LateFlags::LateFlags(c10::Device device, size_t parameters)
    : device_(device), parameters_(parameters) {
  for (int64_t i = 0; i <= kLongest; ++i) {
    found_.push_back({memory::zeros_on_host({static_cast<int64_t>(parameters)}, at::kByte, device),
                      c10::Event(device.type())});
  }
}

uint8_t LateFlags::flag(int64_t step, size_t parameter) const {
  const auto& found = at_step(step);
  if (parameter >= parameters_ || !found.compared) {
    return kUpdateUnknown;
  }
  return found.flags.const_data_ptr<uint8_t>()[parameter];
}

std::array<uint8_t, 8> LateFlags::of_last_steps(int64_t now) const {
  std::array<uint8_t, 8> flags{};
  flags.fill(kAllUnknown);
  for (int64_t ago = 1; ago <= std::min(kLongest, now); ++ago) {
    const auto& found = at_step(now - ago);
    const bool is_here = found.settled || !found.compared || found.arrived.query();
    for (size_t i = 0; i < kParameters; ++i) {
      auto& byte = flags[byte_of(ago, i)];
      const auto value = is_here ? flag(now - ago, i) : kUpdateNotCompared;
      byte = static_cast<uint8_t>((byte & ~(kFlagMask << shift_of(i))) | value << shift_of(i));
    }
  }
  return flags;
}

void LateFlags::note(int64_t step, const at::Tensor& updated) {
  auto& found = at_step(step);
  found.settled = true;  // until the step stands
  found.compared = updated.defined();
  if (found.compared) {
    found.flags.copy_(updated, /*non_blocking=*/true);
    found.arrived.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }
}

std::optional<LateFlags::Differing> LateFlags::settle(const std::vector<ControlRecord>& records,
                                                      int64_t now) {
  std::optional<Differing> differing;
  for (int64_t ago = std::min(kLongest, now); ago >= 1; --ago) {
    auto& found = at_step(now - ago);
    if (found.settled) {
      continue;
    }
    auto theirs = of_step(records, ago);
    const bool here = are_here(theirs);
    found.settled = here || ago == kLongest;
    if (here && !differing && !updated_alike(theirs)) {
      differing = {now - ago, std::move(theirs)};
    }
  }
  at_step(now).settled = false;
  return differing;
}

void LateFlags::forget() {
  for (auto& found : found_) {
    found.settled = true;
  }
}

}  // namespace brimful
