#pragma once
#include <cstdint>
#include <string>

#include "bindings/bindings.h"

namespace brimful {

/// Which rows a function of the program's gets, for its errors. Needs the GIL.
class PieceNote {
 public:
  /// Rows [begin, end) of `rows`. `whole`: what became of the batch in one piece, such as "never run whole".
  static std::string of(int64_t begin, int64_t end, int64_t rows, const char* whole);

  /// Calls `fn`; an error of Python's gets the note that `note` returns, unless that is empty or memory ran out.
  template <typename Fn, typename Note>
  static auto with(const Fn& fn, const Note& note) -> decltype(fn()) {
    try {
      return fn();
    } catch (py::error_already_set& error) {
      if (is_for_notes(error)) {
        add(error, note());
      }
      throw;
    }
  }

 private:
  static bool is_for_notes(const py::error_already_set& error);
  static void add(py::error_already_set& error, const std::string& note);
};

}  // namespace brimful
