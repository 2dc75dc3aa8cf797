#pragma once
#include <brimful/pipeline/pipeline_options.h>

#include <exception>
#include <functional>
#include <string>

#include "pipeline/call.h"
#include "pipeline/tied_weights.h"
#include "pipeline/transport/peers.h"

namespace brimful::pipeline {

/// What the ranks of this pipeline have in common, and how they find out. Without other processes all of it is this rank's
/// own.
class PeerAgreement {
 public:
  /// Both outlive it.
  PeerAgreement(const PipelineOptions& options, TiedWeights& tied)
      : options_(options), tied_(tied) {}

  void begin_call() { broken_ = false; }
  /// The reducers have other groups, and the parameters have taken so many steps.
  void regrouped(int64_t progress);
  /// Of the last call: a group broke, on some rank.
  bool is_broken() const { return broken_; }
  /// The BatchNorms of all ranks may be given microbatches.
  bool may_split() const { return may_split_; }
  /// A rank has a tied weight.
  bool any_tied() const { return any_tied_; }
  /// The ranks are to meet() before the first action: their set-ups were not compared yet, or links are missing.
  bool is_due() const { return options_.peers && (!made_ || options_.peers->wants_links()); }
  /// Compares what the ranks were given, and takes the most microbatches that one asks for. `set_up`: a text of what they
  /// must have alike, whose error fails the call on all. What is wrong, `call` says afterwards.
  void meet(Call& call, bool may_split, const std::function<std::string()>& set_up,
            const std::function<std::vector<int>()>& places);
  /// Of all ranks, whether a group broke on one of them too.
  PeerVerdict agree(const PeerVerdict& own);
  /// Of what failed in none of the actions.
  ActionFailure failure_outside(std::exception_ptr error) const;

 private:
  PeerVerdict said_in(Call& call, bool may_split, const std::function<std::string()>& set_up);
  /// Links between the ranks, beside their group.
  void connect(Call& call, int64_t name, const std::function<std::vector<int>()>& places);
  static void read(Call& call, const PeerVerdict& all);

  const PipelineOptions& options_;
  TiedWeights& tied_;
  bool made_ = false;  ///< set-ups were compared, and are alike
  bool may_split_ = true;
  bool any_tied_ = false;
  bool broken_ = false;
  int64_t progress_ = 0;  ///< steps of the parameters, when the reducers regrouped
};

}  // namespace brimful::pipeline
