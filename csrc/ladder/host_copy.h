#pragma once
#include <c10/core/Storage.h>

#include <memory>

#include "ladder/aside.h"

namespace brimful::ladder {

/// A copy in pinned memory of the host, made on a stream of its own; it is brought back on another one. No host waits.
/// @throws what torch throws where the host has no pinned memory left
std::shared_ptr<StoredBytes> store_on_host(const c10::Storage& storage);

}  // namespace brimful::ladder
