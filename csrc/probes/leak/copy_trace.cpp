#include "probes/leak/copy_trace.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/record_function.h>
#include <c10/core/StorageImpl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace brimful::probes {
namespace {

using Shares = std::map<uint32_t, double>;  // bytes of each site
// The weak pointer keeps the address from being another storage's.
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

struct CopySource {
  uint64_t birth = 0;
  int64_t bytes = 0;
  uint32_t site = 0;
};

struct Content {
  WeakStorage storage;
  const void* data = nullptr;
  Shares shares;
  bool is_new = false;
};

struct Following {
  std::mutex mutex;
  std::optional<at::CallbackHandle> handle;
  std::atomic<pid_t> owner{0};
  int64_t since = 0;  // step
  size_t sweep_at = 0;
  std::unordered_map<const void*, CopySource> sources;
  std::unordered_map<c10::StorageImpl*, Content> contents;  // with something of a source
};

Following& following() {
  static auto* ours =
      new Following();  // never destroyed: threads may run operators while the process ends
  return *ours;
}

template <typename Fn>
void for_each_tensor_in(const c10::IValue& value, const Fn& fn) {
  if (value.isTensor()) {
    fn(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      fn(tensor);
    }
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      for_each_tensor_in(element, fn);
    }
  }
}

c10::StorageImpl* storage_in_memory(const at::Tensor& tensor) {
  const auto* const impl = tensor.unsafeGetTensorImpl();
  const bool has_memory = tensor.defined() && impl->has_storage() && !impl->is_python_dispatch() &&
                          !impl->has_symbolic_sizes_strides() &&
                          impl->device_type() != c10::DeviceType::Meta;
  return has_memory ? impl->unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

WeakStorage weak(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().getWeakStorageImpl();
}

/// What it has of the sources, if anything. Needs the lock.
Content* content_of(Following& ours, const at::Tensor& tensor, c10::StorageImpl& storage) {
  if (const auto known = ours.contents.find(&storage); known != ours.contents.end()) {
    return &known->second;
  }
  const auto source = ours.sources.find(std::as_const(storage).data());
  if (source == ours.sources.end()) {
    return nullptr;
  }
  const auto block = memory::find_block(source->first, storage.device());
  const auto [birth, bytes, site] = source->second;
  const void* const data = source->first;
  ours.sources.erase(source);  // it is this storage's, or gone
  if (!block || block->birth != birth) {
    return nullptr;
  }
  Content content{weak(tensor), data, {{site, static_cast<double>(bytes)}}};
  return &ours.contents.emplace(&storage, std::move(content)).first->second;
}

/// What an operator reads of one storage.
struct Read {
  double fraction = 0;  // of the storage
  double elements = 0;
  Shares shares;  // of the sources
};

/// Within an operator that reads something of a source, those that it calls are a part of it.
thread_local int copying = 0;

struct CopyCall : at::ObserverContext {
  std::unordered_map<c10::StorageImpl*, Read> reads;
  bool writes = false;  // into inputs; else they are looked at in another way

  CopyCall() { ++copying; }
  ~CopyCall() override { --copying; }
  CopyCall(const CopyCall&) = delete;
  CopyCall& operator=(const CopyCall&) = delete;
};

/// What they read beside what the output has itself, and of how many elements.
Read read_beside(const CopyCall& call, const c10::StorageImpl* output) {
  Read sum;
  for (const auto& [storage, read] : call.reads) {
    if (storage == output || read.shares.empty()) {
      continue;
    }
    sum.elements += read.elements;
    for (const auto& [site, bytes] : read.shares) {
      sum.shares[site] += bytes * std::min(read.fraction, 1.0);
    }
  }
  return sum;
}

/// Operators that look at the form of their inputs alone.
bool makes_alike(std::string_view op) {
  return op.ends_with("_like") || op.starts_with("aten::new_");
}

std::unique_ptr<at::ObserverContext> operator_begins(const at::RecordFunction& function) {
  auto& ours = following();
  if (copying > 0 || ours.owner != getpid() || makes_alike(function.name())) {
    return nullptr;  // a child of fork: another thread of the parent may have had the lock
  }
  std::vector<std::pair<c10::StorageImpl*, at::Tensor>> tensors;
  for (const auto& input : function.inputs()) {
    for_each_tensor_in(input, [&](const at::Tensor& tensor) {
      if (auto* const storage = storage_in_memory(tensor)) {
        tensors.emplace_back(storage, tensor);
      }
    });
  }
  std::unordered_map<c10::StorageImpl*, Shares> found;
  {
    const std::lock_guard lock(ours.mutex);
    if (!ours.handle) {
      return nullptr;
    }
    for (const auto& [storage, tensor] : tensors) {
      if (const Content* const content = content_of(ours, tensor, *storage)) {
        found[storage] = content->shares;
      }
    }
  }
  if (found.empty()) {
    return nullptr;
  }
  auto call = std::make_unique<CopyCall>();
  const auto schema = function.operator_schema();
  call->writes = schema && schema->is_mutable();
  for (const auto& [storage, tensor] : tensors) {
    auto& read = call->reads[storage];
    const auto elements = static_cast<double>(tensor.unsafeGetTensorImpl()->numel());
    const auto all = static_cast<double>(std::max<size_t>(storage->nbytes(), 1));
    read.fraction += elements * static_cast<double>(tensor.itemsize()) / all;
    read.elements += elements;
    if (const auto of_source = found.find(storage); of_source != found.end()) {
      read.shares = of_source->second;
    }
  }
  return call;
}

/// Whether a block that an operator writes into is none from before. Needs the lock.
bool is_born_since(const Following& ours, const c10::StorageImpl& storage) {
  const auto block = memory::find_block(storage.data(), storage.device());
  return block && block->step >= ours.since;
}

/// Those that are gone. Needs the lock.
void sweep(Following& ours) {
  constexpr size_t kMany = 4096;
  if (ours.contents.size() >= std::max(ours.sweep_at, kMany)) {
    std::erase_if(ours.contents,
                  [](const auto& entry) { return entry.second.storage.use_count() == 0; });
    ours.sweep_at = 2 * ours.contents.size();
  }
}

void note_output(Following& ours, const CopyCall& call, const at::Tensor& tensor) {
  auto* const storage = storage_in_memory(tensor);
  const bool is_input = storage != nullptr && call.reads.contains(storage);
  if (storage == nullptr || (is_input && !call.writes)) {
    return;  // a view
  }
  const auto read = read_beside(call, storage);
  auto known = ours.contents.find(storage);
  if (known == ours.contents.end()) {
    if (read.shares.empty() || (is_input && !is_born_since(ours, *storage))) {
      return;
    }
    sweep(ours);
    known = ours.contents.emplace(storage, Content{weak(tensor), nullptr, {}}).first;
  }
  auto& content = known->second;
  const void* const data = std::as_const(*storage).data();
  if (data != content.data) {  // a resize has moved it, unless it is new
    content.is_new = !is_input || is_born_since(ours, *storage);
    content.data = data;
  }
  const auto elements = static_cast<double>(tensor.unsafeGetTensorImpl()->numel());
  const auto kept = std::min(elements / std::max(read.elements, 1.0), 1.0);
  for (const auto& [site, bytes] : read.shares) {
    content.shares[site] += bytes * kept;
  }
}

void operator_ends(const at::RecordFunction& function, at::ObserverContext* context) {
  const auto* const call = dynamic_cast<CopyCall*>(context);
  auto& ours = following();
  if (call == nullptr || ours.owner != getpid()) {
    return;
  }
  const std::lock_guard lock(ours.mutex);
  if (!ours.handle) {
    return;
  }
  for (const auto& output : function.outputs()) {
    for_each_tensor_in(output, [&](const at::Tensor& tensor) { note_output(ours, *call, tensor); });
  }
}

std::unique_ptr<at::ObserverContext> copy_begins(const at::RecordFunction& function) {
  try {
    return operator_begins(function);
  } catch (...) {  // a copy that is not seen; the operator goes on
    return nullptr;
  }
}

void copy_ends(const at::RecordFunction& function, at::ObserverContext* context) {
  try {
    operator_ends(function, context);
  } catch (...) {  // NOLINT(bugprone-empty-catch): as above
  }
}

}  // namespace

