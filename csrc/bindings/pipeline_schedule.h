#pragma once
#include <brimful/pipeline/pipeline_options.h>

#include "bindings/bindings.h"

namespace brimful {

/// A name, a schedule, or a function that makes one for a number of microbatches.
void set_schedule(const py::object& schedule, pipeline::PipelineOptions& options);

}  // namespace brimful
