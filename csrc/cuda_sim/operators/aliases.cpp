#include "aliases.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>

#include "in_order.h"
#include "values.h"

namespace sim_operators {
namespace {

/// As a kernel would: the memory may have been another tensor's, which the stream has yet to read.
void move_values(const at::Tensor& from, const at::Tensor& to) {
  const auto bytes = static_cast<size_t>(span_of(from)) * from.itemsize();
  if (bytes == 0) {
    return;
  }
  auto* const target = to.mutable_data_ptr();
  const auto move = [=] { std::memcpy(target, from.const_data_ptr(), bytes); };
  if (defers(to.device())) {
    enqueue(to.device(), move);
  } else {
    move();
  }
}

}  // namespace

at::Tensor Aliases::operator()(const at::Tensor& cuda) {
  if (!cuda.defined() || !cuda.is_cuda()) {
    return cuda;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(cuda.layout() == c10::kStrided, "simulated CUDA: only dense tensors");
  for (const auto& [theirs, ours] : pairs_) {
    if (theirs.is_same(cuda)) {
      return ours;
    }
  }
  auto& storage = storages_[cuda.storage().unsafeGetStorageImpl()];
  if (!storage) {
    const auto& theirs = cuda.storage();
    storage.emplace(c10::Storage::use_byte_size_t(), theirs.nbytes(),
                    c10::DataPtr(const_cast<void*>(theirs.data()), c10::kCPU),
                    c10::GetCPUAllocator(), /*resizable=*/true);
  }
  auto ours = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(*storage), c10::DispatchKeySet(c10::DispatchKey::CPU), cuda.dtype());
  c10::TensorImpl* impl = ours.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(cuda.sizes(), cuda.strides(), cuda.storage_offset());
  if (cuda.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  impl->_set_conj(cuda.is_conj());
  impl->_set_neg(cuda.is_neg());
  pairs_.emplace_back(cuda, ours);
  return ours;
}

void Aliases::write_back() {
  for (const auto& [theirs, ours] : pairs_) {
    const bool moved = ours.storage().data() != theirs.storage().data();
    if (!moved && ours.sizes() == theirs.sizes() && ours.strides() == theirs.strides()) {
      continue;
    }
    theirs.resize_(ours.sizes());
    if (theirs.strides() != ours.strides()) {
      theirs.resize_({span_of(ours)});
      theirs.as_strided_(ours.sizes(), ours.strides());
    }
    if (moved) {
      move_values(ours, theirs);
    }
  }
}

at::Tensor Aliases::result(const at::Tensor& cpu, c10::Device device) {
  if (!cpu.defined() || !cpu.is_cpu()) {
    return cpu;
  }
  for (const auto& [theirs, ours] : pairs_) {
    if (ours.is_same(cpu)) {
      return theirs;
    }
  }
  for (const auto& [theirs, ours] : pairs_) {
    if (ours.storage().unsafeGetStorageImpl() == cpu.storage().unsafeGetStorageImpl()) {
      return theirs.as_strided(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    }
  }
  auto made = at::empty_strided(cpu.sizes(), cpu.strides(), cpu.options().device(device));
  if (cpu.is_conj()) {
    made._set_conj(true);
  }
  if (cpu.is_neg()) {
    made._set_neg(true);
  }
  move_values(cpu, made);
  return made;
}

}  // namespace sim_operators
