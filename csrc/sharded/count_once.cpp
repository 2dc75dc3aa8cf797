#include "sharded/count_once.h"

#include <algorithm>
#include <cmath>

#include "base/text_stream.h"

namespace brimful {
namespace {
constexpr double kClose = 1e-6;  // of sums that ranks make by themselves

/// Of weights that both ranks know.
bool differ(double one, double other) {
  return std::abs(one - other) > kClose * std::max(std::abs(one), std::abs(other));
}

std::string text_of(size_t first, double weight, size_t second, double other) {
  TextStream text;
  text << "ranks of one tensor-parallel group have different rows (ranks: " << first << ", "
       << second << ", weights: " << weight << ", " << other
       << "); give them the same batch: number of replicas and rank of a sampler are those of the "
          "data-parallel mesh";
  return text.str();
}
}  // namespace

std::string count_once(std::vector<ControlRecord>& records, const std::vector<int>& rows_of) {
  std::string text;
  for (size_t rank = 0; rank < rows_of.size(); ++rank) {
    const auto lowest = static_cast<size_t>(rows_of[rank]);
    if (lowest == rank) {
      continue;
    }
    auto& record = records[rank];
    const auto& first = records[lowest];
    for (const auto weight : {&ControlRecord::weight, &ControlRecord::next_weight}) {
      if (text.empty() && differ(first.*weight, record.*weight)) {
        text = text_of(lowest, first.*weight, rank, record.*weight);
      }
      record.*weight = record.*weight > 0 ? 0 : record.*weight;
    }
    record.loss_sum = 0;
  }
  return text;
}

}  // namespace brimful
