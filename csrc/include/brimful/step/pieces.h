#pragma once
#include <brimful/export.h>

#include <cstdint>
#include <set>
#include <vector>

namespace brimful {

/// Rows per piece, as even as can be: sizes differ by at most one, larger ones first. More pieces than rows give empty
/// ones. Pure.
/// @throws c10::ValueError unless rows >= 0 and pieces >= 1
BRIMFUL_API std::vector<int64_t> split_rows(int64_t rows, int64_t pieces);

/// Rows of the largest piece; 0 for no pieces. Pure.
BRIMFUL_API int64_t largest_piece(const std::vector<int64_t>& split);

/// How many pieces of at most `piece_rows` rows a batch needs (at least 1). Pure.
BRIMFUL_API int64_t pieces_for(int64_t rows, int64_t piece_rows);

/// The fewest pieces that all have the same number of rows, at least `pieces` and at most a quarter more; `pieces` where
/// there is no such number. A compiled model compiles for each size that it meets. Pure.
BRIMFUL_API int64_t equal_pieces(int64_t rows, int64_t pieces);

/// The largest of 1, 2, 3, 4, 6, 8, 12, 16, 24 ... that is at most `size`, which is 1 or more. Pure.
BRIMFUL_API int64_t common_size(int64_t size);

/// A split for a compiled model: equal pieces of at most `piece_rows` rows where a quarter more of them gives that and
/// their size is one of `equal_sizes`, which has room for four; else pieces of the largest of 1, 2, 3, 4, 6, 8, 12, 16,
/// 24 ... that is no more, and what is left in smaller ones of these, of two rows where that can be (BatchNorm refuses
/// one). However batches and memory change, pieces of up to n rows have no more than 5 + 2 log2(n) sizes.
/// @throws c10::ValueError unless rows >= 0 and piece_rows >= 1
BRIMFUL_API std::vector<int64_t> split_into_few_sizes(int64_t rows, int64_t piece_rows,
                                                      std::set<int64_t>& equal_sizes);

/// The number of pieces to try after `pieces` ran out of memory: twice as many, at most one row each. Pure.
BRIMFUL_API int64_t finer(int64_t rows, int64_t pieces);

/// The same after `failures` tries of a batch, which may be repeated `max_retries` times: at least twice as many, and with
/// eight retries or more as many times more as it takes to try one row each with the last of them. Fewer retries are
/// meant to end sooner. Pure.
BRIMFUL_API int64_t finer_within(int64_t rows, int64_t pieces, int64_t failures,
                                 int64_t max_retries);

}  // namespace brimful
