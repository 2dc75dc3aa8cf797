#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace c10d {
class ProcessGroup;
}

namespace brimful {
class Reducer;

/// The reducers of this process. From any thread.
void own(const std::shared_ptr<Reducer>& reducer, const std::vector<at::Tensor>& parameters,
         const c10d::ProcessGroup* group);
void disown(const Reducer* reducer);
/// Those that have one of these parameters.
std::vector<std::shared_ptr<Reducer>> owners_of(const std::vector<at::Tensor>& parameters);
/// Those, and the others of the group, oldest first.
std::vector<std::shared_ptr<Reducer>> reducers_beside(const std::vector<at::Tensor>& parameters,
                                                      const c10d::ProcessGroup* group);

}  // namespace brimful
