#include "bindings/module_entries.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <unordered_set>

#include "bindings/callbacks.h"

namespace brimful {
namespace {
template <typename Visit>
void for_each_item(const py::object& mapping, const Visit& visit) {
  if (PyDict_Check(mapping.ptr())) {
    PyObject* name = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(mapping.ptr(), &position, &name, &value) != 0) {
      visit(name, value);
    }
    return;
  }
  for (const auto& item : mapping.attr("items")()) {  // a ScriptModule's
    const auto pair = py::reinterpret_borrow<py::sequence>(item);
    const py::object name = pair[0];
    const py::object value = pair[1];
    visit(name.ptr(), value.ptr());
  }
}

bool is_same_tensor(const py::object& value, PyObject* other) {
  return value.ptr() == other ||
         (THPVariable_Check(value.ptr()) && THPVariable_Check(other) &&
          THPVariable_Unpack(value.ptr()).is_same(THPVariable_Unpack(other)));
}
}  // namespace

ModuleEntries::ModuleEntries(const std::vector<py::object>& buffers,
                             const std::vector<py::object>& parameters) {
  for (const auto& mapping : buffers) {
    owners_.push_back({mapping, true});
  }
  for (const auto& mapping : parameters) {
    owners_.push_back({mapping, false});
  }
}

// Most steps find what the one before found: then nothing is allocated.
bool ModuleEntries::is_as_captured() const {
  size_t next = 0;
  bool same = true;
  for (const auto& owner : owners_) {
    for_each_item(owner.mapping, [&](PyObject* name, PyObject* value) {
      same = same && next < entries_.size() && entries_[next].mapping == owner.mapping.ptr() &&
             entries_[next].name.ptr() == name && is_same_tensor(entries_[next].value, value);
      ++next;
    });
  }
  return same && next == entries_.size();
}

std::vector<at::Tensor> ModuleEntries::capture() {
  return call_python([&] {
    if (!is_as_captured()) {
      entries_.clear();
      for (auto& owner : owners_) {
        const auto before = entries_.size();
        for_each_item(owner.mapping, [&](PyObject* name, PyObject* value) {
          entries_.push_back({owner.mapping.ptr(), py::reinterpret_borrow<py::object>(name),
                              py::reinterpret_borrow<py::object>(value), owner.has_buffers});
        });
        owner.size = static_cast<Py_ssize_t>(entries_.size() - before);
      }
      collect_buffers();
    }
    return buffers_;
  });
}

void ModuleEntries::collect_buffers() {
  buffers_.clear();
  std::unordered_set<const void*> seen;
  for (const auto& entry : entries_) {
    if (entry.is_buffer && THPVariable_Check(entry.value.ptr())) {
      const auto& tensor = THPVariable_Unpack(entry.value.ptr());
      if (seen.insert(tensor.unsafeGetTensorImpl()).second) {
        buffers_.push_back(tensor);
      }
    }
  }
}

void ModuleEntries::restore() {
  call_python([&] {
    if (is_as_captured()) {
      return;
    }
    for (const auto& owner : owners_) {  // what was not there
      std::vector<py::object> added;
      for_each_item(owner.mapping, [&](PyObject* name, PyObject* /*value*/) {
        const bool known = std::any_of(entries_.begin(), entries_.end(), [&](const auto& entry) {
          return entry.mapping == owner.mapping.ptr() && entry.name.equal(py::handle(name));
        });
        if (!known) {
          added.push_back(py::reinterpret_borrow<py::object>(name));
        }
      });
      for (const auto& name : added) {
        owner.mapping.attr("__delitem__")(name);
      }
    }
    for (const auto& entry : entries_) {
      const py::handle mapping(entry.mapping);
      const bool there = mapping.contains(entry.name);
      if (!there || !is_same_tensor(entry.value, py::object(mapping[entry.name]).ptr())) {
        mapping.attr("__setitem__")(entry.name, entry.value);
      }
    }
  });
}

void follow(Transaction& transaction, const std::shared_ptr<ModuleEntries>& entries) {
  transaction.follow([entries] { return entries->capture(); });
  transaction.add({[] {}, [entries] { entries->restore(); }});
}

}  // namespace brimful
