#pragma once
#include "pipeline/call.h"
#include "pipeline/executor/step_result.h"
#include "pipeline/peer_agreement.h"

#include <exception>
#include <vector>

namespace brimful::pipeline {

/// What follows a verdict that lets a step stand. Other ranks wait for this one here too: what fails is sent in place of
/// what they wait for.
class Settlement {
 public:
  /// All outlive it.
  Settlement(const PipelineOptions& options, PeerAgreement& agreement, TiedWeights& tied,
             const std::vector<Stage>& stages)
      : options_(options), agreement_(agreement), tied_(tied), stages_(stages) {}

  /// Makes the gradients of the attempt the step's.
  /// @throws what failed, on any rank
  void run(Call& call, const PeerVerdict& verdict, const StepResult& result);

 private:
  /// To the caller's tensors that need them.
  void return_gradients(const StepResult& result, double scale) const;
  /// Where ranks have more to exchange than a verdict they learn what failed in it. Gradients that have overflowed on one
  /// rank make another rank's not finite: the scalers of all skip the step.
  void post(const Call& call, const PeerVerdict& verdict, std::exception_ptr failed);

  const PipelineOptions& options_;
  PeerAgreement& agreement_;
  TiedWeights& tied_;
  const std::vector<Stage>& stages_;
};

}  // namespace brimful::pipeline
