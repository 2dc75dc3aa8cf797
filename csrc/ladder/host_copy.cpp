#include "ladder/host_copy.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <mutex>
#include <optional>
#include <utility>

namespace brimful::ladder {
namespace {
using Guard = c10::impl::VirtualGuardImpl;

at::Tensor bytes_of(const c10::Storage& storage) {
  const auto options = at::TensorOptions(at::kByte).device(storage.device());
  return at::empty({0}, options).set_(storage, 0, {static_cast<int64_t>(storage.nbytes())}, {1});
}

/// `to` is filled by a stream apart, when the computing one has come to this point and `ready` is there.
std::shared_ptr<c10::Event> copy_apart(const at::Tensor& to, const at::Tensor& from,
                                       c10::Device device, const c10::Event* ready) {
  const Guard guard(device.type());
  const auto apart = guard.getStreamFromGlobalPool(device);
  c10::Event here(device.type());
  here.record(guard.getStream(device));
  here.block(apart);
  if (ready != nullptr) {
    ready->block(apart);
  }
  const c10::StreamGuard on_it(apart);
  to.copy_(from, /*non_blocking=*/true);
  const auto& on_device = from.is_cpu() ? to : from;
  guard.recordDataPtrOnStream(on_device.storage().data_ptr(), apart);
  auto done = std::make_shared<c10::Event>(device.type());
  done->record(apart);
  return done;
}

class StoredOnHost final : public StoredBytes {
 public:
  StoredOnHost(const c10::Storage& storage, at::Tensor host)
      : device_(storage.device()),
        host_(std::move(host)),
        stored_(copy_apart(host_, bytes_of(storage), device_, nullptr)) {}

  c10::Storage bring_back() override {
    const std::lock_guard lock(mutex_);
    const auto stream = Guard(device_.type()).getStream(device_);
    c10::Storage storage(back_ ? back_->lock() : c10::intrusive_ptr<c10::StorageImpl>());
    if (!storage) {
      const auto device_bytes =
          at::empty_like(host_, at::TensorOptions(device_).pinned_memory(false));
      arrived_ = copy_apart(device_bytes, host_, device_, stored_.get());
      storage = device_bytes.storage();
      back_ = storage.getWeakStorageImpl();
    }
    arrived_->block(stream);
    return storage;
  }

 private:
  c10::Device device_;
  at::Tensor host_;
  std::shared_ptr<c10::Event> stored_;
  std::mutex mutex_;
  std::shared_ptr<c10::Event> arrived_;
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> back_;
};
}  // namespace

std::shared_ptr<StoredBytes> store_on_host(const c10::Storage& storage, at::Tensor host) {
  return std::make_shared<StoredOnHost>(storage, std::move(host));
}

}  // namespace brimful::ladder
