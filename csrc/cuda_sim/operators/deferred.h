#pragma once
#include "arguments.h"

namespace sim_operators {

/// Queues the operator on its stream and puts its results in the place of its arguments, if the stream has other things to
/// do first and the results' sizes are known beforehand. Else false: it is run inside the call.
bool call_later(const c10::OperatorHandle& op, const Places& places, torch::jit::Stack* arguments);

/// Queues a copy on a device, if its stream has other things to do first.
bool copy_later(const at::Tensor& to, const at::Tensor& from);

}  // namespace sim_operators
