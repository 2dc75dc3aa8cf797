#include "bindings/piece_note.h"

namespace brimful {

std::string PieceNote::of(int64_t begin, int64_t end, int64_t rows, const char* whole) {
  if (begin == 0 && end == rows) {
    return "";
  }
  return "in a piece of the batch, which was " + std::string(whole) +
         " (rows: " + std::to_string(begin) + " to " + std::to_string(end) + " of " +
         std::to_string(rows) +
         "); a model that takes the whole but not the piece needs size_fn and split_fn: for "
         "entries that hold "
         "places of rows, or widths that are computed from lengths";
}

bool PieceNote::is_for_notes(const py::error_already_set& error) {
  const py::object of_torch = py::module_::import("torch").attr("OutOfMemoryError");
  return error.matches(PyExc_Exception) && !error.matches(PyExc_MemoryError) &&
         !error.matches(of_torch);
}

void PieceNote::add(py::error_already_set& error, const std::string& note) {
  if (note.empty()) {
    return;
  }
  try {
    error.value().attr("add_note")(note);
  } catch (py::error_already_set& own) {  // an exception class of another kind
    own.discard_as_unraisable("add_note");
  }
}

}  // namespace brimful
