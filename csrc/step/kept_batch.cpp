#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <brimful/memory/stats.h>
#include <brimful/step/kept_batch.h>
#include <brimful/step/oom.h>

#include <algorithm>

namespace brimful {
namespace {
uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
}

bool can_be_copied(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.is_inference() &&
         at::has_internal_overlap(tensor) != at::MemOverlap::Yes;
}

/// Whose history an in-place operation on a view would extend.
at::Tensor base_of(const at::Tensor& tensor) {
  return tensor.is_view() ? at::Tensor(tensor._base()) : tensor;
}

/// Undefined where a device has no room for it: the work is run all the same, and cannot be repeated if it changes it.
at::Tensor copy_of(const at::Tensor& tensor) {
  try {
    return tensor.detach().clone();
  } catch (...) {
    if (!is_out_of_memory(std::current_exception())) {
      throw;
    }
    return {};
  }
}

/// Where a number is NaN in both they are the same too.
bool same_values(const at::Tensor& a, const at::Tensor& b) {
  return at::equal(a, b) || at::all(a.eq(b).logical_or(a.ne(a).logical_and(b.ne(b)))).item<bool>();
}

bool in_graph(const at::Tensor& tensor) {
  return base_of(tensor).requires_grad();
}
}  // namespace

bool KeptBatch::is_known(size_t position) const {
  if (copies_ == Copies::all) {
    return true;
  }
  if (changing_.size() == entries_.size()) {
    return changing_[position];
  }
  // A batch of another form: which of its tensors will change is not known.
  return std::find(changing_.begin(), changing_.end(), true) != changing_.end();
}

void KeptBatch::copy_known() {
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < entries_.size(); ++i) {
    auto& entry = entries_[i];
    const auto& tensor = entry.named.second;
    if (is_known(i) && !entry.copy.defined() && can_be_copied(tensor)) {
      entry.copy = copy_of(tensor);
    }
  }
}

void KeptBatch::begin(std::vector<NamedTensor> tensors, Copies copies) {
  entries_.clear();
  copies_ = copies;
  for (auto& named : tensors) {
    if (named.second.defined()) {
      Entry entry;
      entry.version = version_of(named.second);
      entry.has_graph = in_graph(named.second);
      entry.named = std::move(named);
      entries_.push_back(std::move(entry));
    }
  }
  copy_known();
}

std::vector<at::Tensor> KeptBatch::copies() const {
  std::vector<at::Tensor> copies;
  for (const auto& entry : entries_) {
    if (entry.copy.defined()) {
      copies.push_back(entry.copy);
    }
  }
  return copies;
}

void KeptBatch::look() {
  for (auto& entry : entries_) {
    entry.changed = entry.changed || version_of(entry.named.second) != entry.version;
  }
}

void KeptBatch::look_closely() {
  look();
  for (auto& entry : entries_) {
    if (copies_ == Copies::all && entry.copy.defined()) {
      entry.changed = entry.changed || !same_values(entry.named.second, entry.copy);
    }
  }
}

void KeptBatch::restore() {
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  look_closely();
  for (auto& entry : entries_) {
    const auto& [name, tensor] = entry.named;
    TORCH_CHECK_VALUE(!entry.changed || entry.copy.defined(),
                      "a tensor of the batch was changed in place, and there is no copy to repeat "
                      "the work with (tensor: ",
                      name, ", shape: ", tensor.sizes(),
                      "); change a copy instead: x = x / 255, not x.div_(255)");
    if (!entry.copy.defined() || (copies_ == Copies::all && !entry.changed)) {
      continue;
    }
    if (!entry.has_graph && in_graph(tensor)) {
      base_of(tensor).detach_();  // the graph of the work that is undone
    }
    tensor.copy_(entry.copy);
    entry.version = version_of(tensor);
  }
}

void KeptBatch::end() {
  look();
  if (std::any_of(entries_.begin(), entries_.end(), [](const auto& e) { return e.changed; })) {
    std::vector<bool> seen(entries_.size());
    const bool same = changing_.size() == seen.size();
    for (size_t i = 0; i < seen.size(); ++i) {
      seen[i] = entries_[i].changed || (same && changing_[i]);
    }
    changing_ = std::move(seen);
  }
  entries_.clear();
}

void KeptBatch::learn(const KeptBatch& other) {
  std::vector<bool> seen;
  seen.reserve(other.entries_.size());
  for (const auto& entry : other.entries_) {
    seen.push_back(entry.changed);
  }
  for (auto& entry : entries_) {  // what `other` put back
    entry.version = version_of(entry.named.second);
  }
  if (std::find(seen.begin(), seen.end(), true) != seen.end()) {
    changing_ = std::move(seen);
    copy_known();
  }
}

}  // namespace brimful
