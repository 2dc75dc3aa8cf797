#pragma once
#include <brimful/export.h>
#include <c10/core/Device.h>

#include <functional>
#include <memory>

#include "ladder/aside.h"

namespace brimful::ladder {

/// Whether what a step saves can be put aside on the device. Warns if not.
bool can_put_aside(c10::Device device);

/// While what it returns lives, what the operators of this thread save for backward is put aside. To be destroyed by this
/// thread, the last one first. A process without Python gets an engine of autograd that has hooks for what is saved, in the
/// place of LibTorch's, the first time.
/// @throws c10::Error if the process has another engine, whose language has not set its own hooks
BRIMFUL_API std::shared_ptr<void> put_aside_in_scope(std::shared_ptr<Aside> aside);

/// Replaces how that is done in a process whose engine has hooks of another language.
using AsideScope = std::function<std::shared_ptr<void>(std::shared_ptr<Aside>)>;
BRIMFUL_API void set_aside_scope(AsideScope make);

}  // namespace brimful::ladder
