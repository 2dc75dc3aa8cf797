#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "ladder/scratch_file.h"
#include "ladder/step_recorder.h"

namespace brimful::ladder {

/// Where the bytes of a storage lie that was put aside.
class StoredBytes {
 public:
  virtual ~StoredBytes() = default;
  /// On the device that they came from. From any thread.
  virtual c10::Storage bring_back() = 0;
  /// It will be asked for soon: its way back begins. Fails in silence, as it is brought back when it is used all the same.
  virtual void fetch_ahead() noexcept {}
};

/// What takes the place of a tensor that a step saved for backward.
class BRIMFUL_API SavedAside {
 public:
  SavedAside(std::shared_ptr<StoredBytes> stored, const at::Tensor& tensor,
             std::shared_ptr<StepEventRecorder> recorder, int64_t save);
  ~SavedAside();
  SavedAside(const SavedAside&) = delete;
  SavedAside& operator=(const SavedAside&) = delete;

  /// The tensor, with the same bits. From any thread.
  /// @throws c10::Error where it was changed in place since, as torch does
  at::Tensor get() const;

 private:
  std::shared_ptr<StoredBytes> stored_;
  at::TensorOptions options_;
  std::vector<int64_t> sizes_;
  std::vector<int64_t> strides_;
  int64_t offset_;
  c10::VariableVersion counter_;  ///< torch compares no versions of what goes through hooks
  uint32_t version_;
  std::shared_ptr<StepEventRecorder> recorder_;
  int64_t save_;
};

/// Puts tensors aside that a step saves for backward: on the CPU in a file, on CUDA in pinned memory of the host. Several
/// tensors of one storage are put aside once. Used by one thread at a time.
class BRIMFUL_API Aside {
 public:
  /// `fetch_ahead`: on CUDA what was put aside comes back when what was put aside behind it is used, which a backward
  /// does before.
  /// @throws c10::Error where there is no room for a file
  explicit Aside(c10::Device device, std::shared_ptr<StepEventRecorder> recorder = nullptr,
                 bool fetch_ahead = false);

  /// Storages that live on by themselves: parameters, buffers, the batch.
  void keep(const std::vector<at::Tensor>& tensors);
  /// What keep() named, and what is small, stays where it is, and must not be changed until it is used. nullptr for what
  /// is sparse, or on another device.
  /// @throws std::system_error where the disk is full; torch's own where the host has no pinned memory left
  std::shared_ptr<SavedAside> put(const at::Tensor& tensor);
  int64_t bytes() const { return bytes_; }
  /// Why the host had no pinned memory; empty: it had.
  const std::string& refused() const { return refused_; }

 private:
  struct Known {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    uint32_t version;
    std::weak_ptr<StoredBytes> stored;
  };
  bool takes(const at::Tensor& tensor) const;
  bool stays(const c10::Storage& storage) const;
  using Milliseconds = std::chrono::duration<double, std::milli>;
  std::shared_ptr<StoredBytes> store(const c10::Storage& storage, Milliseconds& took);
  at::Tensor pinned_for(const c10::Storage& storage);

  c10::Device device_;
  std::shared_ptr<StepEventRecorder> recorder_;
  std::shared_ptr<ScratchFile> file_;
  bool fetch_ahead_;
  std::weak_ptr<StoredBytes> last_stored_;
  std::unordered_set<const c10::StorageImpl*> kept_;
  std::unordered_map<const c10::StorageImpl*, Known> known_;
  int64_t bytes_ = 0;
  std::string refused_;
};

}  // namespace brimful::ladder
