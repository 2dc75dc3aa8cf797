#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/step/forward_state.h>

#include <memory>
#include <vector>

#include "bindings/bindings.h"

namespace brimful {

/// The tensors that modules of Python have under their names, which a forward may replace by others (`self.n = self.n + 1`).
/// All but the constructor take the GIL.
class ModuleEntries final : public TensorNames {
 public:
  /// Of each module its `_buffers` and its `_parameters`.
  ModuleEntries(const std::vector<py::object>& buffers, const std::vector<py::object>& parameters);
  std::shared_ptr<const Moment> now() override;
  bool put_back(const Moment& moment, const Instead& instead) override;

 private:
  struct Owner {
    py::object mapping;
    bool has_buffers = false;
  };
  struct Entry {
    PyObject* mapping = nullptr;  ///< kept alive by its owner
    py::object name;
    py::object value;
    bool is_buffer = false;
  };
  using Owners = std::vector<Owner>;
  using Entries = std::vector<Entry>;
  struct Names final : Moment {
    std::shared_ptr<Entries> entries;
  };

  bool are_as(const Entries& entries) const;
  static void put_entries(const py::object& mapping, const Entries& wanted);
  Entries entries_now() const;

  std::shared_ptr<Owners> owners_;
  std::shared_ptr<const Names> last_;  ///< most steps find what the one before found
};

void bind_module_entries(py::module_& m);

}  // namespace brimful
