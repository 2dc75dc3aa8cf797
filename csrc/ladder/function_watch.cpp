#include "ladder/function_watch.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <brimful/memory/stats.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string_view>
#include <utility>

namespace brimful::ladder {
namespace {
/// Of this thread, whatever state it has from another one.
thread_local FunctionWatch* innermost_watch = nullptr;

/// Which arguments of an operator it changes.
struct OperatorWrites {
  std::vector<bool> arguments;
  bool statistics =
      false;  ///< in training those of kRunning besides, which its schema does not say
};
enum NormArgument : size_t { kRunningMean = 3, kRunningVariance = 4, kInTraining = 5 };

OperatorWrites find_writes(const at::RecordFunction& call) {
  static constexpr std::array<std::string_view, 5> kNorms = {
      "aten::batch_norm", "aten::_batch_norm_impl_index", "aten::native_batch_norm",
      "aten::cudnn_batch_norm", "aten::instance_norm"};
  OperatorWrites writes;
  writes.statistics = std::find(kNorms.begin(), kNorms.end(), call.name()) != kNorms.end();
  const auto name = call.operator_name();
  const auto op = name ? c10::Dispatcher::singleton().findSchema(*name) : std::nullopt;
  if (op && op->schema().is_mutable()) {
    for (const auto& argument : op->schema().arguments()) {
      const auto* alias = argument.alias_info();
      writes.arguments.push_back(alias != nullptr && alias->isWrite());
    }
  }
  return writes;
}

const OperatorWrites& writes_of(const at::RecordFunction& call) {
  // By the place of its name, which lives as long as the operator.
  thread_local std::unordered_map<const char*, OperatorWrites> known;
  const auto found = known.find(call.name());
  return found != known.end() ? found->second
                              : known.emplace(call.name(), find_writes(call)).first->second;
}

template <typename Visit>
void each_tensor_of(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) {
      visit(value.toTensor());
    }
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    for (const auto& element : value.toListRef()) {
      each_tensor_of(element, visit);
    }
  }
}

const c10::Storage* storage_of(const at::Tensor& tensor) {
  if (!tensor.has_storage()) {
    return nullptr;
  }
  const auto& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  return storage ? &storage : nullptr;
}

template <typename Visit>
void each_watch(const Visit& visit) {
  for (auto* watch = innermost_watch; watch != nullptr; watch = watch->outer()) {
    visit(*watch);
  }
}

/// With the current device's number where none is said.
c10::Device device_of(const c10::IValue& value) {
  const auto device = value.toDevice();
  return device.is_cuda() && !device.has_index()
             ? c10::impl::VirtualGuardImpl(device.type()).getDevice()
             : device;
}

/// An operator that is running.
struct Running : at::ObserverContext {
  Running() { ++depth; }
  ~Running() override { --depth; }

  static thread_local int depth;
  std::vector<const c10::StorageImpl*> inputs;
};
thread_local int Running::depth = 0;

std::unique_ptr<at::ObserverContext> on_operator_start(const at::RecordFunction& call) {
  if (innermost_watch == nullptr) {
    return nullptr;
  }
  const at::DisableRecordFunctionGuard unseen;
  const auto& writes = writes_of(call);
  const bool within = Running::depth > 0;
  auto context = std::make_unique<Running>();
  const auto inputs = call.inputs();
  const bool trains = writes.statistics && inputs.size() > kInTraining &&
                      inputs[kInTraining].isBool() && inputs[kInTraining].toBool();
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool statistics = trains && (i == kRunningMean || i == kRunningVariance);
    const bool changed = statistics || (i < writes.arguments.size() && writes.arguments[i]);
    each_tensor_of(inputs[i], [&](const at::Tensor& tensor) {
      if (const auto* storage = storage_of(tensor)) {
        context->inputs.push_back(storage->unsafeGetStorageImpl());
        each_watch([&](FunctionWatch& watch) {
          watch.use(tensor.device());
          watch.before(tensor, changed, within);
        });
      }
    });
    if (inputs[i].isDevice()) {
      each_watch([&](FunctionWatch& watch) { watch.use(device_of(inputs[i])); });
    }
  }
  return context;
}

