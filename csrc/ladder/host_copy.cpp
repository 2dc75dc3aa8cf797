#include "ladder/host_copy.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <exception>
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

std::shared_ptr<c10::Event> copy_here(const at::Tensor& to, const at::Tensor& from,
                                      c10::Device device) {
  to.copy_(from, /*non_blocking=*/true);
  auto done = std::make_shared<c10::Event>(device.type());
  done->record(Guard(device.type()).getStream(device));
  return done;
}

class StoredOnHost final : public StoredBytes {
 public:
  StoredOnHost(const c10::Storage& storage, at::Tensor host, std::weak_ptr<StoredBytes> before,
               bool here)
      : device_(storage.device()),
        host_(std::move(host)),
        stored_(here ? copy_here(host_, bytes_of(storage), device_)
                     : copy_apart(host_, bytes_of(storage), device_, nullptr)),
        before_(std::move(before)),
        here_(here) {}

  c10::Storage bring_back() override {
    auto storage = take();
    if (const auto before = before_.lock()) {
      before->fetch_ahead();
    }
    return storage;
  }

  void fetch_ahead() noexcept override {
    const std::lock_guard lock(mutex_);
    if (std::exchange(was_fetched_, true)) {
      return;
    }
    try {
      ahead_ = fetch();
    } catch (const std::exception&) {  // there was no room: it is brought back when it is used
    }
  }

 private:
  c10::Storage take() {
    const std::lock_guard lock(mutex_);
    was_fetched_ = true;
    auto storage = ahead_ ? std::move(*std::exchange(ahead_, std::nullopt)) : fetch();
    arrived_->block(Guard(device_.type()).getStream(device_));
    return storage;
  }

  c10::Storage fetch() {
    if (auto storage = back_ ? back_->lock() : nullptr) {
      return c10::Storage(std::move(storage));
    }
    const auto device_bytes =
        at::empty_like(host_, at::TensorOptions(device_).pinned_memory(false));
    arrived_ = here_ ? copy_here(device_bytes, host_, device_)
                     : copy_apart(device_bytes, host_, device_, stored_.get());
    back_ = device_bytes.storage().getWeakStorageImpl();
    return device_bytes.storage();
  }

  c10::Device device_;
  at::Tensor host_;
  std::shared_ptr<c10::Event> stored_;
  std::weak_ptr<StoredBytes> before_;
  bool here_;
  std::mutex mutex_;
  bool was_fetched_ = false;
  std::optional<c10::Storage> ahead_;  ///< until it is used
  std::shared_ptr<c10::Event> arrived_;
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> back_;
};
}  // namespace

std::shared_ptr<StoredBytes> store_on_host(const c10::Storage& storage, at::Tensor host,
                                           std::weak_ptr<StoredBytes> before, bool here) {
  return std::make_shared<StoredOnHost>(storage, std::move(host), std::move(before), here);
}

}  // namespace brimful::ladder
