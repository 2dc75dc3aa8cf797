#include "place.h"

#include <ATen/ops/from_blob.h>

#include "../operators/values.h"
#include "../runtime/sim_cuda.h"

namespace sim_values {
namespace {

constexpr size_t kFloatingBytes = size_t{64} << 10;

}  // namespace

bool Place::is_known() const {
  return sim_cuda_is_known(begin, bytes) != 0;
}

bool Place::may_be_known() const {
  const size_t most = at::isIntegralType(type, /*includeBool=*/true)
                          ? sim_cuda_known_bytes()
                          : std::min(kFloatingBytes, sim_cuda_known_bytes());
  return bytes <= most;
}

void Place::forget() const {
  sim_cuda_forget(begin, bytes);
}

Layout::Layout(const Place& place, const at::Tensor& tensor)
    : place(place), sizes(tensor.sizes().vec()), strides(tensor.strides().vec()) {}

at::Tensor Layout::values() const {
  return at::from_blob(place.begin, sizes, strides, at::TensorOptions().dtype(place.type));
}

void Layout::set(const at::Tensor& values) const {
  const auto all = static_cast<size_t>(c10::multiply_integers(sizes)) * values.itemsize();
  const bool is_whole =
      place.bytes == all || place.is_known();  // else what lies between would be known too
  if (place.bytes > 0 && is_whole && place.may_be_known() &&
      sim_cuda_keep(place.begin, place.bytes) != 0) {
    this->values().copy_(values);
  } else {
    place.forget();
  }
}

std::optional<Place> place_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda() || stands_for_others(tensor) ||
      tensor.layout() != c10::kStrided || tensor.is_conj() || tensor.is_neg()) {
    return std::nullopt;
  }
  const auto& storage = tensor.storage();
  if (!storage.device().is_cuda() || storage.data() == nullptr) {
    return std::nullopt;
  }
  auto* const first = static_cast<char*>(const_cast<void*>(storage.data()));
  return Place{.begin = first + tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize()),
               .bytes = static_cast<size_t>(sim_operators::span_of(tensor)) * tensor.itemsize(),
               .type = tensor.scalar_type()};
}

bool stands_for_others(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kOthers(
      {c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
       c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize});
  return tensor.defined() &&
         (tensor.key_set().has_any(kOthers) || !tensor.unsafeGetTensorImpl()->has_storage());
}

}  // namespace sim_values