void on_operator_end(const at::RecordFunction& call, at::ObserverContext* context) {
  if (innermost_watch == nullptr || context == nullptr) {
    return;
  }
  const at::DisableRecordFunctionGuard unseen;
  const auto& inputs = static_cast<Running*>(context)->inputs;
  for (const auto& output : call.outputs()) {
    each_tensor_of(output, [&](const at::Tensor& tensor) {
      each_watch(
          [&](FunctionWatch& watch) { watch.after(tensor, inputs, &watch == innermost_watch); });
    });
  }
}

/// All bytes of a storage, without its tensors' versions.
at::Tensor whole_memory(const c10::Storage& storage) {
  const at::DisableRecordFunctionGuard unseen;
  const auto options = at::TensorOptions(storage.device()).dtype(at::kByte);
  return at::empty({0}, options).set_(storage, 0, {static_cast<int64_t>(storage.nbytes())}, {1});
}

/// As many of a storage's first bytes, which grows where it has fewer.
at::Tensor first_memory(const c10::Storage& storage, int64_t bytes) {
  const at::DisableRecordFunctionGuard unseen;
  const auto memory = whole_memory(storage);
  return bytes > memory.numel() ? memory.resize_({bytes}) : memory.narrow(0, 0, bytes);
}

at::Tensor locked(const WeakTensor& tensor) {
  auto strong = tensor.lock();
  return strong.defined() ? at::Tensor(std::move(strong)) : at::Tensor();
}

template <typename Map>
void forget_gone(Map& map) {
  std::erase_if(map, [](const auto& entry) {
    if constexpr (requires { entry.second.use_count(); }) {
      return entry.second.use_count() == 0;
    } else if constexpr (requires { entry.second.tensor; }) {
      return entry.second.tensor.use_count() == 0;
    } else {
      return entry.second.storage.use_count() == 0;
    }
  });
}
}  // namespace

at::Tensor ReadTensor::get() const {
  return locked(tensor);
}

at::Tensor ChangedTensor::get() const {
  return locked(tensor);
}

FunctionWatch::FunctionWatch(Skeletons* skeletons, bool generators)
    : outer_(innermost_watch), skeletons_(skeletons), keeps_generators_(generators) {
  use(c10::Device(c10::DeviceType::CPU));
  innermost_watch = this;
  if (outer_ == nullptr) {
    handle_ =
        at::addThreadLocalCallback(at::RecordFunctionCallback(&on_operator_start, &on_operator_end)
                                       .needsInputs(true)
                                       .needsOutputs(true)
                                       .scopes({at::RecordScope::FUNCTION}));
  }
}

FunctionWatch::~FunctionWatch() {
  innermost_watch = outer_;
  if (handle_) {
    at::removeCallback(*handle_);
  }
}

bool FunctionWatch::is_born(const at::Tensor& tensor) const {
  const auto* storage = storage_of(tensor);
  return storage != nullptr && born_.count(storage->unsafeGetStorageImpl()) != 0;
}

void FunctionWatch::use(c10::Device device) {
  const bool has_generator = device.is_cpu() || device.is_cuda();
  if (keeps_generators_ && has_generator && error_ == nullptr &&
      std::none_of(generators_.begin(), generators_.end(),
                   [&](const auto& known) { return known.first == device; })) {
    try {
      generators_.emplace_back(device, generator_state(device));
    } catch (...) {
      error_ = std::current_exception();
    }
  }
}

GeneratorStates FunctionWatch::drawn_from() const {
  return changed_since(generators_);
}

void FunctionWatch::before(const at::Tensor& input, bool is_changed, bool within) {
  const auto* storage = storage_of(input);
  const auto* impl = storage->unsafeGetStorageImpl();
  if (born_.count(impl) != 0) {
    return;
  }
  if (outside_.count(impl) == 0) {
    // What comes from outside is an input of an operator that the function itself calls. What is seen first by one that
    // such an operator calls is that operator's own, which it allocated without another.
    auto& place = within ? born_ : outside_;
    place.emplace(impl, storage->getWeakStorageImpl());
    if (within) {
      return;
    }
  }
  if (!input.is_inference()) {
    reads_.try_emplace(
        input.unsafeGetTensorImpl(),
        ReadTensor{WeakTensor(input.getIntrusivePtr()), static_cast<uint32_t>(input._version())});
  }
  if (is_changed) {
    note_change(input);
  }
}

