#include <brimful/reducer/bucket_plan.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <utility>

#include "base/format.h"
#include "base/json.h"
#include "base/text_stream.h"

namespace brimful {
namespace {
using Infos = std::vector<ParameterInfo>;

struct OpenBucket {
  BucketPlan::Bucket bucket;
  int64_t bytes = 0;
  size_t last = 0;  ///< position in the order of its last parameter
};

bool same_kind(const BucketPlan::Bucket& bucket, const ParameterInfo& info) {
  return bucket.dtype == info.dtype && bucket.device == info.device;
}

/// On a device a copy costs less than the call of a collective.
bool is_direct(const ParameterInfo& info, const PlanOptions& options) {
  return !info.sparse && info.packed && info.device.is_cpu() &&
         info.bytes() >= options.direct_bytes;
}

BucketPlan::Bucket bucket_for(const ParameterInfo& info, const PlanOptions& options) {
  return {{}, info.dtype, info.device, info.sparse, is_direct(info, options)};
}

/// Kind of the flat buffer behind which the record rides, whatever the order; nothing if there is no such buffer.
std::optional<ParameterInfo> record_carrier(const Infos& parameters, const PlanOptions& options) {
  if (options.own_record) {
    return std::nullopt;
  }
  const auto dense = std::find_if(parameters.begin(), parameters.end(),
                                  [](const auto& info) { return !info.sparse; });
  const auto flat = std::find_if(dense, parameters.end(), [&](const auto& info) {
    return !info.sparse && info.device == dense->device && !is_direct(info, options);
  });
  return flat == parameters.end() ? std::nullopt : std::optional(*flat);
}

BucketPlan::Bucket empty_record_bucket(const Infos& parameters, const PlanOptions& options) {
  const auto dense = std::find_if(parameters.begin(), parameters.end(),
                                  [](const auto& info) { return !info.sparse; });
  const auto& main = dense == parameters.end() ? parameters.front() : *dense;
  return {{}, options.record_dtype, main.device, false, false};
}

void put_record_bucket_last(BucketPlan& plan, const Infos& parameters, const PlanOptions& options) {
  const auto carrier = record_carrier(parameters, options);
  if (!carrier) {
    plan.buckets.push_back(empty_record_bucket(parameters, options));
    return;
  }
  const auto found =
      std::find_if(plan.buckets.rbegin(), plan.buckets.rend(), [&](const auto& bucket) {
        return !bucket.sparse && !bucket.direct && same_kind(bucket, *carrier);
      });
  std::rotate(found.base() - 1, found.base(), plan.buckets.end());
}

std::vector<int64_t> order_of(const Infos& parameters, const PlanOptions& options) {
  std::vector<int64_t> order(parameters.size());
  std::iota(order.rbegin(), order.rend(), 0);
  if (options.order.empty()) {
    return order;
  }
  auto sorted = options.order;
  std::sort(sorted.rbegin(), sorted.rend());
  TORCH_CHECK_VALUE(sorted == order,
                    "the order must name each parameter once (order: ", options.order.size(),
                    " entries, parameters: ", parameters.size(), ")");
  return options.order;
}

/// The cap of the bucket that fills.
class Caps {
 public:
  explicit Caps(const PlanOptions& options) : options_(options) {}

  int64_t of(const ParameterInfo& info) {
    const auto& list = options_.bucket_bytes_list;
    if (list.empty()) {
      return any_closed_ ? options_.bucket_bytes : options_.first_bucket_bytes;
    }
    return list[std::min(closed_[kind_of(info)], list.size() - 1)];
  }
  void closed(const ParameterInfo& info) {
    any_closed_ = true;
    closed_[kind_of(info)] += info.sparse ? 0 : 1;
  }

 private:
  using Kind = std::pair<c10::ScalarType, std::string>;
  static Kind kind_of(const ParameterInfo& info) { return {info.dtype, info.device.str()}; }

