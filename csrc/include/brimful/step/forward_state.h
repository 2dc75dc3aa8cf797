#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

namespace brimful {

/// Where modules keep tensors by name. A forward may put another tensor in a name's place, or register a name.
class BRIMFUL_API TensorNames {
 public:
  /// What the names stood for at one moment. It keeps these tensors alive, and copies none.
  class BRIMFUL_API Moment {
   public:
    Moment() = default;
    Moment(const Moment&) = delete;
    Moment& operator=(const Moment&) = delete;
    virtual ~Moment();
    std::vector<at::Tensor> buffers;  ///< each once, none undefined
  };
  /// By tensors of a moment: what the names are to stand for in their place.
  using Instead = std::unordered_map<const c10::TensorImpl*, at::Tensor>;

  TensorNames() = default;
  TensorNames(const TensorNames&) = delete;
  TensorNames& operator=(const TensorNames&) = delete;
  virtual ~TensorNames();
  virtual std::shared_ptr<const Moment> now() = 0;
  /// Each name stands for what it stood for then, and names that are new since are gone. Returns false where names cannot be
  /// put back, and have not been.
  virtual bool put_back(const Moment& moment, const Instead& instead) = 0;
};

/// Of modules of torch::nn, whose buffers can be asked for, and not replaced.
BRIMFUL_API std::shared_ptr<TensorNames> names_of(std::function<std::vector<at::Tensor>()> buffers);
/// All of them together; some may be null.
BRIMFUL_API std::shared_ptr<TensorNames> names_of(std::vector<std::shared_ptr<TensorNames>> each);

/// What a forward may change of modules, as it was at one moment: a buffer's values and size, the tensor that a name stands
/// for, None among them, and which names there are. What is repeated, undone or only tried gives it back from here. From
/// one thread at a time.
class BRIMFUL_API ForwardState {
 public:
  /// `others`: tensors besides, which keep their places. `names` may be null. Copies are allocated at once, so that capture()
  /// allocates nothing on their device while there are the same tensors.
  ForwardState(std::vector<at::Tensor> others, std::shared_ptr<TensorNames> names);

  void capture();
  /// Writes tensors back in place, only those that changed; may be called several times after one capture(). Compares their
  /// values, and so waits for the device: BatchNorm changes its statistics behind the version counter.
  /// @throws c10::ValueError if a module of torch::nn has registered a buffer since, which cannot be undone; all else has been
  void restore();
  /// The same between two passes of work of which no graph is left: writes all tensors, and waits for no device.
  void rewind();
  /// What it holds itself.
  const std::vector<at::Tensor>& copies() const { return copies_; }

 private:
  struct Form;
  void hold();
  void put_names_back();
  void put_forms_back();

  std::shared_ptr<TensorNames> names_;
  std::shared_ptr<const TensorNames::Moment> moment_;
  std::vector<at::Tensor> others_;
  std::vector<at::Tensor> tensors_;  ///< the others, and the buffers of the moment
  std::vector<at::Tensor> copies_;
  std::vector<std::shared_ptr<const Form>> forms_;
  std::vector<uint32_t> versions_;
};

/// What a part of a model finds when its forward runs once more in backward: its names as before its first forward, while the
/// tensors that they stand for now stay as they are.
class BRIMFUL_API SecondRun {
 public:
  /// Before the first forward. `changed`: buffers that this will change in place; the second one gets copies.
  SecondRun(std::shared_ptr<TensorNames> names, const std::vector<at::Tensor>& changed);

  /// Around each further forward, by any thread; one may be inside another. begin() returns false, and has no end, where the
  /// first one has registered a buffer of torch::nn, which stays.
  bool begin();
  void end() noexcept;

 private:
  std::shared_ptr<TensorNames> names_;
  std::shared_ptr<const TensorNames::Moment> before_;
  TensorNames::Instead copies_;
  std::vector<std::shared_ptr<const TensorNames::Moment>> outside_;
};

}  // namespace brimful
