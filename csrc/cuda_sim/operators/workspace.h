#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <string>

namespace sim_operators {

/// Whether CUDA's kernel is a product of matrices, which torch lends a workspace.
bool takes_workspace(const std::string& operator_name);

/// A workspace of the size that torch has chosen, on the current device: gone with the call, as a temporary.
at::DataPtr workspace();

/// Whether SIM_CUDA_CONV_WORKSPACE is set and this is a convolution.
bool takes_convolution_workspace(const std::string& operator_name);

/// A made-up one in the place of cuDNN's: a quarter of the input's bytes, and from as many rows on as
/// SIM_CUDA_CONV_WORKSPACE says, as if another algorithm were chosen, four times these bytes.
at::DataPtr convolution_workspace(const at::Tensor& input);

}  // namespace sim_operators
