#pragma once
#include <set>
#include <string>

namespace sim_operators {

/// torch's own that launch nothing and touch no values: they name or move memory.
inline const std::set<std::string> kWithoutValues = {
    "aten::as_strided",
    "aten::view",
    "aten::view.dtype",
    "aten::_reshape_alias",
    "aten::unfold",
    "aten::resize_",
    "aten::set_",
    "aten::set_.source_Tensor",
    "aten::set_.source_Storage",
    "aten::set_.source_Storage_storage_offset",
    "aten::_local_scalar_dense",
    "aten::record_stream",
    "aten::is_set_to",
    "aten::is_pinned",
    "aten::_pin_memory",
    "aten::view_as_real",
    "aten::view_as_complex",
};

/// torch's own that launch nothing and make memory.
inline const std::set<std::string> kMakeMemory = {
    "aten::empty.memory_format",
    "aten::empty_strided",
    "aten::_efficientzerotensor",
};

}  // namespace sim_operators
