#include <brimful/step/stop.h>

#include "bindings/bindings.h"

namespace brimful {

void bind_stop(py::module_& m) {
  m.def("request_stop", &request_stop, py::arg("signal") = 0,
        "Ask that training ends: all ranks then end it after the same step.\n\n"
        "A loop over ``BatchSizer.batches`` ends by itself; ``Outcome.stop`` and\n"
        "``DistributedDataParallel.stop`` are true on all ranks after that step. Costs no "
        "collective. From any thread.\n"
        "``signal``: the one that asked; 0: the program.");
  m.def("stop_requested", &stop_requested,
        "Whether this process was asked to stop, or learnt of another rank's request by a step.");
  m.def("stop_exit_code", &stop_exit_code,
        "What the process should exit with: 128 + the signal's number, which launchers expect "
        "(SIGTERM: 143), and 0\n"
        "where the program asked, and without a request. After a step that stops the same on all "
        "ranks.");
  m.def("clear_stop", &clear_stop,
        "Forget a request, to train again in this process. On all ranks, between two steps.");
  m.def(
      "stop_on", [](const py::args& signals) { stop_on(signals.cast<std::vector<int>>()); },
      "Make each of the signals a request to stop: ``stop_on(signal.SIGTERM, signal.SIGUSR1)``.\n\n"
      "A signal that comes once more does what it did before this call. Processes that are forked "
      "later end as\n"
      "before. Raises ``ValueError`` for a signal that cannot be handled.");
}

}  // namespace brimful
