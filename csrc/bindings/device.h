#pragma once
#include <c10/core/Device.h>
#include "bindings/bindings.h"

namespace brimful {

/// A torch.device, or its name.
c10::Device as_device(py::handle given);

}  // namespace brimful
