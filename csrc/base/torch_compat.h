#pragma once
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <exception>
#include <string>

namespace brimful {

/// Another text whenever the group's members were changed in place, which torch can from 2.15 on (reconfigure()); size
/// and rank may be as before then. Empty for a group that has no such thing.
inline std::string configuration_of([[maybe_unused]] const c10d::ProcessGroup& group) {
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  try {
    return group.supportsReconfigure() ? group.get_reconfigure_handle() : std::string();
  } catch (const std::exception&) {  // of several backends, or of none
  }
#endif
  return {};
}

}  // namespace brimful
