#include <brimful/launch/checkpoint.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "bindings/bindings.h"
#include "bindings/callbacks.h"
#include "launch/meet.h"
#include "step/engine_queue.h"

namespace brimful {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

/// What torch.save writes to; only for the time of the call that made it.
struct FileSink {
  const detail::ByteSink* sink;

  size_t write(const py::buffer& bytes) const {
    if (sink == nullptr) {
      throw py::value_error("the checkpoint's file is closed");
    }
    const auto view = bytes.request();
    const auto count = static_cast<size_t>(view.size * view.itemsize);
    const py::gil_scoped_release no_gil;
    return (*sink)(view.ptr, count);
  }
};

void save_with(const Group& group, const std::string& path, const py::function& save) {
  const py::gil_scoped_release no_gil;
  detail::write_on_rank0(group, path, [&](const detail::ByteSink& sink) {
    call_python([&] {
      auto file = std::make_shared<FileSink>(FileSink{&sink});
      try {
        save(file);
      } catch (...) {
        file->sink = nullptr;
        throw;
      }
      file->sink = nullptr;
    });
  });
}

py::object load_with(const Group& group, const std::string& path, const py::function& load) {
  py::object value;
  {
    const py::gil_scoped_release no_gil;
    detail::read_together(group, path, [&] { call_python([&] { value = load(); }); });
  }
  return value;
}

}  // namespace

void bind_launch(py::module_& m) {
  py::class_<FileSink, std::shared_ptr<FileSink>>(m, "_FileSink", "What torch.save writes to.")
      .def("write", &FileSink::write, py::arg("bytes"))
      .def("flush", [](const FileSink&) {});
  m.def("_save_on_rank0", &save_with, py::arg("group").none(true), py::arg("path"),
        py::arg("save"));
  m.def(
      "_share_attempt",
      [](const Group& group, const std::string& what, bool out_of_memory, bool failed,
         const std::string& text) {
        const auto end = failed          ? Status::error
                         : out_of_memory ? Status::out_of_memory
                                         : Status::ok;
        const py::gil_scoped_release no_gil;
        return launch::share_attempt(group, what, end, text);
      },
      py::arg("group").none(true), py::arg("what"), py::arg("out_of_memory"), py::arg("failed"),
      py::arg("text"));
  m.def(
      "_empty_engine_queue",
      [](const std::string& device) {
        const py::gil_scoped_release no_gil;
        empty_engine_queue(c10::Device(device));
      },
      py::arg("device"));
  m.def("_load", &load_with, py::arg("group").none(true), py::arg("path"), py::arg("load"));
}

}  // namespace brimful
