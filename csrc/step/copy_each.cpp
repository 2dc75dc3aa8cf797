#include "step/copy_each.h"

#include <ATen/ATen.h>

#include <map>
#include <tuple>

namespace brimful {

void for_each_kind(const std::vector<at::Tensor>& tensors,
                   const std::function<void(const std::vector<size_t>&)>& visit) {
  using Kind = std::tuple<c10::DeviceType, c10::DeviceIndex, c10::ScalarType>;
  std::map<Kind, std::vector<size_t>> kinds;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto device = tensors[i].device();
    kinds[{device.type(), device.index(), tensors[i].scalar_type()}].push_back(i);
  }
  for (const auto& [kind, places] : kinds) {
    visit(places);
  }
}

void copy_each(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from) {
  for_each_kind(to, [&](const std::vector<size_t>& places) {
    std::vector<at::Tensor> targets;
    std::vector<at::Tensor> sources;
    for (const auto i : places) {
      targets.push_back(to[i]);
      sources.push_back(from[i]);
    }
    at::_foreach_copy_(targets, sources);
  });
}

}  // namespace brimful
