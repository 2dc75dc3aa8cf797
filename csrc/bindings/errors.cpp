#include <brimful/error.h>
#include <brimful/launch/members.h>
#include <brimful/log.h>
#include <brimful/step/oom.h>
#include <torch/csrc/Exceptions.h>

#include <system_error>

#include "base/one_line.h"
#include "bindings/callbacks.h"
#include "bindings/native_read.h"

namespace brimful {
namespace {
// Owned by the module; plain pointers, because they are used until the interpreter ends.
struct ErrorTypes {
  PyObject* rank_failed = nullptr;
  PyObject* rank_out_of_memory = nullptr;
  PyObject* batch_too_large = nullptr;
  PyObject* half_step = nullptr;
  PyObject* plan_mismatch = nullptr;
  PyObject* left_out = nullptr;
  PyObject* store_lost = nullptr;
  PyObject* out_of_memory = nullptr;  ///< torch's
  PyObject* distributed = nullptr;    ///< torch's: a communicator is lost
  PyObject* accelerator = nullptr;    ///< torch's, with the device's code
};
ErrorTypes error_types;

PyObject* new_type(py::module_& m, const char* name, const char* doc, const py::tuple& bases) {
  const auto full_name = std::string("brimful.") + name;
  PyObject* type = PyErr_NewExceptionWithDoc(full_name.c_str(), doc, bases.ptr(), nullptr);
  if (type == nullptr) {
    throw py::error_already_set();
  }
  m.attr(name) = py::handle(type);
  return type;
}

/// Any bytes, since a file's name or another language's error may be in a text.
py::str as_str(std::string_view text) {
  return py::str(as_utf8(text));
}

void set_error(PyObject* type, const c10::Error& error) {
  PyErr_SetObject(type, as_str(error.what_without_backtrace()).ptr());
}

void set_rank_failed(PyObject* type, const RankFailed& error) {
  py::object instance =
      py::reinterpret_borrow<py::object>(type)(as_str(error.what_without_backtrace()));
  instance.attr("rank") = error.rank();
  instance.attr("step") = error.step();
  instance.attr("kind") = error.kind() == Status::out_of_memory ? "out_of_memory" : "error";
  PyErr_SetObject(type, instance.ptr());
}

template <typename Pairs>
py::dict dict_of_bytes(const Pairs& pairs) {
  py::dict dict;
  for (const auto& [name, bytes] : pairs) {
    dict[py::str(name)] = bytes;
  }
  return dict;
}

void set_too_large(const BatchTooLarge& error) {
  const auto& facts = error.facts();
  py::object instance = py::reinterpret_borrow<py::object>(error_types.batch_too_large)(
      as_str(error.what_without_backtrace()));
  const bool is_known = !facts.device.empty();
  py::list tried;
  for (const auto& split : facts.tried) {
    tried.append(py::make_tuple(split.pieces, split.piece_rows, split.peak_bytes));
  }
  instance.attr("rank") = is_known ? py::object(py::int_(facts.rank)) : py::none();
  instance.attr("device") = is_known ? py::object(py::str(facts.device)) : py::none();
  instance.attr("tried") = tried;
  instance.attr("bytes") = dict_of_bytes(facts.bytes);
  instance.attr("limit_bytes") = facts.limit_bytes;
  instance.attr("held") = dict_of_bytes(facts.held);
  instance.attr("advice") = facts.advice;
  PyErr_SetObject(error_types.batch_too_large, instance.ptr());
}

void set_accelerator_error(const c10::AcceleratorError& error) {
  py::object instance = py::reinterpret_borrow<py::object>(error_types.accelerator)(
      as_str(error.what_without_backtrace()));
  instance.attr("error_code") = error.get_error_code();
  PyErr_SetObject(error_types.accelerator, instance.ptr());
}

void translate(std::exception_ptr pointer) {  // NOLINT(*-unnecessary-value-param): pybind11's type
  try {
    if (pointer) {
      std::rethrow_exception(pointer);
    }
  } catch (const RankOutOfMemory& e) {
    set_rank_failed(error_types.rank_out_of_memory, e);
  } catch (const RankFailed& e) {
    set_rank_failed(error_types.rank_failed, e);
  } catch (const BatchTooLarge& e) {
    set_too_large(e);
  } catch (const HalfStepError& e) {
    set_error(error_types.half_step, e);
  } catch (const PlanMismatch& e) {
    set_error(error_types.plan_mismatch, e);
  } catch (const LeftOut& e) {
    set_error(error_types.left_out, e);
  } catch (const StoreLost& e) {
    set_error(error_types.store_lost, e);
  } catch (const c10::ValueError& e) {
    set_error(PyExc_ValueError, e);
  } catch (const c10::TypeError& e) {
    set_error(PyExc_TypeError, e);
  } catch (const c10::NotImplementedError& e) {
    set_error(PyExc_NotImplementedError, e);
  } catch (const c10::OutOfMemoryError& e) {
    set_error(error_types.out_of_memory, e);
  } catch (const c10::AcceleratorError& e) {
    set_accelerator_error(e);
  } catch (const std::system_error& e) {
    // Of the file system: OSError makes a FileNotFoundError and the like of it.
    const auto instance = py::handle(PyExc_OSError)(e.code().value(), as_str(e.what()));
    PyErr_SetObject(py::type::of(instance).ptr(), instance.ptr());
  } catch (python_error& e) {
    e.restore();
  } catch (const c10::Error& e) {
    set_error(PyExc_RuntimeError, e);
  }
}

bool is_a(const py::handle& error, PyObject* type) {
  return PyErr_GivenExceptionMatches(error.ptr(), type) != 0;
}

bool speaks_of_own_memory(const py::error_already_set& error) {
  // A peer's failure is not this rank's own shortage, although it is an out-of-memory error to Python.
  return !error.matches(py::handle(error_types.rank_failed)) && ran_out_of_memory(error.value());
}

/// With the GIL held, by BareGil. Where torch left the error in the thread's state too, it is taken out.
py::error_already_set as_pybinds(python_error& error) {
  error.persist();
  PyErr_Restore(py::handle(error.type).inc_ref().ptr(), py::handle(error.value).inc_ref().ptr(),
                py::handle(error.traceback).inc_ref().ptr());
  if (PyErr_Occurred() == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "an error of Python was lost on its way through C++");
  }
  return {};
}

detail::BindingError read_error(const py::error_already_set& error) {
  const auto& value = error.value();
  return {type_name(value.ptr()) + ": " + message_of(value.ptr()), speaks_of_own_memory(error)};
}

std::optional<detail::BindingError> read_python_error(const std::exception_ptr& error) {
  if (Py_IsInitialized() == 0) {
    return std::nullopt;
  }
  try {
    std::rethrow_exception(error);
  } catch (const py::error_already_set& of_pybind) {
    const Gil gil;
    return read_error(of_pybind);
  } catch (python_error& of_torch) {
    const BareGil gil;
    return read_error(as_pybinds(of_torch));
  } catch (...) {
    return std::nullopt;
  }
}

void make_types(py::module_& m) {
  const py::object out_of_memory = py::module_::import("torch").attr("OutOfMemoryError");
  error_types.out_of_memory = py::object(out_of_memory).release().ptr();
  error_types.accelerator =
      py::object(py::module_::import("torch").attr("AcceleratorError")).release().ptr();
  error_types.distributed =
      py::object(py::module_::import("torch.distributed").attr("DistError")).release().ptr();
  error_types.rank_failed = new_type(
      m, "RankFailed",
      "A rank failed the step and every rank raises: parameters, buffers and RNG are as before "
      "it.\n\n"
      "Attributes: rank (the lowest that failed), step, kind ('error' or 'out_of_memory').",
      py::make_tuple(py::handle(PyExc_RuntimeError)));
  error_types.rank_out_of_memory = new_type(
      m, "RankOutOfMemory",
      "The rank that failed had run out of memory, and nothing was left to split or to retry.",
      py::make_tuple(py::handle(error_types.rank_failed), out_of_memory));
  error_types.batch_too_large =
      new_type(m, "BatchTooLarge",
               "Raised on the rank for which no split of the batch fits.\n\n"
               "Attributes: rank, device, tried (a list of (pieces, rows of the largest, peak in "
               "bytes), empty where the optimizer's step would not fit), bytes (of the last peak "
               "by category), limit_bytes, held (bytes beside tensors), advice (what to try next, "
               "in this order).",
               py::make_tuple(out_of_memory));
  error_types.half_step =
      new_type(m, "HalfStepError",
               "The optimizer failed in the middle of its step: parameters may be "
               "half updated. Never retried.",
               py::make_tuple(py::handle(PyExc_RuntimeError)));
  error_types.plan_mismatch = new_type(
      m, "PlanMismatch",
      "The ranks' models differ in the number, shape, dtype or values of their parameters, or "
      "their sizers in the state that they loaded.",
      py::make_tuple(py::handle(PyExc_ValueError)));
  error_types.left_out =
      new_type(m, "LeftOut",
               "The other ranks formed a group without this process, which was silent "
               "for too long: it must be started again, and joins the next group.",
               py::make_tuple(py::handle(PyExc_RuntimeError)));
  error_types.store_lost =
      new_type(m, "StoreLost",
               "The store through which ranks find each other is gone, so that no "
               "new group can be formed.",
               py::make_tuple(py::handle(PyExc_RuntimeError)));
}

void set_throwers() {
  // From an autograd callback only an error that Python has set reaches the caller of backward() with its type.
  detail::set_rank_failed_thrower([](const RankFailed& error) {
    const py::gil_scoped_acquire gil;
    const bool memory = error.kind() == Status::out_of_memory;
    set_rank_failed(memory ? error_types.rank_out_of_memory : error_types.rank_failed, error);
    throw py::error_already_set();
  });
  detail::set_plan_mismatch_thrower([](const PlanMismatch& error) {
    const py::gil_scoped_acquire gil;
    set_error(error_types.plan_mismatch, error);
    throw py::error_already_set();
  });
}

void bind_log(py::module_& m) {
  m.def("_set_log_sink", [](py::function write) {
    // Leaked: lines may come while the interpreter ends.
    auto* kept = new py::function(std::move(write));
    set_log_sink([kept](LogLevel level, const std::string& line) {
      if (Py_IsInitialized() == 0) {
        return;
      }
      const Gil gil;
      try {
        (*kept)(static_cast<int>(level), as_str(line));
      } catch (py::error_already_set& e) {
        e.discard_as_unraisable("brimful's log sink");
      }
    });
  });
  m.def("_set_log_level", [](int level) { set_log_level(static_cast<LogLevel>(level)); });
  m.def("_log_level", [] { return static_cast<int>(log_level()); });
}
}  // namespace

bool ran_out_of_memory(const py::handle& error) {
  if (is_a(error, error_types.out_of_memory) || is_a(error, PyExc_MemoryError)) {
    return true;
  }
  return is_a(error, PyExc_RuntimeError) && !is_a(error, error_types.rank_failed) &&
         !is_a(error, error_types.distributed) && is_out_of_memory_message(message_of(error.ptr()));
}

void throw_to_core(py::error_already_set& error) {
  if (!speaks_of_own_memory(error)) {
    throw error;
  }
  C10_THROW_ERROR(OutOfMemoryError, message_of(error.value().ptr()));
}

void throw_to_core(python_error& error) {
  const BareGil gil;
  auto read = as_pybinds(error);
  throw_to_core(read);
}

void bind_errors(py::module_& m) {
  make_types(m);
  py::register_local_exception_translator(&translate);
  set_throwers();
  detail::set_binding_error_reader(&read_python_error);
  m.def("_is_out_of_memory", &ran_out_of_memory, py::arg("error"));
  bind_log(m);
}

}  // namespace brimful
