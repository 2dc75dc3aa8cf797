#include "sizer/pair_layout.h"

#include <ATen/ATen.h>
#include <brimful/error.h>

#include <algorithm>
#include <numeric>

#include "base/fnv.h"
#include "base/format.h"
#include "base/text_stream.h"

namespace brimful::pairs {
namespace {
constexpr int64_t kAlignment = 16;
enum Flag : size_t { kIsDouble, kIsHalf };

int64_t aligned(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

template <typename Number>
int64_t sum_over(const std::vector<Form::Tower>& towers, const Number& number) {
  return std::accumulate(towers.begin(), towers.end(), int64_t{0},
                         [&](int64_t sum, const auto& tower) { return sum + number(tower); });
}

bool holds(const std::vector<Form::Tower>& towers, at::ScalarType dtype) {
  return std::any_of(towers.begin(), towers.end(),
                     [&](const auto& tower) { return tower.dtype == dtype; });
}
}  // namespace

int64_t Form::Tower::numel() const {
  return c10::multiply_integers(sizes);
}
int64_t Form::Tower::bytes() const {
  return numel() * static_cast<int64_t>(c10::elementSize(dtype));
}
bool Form::Tower::trains() const {
  return c10::isFloatingType(dtype);
}

Form Form::of(const Towers& towers, int64_t rows) {
  Form form;
  for (size_t i = 0; i < towers.size(); ++i) {
    const auto& tower = towers[i];
    TORCH_CHECK_TYPE(tower.defined() && tower.layout() == at::kStrided && !tower.is_complex(),
                     "embeddings are no dense, real tensor (tower: ", i,
                     "); return dense tensors from embed_fn");
    TORCH_CHECK_VALUE(tower.dim() > 0 && tower.size(0) == rows,
                      "embeddings have another number of rows than their piece (tower: ", i,
                      ", shape: ", tower.sizes(), ", rows: ", rows,
                      "); return a row for each row of the piece, rows first");
    form.towers.push_back({tower.sizes().slice(1).vec(), tower.scalar_type()});
  }
  TORCH_CHECK_TYPE(
      std::any_of(form.towers.begin(), form.towers.end(), [](const auto& t) { return t.trains(); }),
      "there are no embeddings with floating values (tensors: ", towers.size(),
      "); return them from embed_fn");
  return form;
}

int64_t Form::numel() const {
  return sum_over(towers, [](const auto& t) { return t.trains() ? t.numel() : 0; });
}
int64_t Form::bytes() const {
  return sum_over(towers, [](const auto& t) { return t.bytes(); });
}
bool Form::is_double() const {
  return holds(towers, at::kDouble);
}
bool Form::is_half() const {
  return holds(towers, at::kHalf) || holds(towers, at::kBFloat16);
}

uint32_t Form::mark() const {
  Fnv<uint32_t> hash;
  hash.add(text());
  return hash.value();
}

std::string Form::text() const {
  TextStream out;
  for (size_t i = 0; i < towers.size(); ++i) {
    out << (i == 0 ? "" : ", ") << c10::toString(towers[i].dtype) << " [rows";
    for (const auto size : towers[i].sizes) {
      out << ", " << size;
    }
    out << "]";
  }
  return out.str();
}

ControlRecord Meeting::record_of(Status verdict, int64_t rows, const Form& form, int64_t bad_rows) {
  ControlRecord record;
  record.verdict = verdict;
  record.weight = static_cast<double>(rows);
  record.loss_sum = static_cast<double>(form.bytes());
  record.next_weight = static_cast<double>(bad_rows);
  record.next_pieces = static_cast<uint16_t>(form.towers.size());
  record.ref = form.mark();
  record.plan = static_cast<uint32_t>(form.numel());
  record.updated[kIsDouble] = form.is_double() ? 1 : 0;
  record.updated[kIsHalf] = form.is_half() ? 1 : 0;
  return record;
}

Meeting::Meeting(std::vector<ControlRecord> records) : records_(std::move(records)) {}

bool Meeting::is_off() const {
  return worst(records_) >= Status::peer_failed;
}

const ControlRecord* Meeting::first() const {
  const auto found = std::find_if(records_.begin(), records_.end(),
                                  [](const auto& record) { return record.weight > 0; });
  return found == records_.end() ? nullptr : &*found;
}

void Meeting::require_alike(bool may_be_nan) const {
  std::vector<int> differ;
  std::vector<int> bad;
  for (size_t rank = 0; rank < records_.size(); ++rank) {
    const auto& record = records_[rank];
    if (record.weight > 0 && record.ref != first()->ref) {
      differ.push_back(static_cast<int>(rank));
    }
    if (record.weight > 0 && record.next_weight > 0) {
      bad.push_back(static_cast<int>(rank));
    }
  }
  if (!differ.empty()) {
    throw PlanMismatch("the ranks' embeddings differ in shape or dtype (ranks that differ: " +
                       format_list(differ) +
                       "); return the same towers from embed_fn on every rank");
  }
  TORCH_CHECK_VALUE(may_be_nan || bad.empty(),
                    "embeddings are not finite, which would spoil the loss of all pairs (ranks: ",
                    format_list(bad),
                    ", rows of the first: ", bad.empty() ? 0 : records_[bad[0]].next_weight,
                    "); look for NaN in the batch, or for weights that have grown too large");
}

int64_t Meeting::rows_of(size_t rank) const {
  return static_cast<int64_t>(records_[rank].weight);
}

int64_t Meeting::rows() const {
  return static_cast<int64_t>(total_weight(records_));
}

int Meeting::ranks_with_rows() const {
  return static_cast<int>(std::count_if(records_.begin(), records_.end(),
                                        [](const auto& record) { return record.weight > 0; }));
}

OwnRows Meeting::own(int rank) const {
  int64_t begin = 0;
  for (int before = 0; before < rank; ++before) {
    begin += rows_of(before);
  }
  return {begin, begin + rows_of(rank)};
}

int64_t Meeting::longest() const {
  int64_t most = 0;
  for (size_t rank = 0; rank < records_.size(); ++rank) {
    most = std::max(most, rows_of(rank));
  }
  return most;
}

int64_t Meeting::blob_bytes() const {
  const auto* record = first();
  return record == nullptr ? 0
                           : longest() * static_cast<int64_t>(record->loss_sum) +
                                 record->next_pieces * kAlignment;
}

int64_t Meeting::offset(const Form& form, size_t tower) const {
  int64_t offset = 0;
  for (size_t i = 0; i < tower; ++i) {
    offset = aligned(offset + longest() * form.towers[i].bytes());
  }
  return offset;
}

int64_t Meeting::numel() const {
  return first() == nullptr ? 0 : first()->plan;
}
bool Meeting::is_double() const {
  return first() != nullptr && first()->updated[kIsDouble] != 0;
}
bool Meeting::is_half() const {
  return first() != nullptr && first()->updated[kIsHalf] != 0;
}

}  // namespace brimful::pairs
