#pragma once
#include <brimful/export.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

namespace brimful {

struct ParameterInfo {
  int64_t numel = 0;
  c10::ScalarType dtype = c10::ScalarType::Float;
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  bool sparse = false;  ///< its gradient is a sparse tensor
  bool packed = true;   ///< non-overlapping and dense, in any order of strides
  int64_t bytes() const { return numel * static_cast<int64_t>(c10::elementSize(dtype)); }
};

struct PlanOptions {
  int64_t first_bucket_bytes = int64_t{1} << 20;  ///< small, so that communication starts early
  int64_t bucket_bytes = int64_t{25} << 20;
  /// In place of those two: caps of the first, second, ... bucket of each dtype and device, the last one for all that
  /// follow, as in torch's bucket_cap_mb_list. A direct parameter takes an entry, a sparse one does not.
  std::vector<int64_t> bucket_bytes_list = {};
  /// From here on a gradient of the CPU is reduced where it lies. One of a device shares a bucket with others.
  int64_t direct_bytes = int64_t{4} << 20;
  bool own_record = false;  ///< the control record has a bucket of its own
  c10::ScalarType record_dtype = c10::ScalarType::Float;  ///< of that bucket
  std::vector<int64_t> order = {};  ///< in which gradients come; empty: the reverse of registration
};

/// Which parameters travel together, in launch order.
struct BucketPlan {
  struct Bucket {
    std::vector<int64_t> parameters;  ///< indices, in the order in which gradients are expected
    c10::ScalarType dtype = c10::ScalarType::Float;
    c10::Device device = c10::Device(c10::DeviceType::CPU);
    bool sparse = false;
    bool direct = false;  ///< one parameter, whose gradient is reduced where autograd left it
  };
  std::vector<Bucket> buckets;
};

/// Fills buckets in the order of gradients, one dtype and device each; a sparse or direct parameter is alone. A bucket
/// closes once it has reached its cap. The last bucket carries the control record: it is a flat buffer on the device of
/// the first dense parameter; where none qualifies, or with own_record, an empty one is appended. Pure.
/// @throws c10::ValueError if a cap is not positive, there is no parameter, or `order` does not name each once
BRIMFUL_API BucketPlan plan_buckets(const std::vector<ParameterInfo>& parameters,
                                    const PlanOptions& options = {});

/// A plan as lists of parameters, and back; the rest follows from the parameters. `options` as in plan_buckets (its
/// caps and order are not used).
/// @throws c10::ValueError if the text is not a plan of these parameters
BRIMFUL_API std::string to_json(const BucketPlan& plan);
BRIMFUL_API BucketPlan plan_from_json(const std::string& text,
                                      const std::vector<ParameterInfo>& parameters,
                                      const PlanOptions& options = {});

/// A line a bucket: number, parameters, dtype, device, bytes.
BRIMFUL_API std::string to_string(const BucketPlan& plan,
                                  const std::vector<ParameterInfo>& parameters);

}  // namespace brimful
