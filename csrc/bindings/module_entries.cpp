#include "bindings/module_entries.h"

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

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

py::object in_place_of(const py::object& value, const TensorNames::Instead& instead) {
  if (!instead.empty() && THPVariable_Check(value.ptr())) {
    const auto found = instead.find(THPVariable_Unpack(value.ptr()).unsafeGetTensorImpl());
    if (found != instead.end()) {
      return py::reinterpret_steal<py::object>(THPVariable_Wrap(found->second));
    }
  }
  return value;
}
}  // namespace

ModuleEntries::ModuleEntries(const std::vector<py::object>& buffers,
                             const std::vector<py::object>& parameters) {
  Owners owners;
  std::unordered_set<PyObject*> known;
  const auto add = [&](const py::object& mapping, bool has_buffers) {
    if (known.insert(mapping.ptr()).second) {
      owners.push_back({mapping, has_buffers});
    }
  };
  for (const auto& mapping : buffers) {
    add(mapping, true);
  }
  for (const auto& mapping : parameters) {
    add(mapping, false);
  }
  owners_ = shared_object(std::move(owners));
}

bool ModuleEntries::are_as(const Entries& entries) const {
  size_t next = 0;
  bool same = true;
  for (const auto& owner : *owners_) {
    for_each_item(owner.mapping, [&](PyObject* name, PyObject* value) {
      same = same && next < entries.size() && entries[next].mapping == owner.mapping.ptr() &&
             entries[next].name.equal(py::handle(name)) &&
             is_same_tensor(entries[next].value, value);
      ++next;
    });
  }
  return same && next == entries.size();
}

ModuleEntries::Entries ModuleEntries::entries_now() const {
  Entries entries;
  for (const auto& owner : *owners_) {
    for_each_item(owner.mapping, [&](PyObject* name, PyObject* value) {
      entries.push_back({owner.mapping.ptr(), py::reinterpret_borrow<py::object>(name),
                         py::reinterpret_borrow<py::object>(value), owner.has_buffers});
    });
  }
  return entries;
}

std::shared_ptr<const TensorNames::Moment> ModuleEntries::now() {
  return call_python([&]() -> std::shared_ptr<const Moment> {
    if (last_ && are_as(*last_->entries)) {
      return last_;
    }
    auto names = std::make_shared<Names>();
    names->entries = shared_object(entries_now());
    std::unordered_set<const void*> seen;
    for (const auto& entry : *names->entries) {
      if (entry.is_buffer && THPVariable_Check(entry.value.ptr())) {
        const auto& tensor = THPVariable_Unpack(entry.value.ptr());
        if (seen.insert(tensor.unsafeGetTensorImpl()).second) {
          names->buffers.push_back(tensor);
        }
      }
    }
    last_ = names;
    return names;
  });
}

bool ModuleEntries::put_back(const Moment& moment, const Instead& instead) {
  const auto& entries = *dynamic_cast<const Names&>(moment).entries;
  return call_python([&] {
    auto next = entries.begin();
    for (const auto& owner : *owners_) {
      const auto end = std::find_if(next, entries.end(), [&](const Entry& entry) {
        return entry.mapping != owner.mapping.ptr();
      });
      Entries wanted(next, end);
      for (auto& entry : wanted) {
        entry.value = in_place_of(entry.value, instead);
      }
      put_entries(owner.mapping, wanted);
      next = end;
    }
    return true;
  });
}

// A dict that is as it should be is left alone: what is compiled has guards on it.
void ModuleEntries::put_entries(const py::object& mapping, const Entries& wanted) {
  auto next = wanted.begin();
  bool same = true;
  for_each_item(mapping, [&](PyObject* name, PyObject* value) {
    same = same && next != wanted.end() && next->name.equal(py::handle(name)) &&
           is_same_tensor(next->value, value);
    next += next != wanted.end() ? 1 : 0;
  });
  if (same && next == wanted.end()) {
    return;
  }
  const bool is_dict = PyDict_Check(mapping.ptr());
  if (is_dict) {  // in the order of before
    PyDict_Clear(mapping.ptr());
  }
  for (const auto& entry : wanted) {
    if (is_dict || !is_same_tensor(entry.value, py::object(mapping[entry.name]).ptr())) {
      mapping[entry.name] = entry.value;
    }
  }
}

void bind_module_entries(py::module_& m) {
  py::class_<TensorNames, std::shared_ptr<TensorNames>>(m, "_TensorNames");
  py::class_<ModuleEntries, TensorNames, std::shared_ptr<ModuleEntries>>(m, "_ModuleEntries")
      .def(py::init<const std::vector<py::object>&, const std::vector<py::object>&>(),
           py::arg("buffers"), py::arg("parameters"));
  py::class_<ForwardState>(m, "_ForwardState")
      .def(py::init([](std::vector<at::Tensor> others, std::shared_ptr<ModuleEntries> names) {
             return ForwardState(std::move(others), std::move(names));
           }),
           py::arg("others"), py::arg("names"))
      .def("capture", &ForwardState::capture)
      .def("restore", &ForwardState::restore)
      .def_property_readonly("copies", &ForwardState::copies);
  py::class_<SecondRun>(m, "_SecondRun")
      .def(py::init(
               [](std::shared_ptr<ModuleEntries> names, const std::vector<at::Tensor>& changed) {
                 return SecondRun(std::move(names), changed);
               }),
           py::arg("names"), py::arg("changed"))
      .def("begin", &SecondRun::begin)
      .def("end", &SecondRun::end);
}

}  // namespace brimful
