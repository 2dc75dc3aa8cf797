// The one owner of what a forward may have changed of modules.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/memory/stats.h>
#include <brimful/step/distinct_tensors.h>
#include <brimful/step/forward_state.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "step/behind_error.h"
#include "step/copy_each.h"
#include "step/tensor_form.h"

namespace brimful {
namespace {
/// Modules of torch::nn, of which a tensor cannot be taken away.
class ListedNames final : public TensorNames {
 public:
  explicit ListedNames(std::function<std::vector<at::Tensor>()> buffers)
      : buffers_(std::move(buffers)) {}
  std::shared_ptr<const Moment> now() override {
    auto moment = std::make_shared<Moment>();
    moment->buffers = distinct_tensors(buffers_());
    return moment;
  }
  bool put_back(const Moment& moment, const Instead& /*instead*/) override {
    const auto there = now();
    return std::equal(there->buffers.begin(), there->buffers.end(), moment.buffers.begin(),
                      moment.buffers.end(),
                      [](const auto& one, const auto& other) { return one.is_same(other); });
  }

 private:
  std::function<std::vector<at::Tensor>()> buffers_;
};

class JoinedNames final : public TensorNames {
 public:
  explicit JoinedNames(std::vector<std::shared_ptr<TensorNames>> each) : each_(std::move(each)) {
    std::erase(each_, nullptr);
  }
  std::shared_ptr<const Moment> now() override {
    auto all = std::make_shared<All>();
    for (const auto& names : each_) {
      const auto& moment = all->moments.emplace_back(names->now());
      all->buffers.insert(all->buffers.end(), moment->buffers.begin(), moment->buffers.end());
    }
    all->buffers = distinct_tensors(std::move(all->buffers));
    return all;
  }
  bool put_back(const Moment& moment, const Instead& instead) override {
    const auto& all = dynamic_cast<const All&>(moment);
    bool could = true;
    for (size_t i = 0; i < each_.size(); ++i) {
      could = each_[i]->put_back(*all.moments[i], instead) && could;
    }
    return could;
  }

 private:
  struct All final : Moment {
    std::vector<std::shared_ptr<const Moment>> moments;
  };
  std::vector<std::shared_ptr<TensorNames>> each_;
};

uint32_t changes_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
}

bool is_of_kind(const at::Tensor& tensor, const at::Tensor& other) {
  return tensor.scalar_type() == other.scalar_type() && tensor.device() == other.device() &&
         tensor.layout() == other.layout();
}

bool can_compare(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_quantized() && !tensor.is_meta();
}

/// Of any mode: a tensor that was made in inference mode can be written in that alone, and no other one should be made there.
void write(const at::Tensor& to, const at::Tensor& from) {
  const c10::InferenceMode mode(to.is_inference());
  const at::NoGradGuard no_grad;  // which the mode ends
  to.copy_(from);
}

void write_each(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from) {
  const bool plain =
      std::none_of(to.begin(), to.end(), [](const auto& tensor) { return tensor.is_inference(); });
  if (plain && !c10::InferenceMode::is_enabled()) {
    copy_each(to, from);
    return;
  }
  for (size_t i = 0; i < to.size(); ++i) {
    write(to[i], from[i]);
  }
}

at::Tensor made_like(const at::Tensor& tensor) {
  const c10::InferenceMode mode(false);
  return at::empty_like(tensor);
}

at::Tensor plain_copy(const at::Tensor& tensor, bool for_inference) {
  const c10::InferenceMode mode(for_inference);
  const at::NoGradGuard no_grad;
  return tensor.detach().clone();
}

at::Tensor plain_copy(const at::Tensor& tensor) {
  return plain_copy(tensor, tensor.is_inference());
}

/// Its values and form, in memory of its own.
void give_data(const at::Tensor& tensor, const at::Tensor& values) {
  tensor.set_data(plain_copy(values, tensor.is_inference()));
}
}  // namespace

TensorNames::~TensorNames() = default;
TensorNames::Moment::~Moment() = default;

std::shared_ptr<TensorNames> names_of(std::function<std::vector<at::Tensor>()> buffers) {
  return std::make_shared<ListedNames>(std::move(buffers));
}

std::shared_ptr<TensorNames> names_of(std::vector<std::shared_ptr<TensorNames>> each) {
  return std::make_shared<JoinedNames>(std::move(each));
}

struct ForwardState::Form : TensorForm {
  explicit Form(const at::Tensor& tensor) : TensorForm(TensorForm::of(tensor)) {}
};

ForwardState::ForwardState(std::vector<at::Tensor> others, std::shared_ptr<TensorNames> names)
    : names_(std::move(names)), others_(std::move(others)) {
  hold();
}

