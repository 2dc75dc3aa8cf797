// What follows a verdict that lets a step stand. Other ranks wait for this one here too: what fails is sent in place of what
// they wait for.
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

void Pipeline::State::settle(Call& call, const PeerVerdict& verdict, const StepResult& result) {
  doing = "the step stands: the ranks exchange what their gradients have in common";
  const double scale = call.ref / verdict.weight;
  auto failed = thrown_by([&] { call.group.accept(scale, true); });
  failed = thrown_by([&] { tied.sum_gradients(failed); });
  failed = failed ? failed : thrown_by([&] { return_gradients(result, scale); });
  failed = thrown_by([&] { post_settled(call, verdict, failed); });
  if (failed) {
    undo(call);
    std::rethrow_exception(failed);
  }
}

void Pipeline::State::return_gradients(const StepResult& result, double scale) const {
  try {
    give_back(result.caller_gradients, scale);
  } catch (...) {
    std::rethrow_exception(options.translate ? options.translate(std::current_exception())
                                             : std::current_exception());
  }
}

void Pipeline::State::post_settled(const Call& call, const PeerVerdict& verdict,
                                   std::exception_ptr failed) {
  const bool scaled = options.scaler != nullptr && options.scaler->enabled();
  if (options.peers && (scaled || agreed_.any_tied || verdict.has_more)) {
    const memory::Unlimited unlimited;
    const at::NoGradGuard no_grad;
    PeerVerdict own;
    own.rank = options.peers->rank();
    own.rows = call.rows;
    at::Tensor first;
    failed = failed || !scaled ? failed : thrown_by([&] {
      for (const auto& parameter : trained_of(executor->stages())) {
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
    const auto all = agree(own);
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
