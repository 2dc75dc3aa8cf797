#include "pipeline/schedule/action_sentence.h"

namespace brimful::pipeline {
namespace {

const char* name_of(ActionKind kind) {
  switch (kind) {
    case ActionKind::forward:
      return "forward";
    case ActionKind::backward:
      return "backward";
    case ActionKind::backward_input:
      return "backward to the inputs";
    case ActionKind::backward_weight:
      return "backward to the weights";
    case ActionKind::send_forward:
      return "sending the outputs";
    case ActionKind::receive_forward:
      return "receiving the inputs";
    case ActionKind::send_backward:
      return "sending the gradients";
    case ActionKind::receive_backward:
      return "receiving the gradients";
  }
  return "action";
}
}  // namespace

std::string to_sentence(const Action& action) {
  return std::string(name_of(action.kind)) + " of microbatch " + std::to_string(action.microbatch) +
         " in stage " + std::to_string(action.stage);
}

}  // namespace brimful::pipeline
