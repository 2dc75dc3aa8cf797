#include "step/meet.h"

#include <ATen/ATen.h>
#include <brimful/memory/stats.h>

#include <algorithm>

#include "step/each_parameter.h"

namespace brimful {

std::vector<ControlRecord> meet_ranks(const StepGroup& group, const ControlRecord& record) {
  const memory::Unlimited unlimited;
  const auto bytes = encode(record);
  auto own = at::empty({kRecordBytes}, at::kByte);
  std::copy(bytes.begin(), bytes.end(), own.mutable_data_ptr<uint8_t>());
  std::vector<ControlRecord> records;
  for (const auto& theirs : gather_over_ranks(group, own)) {
    records.push_back(decode_first({theirs.const_data_ptr<uint8_t>(), kRecordBytes}));
  }
  return records;
}

std::vector<at::Tensor> gather_over_ranks(const StepGroup& group, const at::Tensor& own) {
  return group.participants().empty() ? std::vector<at::Tensor>{own}
                                      : group.participants()[0]->gather(own);
}

void sum_over_ranks(const StepGroup& group, at::Tensor& tensor) {
  if (!group.participants().empty()) {
    group.participants()[0]->sum(tensor);
  }
}

std::vector<at::Tensor> parameters_of(const StepGroup& group) {
  std::vector<at::Tensor> all;
  for_each_parameter(group.participants(), group.outside(),
                     [&](const at::Tensor& parameter) { all.push_back(parameter); });
  return all;
}

}  // namespace brimful
