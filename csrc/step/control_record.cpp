#include <brimful/step/control_record.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace brimful {
namespace {
// Layout: verdict and regroup 1, next and stop 1, next_pieces 2, weight 8, loss_sum 8, next_weight 8, ref 4, work_ms 4, plan 4, updated 8.
template <typename Record, typename Visit>
void for_each_field(Record& record, const Visit& visit) {
  int64_t offset = 0;
  const auto field = [&](auto& value) {
    visit(value, offset);
    offset += static_cast<int64_t>(sizeof(value));
  };
  field(record.verdict);
  field(record.next);
  field(record.next_pieces);
  field(record.weight);
  field(record.loss_sum);
  field(record.next_weight);
  field(record.ref);
  field(record.work_ms);
  field(record.plan);
  field(record.updated);
}
constexpr size_t kVerdictOffset = 0;
constexpr uint8_t kRegroupBit = 0x80;  // beside the verdict
constexpr size_t kNextOffset = 1;
constexpr int kNextBits = 2;
static_assert(1 + 1 + 2 + 8 * 3 + 4 * 3 == kUpdatedOffset);
static_assert(kUpdatedOffset + sizeof(ControlRecord::updated) == kRecordBytes);
static_assert(kLossSumOffset == 1 + 1 + 2 + 8);

template <typename Number>
double total_of(const std::vector<ControlRecord>& records, const Number& number) {
  double total = 0;
  for (const auto& record : records) {
    total += number(record);
  }
  return total;
}
}  // namespace

RecordBytes encode(const ControlRecord& record) {
  RecordBytes bytes{};
  for_each_field(record, [&](const auto& value, int64_t offset) {
    std::memcpy(bytes.data() + offset, &value, sizeof(value));
  });
  bytes[kNextOffset] |= record.stop << kNextBits;
  bytes[kVerdictOffset] |= record.regroup ? kRegroupBit : 0;
  return bytes;
}

ControlRecord decode(std::span<const uint8_t, kRecordBytes> bytes) {
  ControlRecord record;
  for_each_field(record, [&](auto& value, int64_t offset) {
    std::memcpy(&value, bytes.data() + offset, sizeof(value));
  });
  record.regroup = (bytes[kVerdictOffset] & kRegroupBit) != 0;
  record.verdict = static_cast<Status>(bytes[kVerdictOffset] & ~kRegroupBit);
  record.next = static_cast<Next>(bytes[kNextOffset] & ((1 << kNextBits) - 1));
  record.stop = bytes[kNextOffset] >> kNextBits;
  return record;
}

Status worst(const std::vector<ControlRecord>& records) {
  auto verdict = Status::silent;
  for (const auto& record : records) {
    verdict = std::max(verdict, record.verdict);
  }
  return verdict;
}

std::vector<int> ranks_with(const std::vector<ControlRecord>& records, Status verdict) {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < records.size(); ++rank) {
    if (records[rank].verdict == verdict) {
      ranks.push_back(static_cast<int>(rank));
    }
  }
  return ranks;
}

double total_weight(const std::vector<ControlRecord>& records) {
  return total_of(records, [](const auto& record) { return record.weight; });
}

bool has_late_weight(const std::vector<ControlRecord>& records) {
  return std::any_of(records.begin(), records.end(),
                     [](const auto& record) { return std::isnan(record.weight); });
}

double known_weight(const std::vector<ControlRecord>& records) {
  return total_of(records,
                  [](const auto& record) { return std::isnan(record.weight) ? 0 : record.weight; });
}

double mean_loss(const std::vector<ControlRecord>& records) {
  const double total = total_weight(records);
  const double sum = total_of(records, [](const auto& record) { return record.loss_sum; });
  return total > 0 ? sum / total : 0;
}

double next_total_weight(const std::vector<ControlRecord>& records) {
  return total_of(
      records, [](const auto& record) { return record.next == Next::no ? 0 : record.next_weight; });
}

bool no_rank_continues(const std::vector<ControlRecord>& records) {
  return std::all_of(records.begin(), records.end(),
                     [](const auto& record) { return record.next == Next::no; });
}

bool no_rank_steps(const std::vector<ControlRecord>& records) {
  const bool stop = stops(records);
  return stop || no_rank_continues(records);
}

int64_t wanted_pieces(const std::vector<ControlRecord>& records) {
  const bool repeats = worst(records) == Status::retry;
  int64_t most = 1;
  for (const auto& record : records) {
    if (!repeats || record.verdict == Status::retry) {
      most = std::max<int64_t>(most, record.next_pieces);
    }
  }
  return most;
}

int next_buffer_source(const std::vector<ControlRecord>& records) {
  const auto promise = [](const ControlRecord& record) {
    if (record.next == Next::unknown) {
      return record.verdict == Status::no_data ? 1 : 2;
    }
    return record.next == Next::yes ? 3 : 0;
  };
  const auto best =
      std::max_element(records.begin(), records.end(), [&](const auto& a, const auto& b) {
        return promise(a) < promise(b);
      });  // the first of equals
  return static_cast<int>(best - records.begin());
}

uint32_t fingerprint(double value) {
  constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;
  return static_cast<uint32_t>(std::bit_cast<uint64_t>(value) * kGolden >> 32);
}

std::vector<int> ranks_with_another_ref(const std::vector<ControlRecord>& records) {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < records.size(); ++rank) {
    if (records[rank].ref != records[0].ref) {
      ranks.push_back(static_cast<int>(rank));
    }
  }
  return ranks;
}

bool updated_alike(const std::vector<ControlRecord>& records) {
  std::array<std::array<bool, 4>, std::tuple_size_v<decltype(ControlRecord::updated)>> seen{};
  for (const auto& record : records) {
    for (size_t i = 0; i < seen.size(); ++i) {
      seen[i][record.updated[i] & 3] = true;
    }
  }
  return std::all_of(seen.begin(), seen.end(),
                     [](const auto& of) { return of[3] || !(of[0] && of[1]); });
}

}  // namespace brimful
