#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "bindings/bindings.h"

namespace brimful {

/// Sequences in a PackedSequence.
int64_t packed_rows(const py::handle& packed);

/// Sequences [begin, end) of a batch, in its order, packed. Waits for the device of its indices.
py::object slice_packed(const py::handle& packed, int64_t begin, int64_t end);

/// Cuts jagged tensors, which go on to share a ragged dimension where they did. Not thread-safe.
class JaggedSlices {
 public:
  /// Rows [begin, end); a view of their values. Waits for the device of the offsets.
  py::object slice(const py::handle& jagged, int64_t begin, int64_t end);

 private:
  struct Piece {
    py::object ragged_size;  ///< a symbolic int, equal in tensors of the same raggedness
    at::Device device;
    py::object offsets;
    py::object lengths;
    int64_t first;  ///< of the values
    int64_t count;
  };
  const Piece& piece_of(const py::handle& jagged, const py::object& ragged_size, int64_t begin,
                        int64_t end);

  std::vector<Piece> pieces_;
};

}  // namespace brimful
