#pragma once
#include <brimful/probes/explain.h>
#include <cstdint>
#include <string>

namespace brimful::probes {

/// What a call of a CUDA library takes of the device beside tensors.
struct LibraryNeed {
  int64_t bytes = 0;
  std::string text;  ///< what it is made of, or that it is not known
};

/// By the error's message and the evidence alone.
LibraryNeed need_of(const std::string& error, const ErrorEvidence& evidence);

}  // namespace brimful::probes
