#pragma once
#include <c10/core/Device.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace sim_operators {

/// While it lives, calls go to the backend's kernels: no autograd, autocast, modes.
struct BackendOnly : c10::impl::ForceDispatchKeyGuard {
  BackendOnly()
      : ForceDispatchKeyGuard(
            c10::default_included_set,
            c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset) {}
};

/// Waits for all that was asked of the device's current stream.
void finish_stream(c10::Device device);

}  // namespace sim_operators
