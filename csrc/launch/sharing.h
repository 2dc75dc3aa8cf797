#pragma once
#include <brimful/launch/global_sampler.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace brimful::launch {

using Order = std::vector<size_t>;  ///< an epoch's rows

/// Which rows of an epoch's order a step has, and which of them each rank takes: the same on all ranks. The share of a
/// step follows the steps that were noted up to `lag` before it.
class Sharing {
 public:
  Sharing() = default;
  Sharing(const Sharing&) = delete;
  Sharing& operator=(const Sharing&) = delete;
  virtual ~Sharing() = default;

  /// The same among other ranks: nothing is known of their speeds.
  /// @throws c10::ValueError where options, batch and ranks contradict each other
  virtual std::unique_ptr<Sharing> among(int world_size,
                                         const GlobalSamplerOptions& options) const = 0;

  /// Rows of the step that begins at this place; 0: the epoch has none.
  virtual size_t rows_from(const Order& order, size_t begin) const = 0;
  /// Hands out that step, of so many rows, `ahead` steps behind the first that was not noted; those in between are handed
  /// out. Returns what a rank takes of it.
  virtual std::vector<size_t> own(const Order& order, size_t begin, size_t rows, size_t ahead,
                                  int rank) = 0;
  /// Rows of each rank in the first step that was not noted, which begins there.
  virtual std::vector<int64_t> shares(const Order& order, size_t begin) const = 0;

  /// The first step that was not noted, which was handed out, has ended, with so many rows. Times by rank (NaN: unknown), or none.
  virtual void note(size_t rows, const std::vector<double>& work_ms) = 0;

  virtual void save(GlobalSamplerState& saved) const = 0;
  /// Of a sharing about which nothing is known yet. Shares of other ranks, batches or lags are left.
  /// @throws c10::ValueError where the state is of another kind
  virtual void load(const GlobalSamplerState& saved) = 0;
};

/// Of each rank in a step of at most `rows` rows.
/// @throws c10::ValueError where the options have another number of them, or fewer than `min_rows`
std::vector<int64_t> most_rows(const GlobalSamplerOptions& options, int world_size, int64_t rows);

std::unique_ptr<Sharing> share_rows(size_t size, size_t batch_size, int world_size,
                                    const GlobalSamplerOptions& options);
std::unique_ptr<Sharing> share_costs(RowCosts costs, int world_size,
                                     const GlobalSamplerOptions& options);

}  // namespace brimful::launch
