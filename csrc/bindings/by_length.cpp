#include "bindings/by_length.h"

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/batch.h"
#include "bindings/callbacks.h"
#include "bindings/piece_note.h"
#include "bindings/sizer_parts.h"

namespace brimful {
namespace {
/// The rows, the loss function and the model: let go of without the GIL.
using Called = std::shared_ptr<std::vector<py::object>>;

/// `place`: nothing for the rows that are asked for; else as many like the one there.
PieceWork work_on(const Called& called, std::optional<int64_t> place) {
  const auto forward = [called, place](int64_t begin, int64_t end) {
    return call_python([&] {
      const auto& rows = called->at(0);
      const py::object piece =
          place ? rows.attr("like")(*place, end - begin) : rows.attr("piece")(begin, end);
      const auto weight = place ? static_cast<double>(end - begin)
                                : py::float_(rows.attr("weight")(begin, end)).cast<double>();
      return PieceNote::with(
          [&] { return as_piece_loss(called->at(1)(called->at(2), piece), weight); },
          [&] { return place ? "" : rows.attr("note")(begin, end).cast<std::string>(); });
    });
  };
  return {forward, run_python_backward, {}};
}

void put_rows(StepInput& input, const Called& called) {
  const auto& rows = called->at(0);
  auto lengths = std::make_shared<RowLengths>();
  lengths->lengths = rows.attr("lengths").cast<std::vector<int64_t>>();
  lengths->order = rows.attr("order").cast<std::vector<int64_t>>();
  lengths->packed = rows.attr("packed").cast<bool>();
  if (lengths->lengths.empty()) {
    input.rows.reset();  // none of this rank's rows counts
    return;
  }
  const auto kind_at = [called](int64_t place) {
    return call_python([&] { return row_kind_of(called->at(0).attr("like")(place, 1)); });
  };
  lengths->kind_at = kind_at;
  lengths->work_at = [called](int64_t place) { return work_on(called, place); };
  input.rows = std::ssize(lengths->lengths);
  input.kind = kind_at(0);
  input.ask_kind = [kind_at] { return kind_at(0); };
  input.weight = py::float_(rows.attr("weight")(0, *input.rows)).cast<double>();
  input.by_length = std::move(lengths);
}
}  // namespace

PieceWork put_lengths(StepInput& input, const py::object& rows, const py::object& loss_fn,
                      const py::object& model) {
  const auto called = shared_object(std::vector<py::object>{rows, loss_fn, model});
  try {  // what is wrong here must fail the step, not this call: the other ranks wait
    put_rows(input, called);
  } catch (...) {
    input.error = std::current_exception();
  }
  return work_on(called, std::nullopt);
}

}  // namespace brimful
