#include "probes/oom/index_check.h"
#include <algorithm>
#include <array>
#include <string>

namespace brimful::probes {
namespace {

using Inputs = c10::ArrayRef<const c10::IValue>;

/// Holds its values itself: no subclass, no wrapper of a transform, not sparse.
bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.unsafeGetTensorImpl()->is_python_dispatch() &&
         tensor.layout() == c10::kStrided && tensor.has_storage();
}

std::optional<at::Tensor> tensor_at(Inputs inputs, size_t at) {
  if (at < inputs.size() && inputs[at].isTensor() && is_plain(inputs[at].toTensor())) {
    return inputs[at].toTensor();
  }
  return std::nullopt;
}

std::optional<int64_t> int_at(Inputs inputs, size_t at) {
  return at < inputs.size() && inputs[at].isInt() ? std::optional(inputs[at].toInt())
                                                  : std::nullopt;
}

bool is_index(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kLong || tensor.scalar_type() == at::kInt;
}

/// (weight, indices, ...)
std::vector<IndexUse> of_rows(Inputs inputs) {
  const auto weight = tensor_at(inputs, 0);
  const auto index = tensor_at(inputs, 1);
  if (!weight || !index || weight->dim() == 0) {
    return {};
  }
  return {{*index, 0, weight->size(0) - 1, std::nullopt}};
}

/// (self, dim, index, ...)
std::vector<IndexUse> of_dim(Inputs inputs) {
  const auto self = tensor_at(inputs, 0);
  const auto dim = int_at(inputs, 1);
  const auto index = tensor_at(inputs, 2);
  if (!self || !dim || !index || *dim >= self->dim() || *dim < -self->dim()) {
    return {};
  }
  return {{*index, 0, self->size(*dim) - 1, std::nullopt}};
}

/// (scores, target, weight, reduction, ignore_index, ...)
std::vector<IndexUse> of_classes(Inputs inputs) {
  const auto scores = tensor_at(inputs, 0);
  const auto target = tensor_at(inputs, 1);
  if (!scores || !target || scores->dim() == 0) {
    return {};
  }
  const auto classes = scores->size(scores->dim() == 1 ? 0 : 1);
  return {{*target, 0, classes - 1, int_at(inputs, 4)}};
}

/// (self, [index or none for each dimension])
std::vector<IndexUse> of_dims(Inputs inputs) {
  const auto self = tensor_at(inputs, 0);
  if (!self || inputs.size() < 2 || !inputs[1].isList()) {
    return {};
  }
  std::vector<IndexUse> uses;
  int64_t dim = 0;
  for (const c10::IValue& given : inputs[1].toListRef()) {
    if (given.isTensor() && given.toTensor().defined()) {
      const auto index = given.toTensor();
      if (!is_plain(index) || !is_index(index) || dim >= self->dim()) {
        break;  // a mask takes several dimensions
      }
      uses.push_back({index, -self->size(dim), self->size(dim) - 1, std::nullopt});
    }
    ++dim;
  }
  return uses;
}

}  // namespace

std::vector<IndexUse> index_uses(std::string_view op, Inputs inputs) {
  using Reader = std::vector<IndexUse> (*)(Inputs);
  struct Known {
    std::string_view name;
    Reader read;
  };
  constexpr std::array kKnown{
      Known{"aten::embedding", of_rows},
      Known{"aten::embedding_bag", of_rows},
      Known{"aten::index_select", of_dim},
      Known{"aten::gather", of_dim},
      Known{"aten::scatter", of_dim},
      Known{"aten::scatter_", of_dim},
      Known{"aten::scatter_add", of_dim},
      Known{"aten::scatter_add_", of_dim},
      Known{"aten::scatter_reduce", of_dim},
      Known{"aten::scatter_reduce_", of_dim},
      Known{"aten::nll_loss_nd", of_classes},
      Known{"aten::nll_loss", of_classes},
      Known{"aten::nll_loss2d", of_classes},
      Known{"aten::nll_loss_forward", of_classes},
      Known{"aten::cross_entropy_loss", of_classes},
      Known{"aten::index", of_dims},
      Known{"aten::index_put_", of_dims},
  };
  const auto* known = std::find_if(kKnown.begin(), kKnown.end(),
                                   [&](const Known& entry) { return entry.name == op; });
  auto uses = known == kKnown.end() ? std::vector<IndexUse>() : known->read(inputs);
  std::erase_if(uses, [](const IndexUse& use) { return !is_index(use.index); });
  return uses;
}

}  // namespace brimful::probes
