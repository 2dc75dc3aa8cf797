#include <ATen/ATen.h>
#include <brimful/pipeline/stage.h>

#include "ladder/refuse_second_run.h"
#include "pipeline/executor/keyword_scope.h"

namespace brimful::pipeline {
namespace {
thread_local const KeywordScope* current = nullptr;
}  // namespace

KeywordScope::KeywordScope(const std::function<Keywords(int microbatch)>& keywords, int microbatch,
                           c10::Device device, std::vector<CallerLeaf>* leaves)
    : device_(device), leaves_(leaves), outer_(current) {
  if (keywords) {
    keywords_ = keywords(microbatch);
  }
  current = this;
}

KeywordScope::KeywordScope(std::shared_ptr<const GivenKeywords> again)
    : keywords_(again->all),
      device_(c10::DeviceType::CPU),
      leaves_(nullptr),
      again_(std::move(again)),
      outer_(current) {
  current = this;
}

KeywordScope::~KeywordScope() {
  current = outer_;
}

const Value* KeywordScope::find(const std::string& name) const {
  const auto found = keywords_.find(name);
  return found == keywords_.end() ? nullptr : &found->second;
}

Value KeywordScope::get(const std::string& name) const {
  const auto* found = find(name);
  if (found == nullptr) {
    std::string names;
    for (const auto& [known, value] : keywords_) {
      names += (names.empty() ? "" : ", ") + known;
    }
    TORCH_CHECK_VALUE(false, "the step was given no keyword of this name (name: ", name,
                      ", there are: ", names.empty() ? "none" : names, "); pass it to step()");
  }
  if (again_ != nullptr) {
    const auto& values = again_->values;
    if (next_ >= values.size() || values[next_].first != name) {
      ladder::refuse_second_run(
          "its forward asked for other keywords when it ran again (now: ", name, ")");
    }
    return values[next_++].second;
  }
  auto value = *found;
  for (auto& tensor : value.tensors) {
    if (tensor.defined()) {
      tensor = leaf_of(tensor.requires_grad() ? tensor : tensor.detach(), device_, leaves_);
    }
  }
  if (kept_ != nullptr) {
    kept_->values.emplace_back(name, value);
  }
  return value;
}

std::shared_ptr<GivenKeywords> KeywordScope::keep() {
  kept_ = std::make_shared<GivenKeywords>(GivenKeywords{keywords_, {}});
  return kept_;
}

Value keyword_value(const std::string& name) {
  TORCH_CHECK_VALUE(current != nullptr,
                    "a keyword was asked for outside a stage's forward (stage: none); call "
                    "keyword() in a forward");
  return current->get(name);
}

at::Tensor keyword(const std::string& name) {
  auto value = keyword_value(name);
  TORCH_CHECK_TYPE(value.form == nullptr && value.tensors.size() == 1,
                   "the keyword is not a tensor (name: ", name,
                   "); ask for keyword_value(), which may be anything");
  return std::move(value.tensors[0]);
}

detail::NamedIValues detail::keywords_named(const std::vector<std::string>& names) {
  NamedIValues values;
  for (const auto& name : names) {
    if (has_keyword(name)) {
      values.emplace(name, to_ivalue(keyword_value(name)));
    }
  }
  return values;
}

std::vector<std::string> keyword_names() {
  std::vector<std::string> names;
  for (const auto& [name, value] : current != nullptr ? current->all() : Keywords()) {
    names.push_back(name);
  }
  return names;
}

bool has_keyword(const std::string& name) {
  return current != nullptr && current->find(name) != nullptr;
}

}  // namespace brimful::pipeline