  const PlanOptions& options_;
  bool any_closed_ = false;
  std::map<Kind, size_t> closed_;
};

void require_options(const Infos& parameters, const PlanOptions& options) {
  TORCH_CHECK_VALUE(!parameters.empty(),
                    "no parameter needs a gradient (parameters: 0); nothing would ever be reduced");
  TORCH_CHECK_VALUE(options.first_bucket_bytes > 0 && options.bucket_bytes > 0,
                    "bucket caps must be positive (first_bucket_bytes: ",
                    options.first_bucket_bytes, ", bucket_bytes: ", options.bucket_bytes, ")");
  for (const auto cap : options.bucket_bytes_list) {
    TORCH_CHECK_VALUE(cap > 0, "bucket caps must be positive (bucket_bytes_list: ",
                      c10::IntArrayRef(options.bucket_bytes_list), ")");
  }
}
}  // namespace

BucketPlan plan_buckets(const Infos& parameters, const PlanOptions& options) {
  require_options(parameters, options);
  BucketPlan plan;
  std::vector<OpenBucket> open;
  Caps caps(options);
  const auto order = order_of(parameters, options);
  for (size_t position = 0; position < order.size(); ++position) {
    const auto i = order[position];
    const auto& info = parameters[i];
    auto fresh = bucket_for(info, options);
    if (fresh.sparse || fresh.direct) {
      fresh.parameters = {i};
      plan.buckets.push_back(std::move(fresh));
      caps.closed(info);
      continue;
    }
    auto target = std::find_if(open.begin(), open.end(),
                               [&](const auto& o) { return same_kind(o.bucket, info); });
    if (target == open.end()) {
      target = open.insert(open.end(), OpenBucket{std::move(fresh), 0, 0});
    }
    target->bucket.parameters.push_back(i);
    target->bytes += info.bytes();
    target->last = position;
    if (target->bytes >= caps.of(info)) {
      plan.buckets.push_back(std::move(target->bucket));
      open.erase(target);
      caps.closed(info);
    }
  }
  // What is still open ends with its last parameter: the one that arrives first leaves first.
  std::sort(open.begin(), open.end(), [](const auto& a, const auto& b) { return a.last < b.last; });
  for (auto& rest : open) {
    plan.buckets.push_back(std::move(rest.bucket));
  }
  put_record_bucket_last(plan, parameters, options);
  return plan;
}

std::string to_json(const BucketPlan& plan) {
  std::vector<std::vector<int64_t>> lists;
  lists.reserve(plan.buckets.size());
  for (const auto& bucket : plan.buckets) {
    lists.push_back(bucket.parameters);
  }
  return lists_to_json(lists);
}

BucketPlan plan_from_json(const std::string& text, const Infos& parameters,
                          const PlanOptions& options) {
  require_options(parameters, options);
  const auto require = [](bool holds, const std::string& what) {
    TORCH_CHECK_VALUE(holds, "not a plan for this model (", what,
                      "); give one that the same model printed, or plan=\"auto\"");
  };
  const auto lists = lists_from_json(text);
  require(!lists.empty(), "buckets: 0");
  BucketPlan plan;
  std::vector<int> seen(parameters.size(), 0);
  for (const auto& list : lists) {
    if (list.empty()) {
      require(&list == &lists.back(), "a bucket before the last has no parameter");
      plan.buckets.push_back(empty_record_bucket(parameters, options));
      continue;
    }
    for (const auto i : list) {
      const bool known = i >= 0 && i < static_cast<int64_t>(parameters.size());
      require(known, "parameter: " + std::to_string(i));
      require(++seen[i] == 1, "parameter " + std::to_string(i) + " is named twice");
    }
    auto bucket = bucket_for(parameters[list.front()], options);
    for (const auto i : list) {
      const auto other = bucket_for(parameters[i], options);
      require(same_kind(bucket, parameters[i]) && other.sparse == bucket.sparse &&
                  other.direct == bucket.direct &&
                  (list.size() == 1 || !(bucket.sparse || bucket.direct)),
              "parameter " + std::to_string(i) + " does not fit into its bucket");
    }
    bucket.parameters = list;
    plan.buckets.push_back(std::move(bucket));
  }
  require(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }),
          "it does not name every parameter");
  const auto carrier = record_carrier(parameters, options);
  const auto& last = plan.buckets.back();
  require(
      carrier ? same_kind(last, *carrier) && !last.sparse && !last.direct : last.parameters.empty(),
      "its last bucket cannot carry the control record");
  return plan;
}

std::string to_string(const BucketPlan& plan, const Infos& parameters) {
  TextStream out;
  for (size_t i = 0; i < plan.buckets.size(); ++i) {
    const auto& bucket = plan.buckets[i];
    int64_t bytes = 0;
    for (const auto parameter : bucket.parameters) {
      bytes += parameters[parameter].bytes();
    }
    out << "bucket " << i << ": " << bucket.parameters.size() << " parameters, "
        << (bucket.sparse   ? "sparse "
            : bucket.direct ? "direct "
                            : "")
        << c10::toString(bucket.dtype) << ", " << bucket.device << ", " << format_bytes(bytes)
        << "\n";
  }
  return out.str();
}

}  // namespace brimful
