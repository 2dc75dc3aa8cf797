#include "reducer/bucket.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>

#include "base/units.h"
#include "reducer/scaled_copy.h"

namespace brimful {
namespace {
constexpr int64_t kGradientAlignmentBytes = 64;
constexpr int64_t kSparseDim =
    1;  // as of an embedding's gradient; gloo kills a process whose peer sends another one
constexpr int64_t kSmallNumel =
    32768;  // below, an own loop beats the dispatcher; above, ATen's vectorised one wins

int64_t aligned(int64_t numel, int64_t element_bytes) {
  return round_up(numel, kGradientAlignmentBytes / element_bytes);
}

int64_t reals_of(const at::Tensor& parameter) {
  return parameter.numel() * (parameter.is_complex() ? 2 : 1);
}

at::Tensor view_like(const at::Tensor& part, const at::Tensor& parameter) {
  auto flat = part;
  if (parameter.is_complex()) {
    flat = at::view_as_complex(part.view({-1, 2}));
  }
  if (parameter.is_non_overlapping_and_dense()) {
    return flat.as_strided(parameter.sizes(), parameter.strides(), flat.storage_offset());
  }
  return flat.view(parameter.sizes());
}

template <typename T>
bool copy_small(const at::Tensor& view, const at::Tensor& gradient, double scale) {
  const T* from = gradient.const_data_ptr<T>();
  T* to = view.mutable_data_ptr<T>();
  const int64_t count = view.numel();
  if (scale == 1) {
    std::memcpy(to, from, sizeof(T) * count);
    return true;
  }
  scaled_copy(to, from, count, static_cast<T>(scale));
  return true;
}

bool try_copy_small(const at::Tensor& view, const at::Tensor& gradient, double scale) {
  const bool alike = view.numel() <= kSmallNumel && view.is_cpu() && gradient.is_cpu() &&
                     gradient.layout() == at::kStrided &&
                     gradient.scalar_type() == view.scalar_type() &&
                     gradient.strides() == view.strides() && view.is_non_overlapping_and_dense() &&
                     !gradient.is_conj() && !gradient.is_neg();
  if (!alike) {
    return false;
  }
  switch (view.scalar_type()) {
    case at::kFloat:
      return copy_small<float>(view, gradient, scale);
    case at::kDouble:
      return copy_small<double>(view, gradient, scale);
    default:
      return false;
  }
}

template <typename Visit>
void with_elements(const at::Tensor& buffer, const Visit& visit) {
  switch (buffer.scalar_type()) {
    case at::kFloat:
      return visit(buffer.mutable_data_ptr<float>());
    case at::kDouble:
      return visit(buffer.mutable_data_ptr<double>());
    case at::kHalf:
      return visit(buffer.mutable_data_ptr<at::Half>());
    case at::kBFloat16:
      return visit(buffer.mutable_data_ptr<at::BFloat16>());
    default:
      TORCH_INTERNAL_ASSERT(false, "no bucket has this dtype: ", buffer.scalar_type());
  }
}
}  // namespace

namespace {
bool is_flat(const BucketPlan::Bucket& bucket) {
  return !bucket.sparse && !bucket.direct;
}

int64_t element_bytes_of(const BucketPlan::Bucket& bucket) {
  return static_cast<int64_t>(c10::elementSize(c10::toRealValueType(bucket.dtype)));
}
}  // namespace

Arenas::Kind Arenas::kind_of(const BucketPlan::Bucket& bucket) {
  return {c10::toRealValueType(bucket.dtype), bucket.device.str()};
}

/// In every plan the same in sum.
int64_t Arenas::numel_of(const BucketPlan::Bucket& bucket,
                         const std::vector<at::Tensor>& parameters) {
  int64_t numel = 0;
  for (const auto i : bucket.parameters) {
    numel += aligned(reals_of(parameters[i]), element_bytes_of(bucket));
  }
  return numel;
}

void Arenas::provide(const std::map<Kind, int64_t>& numels) {
  std::erase_if(memory_, [&](const auto& entry) {
    const auto wanted = numels.find(entry.first);
    return wanted == numels.end() || wanted->second != entry.second.numel();
  });
  for (const auto& [kind, numel] : numels) {
    auto& memory = memory_[kind];
    if (memory.defined()) {
      memory.zero_();
    } else {
      const auto options = at::TensorOptions().dtype(kind.first).device(kind.second);
      memory = allocate_ ? allocate_(numel, options) : at::zeros({numel}, options);
    }
  }
}

Layout Arenas::carve(const BucketPlan& plan, int64_t tail_numel,
                     const std::vector<at::Tensor>& parameters, bool dense) {
  const auto tail_of = [&](const BucketPlan::Bucket& bucket) {
    return &bucket == &plan.buckets.back() ? tail_numel : 0;
  };
  std::map<Kind, int64_t> numels;
  for (const auto& bucket : plan.buckets) {
    if (is_flat(bucket)) {
      numels[kind_of(bucket)] += numel_of(bucket, parameters) + tail_of(bucket);
    }
  }
  provide(numels);

  // Not views to autograd: LibTorch's zero_grad() detaches gradients in place, which views refuse.
  const at::AutoDispatchBelowADInplaceOrView no_view_metadata;
  Layout layout;
  layout.slots.resize(parameters.size());
  std::map<Kind, int64_t> taken;
  for (const auto& planned : plan.buckets) {
    const auto index = static_cast<int64_t>(layout.buckets.size());
    Bucket bucket;
    bucket.parameters = planned.parameters;
    bucket.direct = planned.direct;
    bucket.device = planned.device;
    for (const auto i : planned.parameters) {
      layout.slots[i] = {{}, index, parameters[i].numel()};
    }
    if (planned.sparse) {
      bucket.sparse_zero = sparse_scaled(at::zeros_like(parameters[planned.parameters[0]]), 1);
    } else if (is_flat(planned)) {
      const auto kind = kind_of(planned);
      const auto room =
          memory_[kind].narrow(0, taken[kind], numel_of(planned, parameters) + tail_of(planned));
      taken[kind] += room.numel();
      int64_t offset = 0;
      for (const auto i : planned.parameters) {
        const auto numel = reals_of(parameters[i]);
        layout.slots[i].view = view_like(room.narrow(0, offset, numel), parameters[i]);
        offset += dense ? numel : aligned(numel, element_bytes_of(planned));
      }
      bucket.gradients = room.narrow(0, 0, offset);
      bucket.flat = room.narrow(0, 0, offset + tail_of(planned));
    }
    layout.buckets.push_back(std::move(bucket));
  }
  return layout;
}

void Bucket::join_current_stream() {
  if (device.is_cpu()) {
    return;
  }
  const auto current = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  if (stream && *stream != current) {
    c10::Event worked(device.type());
    worked.record(*stream);
    worked.block(current);
  }
  stream = current;
}

int64_t Arenas::bytes() const {
  int64_t sum = 0;
  for (const auto& [kind, memory] : memory_) {
    sum += static_cast<int64_t>(memory.nbytes());
  }
  return sum;
}

bool is_alias(const at::Tensor& gradient, const at::Tensor& view) {
  return gradient.defined() && view.defined() && gradient.layout() == at::kStrided &&
         gradient.const_data_ptr() == view.const_data_ptr();
}

at::Tensor as_row(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView no_view_metadata;
  const auto row = tensor.as_strided({tensor.numel()}, {1}, tensor.storage_offset());
  return row.is_complex() ? at::view_as_real(row).view({-1}) : row;
}

void set_zero(const at::Tensor& view) {
  if (view.is_cpu() && view.is_non_overlapping_and_dense()) {
    std::memset(view.mutable_data_ptr(), 0, view.nbytes());
  } else {
    view.zero_();
  }
}

void copy_scaled(const at::Tensor& view, const at::Tensor& gradient, double scale) {
  if (try_copy_small(view, gradient, scale)) {
    return;
  }
  if (scale == 1) {
    view.copy_(gradient, /*non_blocking=*/true);
  } else if (gradient.scalar_type() == view.scalar_type() && gradient.layout() == at::kStrided) {
    auto out = view;
    at::mul_out(out, gradient, at::scalar_tensor(scale, at::TensorOptions().dtype(at::kDouble)));
  } else {
    view.copy_(gradient, /*non_blocking=*/true);
    view.mul_(scale);
  }
}

at::Tensor sparse_scaled(const at::Tensor& gradient, double scale) {
  auto rows = gradient.detach();
  if (!rows.is_sparse() || rows.sparse_dim() != kSparseDim) {
    rows = (rows.is_sparse() ? rows.to_dense() : rows).to_sparse(kSparseDim);
  }
  return (scale == 1 ? rows : rows * scale).coalesce();
}

void write_bytes(const at::Tensor& buffer, int64_t offset, const uint8_t* bytes, int64_t count) {
  with_elements(buffer, [&](auto* elements) {
    using T = std::remove_pointer_t<decltype(elements)>;
    for (int64_t i = 0; i < count; ++i) {
      elements[offset + i] = static_cast<T>(static_cast<float>(bytes[i]));
    }
  });
}

void read_bytes(const at::Tensor& buffer, int64_t offset, uint8_t* bytes, int64_t count) {
  with_elements(buffer, [&](const auto* elements) {
    for (int64_t i = 0; i < count; ++i) {
      bytes[i] = static_cast<uint8_t>(std::min(static_cast<float>(elements[offset + i]), 255.0F));
    }
  });
}

}  // namespace brimful
