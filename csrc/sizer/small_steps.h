#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "sizer/forecast_room.h"
#include "sizer/peak_model.h"

namespace brimful {

/// What whole steps with a few rows, the optimizer's part included, say of steps with more. One thread.
class BRIMFUL_API SmallSteps {
 public:
  using Step = std::function<void()>;
  /// A step with so many rows, ready to run.
  using StepWith = std::function<Step(int64_t rows)>;

  explicit SmallSteps(c10::Device device) : device_(device) {}

  /// Runs steps with two and three rows, and with more to check, each with fewer than `rows`; none where the device's
  /// allocator does not report what it is asked for. After an error of theirs nothing is known.
  void run(int64_t rows, const StepWith& step_with);
  /// One more, of all rows.
  void run_whole(int64_t rows, const Step& step);

  /// The device is as now, but `gone` has no memory there, and the batch, of `rows` rows, has as many as are asked for.
  void look(int64_t rows, const std::vector<at::Tensor>& batch,
            const std::vector<at::Tensor>& gone);
  /// In all, of a step with so many rows; nothing where steps follow no law, or before look().
  std::optional<int64_t> peak_bytes(int64_t rows) const;
  /// What peak_bytes() may be short by; 0 before look().
  int64_t margin_bytes(int64_t rows) const;
  /// As of a Plan; false where nothing is known.
  bool workspaces_unknown() const;
  /// Of a step that stays within limit_bytes().
  std::optional<int64_t> largest_rows() const;
  /// On CUDA without a limit what the device has for tensors.
  std::optional<int64_t> limit_bytes() const;

 private:
  void trace(int64_t rows, const Step& step);

  c10::Device device_;
  std::vector<TracedRows> traces_;
  std::optional<PeakModel> model_;
  std::optional<ForecastRoom> room_;
};

}  // namespace brimful
