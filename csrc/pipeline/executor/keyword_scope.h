#pragma once
#include <brimful/pipeline/keywords.h>
#include <c10/core/Device.h>

#include <functional>
#include <vector>

#include "pipeline/executor/caller_gradients.h"

namespace brimful::pipeline {

/// A microbatch's keywords in a stage's forward, while this lives on its thread.
class KeywordScope {
 public:
  /// `keywords` may be empty. `leaves` gets those that stand for keywords that need a gradient; none: nothing does.
  KeywordScope(const std::function<Keywords(int microbatch)>& keywords, int microbatch,
               c10::Device device, std::vector<CallerLeaf>* leaves);
  ~KeywordScope();
  KeywordScope(const KeywordScope&) = delete;
  KeywordScope& operator=(const KeywordScope&) = delete;

  const Keywords& all() const { return keywords_; }
  const Value* find(const std::string& name) const;
  /// On the stage's device.
  Value get(const std::string& name) const;

 private:
  Keywords keywords_;
  c10::Device device_;
  std::vector<CallerLeaf>* leaves_;
  const KeywordScope* outer_;
};

}  // namespace brimful::pipeline
