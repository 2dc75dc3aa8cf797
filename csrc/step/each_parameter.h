#pragma once
#include <brimful/step/participant.h>

#include <algorithm>
#include <memory>
#include <vector>

namespace brimful {

template <typename Visit>
void for_each_parameter(const std::vector<std::shared_ptr<Participant>>& participants,
                        const std::vector<at::Tensor>& outside, const Visit& visit) {
  for (const auto& participant : participants) {
    std::for_each(participant->parameters().begin(), participant->parameters().end(), visit);
  }
  std::for_each(outside.begin(), outside.end(), visit);
}

}  // namespace brimful
