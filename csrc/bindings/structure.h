#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/step/kept_batch.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "bindings/bindings.h"

namespace brimful {

/// What an object of Python is to the walk through a batch.
enum class Kind : uint8_t { whole, tensor, jagged, packed, mapping, dataclass, list, tuple };

/// A mapping's key, a dataclass's field or a sequence's index, and what is there.
struct Entry {
  py::object key;
  py::object value;
};

Kind part_kind(const py::handle& object);

inline bool has_entries(Kind kind) {
  return kind >= Kind::mapping;
}

std::vector<Entry> entries_of(const py::handle& object, Kind kind);

/// How an entry is written in Python: ['x'], .x, [0].
std::string path_of(Kind kind, const Entry& entry);

/// An object of the same type with other entries; what it holds beside them is kept. The original, if it cannot be
/// changed and nothing has.
/// @throws TypeError, from what its type says, if it cannot be made
py::object rebuild(const py::handle& original, Kind kind, const std::vector<Entry>& before,
                   const std::vector<Entry>& entries);

/// Calls `visit` for every tensor in an object's structure.
void for_each_tensor(const py::handle& object, const std::function<void(const at::Tensor&)>& visit);

/// Every tensor in an object's structure with its path, which begins with `path`; of a jagged one its values.
std::vector<NamedTensor> named_tensors(const py::handle& object, const std::string& path);

/// True if a part of an object's structure is of this kind.
bool holds(const py::handle& object, Kind kind);

/// Turns too deep a structure, such as a list that holds itself, into a c10::ValueError.
class WalkDepth {
 public:
  WalkDepth();
  ~WalkDepth();
  WalkDepth(const WalkDepth&) = delete;
  WalkDepth& operator=(const WalkDepth&) = delete;
};

std::string type_name(const py::handle& object);

/// Looks up the types that part_kind() distinguishes; once, when the module is imported.
void load_structure_types();

}  // namespace brimful
