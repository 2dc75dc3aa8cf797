#pragma once
#include <cstddef>

namespace sim {

// What is known of the memory of a device without arithmetic. Known bytes lie at their own addresses, whose pages can be
// touched from then on; the rest of a device has none.

/// Makes these bytes known: the caller writes them. False if they are no memory of such a device or more than
/// SIM_CUDA_KNOWN_MB allows: nothing is known of them then.
bool keep(void* begin, size_t bytes);
/// Nothing is known of these bytes any more.
void forget(const void* begin, size_t bytes);
/// Whether each of these bytes is known.
bool is_known(const void* begin, size_t bytes);
/// How many of these bytes are known, from the first on.
size_t known_before(const void* begin, size_t bytes);

/// What a read of bytes that are not known gets: what `sim_cuda_answer_unknown` was given says, else zeros.
void read_unknown(void* to, const void* from, size_t bytes);

}  // namespace sim
