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
};

struct PlanOptions {
  int64_t first_bucket_bytes = int64_t{1} << 20;  ///< small, so that communication starts early
  int64_t bucket_bytes = int64_t{25} << 20;
};

/// Which parameters travel together, in launch order.
struct BucketPlan {
  struct Bucket {
    std::vector<int64_t> parameters;  ///< indices, in the order in which gradients are expected
    c10::ScalarType dtype = c10::ScalarType::Float;
    c10::Device device = c10::Device(c10::DeviceType::CPU);
    bool sparse = false;
  };
  std::vector<Bucket> buckets;
};

/// Fills buckets in the reverse of registration order, one dtype and device each; a sparse parameter is alone. A bucket
/// closes once it has reached its cap. The last bucket is dense and on the device of the first dense parameter, because
/// it carries the control record; where no bucket qualifies, an empty float32 one is appended. Pure.
/// @throws c10::ValueError if a cap is not positive or there is no parameter
BRIMFUL_API BucketPlan plan_buckets(const std::vector<ParameterInfo>& parameters,
                                    const PlanOptions& options = {});

/// A line a bucket: number, parameters, dtype, device, bytes.
BRIMFUL_API std::string to_string(const BucketPlan& plan,
                                  const std::vector<ParameterInfo>& parameters);

}  // namespace brimful
