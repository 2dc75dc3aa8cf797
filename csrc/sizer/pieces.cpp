#include <brimful/sizer/pieces.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace brimful {

std::vector<int64_t> split_rows(int64_t rows, int64_t pieces) {
  TORCH_CHECK_VALUE(rows >= 0 && pieces >= 1, "cannot split a batch (rows: ", rows,
                    ", pieces: ", pieces, ")");
  std::vector<int64_t> split(pieces, rows / pieces);
  std::for_each(split.begin(), split.begin() + rows % pieces, [](int64_t& size) { ++size; });
  return split;
}

int64_t largest_piece(const std::vector<int64_t>& split) {
  return split.empty() ? 0 : *std::max_element(split.begin(), split.end());
}

int64_t pieces_for(int64_t rows, int64_t piece_rows) {
  return std::max<int64_t>(1, (rows + piece_rows - 1) / piece_rows);
}

int64_t equal_pieces(int64_t rows, int64_t pieces) {
  for (int64_t more = pieces; more <= pieces + pieces / 4; ++more) {
    if (rows % more == 0) {
      return more;
    }
  }
  return pieces;
}

int64_t finer(int64_t rows, int64_t pieces) {
  return std::min(rows, 2 * pieces);
}

}  // namespace brimful
