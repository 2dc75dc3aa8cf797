#include "sizer/call_log.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <limits>

#include "sizer/compare.h"

namespace brimful::detail {
namespace {
void add_once(std::vector<std::string>& names, const std::string& name) {
  if (std::find(names.begin(), names.end(), name) == names.end()) {
    names.push_back(name);
  }
}
}  // namespace

double epsilon_of(c10::ScalarType dtype) {
  switch (c10::toRealValueType(dtype)) {
    case at::kDouble:
      return std::numeric_limits<double>::epsilon();
    case at::kFloat:
      return std::numeric_limits<float>::epsilon();
    case at::kHalf:
      return std::numeric_limits<c10::Half>::epsilon();
    case at::kBFloat16:
      return std::numeric_limits<c10::BFloat16>::epsilon();
    default:
      return 0;
  }
}

void CallLog::begin_run(Rows rows) {
  runs_.push_back({rows, {}});
  inside_.clear();
  recording_ = true;
}

std::vector<at::Tensor> CallLog::copies(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> result;
  for (const auto& tensor : tensors) {
    coarsest_epsilon_ = std::max(coarsest_epsilon_, epsilon_of(tensor.scalar_type()));
    result.push_back(tensor.detach().clone());
  }
  return result;
}

void CallLog::enter(const std::string& name, const std::vector<at::Tensor>& inputs) {
  Inside inside{name, -1};
  if (recording_) {
    auto& calls = runs_.back().calls;
    Call call;
    call.name = name;
    call.nth = std::count_if(calls.begin(), calls.end(),
                             [&](const Call& other) { return other.name == name; });
    call.parent = inside_.empty() ? -1 : inside_.back().call;
    call.inputs = copies(inputs);
    inside.call = static_cast<int64_t>(calls.size());
    calls.push_back(std::move(call));
  }
  inside_.push_back(std::move(inside));
}

void CallLog::leave(const std::string& name, const std::vector<at::Tensor>& outputs) {
  while (!inside_.empty() && inside_.back().name != name) {
    inside_.pop_back();  // a module that raised, and whose error was caught
  }
  if (inside_.empty()) {
    return;
  }
  const auto call = inside_.back().call;
  inside_.pop_back();
  if (recording_ && call >= 0) {
    auto& left = runs_.back().calls[call];
    left.outputs = copies(outputs);
    left.left = true;
  }
}

std::optional<std::string> CallLog::current() const {
  return inside_.empty() ? std::nullopt : std::optional(inside_.back().name);
}

void CallLog::drew(bool given_again) {
  if (!inside_.empty()) {
    add_once(random_, inside_.back().name);
  }
  if (given_again) {
    return;
  }
  lost_random_ = true;
  if (recording_ && !inside_.empty() && inside_.back().call >= 0) {
    runs_.back().calls[inside_.back().call].lost_random = true;
  }
}

void CallLog::drew_places() {
  drew(false);
  if (inside_.empty()) {
    places_in_loss_ = true;
  } else {
    add_once(drew_places_, inside_.back().name);
  }
}

std::vector<const CallLog::Call*> CallLog::counterparts(const Call& call) const {
  std::vector<const Call*> found;
  for (size_t run = 1; run < runs_.size(); ++run) {
    const auto& calls = runs_[run].calls;
    const auto match = std::find_if(calls.begin(), calls.end(), [&](const Call& other) {
      return other.left && other.nth == call.nth && other.name == call.name;
    });
    if (match == calls.end()) {
      return {};
    }
    found.push_back(&*match);
  }
  return found;
}

bool CallLog::agree(const Call& whole, const std::vector<const Call*>& pieces,
                    std::vector<at::Tensor> Call::*tensors, bool may_be_mean, double rtol) const {
  std::vector<int64_t> rows;
  for (size_t run = 1; run < runs_.size(); ++run) {
    rows.push_back(runs_[run].rows.end - runs_[run].rows.begin);
  }
  for (size_t i = 0; i < (whole.*tensors).size(); ++i) {
    std::vector<at::Tensor> parts;
    for (const auto* piece : pieces) {
      if ((piece->*tensors).size() != (whole.*tensors).size()) {
        return false;
      }
      parts.push_back((piece->*tensors)[i]);
    }
    if (difference_of_pieces((whole.*tensors)[i], parts, rows, may_be_mean) > rtol) {
      return false;
    }
  }
  return true;
}

std::vector<std::string> CallLog::coupled(double rtol) const {
  if (runs_.size() < 2) {
    return {};
  }
  const auto& calls = runs_[0].calls;
  std::vector<bool> fault(calls.size(), false);
  std::vector<bool> fault_below(calls.size(), false);
  for (auto i = static_cast<int64_t>(calls.size()) - 1; i >= 0; --i) {  // inner calls come first
    const auto& call = calls[i];
    const auto pieces = counterparts(call);
    bool lost = call.lost_random;
    for (const auto* piece : pieces) {
      lost = lost || piece->lost_random;
    }
    const bool differs = call.left && !pieces.empty() && !fault_below[i] &&
                         agree(call, pieces, &Call::inputs, false, rtol) &&
                         !agree(call, pieces, &Call::outputs, true, rtol);
    fault[i] = differs && !lost;
    if (call.parent >= 0 && (differs || fault_below[i])) {
      fault_below[call.parent] = true;
    }
  }
  std::vector<std::string> names;
  for (size_t i = 0; i < calls.size(); ++i) {
    const bool drew_places =
        std::find(drew_places_.begin(), drew_places_.end(), calls[i].name) != drew_places_.end();
    if (fault[i] || drew_places) {
      add_once(names, calls[i].name);
    }
  }
  return names;
}

}  // namespace brimful::detail
