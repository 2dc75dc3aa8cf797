#include <brimful/reducer/bucket_plan.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>

#include "base/format.h"

namespace brimful {
namespace {
struct OpenBucket {
  BucketPlan::Bucket bucket;
  int64_t bytes = 0;
};

bool same_kind(const BucketPlan::Bucket& bucket, const ParameterInfo& info) {
  return bucket.dtype == info.dtype && bucket.device == info.device;
}

int64_t bytes_of(const ParameterInfo& info) {
  return info.numel * static_cast<int64_t>(c10::elementSize(info.dtype));
}

c10::Device main_device(const std::vector<ParameterInfo>& parameters) {
  const auto dense = std::find_if(parameters.begin(), parameters.end(),
                                  [](const auto& info) { return !info.sparse; });
  return dense == parameters.end() ? parameters.front().device : dense->device;
}

void put_record_bucket_last(BucketPlan& plan, c10::Device device) {
  const auto qualifies = [&](const auto& bucket) {
    return !bucket.sparse && bucket.device == device;
  };
  const auto found = std::find_if(plan.buckets.rbegin(), plan.buckets.rend(), qualifies);
  if (found == plan.buckets.rend()) {
    plan.buckets.push_back({{}, c10::ScalarType::Float, device, false});
  } else {
    std::rotate(found.base() - 1, found.base(), plan.buckets.end());
  }
}
}  // namespace

BucketPlan plan_buckets(const std::vector<ParameterInfo>& parameters, const PlanOptions& options) {
  TORCH_CHECK_VALUE(!parameters.empty(),
                    "no parameter needs a gradient (parameters: 0); nothing would ever be reduced");
  TORCH_CHECK_VALUE(options.first_bucket_bytes > 0 && options.bucket_bytes > 0,
                    "bucket caps must be positive (first_bucket_bytes: ",
                    options.first_bucket_bytes, ", bucket_bytes: ", options.bucket_bytes, ")");
  BucketPlan plan;
  std::vector<OpenBucket> open;
  const auto cap = [&] {
    return plan.buckets.empty() ? options.first_bucket_bytes : options.bucket_bytes;
  };
  for (auto i = static_cast<int64_t>(parameters.size()) - 1; i >= 0; --i) {
    const auto& info = parameters[i];
    if (info.sparse) {
      plan.buckets.push_back({{i}, info.dtype, info.device, true});
      continue;
    }
    auto target = std::find_if(open.begin(), open.end(),
                               [&](const auto& o) { return same_kind(o.bucket, info); });
    if (target == open.end()) {
      target = open.insert(open.end(), OpenBucket{{{}, info.dtype, info.device, false}, 0});
    }
    target->bucket.parameters.push_back(i);
    target->bytes += bytes_of(info);
    if (target->bytes >= cap()) {
      plan.buckets.push_back(std::move(target->bucket));
      open.erase(target);
    }
  }
  // What is still open ends with its last parameter: the one that arrives first leaves first.
  std::sort(open.begin(), open.end(), [](const auto& a, const auto& b) {
    return a.bucket.parameters.back() > b.bucket.parameters.back();
  });
  for (auto& rest : open) {
    plan.buckets.push_back(std::move(rest.bucket));
  }
  put_record_bucket_last(plan, main_device(parameters));
  return plan;
}

std::string to_string(const BucketPlan& plan, const std::vector<ParameterInfo>& parameters) {
  std::ostringstream out;
  for (size_t i = 0; i < plan.buckets.size(); ++i) {
    const auto& bucket = plan.buckets[i];
    int64_t bytes = 0;
    for (const auto parameter : bucket.parameters) {
      bytes += bytes_of(parameters[parameter]);
    }
    out << "bucket " << i << ": " << bucket.parameters.size() << " parameters, "
        << (bucket.sparse ? "sparse " : "") << c10::toString(bucket.dtype) << ", " << bucket.device
        << ", " << format_bytes(bytes) << "\n";
  }
  return out.str();
}

}  // namespace brimful
