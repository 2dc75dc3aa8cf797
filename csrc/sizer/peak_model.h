#pragma once
#include <brimful/export.h>
#include <brimful/memory/trace.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace brimful {

/// Of an event of a trace on CUDA.
struct TracedBlock {
  uint64_t stream = 0;
  int64_t taken_at =
      -1;  ///< of what is given back: the event that took it; -1: it was there before
};

/// A piece of work that was traced with this number of rows.
struct TracedRows {
  int64_t rows = 0;
  memory::Trace trace;
  std::vector<TracedBlock> blocks = {};  ///< on CUDA: one for each event
};

/// How the peak of a piece of work depends on its rows, from traces of a few small sizes: each allocation grows by a
/// constant number of bytes a row, and the peak is the largest sum in their order. No line through measured peaks finds
/// that, because another moment may be the fullest at another size. Plain data.
class BRIMFUL_API PeakModel {
 public:
  /// The lines go through the two smallest sizes. An allocation that is not on its line at the largest one (a library
  /// rounds it up to pages, say) is read off between the traced sizes and grows in proportion behind them, with a few
  /// pages more: too large rather than too small. On CUDA (where `blocks` are known) it has no pages more, and is between
  /// two traced sizes as at the larger one: a workspace jumps. Where sizes do not have the same allocations (several threads share the
  /// work from some number of rows on, and each takes a buffer), what only some have is read off in the same way, unless
  /// the peaks of the larger sizes are what the smaller ones say.
  /// Nothing where the sequences of allocations are too different to be made one.
  /// @throws c10::ValueError unless there are at least two sizes, all different and positive
  static std::optional<PeakModel> fit(std::vector<TracedRows> traces);

  /// Bytes of each event, as a trace of so many rows would have them.
  memory::Trace trace_at(int64_t rows) const;
  /// One for each of these events, as the largest size had them; empty where they are not known.
  const std::vector<TracedBlock>& blocks() const { return blocks_; }
  /// Over what is in use at the beginning.
  int64_t peak_bytes(int64_t rows) const;
  /// The most rows, up to `at_most`, whose peak is within `bytes`; 0 if not even one row's is.
  int64_t largest_rows(int64_t bytes, int64_t at_most) const;
  /// Share of the peak of so many rows that it would lack if allocations off their lines grew behind the traced sizes as they
  /// did between them, and not in proportion: a larger traced size says which it is.
  double guessed_share(int64_t rows) const;
  /// Share of allocated bytes, at the largest traced size, that did not lie on their lines.
  double off_line() const { return off_line_; }

 private:
  struct Event {
    double constant = 0;
    double per_row = 0;  ///< off its line: behind the traced sizes
    std::vector<double>
        traced;                ///< off its line: bytes at the traced sizes, 0 where it is not there
    double least_per_row = 0;  ///< by the smallest and the largest traced size
  };
  /// Of traces with one sequence of events.
  explicit PeakModel(const std::vector<TracedRows>& traces);
  Event event_of(const std::vector<double>& bytes) const;
  double bytes_of(const Event& event, double rows) const;

  std::vector<double> rows_;  ///< traced sizes
  std::vector<Event> events_;
  std::vector<TracedBlock> blocks_;
  double off_line_ = 0;
};

}  // namespace brimful
