#pragma once
#include <brimful/pipeline/keywords.h>
#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/executor/caller_gradients.h"

namespace brimful::pipeline {

/// What a forward was given of its keywords, in the order in which it asked, so that a second one is given the same tensors.
struct GivenKeywords {
  Keywords all;
  std::vector<std::pair<std::string, Value>> values;
};

/// A microbatch's keywords in a stage's forward, while this lives on its thread.
class KeywordScope {
 public:
  /// `keywords` may be empty. `leaves` gets those that stand for keywords that need a gradient; none: nothing does.
  KeywordScope(const std::function<Keywords(int microbatch)>& keywords, int microbatch,
               c10::Device device, std::vector<CallerLeaf>* leaves);
  /// In a second forward.
  explicit KeywordScope(std::shared_ptr<const GivenKeywords> again);
  ~KeywordScope();
  KeywordScope(const KeywordScope&) = delete;
  KeywordScope& operator=(const KeywordScope&) = delete;

  const Keywords& all() const { return keywords_; }
  const Value* find(const std::string& name) const;
  /// On the stage's device.
  Value get(const std::string& name) const;
  /// What the forward is given from here on is kept there.
  std::shared_ptr<GivenKeywords> keep();

 private:
  Keywords keywords_;
  c10::Device device_;
  std::vector<CallerLeaf>* leaves_;
  std::shared_ptr<GivenKeywords> kept_;
  std::shared_ptr<const GivenKeywords> again_;
  mutable size_t next_ = 0;  ///< of what is given again
  const KeywordScope* outer_;
};

}  // namespace brimful::pipeline