bool CopyTrace::begin(const std::vector<memory::LiveBlock>& sources) {
  end();
  auto& ours = following();
  const std::lock_guard lock(ours.mutex);
  if (ours.handle && ours.owner == getpid()) {
    return false;
  }
  ours.since = memory::current_step();
  for (const auto& block : sources) {
    ours.sources[block.data] = {block.birth, block.bytes, block.site};
  }
  ours.owner = getpid();
  ours.handle = at::addGlobalCallback(at::RecordFunctionCallback(copy_begins, copy_ends)
                                          .needsInputs(true)
                                          .needsOutputs(true)
                                          .scopes({at::RecordScope::FUNCTION}));
  began_ = true;
  return true;
}

std::vector<CopiedInto> CopyTrace::end() {
  auto& ours = following();
  std::vector<CopiedInto> copied;
  if (!std::exchange(began_, false) || ours.owner != getpid()) {
    return copied;
  }
  const std::lock_guard lock(ours.mutex);
  at::removeCallback(*ours.handle);
  ours.handle.reset();
  for (const auto& [storage, content] : ours.contents) {
    if (!content.is_new || content.storage.use_count() == 0) {
      continue;
    }
    for (const auto& [site, bytes] : content.shares) {
      copied.push_back({content.data, site, bytes});
    }
  }
  ours.contents.clear();
  ours.sources.clear();
  return copied;
}

}  // namespace brimful::probes
