// Stand-ins for CUDA's kernels of operators that the CPU has no kernel of. They are made of other operators, which have
// stand-ins of their own; half types are computed in 32 bits, as by the kernels.
#include "without_cpu_kernel.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>

#include <array>
#include <tuple>
#include <vector>

namespace sim_operators {
namespace {

using at::Tensor;
using Given = std::optional<Tensor>;

bool has(const Given& tensor) {
  return tensor.has_value() && tensor->defined();
}

/// As the kernels add up.
Tensor wide(const Tensor& tensor) {
  const bool is_half = tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
  return is_half ? tensor.to(at::kFloat) : tensor;
}

// --- Products whose result is wider than what is multiplied -------------------------------------

Tensor mm_dtype(const Tensor& a, const Tensor& b, at::ScalarType dtype) {
  return a.to(dtype).mm(b.to(dtype));
}

Tensor bmm_dtype(const Tensor& a, const Tensor& b, at::ScalarType dtype) {
  return a.to(dtype).bmm(b.to(dtype));
}

Tensor addmm_dtype(const Tensor& self, const Tensor& a, const Tensor& b, at::ScalarType dtype,
                   const at::Scalar& beta, const at::Scalar& alpha) {
  return self.to(dtype).addmm(a.to(dtype), b.to(dtype), beta, alpha);
}

Tensor baddbmm_dtype(const Tensor& self, const Tensor& a, const Tensor& b, at::ScalarType dtype,
                     const at::Scalar& beta, const at::Scalar& alpha) {
  return self.to(dtype).baddbmm(a.to(dtype), b.to(dtype), beta, alpha);
}

Tensor& mm_dtype_out(const Tensor& a, const Tensor& b, at::ScalarType dtype, Tensor& out) {
  return out.resize_({a.size(0), b.size(1)}).copy_(mm_dtype(a, b, dtype));
}

Tensor& bmm_dtype_out(const Tensor& a, const Tensor& b, at::ScalarType dtype, Tensor& out) {
  return out.resize_({a.size(0), a.size(1), b.size(2)}).copy_(bmm_dtype(a, b, dtype));
}

Tensor& addmm_dtype_out(const Tensor& self, const Tensor& a, const Tensor& b, at::ScalarType dtype,
                        const at::Scalar& beta, const at::Scalar& alpha, Tensor& out) {
  const Tensor result = addmm_dtype(self, a, b, dtype, beta, alpha);
  return out.resize_(result.sizes()).copy_(result);
}

// --- The backward of RMS norm -------------------------------------------------------------------

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& input,
                                             at::IntArrayRef normalized, const Tensor& rstd,
                                             const Given& weight, std::array<bool, 2> wanted) {
  const auto batch_dims = input.dim() - static_cast<int64_t>(normalized.size());
  std::vector<int64_t> batch;
  std::vector<int64_t> inner;
  std::vector<int64_t> statistic;
  for (int64_t i = 0; i < input.dim(); ++i) {
    (i < batch_dims ? batch : inner).push_back(i);
    statistic.push_back(i < batch_dims ? input.size(i) : 1);
  }
  const Tensor scale = rstd.reshape(statistic);
  const Tensor x = wide(input) * scale;
  const Tensor dy = has(weight) ? wide(grad) * wide(*weight) : wide(grad);
  Tensor grad_input;
  Tensor grad_weight;
  if (wanted[0]) {
    grad_input = ((dy - x * (x * dy).mean(inner, /*keepdim=*/true)) * scale).to(input.dtype());
  }
  if (wanted[1] && has(weight)) {
    const Tensor all = wide(grad) * x;
    grad_weight = (batch.empty() ? all : all.sum(batch)).to(weight->dtype());
  }
  return {grad_input, grad_weight};
}

// --- SyncBatchNorm's steps between its collectives ----------------------------------------------

/// One value for each channel, along dimension 1.
Tensor along_channels(const Tensor& values, const Tensor& input) {
  std::vector<int64_t> sizes(input.dim(), 1);
  sizes[1] = values.numel();
  return wide(values).reshape(sizes);
}

std::vector<int64_t> all_but_channels(const Tensor& input) {
  std::vector<int64_t> dims;
  for (int64_t i = 0; i < input.dim(); ++i) {
    if (i != 1) {
      dims.push_back(i);
    }
  }
  return dims;
}

std::tuple<Tensor, Tensor> batch_norm_stats(const Tensor& input, double eps) {
  const Tensor x = wide(input);
  const auto dims = all_but_channels(x);
  return {x.mean(dims), (x.var(dims, /*unbiased=*/false) + eps).rsqrt()};
}

Tensor batch_norm_elemt(const Tensor& input, const Given& weight, const Given& bias,
                        const Tensor& mean, const Tensor& invstd, double /*eps*/) {
  Tensor y = (wide(input) - along_channels(mean, input)) * along_channels(invstd, input);
  if (has(weight)) {
    y = y * along_channels(*weight, input);
  }
  if (has(bias)) {
    y = y + along_channels(*bias, input);
  }
  return y.to(input.dtype());
}

/// The ranks' statistics are rows of `mean` and `invstd`.
std::tuple<Tensor, Tensor> batch_norm_gather_stats_with_counts(
    const Tensor& /*input*/, const Tensor& mean, const Tensor& invstd, const Given& running_mean,
    const Given& running_var, double momentum, double eps, const Tensor& counts) {
  const Tensor rows = counts.to(mean.dtype()).reshape({-1, 1});
  const Tensor all = rows.sum();
  const Tensor whole = (mean * rows).sum(0) / all;
  const Tensor squares = ((invstd.pow(-2) - eps + (mean - whole).pow(2)) * rows).sum(0);
  if (has(running_mean)) {
    running_mean->mul_(1 - momentum).add_(whole.to(running_mean->dtype()), momentum);
  }
  if (has(running_var)) {
    const Tensor unbiased = squares / (all - 1);
    running_var->mul_(1 - momentum).add_(unbiased.to(running_var->dtype()), momentum);
  }
  return {whole, (squares / all + eps).rsqrt()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_backward_reduce(
    const Tensor& grad, const Tensor& input, const Tensor& mean, const Tensor& invstd,
    const Given& weight, bool input_g, bool weight_g, bool bias_g) {
  const auto dims = all_but_channels(input);
  const Tensor dy = wide(grad);
  const Tensor sum = dy.sum(dims);
  const Tensor sum_xmu = (dy * (wide(input) - along_channels(mean, input))).sum(dims);
  const auto dtype = has(weight) ? weight->scalar_type() : input.scalar_type();
  return {input_g ? sum : Tensor(), input_g ? sum_xmu : Tensor(),
          weight_g ? (sum_xmu * invstd).to(dtype) : Tensor(), bias_g ? sum.to(dtype) : Tensor()};
}

Tensor batch_norm_backward_elemt(const Tensor& grad, const Tensor& input, const Tensor& mean,
                                 const Tensor& invstd, const Given& weight, const Tensor& sum,
                                 const Tensor& sum_xmu, const Tensor& count) {
  const Tensor all = count.sum().to(wide(input).dtype());
  const Tensor scale = along_channels(invstd, input);
  const Tensor xmu = wide(input) - along_channels(mean, input);
  const Tensor share = along_channels(sum_xmu / all, input) * scale * scale;
  Tensor dx = (wide(grad) - along_channels(sum / all, input) - xmu * share) * scale;
  if (has(weight)) {
    dx = dx * along_channels(*weight, input);
  }
  return dx.to(input.dtype());
}

// --- Cells of recurrent networks ----------------------------------------------------------------

Tensor with_bias(const Tensor& gates, const Given& bias) {
  return has(bias) ? wide(gates) + wide(*bias) : wide(gates);
}

/// The new hidden state, the new cell, and the gates as they were used: input, forget, cell, output.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                             const Tensor& cx, const Given& input_bias,
                                             const Given& hidden_bias) {
  const Tensor gates = with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias);
  const auto parts = gates.chunk(4, 1);
  const Tensor in = parts[0].sigmoid();
  const Tensor forget = parts[1].sigmoid();
  const Tensor cell = parts[2].tanh();
  const Tensor out = parts[3].sigmoid();
  const Tensor cy = forget * wide(cx) + in * cell;
  const auto dtype = cx.dtype();
  return {(out * cy.tanh()).to(dtype), cy.to(dtype), at::cat({in, forget, cell, out}, 1).to(dtype)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const Given& grad_hy, const Given& grad_cy,
                                                      const Tensor& cx, const Tensor& cy,
                                                      const Tensor& workspace, bool has_bias) {
  const auto parts = wide(workspace).chunk(4, 1);
  const Tensor &in = parts[0], &forget = parts[1], &cell = parts[2], &out = parts[3];
  const Tensor t = wide(cy).tanh();
  const Tensor dh = has(grad_hy) ? wide(*grad_hy) : t * 0;
  const Tensor dc = dh * out * (1 - t * t) + (has(grad_cy) ? wide(*grad_cy) : t * 0);
  const Tensor gates = at::cat({dc * cell * in * (1 - in), dc * wide(cx) * forget * (1 - forget),
                                dc * in * (1 - cell * cell), dh * t * out * (1 - out)},
                               1)
                           .to(workspace.dtype());
  return {gates, (dc * forget).to(cx.dtype()), has_bias ? gates.sum(0) : Tensor()};
}

/// The new hidden state, and what backward needs: reset, update and new gate, hx, and the new gate's hidden part.
std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                    const Tensor& hx, const Given& input_bias,
                                    const Given& hidden_bias) {
  const auto in = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const Tensor reset = (in[0] + hidden[0]).sigmoid();
  const Tensor update = (in[1] + hidden[1]).sigmoid();
  const Tensor fresh = (in[2] + reset * hidden[2]).tanh();
  const Tensor before = wide(hx);
  const Tensor hy = fresh + update * (before - fresh);
  return {hy.to(hx.dtype()), at::cat({reset, update, fresh, before, hidden[2]}, 1).to(hx.dtype())};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy,
                                                                     const Tensor& workspace,
                                                                     bool has_bias) {
  const auto parts = wide(workspace).chunk(5, 1);
  const Tensor &reset = parts[0], &update = parts[1], &fresh = parts[2], &hx = parts[3],
               &hidden = parts[4];
  const Tensor dh = wide(grad_hy);
  const Tensor d_fresh = dh * (1 - update) * (1 - fresh * fresh);
  const Tensor d_update = dh * (hx - fresh) * update * (1 - update);
  const Tensor d_reset = d_fresh * hidden * reset * (1 - reset);
  const auto dtype = workspace.dtype();
  const Tensor input_gates = at::cat({d_reset, d_update, d_fresh}, 1).to(dtype);
  const Tensor hidden_gates = at::cat({d_reset, d_update, d_fresh * reset}, 1).to(dtype);
  return {input_gates, hidden_gates, (dh * update).to(dtype),
          has_bias ? input_gates.sum(0) : Tensor(), has_bias ? hidden_gates.sum(0) : Tensor()};
}

}  // namespace

