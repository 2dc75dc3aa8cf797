#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace brimful {

/// What one row of a batch is like: batches of one kind differ in their rows only, and those of one form in `sizes` too,
/// such as the length of a sequence. Plain data.
struct BRIMFUL_API RowKind {
  std::string form;            ///< dtypes and numbers of dimensions, tensor by tensor
  std::vector<int64_t> sizes;  ///< of the dimensions that are not the rows', in the same order
  bool uneven =
      false;  ///< rows differ in what they hold (sparse, nested): no law gives their memory
  int64_t elements = 0;  ///< of a row, in all tensors; follows from the sizes

  /// `row_dim`: the dimension that holds rows; nothing for a tensor that every piece gets whole.
  void add(const at::Tensor& tensor, std::optional<int64_t> row_dim);

  bool operator==(const RowKind& other) const {
    return form == other.form && sizes == other.sizes && uneven == other.uneven;
  }
};

/// The same in every process; different for different kinds, but for one pair in four thousand million.
BRIMFUL_API uint32_t fingerprint(const RowKind& kind);

}  // namespace brimful
