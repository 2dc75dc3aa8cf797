#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <memory>

#include "ladder/aside.h"

namespace brimful::ladder {

/// A copy in `host`, pinned memory of as many bytes, made on a stream of its own; it is brought back on another one. No host
/// waits. When it is brought back `before` is fetched ahead. `here`: made on the caller's stream, so that the allocator waits for
/// no other one before it gives the device's memory to others.
std::shared_ptr<StoredBytes> store_on_host(const c10::Storage& storage, at::Tensor host,
                                           std::weak_ptr<StoredBytes> before, bool here);

}  // namespace brimful::ladder
