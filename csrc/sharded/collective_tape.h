#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "sharded/collective_call.h"
#include "sharded/noted_calls.h"

namespace brimful {

/// The collectives of one piece, in the order in which this rank issues them over all groups. It is written by a piece, and
/// holds once the next one was the same (a first one may have what is made once and for all); each later call is compared with it before it is issued. A call counts as issued
/// once it has begun. Calls come from the step's threads, one at a time; all else from the thread that drives the step.
class CollectiveTape final : public CallListener {
 public:
  enum class State : uint8_t {
    unknown,
    written,  ///< by one piece
    holds,    ///< a second one was the same
    parted    ///< a later one was not
  };
  struct Entry {
    CollectiveCall call;
    int64_t source;  ///< what `source_of` said when it was written
    /// Its sizes are not fixed: it is not one of the parameters' own, and they may follow the rows.
    bool is_sized() const { return source < 0; }
  };
  /// Asked for each call while the tape is written: who makes it; -1 if that is not known.
  using SourceOf = std::function<int64_t()>;
  /// A piece has parted from the tape; `what` says how. Before the call that did is issued; may throw in its place.
  using OnParting = std::function<void(const std::string& what)>;
  /// A piece makes a call that is sized, as number `at` of the tape.
  using OnSized = std::function<void(size_t at, const c10::OperatorHandle& op,
                                     const std::vector<c10::IValue>& arguments)>;

  CollectiveTape(SourceOf source_of, OnParting on_parting, OnSized on_sized = nullptr)
      : source_of_(std::move(source_of)),
        on_parting_(std::move(on_parting)),
        on_sized_(std::move(on_sized)) {}

  void begin_piece();
  /// A piece has ended without an error: it has written the tape, or confirms it.
  void end_piece();
  void forget_piece();
  State state() const;
  /// Calls of the piece under way.
  int64_t issued() const;
  /// Those of the piece under way that are not issued yet.
  std::vector<Entry> rest() const;
  const std::vector<Entry>& entries() const { return entries_; }
  /// All groups that it has met, each once.
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups() const;

  void on_collective(const c10::OperatorHandle& op,
                     const std::vector<c10::IValue>& arguments) override;
  /// Of a piece that has failed: functional collectives whose results no thread waits for any more hold them no longer. They have
  /// ended.
  void let_go();

 private:
  void part(const std::string& what);
  std::string expected() const;

  SourceOf source_of_;
  OnParting on_parting_;
  OnSized on_sized_;
  mutable std::mutex mutex_;
  State state_ = State::unknown;
  std::vector<Entry> entries_;
  std::vector<Entry> next_;  ///< of the piece under way, until it holds
  bool alike_ = false;       ///< so far
  size_t issued_ = 0;
  WeakStorages storages_;  ///< of sized calls of the piece under way, which may be functional ones
  bool under_way_ = false;
};

}  // namespace brimful
