#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/step/control_record.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace brimful {

/// What a device found of each step's updates, by watched parameter, on its way to the host: a control record has that of the
/// last four steps that stood, as far as it is there, with two bits for each of eight parameters. A step is compared in the
/// first record in which all ranks have theirs, and after four steps no more: a host that is so far ahead does not wait.
class LateFlags {
 public:
  static constexpr int64_t kLongest = 4;  ///< steps

  LateFlags(c10::Device device, size_t parameters);
  /// For the record of step `now`.
  std::array<uint8_t, 8> of_last_steps(int64_t now) const;
  /// What step `step` has found; undefined: it has compared nothing. Queues a copy.
  void note(int64_t step, const at::Tensor& updated);

  struct Differing {
    int64_t step = 0;
    std::vector<ControlRecord> records;  ///< with `updated` by parameter
  };
  /// The first step whose updates differ, by the records of step `now`, which stands. Alike on all ranks.
  std::optional<Differing> settle(const std::vector<ControlRecord>& records, int64_t now);
  /// What is on its way is of no interest.
  void forget();

 private:
  struct Found {
    at::Tensor flags;  ///< on the host
    c10::Event arrived;
    bool compared = false;
    bool settled = true;
  };
  const Found& at_step(int64_t step) const { return found_[step % std::ssize(found_)]; }
  Found& at_step(int64_t step) { return found_[step % std::ssize(found_)]; }
  uint8_t flag(int64_t step, size_t parameter) const;

  c10::Device device_;
  size_t parameters_;
  std::vector<Found> found_;
};

}  // namespace brimful