void implement_without_cpu_kernel(torch::Library& library) {
  library.impl("mm.dtype", TORCH_FN(mm_dtype));
  library.impl("mm.dtype_out", TORCH_FN(mm_dtype_out));
  library.impl("bmm.dtype", TORCH_FN(bmm_dtype));
  library.impl("bmm.dtype_out", TORCH_FN(bmm_dtype_out));
  library.impl("addmm.dtype", TORCH_FN(addmm_dtype));
  library.impl("addmm.dtype_out", TORCH_FN(addmm_dtype_out));
  library.impl("baddbmm.dtype", TORCH_FN(baddbmm_dtype));
  library.impl("_fused_rms_norm_backward", TORCH_FN(rms_norm_backward));
  library.impl("batch_norm_stats", TORCH_FN(batch_norm_stats));
  library.impl("batch_norm_elemt", TORCH_FN(batch_norm_elemt));
  library.impl("batch_norm_gather_stats_with_counts",
               TORCH_FN(batch_norm_gather_stats_with_counts));
  library.impl("batch_norm_backward_reduce", TORCH_FN(batch_norm_backward_reduce));
  library.impl("batch_norm_backward_elemt", TORCH_FN(batch_norm_backward_elemt));
  library.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
  library.impl("_thnn_fused_lstm_cell_backward_impl", TORCH_FN(lstm_cell_backward));
  library.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  library.impl("_thnn_fused_gru_cell_backward", TORCH_FN(gru_cell_backward));
}

}  // namespace sim_operators
