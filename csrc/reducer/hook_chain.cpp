#include "reducer/hook_chain.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace brimful {
namespace {
c10d::GradBucket grad_bucket_of(const BucketSet& layout, int64_t index) {
  const auto& buckets = layout.buckets;
  const auto& bucket = buckets[index];
  auto row = layout.row_of(bucket);
  if (layout.parameters[bucket.parameters[0]].is_complex()) {
    row = at::view_as_complex(row.view({-1, 2}));
  }
  std::vector<size_t> offsets;
  std::vector<size_t> lengths;
  std::vector<c10::IntArrayRef> sizes;
  std::vector<at::Tensor> members;
  for (const auto i : bucket.parameters) {
    const auto& parameter = layout.parameters[i];
    const auto& view = layout.slots[i].view;
    offsets.push_back(bucket.direct ? 0 : view.storage_offset() - row.storage_offset());
    lengths.push_back(parameter.numel());
    sizes.push_back(parameter.sizes());
    members.push_back(parameter);
  }
  const auto hooked =
      std::count_if(buckets.begin(), buckets.end() - 1, [](const auto& b) { return !b.sparse(); });
  const auto before = std::count_if(buckets.begin(), buckets.begin() + index,
                                    [](const auto& b) { return !b.sparse(); });
  return c10d::GradBucket(before, hooked, row, std::move(offsets), std::move(lengths),
                          std::move(sizes), std::move(members), std::nullopt);
}
}  // namespace

void HookChain::run(BucketSet& layout, int64_t index) {
  auto bucket = grad_bucket_of(layout, index);
  last_.reset();
  last_bucket_ = index;
  began_ = collectives();
  layout.buckets[index].hooked = hook_->runHook(bucket);
  last_ = layout.buckets[index].hooked;
}

void HookChain::note_failed_launch(std::exception_ptr error, int64_t step) {
  if (collectives() != began_) {
    link_.give_up(std::move(error), step);
  }
}

void HookChain::collect(BucketSet& layout) {
  for (auto& bucket : layout.buckets) {
    if (bucket.hooked && !link_.is_broken()) {
      link_.wait_for(*bucket.hooked);
    }
    if (bucket.hooked && !link_.is_broken() && bucket.hooked->hasError() && link_.is_given_up()) {
      link_.fail(bucket.hooked->exception_ptr());
    }
    if (bucket.hooked && !link_.is_broken()) {
      bucket.hooked->waitAndThrow();
      auto result = hook_->parseHookResult(bucket.hooked->value());
      const auto expected = layout.row_of(bucket).numel();
      if (result.is_complex()) {
        result = at::view_as_real(result.resolve_conj());
      }
      TORCH_CHECK_VALUE(result.numel() == expected,
                        "a communication hook returned a tensor of another size than its bucket's "
                        "buffer (returned: ",
                        result.numel(), " real elements, buffer: ", expected,
                        "); return the mean of bucket.buffer() over the ranks");
      bucket.hook_result = std::move(result);
    }
  }
}

std::exception_ptr HookChain::error_of(c10::ivalue::Future& result) const {
  if (result.hasError()) {
    return result.exception_ptr();
  }
  try {  // torch.futures.Future.set_exception() makes an exception the value
    hook_->parseHookResult(result.value());
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

uint64_t HookChain::collectives() const {
  try {
    return link_.group->getSequenceNumberForGroup();
  } catch (const std::exception&) {
    return 0;  // not every backend counts
  }
}

void HookChain::check(bool throws, int64_t step) {
  const auto hook = std::exchange(last_, nullptr);
  if (!hook || link_.is_broken()) {
    return;
  }
  const auto made = collectives() - began_;
  const auto usual = collectives_.find(last_bucket_);
  const auto error = error_of(*hook);
  if (!error) {
    collectives_.insert_or_assign(last_bucket_, made);
    return;
  }
  if (link_.is_given_up()) {
    link_.fail(error);
    return;
  }
  if (usual != collectives_.end() && usual->second != made) {
    link_.give_up(error, step);
  }
  if (throws) {
    std::rethrow_exception(error);
  }
}

void HookChain::wait() {
  if (!link_.is_broken() && !is_done()) {
    link_.wait_for(*last_);
  }
}

}  // namespace brimful