void FunctionWatch::note_change(const at::Tensor& tensor) {
  changed_in_graph_ |= at::GradMode::is_enabled() && tensor.requires_grad();
  const auto& storage = *storage_of(tensor);
  if (changed_.count(tensor.unsafeGetTensorImpl()) == 0) {
    changed_.emplace(tensor.unsafeGetTensorImpl(),
                     ChangedTensor{WeakTensor(tensor.getIntrusivePtr()), TensorForm::of(tensor)});
  }
  if (error_ != nullptr || changes_.count(storage.unsafeGetStorageImpl()) != 0) {
    return;
  }
  try {
    const memory::Unlimited unlimited;
    const at::NoGradGuard no_grad;
    changes_.emplace(storage.unsafeGetStorageImpl(),
                     ChangedStorage{storage.getWeakStorageImpl(), whole_memory(storage).clone()});
  } catch (...) {
    error_ = std::current_exception();
  }
}

void FunctionWatch::after(const at::Tensor& output,
                          const std::vector<const c10::StorageImpl*>& inputs, bool cut) {
  const auto* storage = storage_of(output);
  if (storage == nullptr) {
    return;
  }
  const auto* impl = storage->unsafeGetStorageImpl();
  if (std::find(inputs.begin(), inputs.end(), impl) == inputs.end() && outside_.count(impl) == 0) {
    born_.try_emplace(impl, storage->getWeakStorageImpl());
  }
  if (cut && skeletons_ != nullptr && is_born(output)) {
    try {
      skeletons_->cut(output);
    } catch (...) {  // it is held a little longer
    }
  }
  if (born_.size() + outside_.size() + reads_.size() > sweep_at_) {
    forget_gone(born_);
    forget_gone(outside_);
    forget_gone(reads_);
    forget_gone(changes_);
    forget_gone(changed_);
    sweep_at_ = std::max(sweep_at_, 2 * (born_.size() + outside_.size() + reads_.size()));
  }
}

Changes FunctionWatch::changes() {
  if (error_ != nullptr) {
    std::rethrow_exception(error_);
  }
  forget_gone(changes_);
  Changes found;
  found.storages.reserve(changes_.size());
  for (auto& [key, change] : changes_) {
    found.storages.push_back(change);
  }
  for (const auto& [key, change] : changed_) {
    const auto tensor = change.get();
    if (tensor.defined() && !change.before.is_of(tensor)) {
      found.resized.push_back(change);
    }
  }
  return found;
}

std::vector<ReadTensor> FunctionWatch::reads() {
  forget_gone(reads_);
  std::vector<ReadTensor> found;
  for (const auto& [key, read] : reads_) {
    const auto tensor = read.get();
    const auto* storage = tensor.defined() ? storage_of(tensor) : nullptr;
    if (storage != nullptr && changes_.count(storage->unsafeGetStorageImpl()) == 0) {
      found.push_back(read);
    }
  }
  return found;
}

void FunctionWatch::undo() const noexcept {
  const at::DisableRecordFunctionGuard unseen;
  const at::NoGradGuard no_grad;
  for (const auto& [key, change] : changes_) {
    if (const c10::Storage storage(change.storage.lock()); storage) {
      first_memory(storage, change.before.numel()).copy_(change.before);
    }
  }
  for (const auto& [key, change] : changed_) {
    if (const auto tensor = change.get(); tensor.defined() && !change.before.is_of(tensor)) {
      change.before.put(tensor);
    }
  }
  set_generator_states(generators_);
}

BytesFromBefore::BytesFromBefore(const Changes& changes) {
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> before;
  for (const auto& change : changes.storages) {
    if (const c10::Storage storage(change.storage.lock()); storage) {
      const auto bytes = whole_memory(storage);
      put_back_.emplace_back(bytes, bytes.clone());
      before.push_back(change.before);
    }
  }
  for (const auto& change : changes.resized) {
    if (const auto tensor = change.get(); tensor.defined()) {
      resized_.emplace_back(tensor, TensorForm::of(tensor));
      change.before.put(tensor);
    }
  }
  for (size_t i = 0; i < before.size(); ++i) {
    first_memory(put_back_[i].first.storage(), before[i].numel()).copy_(before[i]);
  }
}

BytesFromBefore::~BytesFromBefore() {
  const at::NoGradGuard no_grad;
  for (const auto& [memory, bytes] : put_back_) {
    first_memory(memory.storage(), bytes.numel()).copy_(bytes);
  }
  for (const auto& [tensor, form] : resized_) {
    form.put(tensor);
  }
}

}  // namespace brimful::ladder
