#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/step/control_record.h>
#include <brimful/step/participant.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace brimful {

/// The record, with those of these figures that lie on the CPU; as for TailHead::Contents.
ControlRecord with_figures_of_host(const Announcement& said, const at::Tensor& updated);

/// What rides behind the gradients besides buffers: a 0/1 element per parameter (used or not), the control records, how many rows
/// each rank has for each sparse gradient, and which buffers come. Or it goes between hosts, but for what a device knows: a loss
/// sum and, where it is late, the weight, of each rank.
class TailHead {
 public:
  /// What of it is in the bucket.
  enum class Place : uint8_t { all, losses, nothing };
  struct Form {
    int64_t parameters = 0;
    int64_t sparse = 0;  ///< gradients
    int rank = 0;
    int world_size = 1;
    Place place = Place::all;
  };
  /// What a rank writes. The loss sum that it says (on the region's device), where defined, stands in for that of its record: no
  /// wait for it. `updated` (0/1, on that device) does so for record.updated. `rows`: of this rank, by sparse gradient.
  struct Contents {
    const std::vector<uint8_t>& used;
    const Announcement& said;
    const at::Tensor& updated;
    const std::vector<int64_t>& rows;
    int buffer_source = 0;
    bool has_losses = false;  ///< on some rank
  };

  TailHead(const Form& form, size_t buffers);
  int64_t numel() const { return numel_; }
  int world_size() const { return form_.world_size; }
  /// `region`: the numel() first elements of the tail.
  void attach(at::Tensor region);
  /// Buffers that this rank gives to all, and a number of the sizes that it has.
  void note_buffers(std::vector<uint8_t> sent, uint64_t sizes);
  void write(const Contents& contents);
  /// From the step's sum; on CUDA waits for an event behind an asynchronous copy.
  void read();
  /// Those that read() has found.
  const std::vector<ControlRecord>& records() const { return records_; }
  // By rank, of the sum of a step that has losses: float64, on the region's device.
  at::Tensor losses() const { return figures(0); }
  /// 0 of a rank whose weight is not late.
  at::Tensor late_weights() const { return figures(1); }

  // Between hosts, once it is written. All ranks give the same number of bytes.
  uint64_t own_sizes() const { return own_sizes_; }
  /// There is more to say than that all is as usual: unused parameters, rows, buffers that do not come.
  bool has_more() const;
  std::vector<uint8_t> more() const;
  /// `sizes` and, unless there was none, `more` by rank, in the place of read().
  void take(const std::vector<uint64_t>& sizes, const std::vector<std::vector<uint8_t>>& more);

  // After read() or take().
  /// Some rank used the parameter in this step.
  bool is_used(int64_t parameter) const { return used_[parameter] != 0; }
  /// By rank, of a sparse gradient.
  std::vector<int64_t> rows(int64_t sparse) const;
  /// The rank whose buffers win has sent this one.
  bool is_sent(size_t buffer) const { return sent_[buffer] != 0; }
  /// The ranks' buffers have the same sizes.
  bool sizes_are_alike() const { return sizes_are_alike_; }

 private:
  void write_all(const Contents& contents);
  void write_figures(const Announcement& said);
  void write_figure(int64_t column, const at::Tensor& value);
  at::Tensor figures(int64_t column) const;
  void note_sizes(const std::vector<uint64_t>& sizes);
  /// Of a rank's record and, behind it, its numbers of rows, and a number of its buffers' sizes.
  int64_t record_offset(int rank) const {
    return form_.parameters + rank * (kRecordBytes + form_.sparse * kNumberBytes + sizes_bytes());
  }
  int64_t sizes_offset(int rank) const { return record_offset(rank + 1) - sizes_bytes(); }
  int64_t flags_offset() const { return numel_ - std::ssize(sent_); }
  int64_t sizes_bytes() const { return sent_.empty() ? 0 : kNumberBytes; }
  static constexpr int64_t kNumberBytes = sizeof(int64_t);
  static constexpr int64_t kFigures = 2;  ///< of a rank: loss and weight, by column

  Form form_;
  int64_t numel_ = 0;
  at::Tensor region_;
  at::Tensor outgoing_;  ///< on the host
  at::Tensor incoming_;  ///< on the host
  std::vector<uint8_t> own_used_;
  std::vector<int64_t> own_rows_;
  uint64_t own_sizes_ = 0;
  bool gives_buffers_ = false;  ///< this rank's win
  std::vector<uint8_t> used_;
  std::vector<std::vector<int64_t>> rows_;  ///< by rank
  std::vector<uint8_t> sent_;               ///< by buffer
  bool sizes_are_alike_ = true;
  std::vector<ControlRecord> records_;
};

}  // namespace brimful
