#include "bindings/ragged.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <numeric>

namespace brimful {
namespace {
std::vector<int64_t> to_vector(const at::Tensor& tensor) {
  const auto host = tensor.to(at::kCPU, at::kLong).contiguous();
  return {host.const_data_ptr<int64_t>(), host.const_data_ptr<int64_t>() + host.numel()};
}

const at::Tensor& unpack(const py::handle& tensor) {
  return THPVariable_Unpack(tensor.ptr());
}

/// Of a piece of a PackedSequence, which lies in steps: first all first elements, by falling length, then the second.
struct PackedPiece {
  std::vector<int64_t> order;        ///< its sequences by falling length
  std::vector<int64_t> batch_sizes;  ///< sequences that reach each step
  std::vector<int64_t> elements;     ///< their places in the data of the whole
};

/// `places`: of the piece's sequences, in the whole's order by length.
PackedPiece piece_at(const std::vector<int64_t>& places, const std::vector<int64_t>& batch_sizes) {
  PackedPiece piece;
  piece.order.resize(places.size());
  std::iota(piece.order.begin(), piece.order.end(), int64_t{0});
  std::sort(piece.order.begin(), piece.order.end(),
            [&](int64_t a, int64_t b) { return places[a] < places[b]; });
  int64_t step_begin = 0;
  for (const int64_t batch_size : batch_sizes) {
    int64_t count = 0;
    for (const int64_t sequence : piece.order) {
      if (places[sequence] < batch_size) {
        piece.elements.push_back(step_begin + places[sequence]);
        ++count;
      }
    }
    if (count == 0) {
      break;
    }
    piece.batch_sizes.push_back(count);
    step_begin += batch_size;
  }
  return piece;
}
}  // namespace

int64_t packed_rows(const py::handle& packed) {
  return unpack(packed.attr("batch_sizes"))[0].item<int64_t>();
}

py::object slice_packed(const py::handle& packed, int64_t begin, int64_t end) {
  const auto batch_sizes = to_vector(unpack(packed.attr("batch_sizes")));
  const py::object unsorted = packed.attr("unsorted_indices");
  std::vector<int64_t> places(end - begin);
  std::iota(places.begin(), places.end(), begin);
  if (!unsorted.is_none()) {
    places = to_vector(unpack(unsorted).narrow(0, begin, end - begin));
  }
  const auto piece = piece_at(places, batch_sizes);
  const auto& data = unpack(packed.attr("data"));
  const auto index = at::tensor(piece.elements, at::kLong).to(data.device());
  py::object order = py::none();
  if (!unsorted.is_none()) {
    order = py::cast(at::tensor(piece.order, at::kLong).to(unpack(unsorted).device()));
  }
  return py::type::handle_of(packed)(py::cast(data.index_select(0, index)),
                                     py::cast(at::tensor(piece.batch_sizes, at::kLong)), order);
}

const JaggedSlices::Piece& JaggedSlices::piece_of(const py::handle& jagged,
                                                  const py::object& ragged_size, int64_t begin,
                                                  int64_t end) {
  const py::object offsets_object = jagged.attr("offsets")();
  const py::object lengths = jagged.attr("lengths")();
  const auto& offsets = unpack(offsets_object);
  for (const auto& piece : pieces_) {
    if (piece.device == offsets.device() && piece.ragged_size.equal(ragged_size)) {
      return piece;
    }
  }
  const int64_t rows = end - begin;
  const auto own = offsets.narrow(0, begin, rows + 1);
  int64_t first = 0;
  int64_t last = 0;
  if (rows > 0 && lengths.is_none()) {
    const auto bounds = to_vector(own);
    first = bounds.front();
    last = bounds.back();
  } else if (rows > 0) {  // with holes between the rows
    const auto starts = own.narrow(0, 0, rows);
    first = starts.min().item<int64_t>();
    last = (starts + unpack(lengths).narrow(0, begin, rows)).max().item<int64_t>();
  }
  // The end of the last hole may lie behind the values that are left.
  pieces_.push_back({ragged_size, offsets.device(), py::cast((own - first).clamp_max(last - first)),
                     lengths.is_none() ? lengths : py::cast(unpack(lengths).narrow(0, begin, rows)),
                     first, last - first});
  return pieces_.back();
}

py::object JaggedSlices::slice(const py::handle& jagged, int64_t begin, int64_t end) {
  int64_t ragged_dim = -1;
  py::object ragged_size;
  for (const auto& size : jagged.attr("shape")) {
    ++ragged_dim;
    if (!PyLong_Check(size.ptr())) {
      ragged_size = py::reinterpret_borrow<py::object>(size);
      break;
    }
  }
  TORCH_INTERNAL_ASSERT(ragged_size, "a jagged tensor has a ragged dimension");
  const auto& piece = piece_of(jagged, ragged_size, begin, end);
  const py::object values =
      jagged.attr("values")().attr("narrow")(ragged_dim - 1, piece.first, piece.count);
  return py::module_::import("torch.nested")
      .attr("nested_tensor_from_jagged")(values, piece.offsets, piece.lengths,
                                         py::arg("jagged_dim") = ragged_dim);
}

}  // namespace brimful
