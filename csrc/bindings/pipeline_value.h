#pragma once
#include <brimful/pipeline/value.h>

#include "bindings/bindings.h"

namespace brimful {

/// A tensor, or tuples, lists, mappings and dataclasses of tensors and of what else there is, as what moves between
/// stages. Needs the GIL.
pipeline::Value as_value(const py::handle& object);

/// The object again, with the Value's tensors in it. Needs the GIL.
py::object as_object(const pipeline::Value& value);

/// What comes from other processes is made of Python's objects from now on.
void take_forms();

}  // namespace brimful
