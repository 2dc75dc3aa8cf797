#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/step/control_record.h>
#include <brimful/step/late_losses.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace brimful {

/// The record, with those of these figures that lie on the CPU; as for Tail::write().
ControlRecord with_figures_of_host(const ControlRecord& record, const at::Tensor& loss_sum,
                                   const at::Tensor& updated);

/// What rides behind the gradients of the last bucket: a head and the buffers that ranks must agree on. The head is a 0/1
/// element per parameter (used or not), the control records, and how many rows each rank has for each sparse gradient; or
/// it goes between hosts, but for the losses of a device. Every element is written by one rank and 0 on the others (or 0/1),
/// so a sum delivers it exactly in any dtype and order of reduction. Buffers of the bucket's dtype travel as values; behind them
/// come the others, as bytes. A single rank's stay where they are.
class Tail {
 public:
  /// What of the head is in the bucket.
  enum class Head : uint8_t { all, losses, nothing };
  /// What a rank writes. `loss_sum` (0-dim float64 on the region's device), where defined, stands in for record.loss_sum: no
  /// wait for it. `updated` (0/1, on that device) does so for record.updated. `rows`: of this rank, by sparse gradient.
  struct Contents {
    const std::vector<uint8_t>& used;
    const ControlRecord& record;
    const at::Tensor& loss_sum;
    const at::Tensor& updated;
    const std::vector<int64_t>& rows;
    int buffer_source = 0;
    bool has_losses = false;  ///< on some rank
  };

  Tail(int64_t parameters, int rank, int world_size, std::vector<at::Tensor> buffers,
       c10::ScalarType dtype, int64_t sparse, Head head = Head::all);
  int64_t numel() const { return numel_; }
  c10::ScalarType dtype() const { return dtype_; }
  /// `region`: the numel() last elements of the bucket.
  void attach(at::Tensor region);

  void write(const Contents& contents);
  /// The head, in the step's sum; on CUDA waits for an event behind an asynchronous copy.
  void read();
  /// Those that read() has found.
  const std::vector<ControlRecord>& records() const { return records_; }
  /// Of the sum of a step that has losses.
  std::shared_ptr<LateLosses> late_losses() const;

  // A head that goes between hosts, once the tail is written. All ranks give the same number of bytes.
  uint64_t own_sizes() const { return own_sizes_; }
  /// There is more to say than that all is as usual: unused parameters, rows, buffers that do not come.
  bool has_more() const;
  std::vector<uint8_t> more() const;
  /// `sizes` and, unless there was none, `more` by rank, in the place of read().
  void take(const std::vector<uint64_t>& sizes, const std::vector<std::vector<uint8_t>>& more);

  /// Some rank used the parameter in this step; valid after read() or take().
  bool is_used(int64_t parameter) const { return used_[parameter] != 0; }
  /// By rank, of a sparse gradient; valid after read() or take().
  std::vector<int64_t> rows(int64_t sparse) const;
  /// `now` takes the place of a buffer. True also where `before` is none of them; false if they are not alike.
  bool replace(const at::Tensor& before, const at::Tensor& now);
  /// Gives the buffers the values of the source rank, without a bump of their version: a graph may hold them. One that a
  /// forward has resized has no room here yet: it is left alone, and the log says so if that lasts.
  void write_back_buffers();
  /// All ranks had the same new sizes of buffers in the last step: numel() is another one after take_up_sizes().
  bool has_new_sizes() const { return has_new_sizes_; }
  /// On all ranks alike, before attach().
  void take_up_sizes();

 private:
  struct Rider {
    at::Tensor buffer;
    c10::ScalarType dtype;
    c10::Device device;
    int64_t offset = 0;
    int64_t numel = 0;  ///< elements of the region
    bool as_bytes = false;
    std::vector<int64_t> sizes;      ///< for which there is room
    std::vector<int64_t> new_sizes;  ///< when the region was written last
    bool was_logged = false;
    at::Tensor place = {};  ///< in the region, or where bytes are made elements of it

    bool fits(const at::Tensor& tensor) const;
  };
  int64_t head_elements(int world_size) const;
  /// Waits for the device.
  void fetch_head();
  void write_head(const Contents& contents);
  void write_loss(const Contents& contents);
  void note_heads(const std::vector<uint64_t>& sizes);
  std::vector<Rider*> riders_in_order();
  void place_riders();
  void attach_riders();
  void write_riders(bool is_source);
  bool shares_buffers() const { return !riders_.empty() && rows_.size() > 1; }
  /// Of what travels as bytes.
  at::Tensor region_of_bytes() const {
    return region_.narrow(0, numel_ - bytes_.numel(), bytes_.numel());
  }
  /// Than there is room for.
  bool has_other_sizes() const;
  void note_sizes(int buffer_source);
  void note_unlike(Rider& rider, size_t number) const;
  /// Of a rank's record and, behind it, its numbers of rows, and a number of its buffers' sizes.
  int64_t record_offset(int rank) const {
    return parameters_ + rank * (kRecordBytes + sparse_ * kNumberBytes + sizes_bytes());
  }
  int64_t sizes_offset(int rank) const { return record_offset(rank + 1) - sizes_bytes(); }
  int64_t flags_offset() const { return head_numel_ - std::ssize(riders_); }
  int64_t sizes_bytes() const { return riders_.empty() ? 0 : kNumberBytes; }
  static constexpr int64_t kNumberBytes = sizeof(int64_t);

  int64_t parameters_;
  int rank_;
  c10::ScalarType dtype_;
  int64_t sparse_;
  Head head_;
  int64_t head_numel_ = 0;
  int64_t numel_ = 0;
  std::vector<Rider> riders_;
  at::Tensor bytes_;           ///< of riders that travel as bytes, as they are in memory
  std::vector<uint8_t> sent_;  ///< riders that the source rank has sent
  uint64_t own_sizes_ = 0;     ///< number of the sizes when the region was written last
  bool has_new_sizes_ = false;
  bool is_source_ = false;
  int changes_left_ = 8;  ///< each lays out all buckets anew: not for what varies from step to step
  at::Tensor region_;
  at::Tensor outgoing_;  ///< on the host
  at::Tensor incoming_;  ///< on the host
  std::vector<uint8_t> used_;
  std::vector<uint8_t> own_used_;
  std::vector<int64_t> own_rows_;
  std::vector<ControlRecord> records_;
  std::vector<std::vector<int64_t>> rows_;  ///< by rank
};

}  // namespace brimful
