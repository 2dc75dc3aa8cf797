#pragma once
#include <ATen/ATen.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "support/tensors.h"

namespace brimful::test {

/// A failure that is planted somewhere in a step, once.
struct Fault {
  enum class At { nowhere, forward, gradient, input };
  enum class Kind { out_of_memory, error };

  At at = At::nowhere;
  int piece = 0;
  int parameter = 0;  // whose gradient fails, for At::gradient
  Kind kind = Kind::error;
  std::string text = "planted";
  bool armed = false;
  bool stays = false;  // armed after it has fired
  int current_piece = 0;

  void reached(At where, int of_parameter = 0) {
    if (!armed || where != at || of_parameter != parameter || (!stays && current_piece != piece)) {
      return;
    }
    armed = stays;
    if (kind == Kind::out_of_memory) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, text);
    }
    throw std::runtime_error(text);
  }
};

/// Three linear layers, the first of them followed by a batch norm if `norm`.
class Net {
 public:
  class Item {
   public:
    Item(std::string key, at::Tensor value) : key_(std::move(key)), value_(std::move(value)) {}
    const std::string& key() const { return key_; }
    const at::Tensor& value() const { return value_; }

   private:
    std::string key_;
    at::Tensor value_;
  };

  static constexpr int kInputs = 4;

  explicit Net(bool norm = true, c10::ScalarType dtype = at::kFloat, double salt = 0,
               int outputs = 1)
      : norm_(norm) {
    add("first.weight", filled({6, kInputs}, salt + 1, dtype));
    add("first.bias", filled({6}, salt + 2, dtype));
    if (norm) {
      add("norm.weight", filled({6}, salt + 3, dtype) + 1);
      add("norm.bias", filled({6}, salt + 4, dtype));
      buffers_ = {at::zeros({6}, dtype), at::ones({6}, dtype), at::zeros({}, at::kLong)};
    }
    add("second.weight", filled({5, 6}, salt + 5, dtype));
    add("second.bias", filled({5}, salt + 6, dtype));
    add("third.weight", filled({outputs, 5}, salt + 7, dtype));
    add("third.bias", filled({outputs}, salt + 8, dtype));
  }

  at::Tensor forward(const at::Tensor& x) {
    fault->reached(Fault::At::forward);
    size_t i = 0;
    const auto next = [&] { return items_[i++].value(); };
    const auto linear = [&](const at::Tensor& input) {
      const auto weight = next();
      return at::linear(input, weight, next());
    };
    auto h = linear(x);
    if (norm_) {
      const auto weight = next();
      h = at::batch_norm(h, weight, next(), buffers_[0], buffers_[1], true, 0.1, 1e-5, false);
      buffers_[2].add_(1);
    }
    h = at::tanh(linear(h));
    return linear(h);
  }

  const std::vector<Item>& named_parameters() const { return items_; }
  const std::vector<at::Tensor>& buffers() const { return buffers_; }
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> result;
    for (const auto& item : items_) {
      result.push_back(item.value());
    }
    return result;
  }
  std::vector<at::Tensor> gradients() const {
    std::vector<at::Tensor> result;
    for (const auto& item : items_) {
      result.push_back(item.value().grad());
    }
    return result;
  }
  /// Plain gradient descent; empties the gradients.
  void update(double rate = 0.1) {
    const at::NoGradGuard no_grad;
    for (const auto& item : items_) {
      auto& gradient = item.value().mutable_grad();
      if (gradient.defined()) {
        item.value().sub_(gradient, rate);
      }
      gradient.reset();
    }
  }

  std::shared_ptr<Fault> fault = std::make_shared<Fault>();

 private:
  void add(const char* name, at::Tensor value) {
    value.set_requires_grad(true);
    value.register_hook([fault = fault, k = static_cast<int>(items_.size())](const at::Tensor&) {
      fault->reached(Fault::At::gradient, k);
    });
    items_.emplace_back(name, std::move(value));
  }

  bool norm_;
  std::vector<Item> items_;
  std::vector<at::Tensor> buffers_;
};

/// An input whose gradient comes after those of all parameters.
inline at::Tensor watched_input(const at::Tensor& x, const std::shared_ptr<Fault>& fault) {
  auto leaf = x.detach().clone();
  leaf.set_requires_grad(true);
  leaf.register_hook([fault](const at::Tensor&) { fault->reached(Fault::At::input); });
  return leaf * 1;
}

}  // namespace brimful::test
