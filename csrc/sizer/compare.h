#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace brimful::detail {

/// The largest value of |tensor| that is finite; 0 if there is none.
double largest_value(const at::Tensor& tensor);

/// The largest |a - b|: 0 where both are the same infinity or NaN, infinite where one alone is. Of the same shape.
double largest_difference(const at::Tensor& a, const at::Tensor& b);

/// The largest difference between a tensor of the whole batch and its pieces, relative to its largest value. The pieces are
/// laid out along the one dimension in which sizes differ, also where rows alternate in it (time, batch); without such a
/// dimension each has to be like the whole. Infinite if they cannot be laid out so; 0 for layouts that are not looked into.
/// `rows` of the pieces. With `may_be_mean` a single number may also be the mean of those of the pieces.
double difference_of_pieces(const at::Tensor& whole, const std::vector<at::Tensor>& pieces,
                            const std::vector<int64_t>& rows, bool may_be_mean);

}  // namespace brimful::detail
