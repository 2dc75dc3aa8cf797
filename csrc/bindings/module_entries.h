#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/step/transaction.h>

#include <memory>
#include <vector>

#include "bindings/bindings.h"

namespace brimful {

/// The tensors that modules have under their names, which a forward may replace by others (`self.n = self.n + 1`). All
/// but the constructor take the GIL.
class ModuleEntries {
 public:
  /// Of each module its `_buffers` and its `_parameters`.
  ModuleEntries(const std::vector<py::object>& buffers, const std::vector<py::object>& parameters);
  /// Notes what there is, and returns the buffers, each once.
  std::vector<at::Tensor> capture();
  void restore();

 private:
  struct Owner {
    py::object mapping;
    bool has_buffers = false;
    Py_ssize_t size = 0;
  };
  struct Entry {
    PyObject* mapping = nullptr;  ///< kept alive by its owner
    py::object name;
    py::object value;
    bool is_buffer = false;
  };
  std::vector<Entry> entries_now();
  bool is_as_captured() const;
  void collect_buffers();

  std::vector<Owner> owners_;
  std::vector<Entry> entries_;
  std::vector<at::Tensor> buffers_;
};

/// Makes a transaction follow the entries, and put them back.
void follow(Transaction& transaction, const std::shared_ptr<ModuleEntries>& entries);

}  // namespace brimful
