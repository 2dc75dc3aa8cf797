#pragma once
#include <cstdint>

namespace brimful {

/// to[i] = from[i] * factor. In a file of its own, because it is compiled to be vectorised.
void scaled_copy(float* to, const float* from, int64_t count, float factor);
void scaled_copy(double* to, const double* from, int64_t count, double factor);

/// to = bfloat16(from * factor), or bfloat16(from * factor + error), rounded to nearest even.
void to_bfloat16(uint16_t* to, const float* from, int64_t count, float factor);
void to_bfloat16(uint16_t* to, const float* from, const float* error, int64_t count, float factor);
/// to = from * factor.
void from_bfloat16(float* to, const uint16_t* from, int64_t count, float factor);
/// error = (x - bfloat16(x)) * carry with x = gradient * sent_factor + error; then gradient = sum * factor. One pass.
void from_bfloat16(float* gradient, const uint16_t* sum, float* error, int64_t count, float factor,
                   float sent_factor, float carry);

}  // namespace brimful
