#pragma once
#include <string>
#include <utility>
#include <vector>

#include "pipeline/schedule/places.h"

namespace brimful::pipeline {

/// Problems up to a number that a person may want to read.
class Findings {
 public:
  void add(std::string problem);
  bool none() const { return problems_.empty(); }
  /// No more are taken: the last one says so.
  bool full() const { return full_; }
  std::vector<std::string> take() { return std::move(problems_); }

 private:
  std::vector<std::string> problems_;
  bool full_ = false;
};

// Each adds what it finds wrong with a part of a schedule. All but the first need what it finds to be none.

/// Numbers of stages, microbatches and actions; actions of stages and microbatches that there are not.
void find_out_of_range(const Schedule& schedule, Findings& findings);
/// Actions that are there twice, and stages on several ranks.
void find_doubled(const Places& places, Findings& findings);
/// Actions that are missing, or contradict each other; sends and receives where there are any.
void find_missing(const Places& places, Findings& findings);
/// Actions of a rank that come before what they need from the same rank.
void find_misordered(const Places& places, Findings& findings);

}  // namespace brimful::pipeline
