#include "bindings/holder_path.h"

#include <array>
#include <string>
#include <string_view>

namespace brimful {
namespace {

using probes::Holder;
using probes::HolderKind;

// What an object may refer to beside its attributes.
constexpr std::array kInnerNames{"__dict__",  "__closure__", "__defaults__", "__kwdefaults__",
                                 "__self__",  "__func__",    "__wrapped__",  "__traceback__",
                                 "__cause__", "__context__", "tb_frame",     "tb_next",
                                 "gi_frame",  "cr_frame",    "func",         "args",
                                 "keywords",  "grad",        "_base",        "_backward_hooks"};

bool is_attribute(py::handle object, const char* name, PyObject* value) {
  if (!py::hasattr(object, name)) {
    return false;
  }
  return py::object(object.attr(name)).is(py::handle(value));
}

std::string short_repr(PyObject* object) {
  constexpr size_t kMost = 40;
  auto text = py::repr(object).cast<std::string>();
  return text.size() <= kMost ? text : text.substr(0, kMost) + "...";
}

std::string slot_of(py::handle object, PyObject* value) {
  for (const auto& type : py::tuple(py::type::of(object).attr("__mro__"))) {
    const py::object slots = py::getattr(type, "__slots__", py::tuple());
    for (const auto& slot :
         py::isinstance<py::str>(slots) ? py::make_tuple(slots) : py::tuple(slots)) {
      const auto name = slot.cast<std::string>();
      if (is_attribute(object, name.c_str(), value)) {
        return name;
      }
    }
  }
  return "";
}

// Of an object whose attributes stand in it, without a dict of their own; or one of its inner names.
std::string name_within(py::handle object, PyObject* value) {
  const py::object attributes = py::getattr(object, "__dict__", py::none());
  if (attributes.ptr() != value && !attributes.is_none()) {
    for (const auto& item : py::list(attributes.attr("items")())) {
      if (py::object(item[py::int_(1)]).is(py::handle(value))) {
        return py::str(py::object(item[py::int_(0)])).cast<std::string>();
      }
    }
  }
  if (auto slot = slot_of(object, value); !slot.empty()) {
    return slot;
  }
  for (const char* const name : kInnerNames) {
    if (is_attribute(object, name, value)) {
      return name;
    }
  }
  return "";
}

/// Builds the path, a step at a time.
class PathWriter {
 public:
  explicit PathWriter(Holder& holder) : holder_(holder) {}

  void begin(const std::string& name) {
    path_ = name;
    is_output_ = is_output(name);
  }

  void go(PyObject* before, PyObject* parent, PyObject* child) {
    if (PyDict_Check(parent)) {
      through_dict(before, parent, child);
    } else if (PyList_Check(parent) || PyTuple_Check(parent) || is(parent, "collections.deque")) {
      through_sequence(before, parent, child);
    } else if (PyAnySet_Check(parent)) {
      grows(HolderKind::sequence, PySet_GET_SIZE(parent));
      path_ += "{...}";
    } else if (PyFrame_Check(parent)) {
      path_ += "." + local_name(parent, child);
    } else if (PyCell_Check(parent)) {
      // named by the function that closes over it
    } else if (is(parent, "functools._lru_cache_wrapper")) {
      through_cache(parent);
    } else {
      through_object(parent, child);
    }
  }

  void finish() {
    holder_.path = path_;
    holder_.container = container_.empty() ? path_ : container_;
    if (is_output_) {
      holder_.kind = HolderKind::notebook;
      holder_.container = "Out";
    } else if (holder_.kind == HolderKind::unknown) {
      holder_.kind =
          path_.find('.') == std::string::npos ? HolderKind::variable : HolderKind::attribute;
    }
  }

 private:
  static bool is(PyObject* object, std::string_view type) {
    return Py_TYPE(object)->tp_name == type;
  }

  // A notebook keeps what cell 12 returns as _12 as well as Out[12].
  static bool is_output(const std::string& name) {
    return name.size() > 1 && name.find_first_not_of("0123456789", 1) == std::string::npos &&
           name[0] == '_';
  }

  // What names a way of its own wins over the containers on it; of these, the longest is what grows.
  void is_of(HolderKind kind) {
    holder_.kind = kind;
    fixed_ = true;
  }
  void grows(HolderKind kind, int64_t length) {
    if (length > holder_.length) {
      container_ = path_;
      holder_.length = length;
      holder_.kind = fixed_ ? holder_.kind : kind;
    }
  }