void ForwardState::hold() {
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  moment_ = names_ ? names_->now() : nullptr;
  auto tensors = others_;
  if (moment_) {
    tensors.insert(tensors.end(), moment_->buffers.begin(), moment_->buffers.end());
  }
  tensors = distinct_tensors(std::move(tensors));
  std::vector<at::Tensor> copies;
  std::vector<std::shared_ptr<const Form>> forms;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const bool known = i < tensors_.size() && tensors[i].is_same(tensors_[i]) &&
                       is_of_kind(tensors[i], copies_[i]) && forms_[i]->is_of(tensors[i]);
    copies.push_back(known ? copies_[i] : made_like(tensors[i]));
    forms.push_back(known ? forms_[i] : std::make_shared<Form>(tensors[i]));
  }
  tensors_ = std::move(tensors);
  copies_ = std::move(copies);
  forms_ = std::move(forms);
  versions_.resize(tensors_.size());
}

void ForwardState::capture() {
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  hold();
  write_each(copies_, tensors_);
  std::transform(tensors_.begin(), tensors_.end(), versions_.begin(), changes_of);
}

void ForwardState::put_forms_back() {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const auto& tensor = tensors_[i];
    const auto& form = *forms_[i];
    const bool is_kind = is_of_kind(tensor, copies_[i]);
    if (is_kind && form.is_of(tensor)) {
      continue;
    }
    const auto needed = is_kind && tensor.layout() == at::kStrided
                            ? std::optional(at::detail::computeStorageNbytes(
                                  form.sizes, form.strides, tensor.element_size(), form.offset))
                            : std::nullopt;
    if (needed && tensor.has_storage() && tensor.storage().nbytes() >= *needed &&
        tensor.unsafeGetTensorImpl()->allow_tensor_metadata_change()) {
      form.put(tensor);
    } else {
      give_data(tensor, copies_[i]);
    }
  }
}

// The tensor that a module of torch::nn had cannot be put back: the one that it has gets the value from before.
void ForwardState::put_names_back() {
  if (!names_ || names_->put_back(*moment_, {})) {
    return;
  }
  const auto& before = moment_->buffers;
  const auto there = names_->now()->buffers;
  for (size_t i = 0; i < std::min(there.size(), before.size()); ++i) {
    if (there[i].is_same(before[i])) {
      continue;
    }
    const auto place = std::find_if(tensors_.begin(), tensors_.end(),
                                    [&](const auto& tensor) { return tensor.is_same(before[i]); });
    give_data(there[i], copies_[place - tensors_.begin()]);
  }
  TORCH_CHECK_VALUE(
      there.size() <= before.size(),
      "a forward has registered a buffer in a step that is undone, and a module of torch::nn keeps "
      "it with the value that it has (buffers: ",
      there.size(), ", before: ", before.size(),
      "); register it before the first step, in the module's constructor");
}

void ForwardState::restore() {
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  put_forms_back();
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const auto& tensor = tensors_[i];
    if (changes_of(tensor) != versions_[i] ||
        (can_compare(tensor) && !at::equal(tensor, copies_[i]))) {
      write(tensor, copies_[i]);
      versions_[i] = changes_of(tensor);
    }
  }
  put_names_back();
}

void ForwardState::rewind() {
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  put_forms_back();
  write_each(tensors_, copies_);
  std::transform(tensors_.begin(), tensors_.end(), versions_.begin(), changes_of);
  put_names_back();
}

SecondRun::SecondRun(std::shared_ptr<TensorNames> names, const std::vector<at::Tensor>& changed)
    : names_(std::move(names)), before_(names_->now()) {
  for (const auto& tensor : changed) {
    copies_.emplace(tensor.unsafeGetTensorImpl(), plain_copy(tensor));
  }
  // The others, apart from their buffers: what is assigned to a buffer's data leaves them the memory of before.
  for (const auto& buffer : before_->buffers) {
    if (buffer.has_storage()) {
      copies_.emplace(buffer.unsafeGetTensorImpl(), buffer.detach());
    }
  }
}

bool SecondRun::begin() {
  auto now = names_->now();
  TensorNames::Instead fresh;
  for (const auto& buffer : before_->buffers) {
    const auto copy = copies_.find(buffer.unsafeGetTensorImpl());
    if (copy != copies_.end() && !(buffer.has_storage() && buffer.is_alias_of(copy->second))) {
      fresh.emplace(copy->first, plain_copy(copy->second));
    }
  }
  if (!names_->put_back(*before_, fresh)) {
    return false;
  }
  outside_.push_back(std::move(now));
  return true;
}

void SecondRun::end() noexcept {
  behind_error([&] {
    names_->put_back(*outside_.back(), {});
    outside_.pop_back();
  });
}

}  // namespace brimful
