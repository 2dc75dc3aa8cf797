#pragma once
#include <brimful/export.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace brimful {

/// Of rows in the order of a step, none longer than the one before.
using Lengths = std::vector<int64_t>;

/// What a piece costs, in any unit of time: `piece` for itself, and for the tokens that it has with its padding.
struct PieceCost {
  double piece = 0;
  double token = 1;
  double square = 0;  ///< for a token, times the length

  double of(int64_t rows, int64_t length) const {
    const auto tokens = static_cast<double>(rows) * static_cast<double>(length);
    return piece + tokens * (token + square * static_cast<double>(length));
  }
};

/// The most rows of a piece that begins at this place; less than one counts as one.
using MostRows = std::function<int64_t(int64_t place)>;

/// Rows of as many tokens as a piece may have. `lengths` outlive it.
BRIMFUL_API MostRows within_tokens(const Lengths& lengths, int64_t tokens);

/// The split that costs least, by a dynamic program over the places where pieces may begin; of those that cost the same
/// one with few pieces. Pure.
/// @throws c10::ValueError for lengths that are not positive, or rise
BRIMFUL_API std::vector<int64_t> fastest_split(const Lengths& lengths, const MostRows& most_rows,
                                               const PieceCost& cost);

/// A split for a compiled model: of pieces that begin with one length all but the last have the same number of rows, one of
/// 1, 2, 3, 4, 6, 8, 12 ..., and about as many tokens as the largest piece of the split that costs least. Pure.
BRIMFUL_API std::vector<int64_t> split_of_few_shapes(const Lengths& lengths,
                                                     const MostRows& most_rows,
                                                     const PieceCost& cost);

/// With the padding, of the piece that has most. Pure.
BRIMFUL_API int64_t largest_tokens(const Lengths& lengths, const std::vector<int64_t>& split);

/// The most rows from a place on that have so many tokens together. Pure.
BRIMFUL_API MostRows within_packed_tokens(const Lengths& lengths, int64_t tokens);

/// Pieces as large as they may be: rows without padding cost the same wherever they are cut. Pure.
BRIMFUL_API std::vector<int64_t> largest_pieces(const Lengths& lengths, const MostRows& most_rows);

/// Of the piece whose rows have most together. Pure.
BRIMFUL_API int64_t largest_packed_tokens(const Lengths& lengths,
                                          const std::vector<int64_t>& split);

/// A length that is at least this one, by a sixteenth at most more, of few. Pure.
BRIMFUL_API int64_t rounded_length(int64_t length);

}  // namespace brimful
