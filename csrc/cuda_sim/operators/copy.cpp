#include "copy.h"

#include <ATen/ops/copy_native.h>

#include "aliases.h"
#include "backend.h"
#include "deferred.h"

extern "C" void sim_cuda_note_operator();

namespace sim_operators {
namespace {

/// Whether its bytes can be copied as they lie.
bool is_one_block(const at::Tensor& to, const at::Tensor& from) {
  return to.dtype() == from.dtype() && to.sizes() == from.sizes() &&
         to.strides() == from.strides() && to.is_non_overlapping_and_dense() &&
         to.is_conj() == from.is_conj() && to.is_neg() == from.is_neg();
}

}  // namespace

at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  if (!to.is_cuda() || !from.is_cuda() || is_one_block(to, from)) {
    return at::native::copy_(to, from, non_blocking);
  }
  sim_cuda_note_operator();
  if (copy_later(to, from)) {
    return to;
  }
  finish_stream(from.device());
  finish_stream(to.device());
  Aliases aliases;
  at::Tensor target = aliases(to);
  const BackendOnly only;
  target.copy_(aliases(from));
  return to;
}

}  // namespace sim_operators
