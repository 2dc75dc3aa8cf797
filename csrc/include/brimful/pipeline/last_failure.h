#pragma once
#include <brimful/export.h>
#include <brimful/pipeline/schedule.h>
#include <brimful/step/failure.h>

#include <exception>
#include <string>

namespace brimful::pipeline {

/// The first action that failed, on a rank of the pipeline.
struct ActionFailure : Failure {
  BRIMFUL_API ActionFailure(int of_rank, int at_index, std::exception_ptr what);

  int index = 0;  ///< in the rank's order; -1: it was none of the actions
  Action action;
  std::string stage;   ///< its name
  std::string shapes;  ///< of the stage's inputs in this microbatch, as far as they were there
  std::exception_ptr error;  ///< none if out of memory: it would pin the tensors of its frames
};
/// "forward of microbatch 3 in stage 1 (decoder; rank 1, action 5, inputs: [8, 64] Float)"
BRIMFUL_API std::string to_string(const ActionFailure& failure);

}  // namespace brimful::pipeline
