#include "ladder/aside.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/step/oom.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "ladder/host_copy.h"

namespace brimful::ladder {
namespace {
constexpr size_t kLeastBytes = 1024;

/// What lives on by itself.
class StoredWhereItIs final : public StoredBytes {
 public:
  explicit StoredWhereItIs(c10::Storage storage) : storage_(std::move(storage)) {}
  c10::Storage bring_back() override { return storage_; }

 private:
  c10::Storage storage_;
};

class StoredInFile final : public StoredBytes {
 public:
  StoredInFile(ScratchFile& file, const c10::Storage& storage)
      : bytes_(storage.nbytes()),
        part_(file.write(storage.data(), static_cast<int64_t>(storage.nbytes()))) {}

  c10::Storage bring_back() override {
    const std::lock_guard lock(mutex_);
    if (auto storage = mapped_ ? mapped_->lock() : nullptr) {
      return c10::Storage(std::move(storage));
    }
    c10::Storage storage(c10::Storage::use_byte_size_t{}, bytes_, ScratchFile::map(part_));
    mapped_ = storage.getWeakStorageImpl();
    return storage;
  }

 private:
  size_t bytes_;
  std::shared_ptr<const ScratchFile::Part> part_;
  std::mutex mutex_;
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> mapped_;
};
}  // namespace

SavedAside::SavedAside(std::shared_ptr<StoredBytes> stored, const at::Tensor& tensor,
                       std::shared_ptr<StepEventRecorder> recorder, int64_t save)
    : stored_(std::move(stored)),
      options_(tensor.options().requires_grad(false)),
      sizes_(tensor.sizes().vec()),
      strides_(tensor.strides().vec()),
      offset_(tensor.storage_offset()),
      counter_(tensor.unsafeGetTensorImpl()->version_counter()),
      version_(counter_.enabled() ? counter_.current_version() : 0),
      recorder_(std::move(recorder)),
      save_(save) {}

SavedAside::~SavedAside() {
  stored_.reset();
  if (recorder_) {
    recorder_->drop(save_);
  }
}

at::Tensor SavedAside::get() const {
  const auto now = counter_.enabled() ? counter_.current_version() : 0;
  TORCH_CHECK(now == version_,
              "one of the variables needed for gradient computation has been modified by an "
              "inplace operation (shape: ",
              c10::IntArrayRef(sizes_), ", version: ", now, ", expected: ", version_,
              "); change a copy of it");
  if (recorder_) {
    recorder_->use(save_);
  }
  const at::NoGradGuard no_grad;
  return at::empty({0}, options_).set_(stored_->bring_back(), offset_, sizes_, strides_);
}

Aside::Aside(c10::Device device, std::shared_ptr<StepEventRecorder> recorder, bool fetch_ahead)
    : device_(device),
      recorder_(std::move(recorder)),
      file_(device.is_cpu() ? ScratchFile::open() : nullptr),
      fetch_ahead_(fetch_ahead) {}

void Aside::keep(const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors) {
    if (tensor.defined() && tensor.has_storage()) {
      kept_.insert(tensor.storage().unsafeGetStorageImpl());
    }
  }
}

bool Aside::takes(const at::Tensor& tensor) const {
  return tensor.layout() == at::kStrided && tensor.has_storage() && tensor.device() == device_ &&
         !tensor.is_quantized() && !tensor.is_conj() && !tensor.is_neg() &&
         !tensor.unsafeGetTensorImpl()->is_python_dispatch();
}

bool Aside::stays(const c10::Storage& storage) const {
  return storage.nbytes() < kLeastBytes || kept_.count(storage.unsafeGetStorageImpl()) > 0;
}

at::Tensor Aside::pinned_for(const c10::Storage& storage) {
  try {
    const auto bytes = static_cast<int64_t>(storage.nbytes());
    return at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(true));
  } catch (const std::exception&) {
    const auto error = std::current_exception();
    if (is_out_of_memory(error)) {
      const auto text = to_string(error);
      refused_ = text.substr(0, text.find('\n'));
    }
    throw;
  }
}

std::shared_ptr<StoredBytes> Aside::store(const c10::Storage& storage, Milliseconds& took) {
  const bool measures = recorder_ && !file_;
  const auto wait = [&] {
    if (measures) {
      c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
    }
  };
  wait();
  const auto began = std::chrono::steady_clock::now();
  std::shared_ptr<StoredBytes> stored;
  if (file_) {
    stored = std::make_shared<StoredInFile>(*file_, storage);
  } else {
    stored = store_on_host(storage, pinned_for(storage), last_stored_, measures);
    if (fetch_ahead_) {
      last_stored_ = stored;
    }
  }
  wait();
  bytes_ += static_cast<int64_t>(storage.nbytes());
  took = std::chrono::steady_clock::now() - began;
  return stored;
}

std::shared_ptr<SavedAside> Aside::put(const at::Tensor& tensor) {
  if (!takes(tensor)) {
    return nullptr;
  }
  const auto& storage = tensor.storage();
  if (stays(storage)) {
    const auto save = recorder_ ? recorder_->save(storage, std::chrono::milliseconds(0)) : kNever;
    return std::make_shared<SavedAside>(std::make_shared<StoredWhereItIs>(storage), tensor,
                                        recorder_, save);
  }
  const auto* const place = storage.unsafeGetStorageImpl();
  const auto version = static_cast<uint32_t>(tensor._version());
  std::shared_ptr<StoredBytes> stored;
  Milliseconds took(0);
  if (const auto known = known_.find(place); known != known_.end() &&
                                             !known->second.storage.expired() &&
                                             known->second.version == version) {
    stored = known->second.stored.lock();
  }
  if (!stored) {
    stored = store(storage, took);
    known_.insert_or_assign(place, Known{storage.getWeakStorageImpl(), version, stored});
  }
  const auto save = recorder_ ? recorder_->save(storage, took) : kNever;
  return std::make_shared<SavedAside>(std::move(stored), tensor, recorder_, save);
}

}  // namespace brimful::ladder
