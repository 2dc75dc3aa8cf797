#include "pipeline/settle.h"

#include <ATen/ATen.h>
#include <brimful/error.h>
#include <brimful/memory/stats.h>
#include <brimful/sizer/grad_scaler.h>
#include <brimful/step/oom.h>

#include <limits>

#include "base/thrown_by.h"
#include "pipeline/executor/caller_gradients.h"
#include "pipeline/pipeline_state.h"
#include "sizer/loss_scale.h"

namespace brimful::pipeline {
namespace {
at::Tensor values_of(const at::Tensor& gradient) {
  return gradient.is_sparse() ? gradient._values() : gradient;
}
}  // namespace

void Settlement::run(Call& call, const PeerVerdict& verdict, const StepResult& result) {
  const double scale = call.ref / verdict.weight;
  auto failed = thrown_by([&] { call.group.accept(scale, true); });
  failed = thrown_by([&] { tied_.sum_gradients(failed); });
  failed = failed ? failed : thrown_by([&] { return_gradients(result, scale); });
  post(call, verdict, failed);
}

void Settlement::return_gradients(const StepResult& result, double scale) const {
  try {
    give_back(result.caller_gradients, scale);
  } catch (...) {
    std::rethrow_exception(options_.translate ? options_.translate(std::current_exception())
                                              : std::current_exception());
  }
}

void Settlement::post(const Call& call, const PeerVerdict& verdict, std::exception_ptr failed) {
  const bool scaled = options_.scaler != nullptr && options_.scaler->enabled();
  if (options_.peers && (scaled || agreement_.any_tied() || verdict.has_more)) {
    const memory::Unlimited unlimited;
    const at::NoGradGuard no_grad;
    PeerVerdict own;
    own.rank = options_.peers->rank();
    own.rows = call.rows;
    at::Tensor first;
    failed = failed || !scaled ? failed : thrown_by([&] {
      for (const auto& parameter : trained_of(stages_)) {
        const auto& gradient = parameter.grad();
        if (gradient.defined()) {
          first = first.defined() ? first : values_of(gradient);
          const bool is_finite = at::isfinite(values_of(gradient)).all().item<bool>();
          own.weight = own.weight > 0 || !is_finite ? 1 : 0;
        }
      }
    });
    if (failed) {
      own.kind = Status::error;
      own.text = brimful::to_string(failed);
    }
    const auto all = agreement_.agree(own);
    if (!failed && all.kind != Status::ok) {
      brimful::detail::throw_rank_failed(
          all.rank, -1, Status::error,
          "rank " + std::to_string(all.rank) +
              " of the pipeline could not finish a step that all ranks had found good: " +
              all.text);
    }
    if (!failed && all.weight > 0 && own.weight == 0 && first.defined()) {
      first.fill_(std::numeric_limits<double>::quiet_NaN());
    }
  }
  if (failed) {
    std::rethrow_exception(failed);
  }
}

}  // namespace brimful::pipeline
