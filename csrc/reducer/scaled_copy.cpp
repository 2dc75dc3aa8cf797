#include "reducer/scaled_copy.h"

namespace brimful {
namespace {
template <typename T>
void copy(T* __restrict to, const T* __restrict from, int64_t count, T factor) {
  for (int64_t i = 0; i < count; ++i) {
    to[i] = from[i] * factor;
  }
}
}  // namespace

void scaled_copy(float* to, const float* from, int64_t count, float factor) {
  copy(to, from, count, factor);
}

void scaled_copy(double* to, const double* from, int64_t count, double factor) {
  copy(to, from, count, factor);
}

}  // namespace brimful
