#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "memory/cuda_caching.h"
#include "sizer/peak_model.h"

namespace brimful {

/// What a device, as it is now, has for work that a PeakModel knows. On the CPU bytes count, up to the limit; on CUDA the
/// work's requests go through a model of torch's allocator.
class ForecastRoom {
 public:
  /// What work may have beside what was traced.
  enum class Beside : uint8_t { nothing, small_blocks };

  /// `margin`: the share of a peak by which forecasts were found to be short.
  ForecastRoom(c10::Device device, double margin, Beside beside = Beside::small_blocks);
  /// Nothing is known of it: a limit is missing, or the allocator is not torch's own.
  static bool is_known(c10::Device device);

  /// As if the storages of these were gone.
  void leave_out(const std::vector<at::Tensor>& tensors);
  /// As if this batch, of `rows` rows, had the rows that are asked for.
  void exchange(const std::vector<at::Tensor>& batch, int64_t rows);
  /// As if the allocator had given its cache back.
  void release_cached();

  struct Need {
    int64_t peak_bytes = 0;  ///< over what is in use
    /// Of bytes(): on CUDA what the allocator keeps, too; more than there is where it does not fit.
    int64_t room_bytes = 0;
    bool fits = false;
    std::optional<int64_t> reserved_bytes = {};  ///< on CUDA: by the allocator, in all
  };
  /// Also of what does not fit.
  Need need(const PeakModel& model, int64_t rows) const;
  bool fits(const PeakModel& model, int64_t rows) const;
  /// The most rows, up to `at_most`, that fit; 0 if not even one does. On CUDA more may fit where fewer do not.
  int64_t largest_rows(const PeakModel& model, int64_t at_most) const;
  /// What a forecast may be short by, which is kept free.
  int64_t margin_bytes(const PeakModel& model, int64_t rows) const;
  /// Of work that is not traced with what it will take: cuDNN tries algorithms at each new shape.
  bool workspaces_unknown() const;
  /// Over what is in use.
  int64_t bytes() const { return room_bytes_; }
  int64_t used_bytes() const { return used_bytes_; }
  /// In all; nothing where there is no limit.
  std::optional<int64_t> capacity_bytes() const { return capacity_bytes_; }

 private:
  struct Exchanged {
    double bytes_per_row;
    int64_t standing_bytes;  ///< that stay
  };
  int64_t bytes_on_cpu(const PeakModel& model, int64_t rows) const;
  /// Those of the batch too.
  std::vector<memory::CachingRequest> requests(const PeakModel& model, int64_t rows,
                                               Beside beside) const;
  void give_room(int64_t bytes);

  c10::Device device_;
  double margin_;
  Beside beside_;
  std::optional<int64_t> capacity_bytes_;
  int64_t used_bytes_;
  int64_t room_bytes_;
  std::optional<memory::CudaPool> pool_;
  std::vector<Exchanged> batch_;
};

}  // namespace brimful
