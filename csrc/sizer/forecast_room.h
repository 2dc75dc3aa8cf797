#pragma once
#include <c10/core/Device.h>
#include "sizer/peak_model.h"

#include <cstdint>
#include <optional>

#include "memory/cuda_caching.h"

namespace brimful {

/// What a device, as it is now, has for work that a PeakModel tells. On the CPU bytes count, up to the limit; on CUDA the
/// work's requests go through a model of torch's allocator.
class ForecastRoom {
 public:
  /// `margin`: the share of a peak by which forecasts were found to be short.
  ForecastRoom(c10::Device device, double margin);
  /// Nothing can be told of it: a limit is missing, or the allocator is not torch's own.
  static bool is_known(c10::Device device);

  struct Need {
    int64_t peak_bytes = 0;  ///< over what is in use
    int64_t room_bytes =
        0;  ///< of bytes(): on CUDA what the allocator keeps, too; more than there is where it does not fit
    bool fits = false;
  };
  Need need(const PeakModel& model, int64_t rows) const;
  /// The most rows, up to `at_most`, that fit; 0 if not even one does.
  int64_t largest_rows(const PeakModel& model, int64_t at_most) const;
  /// Over what is in use.
  int64_t bytes() const { return room_bytes_; }
  int64_t used_bytes() const { return used_bytes_; }
  /// In all; nothing where there is no limit.
  std::optional<int64_t> capacity_bytes() const { return capacity_bytes_; }

 private:
  int64_t with_margin(int64_t bytes) const;

  double margin_;
  std::optional<int64_t> capacity_bytes_;
  int64_t used_bytes_;
  int64_t room_bytes_;
  std::optional<memory::CudaPool> pool_;
};

}  // namespace brimful
