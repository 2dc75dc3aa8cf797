#pragma once
#include <cstdint>

#include "reducer/bucket_set.h"
#include "reducer/group_link.h"

namespace brimful {

/// The rows of sparse gradients, which all ranks have accepted, in their buckets. A collective.
void exchange_rows(GroupLink& link, BucketSet& layout, int64_t step);

}  // namespace brimful
