#include "bindings/pipeline_value.h"

#include <torch/csrc/autograd/python_variable.h>

#include "bindings/callbacks.h"
#include "bindings/form_bytes.h"
#include "bindings/split_types.h"
#include "bindings/structure.h"

namespace brimful {
namespace {

/// Stands where a tensor was.
const py::handle& placeholder() {
  static const py::handle object = py::module_::import("builtins").attr("object")().release();
  return object;
}

/// The structure with placeholders. Parts of it may belong to Python alone, so that it dies under the GIL.
class PythonForm : public pipeline::Form {
 public:
  explicit PythonForm(py::object skeleton) : skeleton_(std::move(skeleton)) {}
  ~PythonForm() override {
    const Gil gil;
    skeleton_ = py::object();
  }
  PythonForm(const PythonForm&) = delete;
  PythonForm& operator=(const PythonForm&) = delete;

  std::string to_string() const override {
    const Gil gil;
    return type_name(skeleton_);
  }
  void write(pipeline::FormWriter& writer) const override {
    call_python([&] { write_form(skeleton_, placeholder(), writer); });
  }
  const py::object& skeleton() const { return skeleton_; }

 private:
  py::object skeleton_;
};

std::shared_ptr<const pipeline::Form> python_form(pipeline::FormReader& reader) {
  return call_python(
      [&] { return std::make_shared<PythonForm>(read_form(reader, placeholder())); });
}

/// Whether a BlockMask stays open, so that its tensors are parts.
enum class BlockMasks : uint8_t { open, close };

/// The structure with each leaf replaced.
template <typename Replace>
py::object rebuilt(const py::handle& part, BlockMasks masks, const Replace& replace) {
  auto kind = part_kind(part);
  py::object object = py::reinterpret_borrow<py::object>(part);
  if (kind == Kind::whole) {
    object = opened_block_mask(part);
    kind = object.is(part) ? kind : Kind::tuple;
  }
  kind = kind == Kind::packed ? Kind::tuple : kind;
  if (!has_entries(kind)) {
    return replace(part);
  }
  const WalkDepth depth;
  const auto before = entries_of(object, kind);
  auto entries = before;
  for (auto& entry : entries) {
    entry.value = rebuilt(entry.value, masks, replace);
  }
  auto made = rebuild(object, kind, before, entries);
  return masks == BlockMasks::close ? closed_block_mask(made) : made;
}
}  // namespace

void take_forms() {
  pipeline::set_form_maker(&python_form);
}

pipeline::Value as_value(const py::handle& object) {
  pipeline::Value value;
  if (THPVariable_Check(object.ptr())) {
    value.tensors.push_back(THPVariable_Unpack(object.ptr()));
    return value;
  }
  auto skeleton = rebuilt(object, BlockMasks::open, [&](const py::handle& leaf) {
    if (!THPVariable_Check(leaf.ptr())) {
      return py::reinterpret_borrow<py::object>(leaf);
    }
    value.tensors.push_back(THPVariable_Unpack(leaf.ptr()));
    return py::reinterpret_borrow<py::object>(placeholder());
  });
  value.form = std::make_shared<PythonForm>(std::move(skeleton));
  return value;
}

py::object as_object(const pipeline::Value& value) {
  if (value.form == nullptr) {
    return value.tensors.size() == 1 ? py::cast(value.tensors[0])
                                     : py::object(py::tuple(py::cast(value.tensors)));
  }
  const auto* form = dynamic_cast<const PythonForm*>(value.form.get());
  TORCH_CHECK_TYPE(form != nullptr, "a stage in Python got a structure from a stage in C++ (form: ",
                   value.form->to_string(), "); pass tensors between such stages");
  size_t next = 0;
  return rebuilt(form->skeleton(), BlockMasks::close, [&](const py::handle& leaf) -> py::object {
    return leaf.is(placeholder()) ? py::cast(value.tensors.at(next++))
                                  : py::reinterpret_borrow<py::object>(leaf);
  });
}

}  // namespace brimful
