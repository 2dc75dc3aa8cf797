#pragma once
#include <brimful/export.h>

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ladder/modules.h"

namespace brimful::ladder {

/// How steps whose single rows do not fit are run: the first one puts all aside that it saves, and is recorded; what others do
/// follows from that record. One thread.
class BRIMFUL_API Ladder {
 public:
  using Room = std::optional<int64_t>;  ///< bytes over what is in use before a step
  /// Of steps that take the same: a name of their kind.
  using Kind = std::string;

  Ladder(std::shared_ptr<Modules> modules, c10::Device device, bool recompute, bool offload);

  /// For the next step's first attempt with one row a piece; none where nothing is known of such steps.
  Rungs first(const Kind& kind, Room room);
  /// After an attempt ran out of memory, which the plans of this kind learn from; nothing where no other way is left.
  std::optional<Rungs> next(const Kind& kind, const Rungs& failed, Room room);
  /// Nothing is put aside from here on: there is no room for it.
  void leave_out_offload();
  bool offloads() const { return has_room_aside_.value_or(true); }
  bool knows_any() const { return !known_.empty(); }
  /// Over what was in use before the step, and milliseconds more than without; nothing where nothing is known.
  std::optional<PlanCost> cost_of(const Kind& kind, const Rungs& rungs) const;
  /// Of a forward without rungs; 0: not known.
  double forward_ms(const Kind& kind) const;
  std::vector<std::string> names_of(const std::vector<int32_t>& modules) const;
  std::vector<int32_t> numbers_of(const std::vector<std::string>& names) const;
  Modules& modules() { return *modules_; }

  /// Modules run with the rungs while it lives.
  class Attempt {
   public:
    /// @throws c10::Error where nothing can be put aside
    Attempt(Ladder& ladder, Kind kind, const Rungs& rungs, const std::vector<at::Tensor>& batch);
    ~Attempt();
    Attempt(const Attempt&) = delete;
    Attempt& operator=(const Attempt&) = delete;

    void begin_forward();
    void end_forward() noexcept;
    /// All pieces have run to their end: what was recorded counts.
    void complete();
    int64_t aside_bytes() const { return aside_ ? aside_->bytes() : 0; }
    /// Why there was no room to put a tensor aside; empty: there was.
    std::string refused() const { return aside_ ? aside_->refused() : std::string(); }

   private:
    Ladder& ladder_;
    Kind kind_;
    std::shared_ptr<StepEventRecorder> recorder_;
    std::shared_ptr<Aside> aside_;
    int64_t pieces_ = 0;
    std::optional<StepEvents> found_;
  };

 private:
  struct Known {
    Kind kind;
    StepEvents step;
    double margin = 0;    ///< share of a peak that plans were found to be short of
    Room chosen_in = {};  ///< room that `chosen` is for
    Rungs chosen = {};
  };
  Known* find(const Kind& kind);
  const Known* find(const Kind& kind) const;
  Rungs choose(Known& known, Room room);
  Fits fits_in_pool(const Known& known) const;
  Allowed allowed() const;
  bool can_put_aside();
  Rungs least();

  std::shared_ptr<Modules> modules_;
  c10::Device device_;
  bool recompute_;
  bool offload_;
  std::optional<bool> has_room_aside_;
  std::list<Known> known_;  ///< the last used first
};

}  // namespace brimful::ladder
