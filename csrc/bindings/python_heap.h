#pragma once
#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "bindings/array_bases.h"
#include "bindings/bindings.h"

namespace brimful {

/// A variable of the program that paths to an object may begin with.
struct PythonRoot {
  std::string name;
  std::string scope;  ///< "global of train", "local of main()"
};

/// Local variables of all frames of all threads, and global ones of all modules; none of torch's and brimful's own.
class PythonRoots {
 public:
  PythonRoots();
  /// Nothing if `object` is no variable's value. `parent`, if it is a module's dict, makes it a global one.
  const PythonRoot* local(PyObject* object) const;
  std::optional<PythonRoot> global(PyObject* parent, PyObject* object) const;
  /// The values of the local variables and the modules' dicts.
  const std::vector<py::object>& objects() const { return objects_; }

 private:
  void add_frames();
  void add_modules();

  std::unordered_map<PyObject*, PythonRoot> locals_;
  std::unordered_map<PyObject*, std::string> modules_;  // by dict
  std::vector<py::object> objects_;                     // of both, kept
};

/// The objects that Python's garbage collector knew when this was made; it keeps them. Of those that gc.freeze() has put
/// aside, which it lists nowhere: what the others and the roots lead to. With the GIL held.
class PythonHeap {
 public:
  explicit PythonHeap(const PythonRoots& roots);

  std::vector<PyObject*> tensors() const;
  /// The objects that refer to each of `wanted`, by one pass over all.
  std::unordered_map<PyObject*, std::vector<PyObject*>> referrers(
      const std::unordered_set<PyObject*>& wanted) const;

 private:
  void add_frozen(const std::vector<py::object>& roots);

  py::list objects_;
  ArrayBases arrays_;
};

/// Calls `fn` for the tensors among the variables of the frames of all threads, global ones of their modules among them, and
/// among the attributes of objects that are such variables; none of torch's and brimful's own.
void for_each_tensor(const std::function<void(const PythonRoot& root, PyObject* tensor)>& fn);

/// By its type, so that no proxy is asked.
bool is_tensor(PyObject* object);

/// The name of the local variable of a frame with this value; empty if there is none.
std::string local_name(py::handle frame, PyObject* value);

/// The key of a dict's value; null if it has none such. Borrowed.
PyObject* key_of(PyObject* dict, PyObject* value);

}  // namespace brimful
