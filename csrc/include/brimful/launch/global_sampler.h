#pragma once
#include <brimful/export.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace brimful {

struct Outcome;

/// The same on all ranks.
struct GlobalSamplerOptions {
  bool shuffle = true;
  uint64_t seed = 0;
  bool drop_last = false;  ///< leave out an epoch's last rows where they are no whole batch
  /// The share of a step follows the outcomes up to `lag` steps before it. At least as many batches as a rank may
  /// have asked for without their outcomes: 3 for BatchSizer::batches over a data loader without workers, which holds
  /// a batch that is looked ahead and one more, and `max_jobs` besides with workers (twice their number by default).
  int64_t lag = 3;
  int64_t min_rows = 1;                ///< of each rank in a whole batch
  std::vector<int64_t> max_rows = {};  ///< of each rank, by rank, where its memory allows no more
};

/// What each row costs, such as its tokens, and the most that the rows of a batch of all ranks cost together. A rank's time is
/// taken to be its speed times the sum of `cost + cost * cost / crossover`; the crossover follows from measured times.
struct RowCosts {
  std::vector<int64_t> of_row;  ///< at least 1 and at most 2^26
  int64_t of_batch = 0;
};

/// Plain numbers, the same on all ranks.
using GlobalSamplerState = std::map<std::string, std::vector<double>>;

/// Batches of the whole job: a step is a range of `batch_size` rows of a permutation that all ranks have, and each rank
/// takes a share of it that follows how fast it was, so that all are done at the same time. BatchSizer's gradient is the
/// exact mean whatever the shares are. In every epoch each row goes to exactly one rank. Shares follow from
/// `Outcome::work_ms`, which all ranks have from a step's control record: there is no collective.
///
/// A sampler for torch::data::make_data_loader, whose own batch size is not used, or used by itself: reset(), then
/// next() until there is nothing. Give it each step's outcome by note(). Copies share their state: the
/// program keeps one where a data loader has another. From one thread at a time.
///
/// With `RowCosts` a step is the next rows of the permutation that cost no more than a batch may. They are in order of cost, the
/// most costly first, and a rank's share is a range of them that is predicted to take as long as those of the others. A step has
/// `min_rows` for each rank even where they cost more than a batch, and no more rows than the ranks' `max_rows`.
///
/// Where an epoch's last step has fewer rows than there are ranks the last ranks have no batch in it.
class BRIMFUL_API GlobalSampler {
 public:
  using BatchRequestType = std::vector<size_t>;

  /// @throws c10::ValueError for a rank outside its world, or where options and batch size contradict each other
  GlobalSampler(size_t size, size_t batch_size, int rank, int world_size,
                GlobalSamplerOptions options = {});
  /// @throws c10::ValueError also for a row that costs nothing, or too much to be squared
  GlobalSampler(RowCosts costs, int rank, int world_size, GlobalSamplerOptions options = {});

  /// The next pass is of this epoch. Of the epoch that is under way it goes on where it was.
  void set_epoch(uint64_t epoch);
  /// Begins a pass: after the last step that was noted, or the next epoch where that was the last one's end. What was
  /// handed out and not noted is handed out again.
  /// @throws c10::ValueError for another size
  void reset(std::optional<size_t> new_size = std::nullopt);
  /// This rank's rows of the next step; nothing at the epoch's end.
  /// @throws c10::ValueError where they depend on an outcome that was not noted: `lag` is too small
  std::optional<std::vector<size_t>> next();
  /// The same, as data loaders ask for it.
  std::optional<std::vector<size_t>> next(size_t /*batch_size*/) { return next(); }

  /// As next(), with no rows where only other ranks have some: nothing means that the epoch has ended.
  std::optional<std::vector<size_t>> next_step();

  /// Goes on among other ranks: what was handed out and not noted is cut anew, by even shares, so that the same rows are the
  /// next step's. Copies that a data loader has follow. `max_rows` is as in the options, by the new ranks.
  /// @throws c10::ValueError as the constructor; the sampler is then as it was
  void regroup(int rank, int world_size, std::vector<int64_t> max_rows = {});

  /// A step has ended. On all ranks, once for each, also those in which this rank had no batch.
  /// @throws c10::ValueError for the times of another number of ranks, or where no step is under way
  void note(const Outcome& outcome);
  /// The same, of each rank's time (NaN: unknown); none where the step failed on all ranks and its rows are skipped.
  void note(const std::vector<double>& work_ms);

  /// Steps that were handed out and not noted.
  size_t handed_out() const;
  /// This rank's batches in a whole epoch; with costs in that of the next step.
  size_t batches() const;
  /// Rows of each rank in the first step that is not noted, if it is a whole batch (with costs whatever it is).
  std::vector<int64_t> shares() const;
  /// Of the next step that is noted.
  uint64_t epoch() const;
  int64_t lag() const;

  /// Of the steps that were noted, whatever was handed out ahead.
  GlobalSamplerState state() const;
  /// Goes on there, with the same shares; even ones where ranks, batch size or lag are others.
  /// @throws c10::ValueError where the state is of other data, other costs, another seed or order, or none
  void load_state(const GlobalSamplerState& state);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace brimful
