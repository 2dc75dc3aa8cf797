#include "pipeline/executor/draw_watch.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <unordered_map>

namespace brimful::pipeline {
namespace {
thread_local bool seen = false;

bool may_draw(const c10::OperatorName& name) {
  // It has the tag for what other devices' attention does with a dropout, which it refuses.
  if (name.name == "aten::_scaled_dot_product_flash_attention_for_cpu") {
    return false;
  }
  const auto op = c10::Dispatcher::singleton().findSchema(name);
  // What is made of other operators (dropout, which in evaluation draws nothing) shows in those.
  return op && op->hasTag(at::Tag::nondeterministic_seeded) &&
         !op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

std::unique_ptr<at::ObserverContext> on_operator(const at::RecordFunction& call) {
  // By the place of its name, which lives as long as the operator.
  thread_local std::unordered_map<const char*, bool> known;
  const auto found = known.find(call.name());
  if (found != known.end()) {
    seen |= found->second;
  } else if (const auto name = call.operator_name()) {
    seen |= known[call.name()] = may_draw(*name);
  }
  return nullptr;
}
}  // namespace

DrawWatch::DrawWatch(bool on) {
  if (on) {
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(&on_operator).scopes({at::RecordScope::FUNCTION}));
  }
}

DrawWatch::~DrawWatch() {
  if (handle_) {
    at::removeCallback(*handle_);
  }
}

bool DrawWatch::take_seen() {
  return std::exchange(seen, false);
}

}  // namespace brimful::pipeline
