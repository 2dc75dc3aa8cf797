#pragma once
#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "reducer/tail_head.h"

namespace brimful {

/// What rides behind the gradients of the last bucket: a head and the buffers that ranks must agree on. Every element is
/// written by one rank and 0 on the others (or 0/1), so a sum delivers it exactly in any dtype and order of reduction. Buffers of
/// the bucket's dtype travel as values; behind them come the others, as bytes. A single rank's stay where they are.
class Tail {
 public:
  Tail(const TailHead::Form& form, std::vector<at::Tensor> buffers, c10::ScalarType dtype);
  int64_t numel() const { return numel_; }
  c10::ScalarType dtype() const { return dtype_; }
  TailHead& head() { return head_; }
  const TailHead& head() const { return head_; }
  /// `region`: the numel() last elements of the bucket.
  void attach(at::Tensor region);
  void write(const TailHead::Contents& contents);

  /// `now` takes the place of a buffer. True also where `before` is none of them; false if they are not alike.
  bool replace(const at::Tensor& before, const at::Tensor& now);
  /// Gives the buffers the values of the source rank, without a bump of their version: a graph may hold them. One that a
  /// forward has resized has no room here yet: it is left alone, and the log says so if that lasts.
  void write_back_buffers();
  /// All ranks had the same new sizes of buffers in the last step: numel() is another one after take_up_sizes().
  bool has_new_sizes() const;
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
  std::vector<Rider*> riders_in_order();
  void place_riders();
  void attach_riders();
  void write_riders(bool is_source);
  bool shares_buffers() const { return !riders_.empty() && head_.world_size() > 1; }
  /// Of what travels as bytes.
  at::Tensor region_of_bytes() const {
    return region_.narrow(0, numel_ - bytes_.numel(), bytes_.numel());
  }
  /// Than there is room for.
  bool has_other_sizes() const;
  void note_sizes(bool is_source);
  void note_unlike(Rider& rider, size_t number) const;

  TailHead head_;
  int rank_;
  c10::ScalarType dtype_;
  int64_t numel_ = 0;
  std::vector<Rider> riders_;
  at::Tensor bytes_;      ///< of riders that travel as bytes, as they are in memory
  int changes_left_ = 8;  ///< each lays out all buckets anew: not for what varies from step to step
  at::Tensor region_;
};

}  // namespace brimful
