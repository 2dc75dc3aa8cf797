#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>
#include <brimful/sizer/split.h>
#include <brimful/step/kept_batch.h>
#include <brimful/step/standing_bytes.h>
#include <brimful/step/transaction.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

namespace brimful {

struct MapOptions {
  int64_t pieces = 1;       ///< to begin with
  int64_t max_retries = 8;  ///< of the same rows, each with pieces of half the size or less
  c10::Device device =
      c10::Device(c10::DeviceType::CPU);     ///< whose cached memory is given back before a retry
  std::vector<Transaction::Keeper> keepers;  ///< of random numbers other than torch's
  /// Of the modules that `fn` calls: what a piece that is repeated has changed of their buffers is as before it. May be null.
  std::shared_ptr<TensorNames> names = {};
  // For the text of BatchTooLarge.
  int rank = 0;
  int world_size = 1;
  std::function<StandingBytes()> standing_bytes = {};  ///< of what `fn` uses
};

namespace detail {
using MapPiece = std::function<std::vector<at::Tensor>(int64_t begin, int64_t end)>;
using MapTensors = std::function<std::vector<NamedTensor>(int64_t begin, int64_t end)>;
/// What calls have in common that may begin with each other's sizes. Plain data.
struct MapKind {
  size_t function = 0;   ///< 0: nothing is remembered
  std::string form;      ///< of the batch, as in RowKind
  int64_t elements = 1;  ///< of a row
};
/// `piece` gives the results of rows [begin, end); returns those of all rows. `tensors`, as PieceWork::tensors, is called
/// before it. Of the 64 kinds that were called last it remembers the sizes that fitted; rows of another length begin in
/// proportion.
BRIMFUL_API std::vector<at::Tensor> map_rows(int64_t rows, const MapPiece& piece,
                                             const MapTensors& tensors, const MapOptions& options,
                                             const MapKind& kind = {});
/// Of all kinds: as if none had been called.
BRIMFUL_API void forget_map_sizes();

/// A lambda's type is its own; of functions of one type the address counts too.
template <typename Fn>
size_t identity_of(const Fn& fn) {
  const auto type = typeid(Fn).hash_code() | 1;
  if constexpr (std::is_pointer_v<std::decay_t<Fn>>) {
    return type ^ reinterpret_cast<size_t>(fn) << 1;
  }
  return type;
}
template <typename Fn, typename Batch>
MapKind map_kind_of(const Fn& fn, const Batch& batch) {
  auto kind = kind_of(batch);
  return {identity_of(fn), std::move(kind.form), std::max<int64_t>(kind.elements, 1)};
}

/// Calls `visit` for every tensor in a tensor, optional, vector, pair, tuple, array or map of such.
template <typename Result, typename Visit>
void visit_tensors(Result& result, const Visit& visit) {
  if constexpr (std::is_same_v<Result, at::Tensor>) {
    visit(result);
  } else if constexpr (requires { result.has_value(); }) {
    if (result) {
      visit_tensors(*result, visit);
    }
  } else if constexpr (requires { std::tuple_size<Result>::value; }) {
    std::apply([&](auto&... items) { (visit_tensors(items, visit), ...); }, result);
  } else if constexpr (requires { typename Result::mapped_type; }) {
    for (auto& [key, item] : result) {
      visit_tensors(item, visit);
    }
  } else {
    for (auto& item : result) {
      visit_tensors(item, visit);
    }
  }
}
}  // namespace detail

/// `fn(batch)` for inference, without gradients: in pieces where memory runs out, each written into its rows of a result
/// that is allocated once. `fn` takes what slice_rows() gives for the batch and returns a tensor, or a vector, pair,
/// tuple, array or map of tensors, with one row in dimension 0 for every row it got; it may be called again for the same
/// rows, from the same random numbers and the same batch: where it changes the batch in place and memory runs out before
/// that was seen, it throws c10::ValueError. A size that fitted is kept, and later calls of the same function (of that
/// type) with batches of this form begin with it, in proportion where rows have more elements; it grows again, within a
/// call too, as a BatchSizer's pieces do. If the first piece is the whole batch, its result is returned as it is.
/// From any thread; waits for the device only where memory ran out.
/// @throws BatchTooLarge (a c10::OutOfMemoryError) with the sizes tried, if a piece of one row does not fit or
/// max_retries is used up; c10::ValueError for a batch without rows, for results with another number of rows or that
/// differ in form, shape, dtype or device between pieces, and for bad options; c10::TypeError for results that are no
/// dense tensors; and what `fn` throws
template <typename Batch, typename Fn>
auto map_batches(Fn&& fn, const Batch& batch, const MapOptions& options = {}) {
  using Result = std::decay_t<decltype(fn(slice_rows(batch, 0, 0)))>;
  std::optional<Result> form;  // the first piece's, without its tensors
  const auto piece = [&](int64_t begin, int64_t end) {
    Result result = fn(slice_rows(batch, begin, end));
    std::vector<at::Tensor> tensors;
    detail::visit_tensors(
        result, [&](at::Tensor& tensor) { tensors.push_back(std::exchange(tensor, {})); });
    if (!form) {
      form.emplace(std::move(result));
    }
    return tensors;
  };
  const auto tensors = [&](int64_t begin, int64_t end) {
    return detail::tensors_of(batch, begin, end);
  };
  auto whole =
      detail::map_rows(rows_of(batch), piece, tensors, options, detail::map_kind_of(fn, batch));
  size_t next = 0;
  detail::visit_tensors(*form, [&](at::Tensor& tensor) { tensor = std::move(whole.at(next++)); });
  return std::move(*form);
}

}  // namespace brimful
