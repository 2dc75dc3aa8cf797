#include "operators.h"

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "../operators/native.h"

namespace sim_values {
namespace {

const std::set<std::string> kCounts = {
    "aten::nonzero",
    "aten::nonzero.out",
    "aten::_unique",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::unique_dim_consecutive",
    "aten::equal",
};
const std::set<std::string> kOverwrite = {
    "aten::copy_",   "aten::fill_.Scalar", "aten::fill_.Tensor", "aten::zero_",
    "aten::random_", "aten::random_.from", "aten::random_.to",
};
/// Where one side decides, as True or anything, the other need not be known. Bits do not meet other bits.
const std::set<std::string> kDecided = {
    "aten::bitwise_or.Tensor",  "aten::bitwise_or_.Tensor",  "aten::bitwise_or.Tensor_out",
    "aten::bitwise_and.Tensor", "aten::bitwise_and_.Tensor", "aten::bitwise_and.Tensor_out",
    "aten::logical_or.out",     "aten::logical_and.out",
};
/// A program that looks after its numbers goes on as with good ones.
const std::set<std::string> kFinite = {
    "aten::isfinite", "aten::isnan",        "aten::isinf",        "aten::isposinf",
    "aten::isneginf", "aten::isposinf.out", "aten::isneginf.out",
};
/// Their schemas do not say that they write running statistics.
const std::set<std::string> kForget = {
    "aten::native_batch_norm",
    "aten::cudnn_batch_norm",
    "aten::batch_norm_update_stats",
    "aten::batch_norm_gather_stats",
    "aten::batch_norm_gather_stats_with_counts",
};

bool is_of(const c10::OperatorName& name, const char* space) {
  return name.name.starts_with(space);
}

bool changes_metadata(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::inplace_view);
}

Kind kind_of(const c10::OperatorHandle& op, const c10::OperatorName& name,
             const std::string& text) {
  if (sim_operators::kWithoutValues.contains(text) || changes_metadata(op) ||
      is_of(name, "c10d::") || is_of(name, "_c10d_functional::")) {  // NCCL knows what it moves
    return Kind::none;
  }
  if (kFinite.contains(text)) {
    return Kind::finite;
  }
  if (text == "aten::copy_") {
    return Kind::computed;
  }
  if (!op.hasKernelForDispatchKey(c10::DispatchKey::CUDA)) {
    return Kind::none;
  }
  if (sim_operators::kMakeMemory.contains(text) || !is_of(name, "aten::") ||
      kForget.contains(text) || !op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) {
    return Kind::unknown;
  }
  return kCounts.contains(text) ? Kind::counts : Kind::computed;
}

}  // namespace

const Operator* find_operator(const c10::OperatorName& name) {
  static std::shared_mutex mutex;
  static auto* all = new std::unordered_map<c10::OperatorName, std::unique_ptr<const Operator>>;
  {
    const std::shared_lock lock(mutex);
    if (const auto found = all->find(name); found != all->end()) {
      return found->second.get();
    }
  }
  const auto op = c10::Dispatcher::singleton().findSchema(name);
  std::unique_ptr<const Operator> made;
  if (op) {
    const std::string text = c10::toString(name);
    made =
        std::make_unique<Operator>(Operator{.handle = *op,
                                            .kind = kind_of(*op, name, text),
                                            .overwrites = kOverwrite.contains(text),
                                            .decides = kDecided.contains(text),
                                            .forgets = kForget.contains(text),
                                            .draws = op->hasTag(at::Tag::nondeterministic_seeded)});
  }
  const std::unique_lock lock(mutex);
  return all->try_emplace(name, std::move(made)).first->second.get();
}

}  // namespace sim_values
