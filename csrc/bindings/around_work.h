#pragma once
// What verify_split and the trials of a loss have in common.
#include <brimful/sizer/verify_split.h>

#include <vector>

#include "bindings/bindings.h"
#include "bindings/callbacks.h"

namespace brimful {

/// A `with` block around what C++ does.
class With {
 public:
  explicit With(const py::object& manager) : manager_(manager) {
    call_python([&] { manager_.attr("__enter__")(); });
  }
  ~With() {
    const Gil gil;
    try {
      manager_.attr("__exit__")(py::none(), py::none(), py::none());
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("brimful");
    }
  }
  With(const With&) = delete;
  With& operator=(const With&) = delete;

 private:
  const py::object& manager_;
};

/// As torch.autograd.grad, within `around`.
inline std::vector<at::Tensor> gradients_within(const py::object& around, const at::Tensor& loss,
                                                const at::Tensor& seed,
                                                const std::vector<at::Tensor>& inputs) {
  const With with(around);  // a checkpoint repeats the forward there
  return with_python_errors([&] { return detail::gradients_of(loss, seed, inputs); });
}

}  // namespace brimful