  void through_dict(PyObject* before, PyObject* dict, PyObject* child) {
    PyObject* const key = key_of(dict, child);
    const bool attributes =
        before != nullptr && (PyType_Check(before) || is_attribute(before, "__dict__", dict));
    if (key == nullptr) {
      path_ += " (as a key)";
      grows(HolderKind::mapping, PyDict_GET_SIZE(dict));
    } else if ((attributes || modules_) && PyUnicode_Check(key)) {
      modules_ = false;
      step_into(py::str(key).cast<std::string>());
    } else {
      if (path_ == "Out" || path_ == "_oh") {
        is_of(HolderKind::notebook);
      }
      grows(HolderKind::mapping, PyDict_GET_SIZE(dict));
      path_ += "[" + short_repr(key) + "]";
    }
  }

  void through_sequence(PyObject* before, PyObject* sequence, PyObject* child) {
    const auto items = py::reinterpret_borrow<py::sequence>(sequence);
    const auto length = static_cast<int64_t>(py::len(items));
    int64_t index = 0;
    while (index < length && !py::object(items[static_cast<size_t>(index)]).is(py::handle(child))) {
      ++index;
    }
    if (before != nullptr && PyFunction_Check(before) &&
        is_attribute(before, "__closure__", sequence)) {
      const py::object names = py::handle(before).attr("__code__").attr("co_freevars");
      path_ += "." + py::str(py::object(names[py::int_(index)])).cast<std::string>();
      return;
    }
    if (!PyTuple_Check(sequence)) {
      const auto before_length = holder_.length;
      grows(HolderKind::sequence, length);
      if (holder_.length != before_length) {
        holder_.bounded =
            is(sequence, "collections.deque") && !py::getattr(items, "maxlen").is_none();
      }
    }
    path_ += "[" + std::to_string(index) + "]";
  }

  void through_cache(PyObject* cache) {
    constexpr int64_t kSmall = 16;
    is_of(HolderKind::lru_cache);
    container_ = path_;
    const py::object most = py::handle(cache).attr("cache_parameters")()["maxsize"];
    holder_.bounded = !most.is_none() && most.cast<int64_t>() <= kSmall;
    holder_.length = py::handle(cache).attr("cache_info")().attr("currsize").cast<int64_t>();
  }

  void through_object(PyObject* object, PyObject* child) {
    if (PyType_Check(object) && PyDict_Check(child)) {
      return;  // a class's own, which its __dict__ only shows
    }
    const auto name = name_within(object, child);
    if (name == "__closure__") {
      is_of(holder_.kind == HolderKind::hook ? HolderKind::hook : HolderKind::closure);
    } else if (name == "tb_frame") {
      is_of(HolderKind::traceback);
    } else if (name != "__dict__") {
      step_into(name.empty() ? "<" + std::string(Py_TYPE(object)->tp_name) + ">" : name);
    }
  }

  void step_into(const std::string& name) {
    if (name == "_modules" || name == "_parameters" ||
        name == "_buffers") {  // model.fc, model.weight
      modules_ = true;
      return;
    }
    if (name.ends_with("_hooks") && name.starts_with("_")) {
      is_of(HolderKind::hook);
      container_ = path_ + "." + name;
    }
    path_ += "." + name;
  }

  Holder& holder_;
  std::string path_;
  std::string container_;
  bool fixed_ = false;
  bool is_output_ = false;
  bool modules_ = false;
};

}  // namespace

Holder describe_chain(const HolderChain& found) {
  Holder holder;
  const auto& chain = found.chain;
  if (chain.empty()) {
    return holder;
  }
  PathWriter writer(holder);
  if (found.root) {
    holder.root = found.root->scope;
    writer.begin(found.root->name);
  } else {
    holder.root = "in a reference cycle";
    writer.begin(Py_TYPE(chain.front())->tp_name);
  }
  for (size_t i = 0; i + 1 < chain.size(); ++i) {
    writer.go(i == 0 ? nullptr : chain[i - 1], chain[i], chain[i + 1]);
  }
  writer.finish();
  if (!found.root) {
    holder.kind = HolderKind::cycle;
  }
  return holder;
}

}  // namespace brimful
