#pragma once
#include <brimful/pipeline/value.h>

#include <map>
#include <string>
#include <vector>

namespace brimful::pipeline {

/// What a microbatch has beside the first stage's input, by name: masks, positions, lengths. Each stage may ask for it.
using Keywords = std::map<std::string, Value>;

/// Within a stage's forward: what the step was given by this name, cut to the stage's microbatch and on its device.
/// A tensor that needs a gradient gets it when the step stands.
/// @throws c10::ValueError outside a stage, or if there is none of that name (those that there are, are named)
BRIMFUL_API Value keyword_value(const std::string& name);

/// The same for one tensor.
/// @throws c10::TypeError if it is none
BRIMFUL_API at::Tensor keyword(const std::string& name);

/// Whether keyword_value() would find it; false outside a stage.
BRIMFUL_API bool has_keyword(const std::string& name);

/// Of all that there are; none outside a stage.
BRIMFUL_API std::vector<std::string> keyword_names();

}  // namespace brimful::pipeline
