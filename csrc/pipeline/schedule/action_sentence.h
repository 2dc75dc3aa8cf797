#pragma once
#include <brimful/pipeline/schedule.h>

#include <string>

namespace brimful::pipeline {

/// "backward to the inputs of microbatch 3 in stage 1"
std::string to_sentence(const Action& action);

}  // namespace brimful::pipeline
