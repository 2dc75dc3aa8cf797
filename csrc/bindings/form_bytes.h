#pragma once
#include "bindings/bindings.h"
#include "pipeline/transport/form_bytes.h"

namespace brimful {

// Structures of Python between processes: None, numbers, texts, bytes, dtypes, devices, and tuples, lists, mappings and
// dataclasses of them, with `placeholder` where a tensor is. No pickle: a type of the program's is looked up by its name
// among the modules that are loaded, and made from its entries alone. Both need the GIL.

/// @throws c10::TypeError for anything else, with its type
void write_form(const py::handle& object, const py::handle& placeholder,
                pipeline::FormWriter& writer);

/// @throws c10::TypeError if this process has no such type
py::object read_form(pipeline::FormReader& reader, const py::handle& placeholder);

}  // namespace brimful
