#pragma once
#include <cstdint>

namespace brimful {

/// to[i] = from[i] * factor. In a file of its own, because it is compiled to be vectorised.
void scaled_copy(float* to, const float* from, int64_t count, float factor);
void scaled_copy(double* to, const double* from, int64_t count, double factor);

}  // namespace brimful
