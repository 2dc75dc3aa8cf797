#include "count.h"

#include <cstring>
#include <vector>

#include "../runtime/sim_cuda.h"

namespace sim_values {
namespace {

struct Count {
  int64_t count;
  bool is_known;
};

thread_local std::vector<Count> expected;

}  // namespace

std::optional<int64_t> counted_dimension(const Operator& op,
                                         c10::ArrayRef<const c10::IValue> inputs) {
  const auto index = op.handle.schema().argumentIndexWithName("dim");
  return index && inputs[*index].isInt() ? std::optional(inputs[*index].toInt()) : std::nullopt;
}

void enter_count(const Operator& op, c10::ArrayRef<const c10::IValue> inputs,
                 std::optional<int64_t> known) {
  const at::Tensor& self = inputs[0].toTensor();
  const auto dimension = counted_dimension(op, inputs);
  const std::string& name = op.handle.schema().name();
  const int64_t most = name == "aten::equal" ? 0 : dimension ? self.size(*dimension) : self.numel();
  const int64_t least = name == "aten::nonzero" ? 0 : std::min<int64_t>(1, most);
  const int64_t assumed = sim_cuda_unknown() == kMost ? most : least;
  expected.push_back({known.value_or(assumed), known.has_value()});
}

void leave_count() {
  expected.pop_back();
}

bool answer_count(void* to, size_t bytes) {
  if (expected.empty()) {
    return false;
  }
  std::memset(to, 0, bytes);
  const int64_t count = expected.back().count;
  // One of 64 or 32 bits, the first of several of 32, or a truth value: the lowest bytes come first.
  std::memcpy(to, &count, bytes == sizeof count ? bytes : std::min(bytes, sizeof(int32_t)));
  return true;
}

bool count_is_unknown() {
  return !expected.empty() && !expected.back().is_known;
}

}  // namespace sim_values
