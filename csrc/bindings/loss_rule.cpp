// How the loss of a program's batch is composed, as a sizer finds it out.
#include <brimful/sizer/rule_vote.h>

#include "bindings/around_work.h"
#include "bindings/batch.h"
#include "bindings/module_entries.h"
#include "bindings/sizer_parts.h"
#include "sizer/rule_evidence.h"

namespace brimful {
namespace {
using detail::LossTrial;
using detail::RuleEvidence;
using detail::TrialPlan;
using detail::TrialWindow;
using Window = std::tuple<int64_t, int64_t, int64_t>;

/// What the trial runs, and around what.
struct Tried {
  py::object batch;
  py::function loss_fn;
  py::object around;
  std::shared_ptr<Splitter> splitter;
  std::shared_ptr<ModuleEntries> entries;
  std::vector<std::pair<py::function, py::function>> keepers;
  c10::Device device;
};

LossTrial run_trial(const Tried& tried, const std::vector<at::Tensor>& parameters,
                    const TrialPlan& plan) {
  Transaction transaction({}, {tried.device});
  transaction.follow(tried.entries);
  for (const auto& [capture, restore] : tried.keepers) {
    transaction.add(keeper_of(capture, restore));
  }
  const auto rows = tried.splitter->rows_of(tried.batch);
  const auto forward = [&](int64_t begin, int64_t end) {
    const With with(tried.around);
    return call_python([&] {
      return as_piece_loss(tried.loss_fn(tried.splitter->slice(tried.batch, rows, begin, end)),
                           end - begin);
    });
  };
  const auto gradients = [&](const at::Tensor& loss, const at::Tensor& seed,
                             const std::vector<at::Tensor>& inputs) {
    return gradients_within(tried.around, loss, seed, inputs);
  };
  const auto tensors = [&](int64_t begin, int64_t end) {
    return call_python([&] { return tried.splitter->tensors(tried.batch, rows, begin, end); });
  };
  const py::gil_scoped_release no_gil;
  return detail::try_loss(parameters, transaction, {forward, gradients, tensors}, plan);
}

void bind_evidence(py::module_& m) {
  py::class_<RuleEvidence>(m, "_RuleEvidence")
      .def(py::init<int64_t, int64_t>(), py::arg("rules"), py::arg("sum"))
      .def(
          "window",
          [](const RuleEvidence& self, const at::Tensor& counts,
             int64_t most_rows) -> std::optional<Window> {
            const auto window = self.window(counts, most_rows);
            if (!window) {
              return std::nullopt;
            }
            return Window{window->begin, window->cut, window->end};
          },
          py::arg("counts"), py::arg("most_rows"))
      .def_property_readonly("agreeing", &RuleEvidence::agreeing)
      .def_property_readonly("knows", &RuleEvidence::knows)
      .def_property_readonly("is_done", &RuleEvidence::is_done)
      .def_property_readonly("repeats", &RuleEvidence::repeats)
      .def_property_readonly("refuses", &RuleEvidence::refuses)
      .def_property_readonly("distances",
                             [](const RuleEvidence& self) { return self.last().distances; })
      .def_property_readonly("repeat_distance",
                             [](const RuleEvidence& self) { return self.last().repeat_distance; })
      .def_property_readonly("tolerance",
                             [](const RuleEvidence& self) { return self.last().tolerance; });
}
}  // namespace

void bind_loss_rule(py::module_& m) {
  bind_evidence(m);
  py::class_<RuleVote, std::shared_ptr<RuleVote>>(m, "_RuleVote")
      .def(py::init([](uint32_t kind, uint64_t agreeing, bool knows, std::vector<std::string> names,
                       int64_t runs, double ms) {
             return std::make_shared<RuleVote>(
                 RuleVote{kind, agreeing, knows, std::move(names), runs, ms});
           }),
           py::kw_only(), py::arg("kind") = 0, py::arg("agreeing") = 0, py::arg("knows") = false,
           py::arg("names") = std::vector<std::string>(), py::arg("runs") = 0, py::arg("ms") = 0)
      .def_readonly("agreeing", &RuleVote::agreeing)
      .def_readonly("knows", &RuleVote::knows)
      .def_readonly("chosen", &RuleVote::chosen)
      .def("settle", [](RuleVote& self) { self.settle({}); });
  m.def(
      "_try_loss",
      [](RuleEvidence& evidence, const at::Tensor& counts, const Window& window, py::object batch,
         py::function loss_fn, py::object around, const std::vector<at::Tensor>& parameters,
         std::shared_ptr<ModuleEntries> entries, c10::Device device,
         std::vector<std::pair<py::function, py::function>> keepers,
         std::shared_ptr<Splitter> splitter, bool gradients, double seed,
         const py::function& coarsest_epsilon) {
        const auto [begin, cut, end] = window;
        TrialPlan plan;
        plan.window = {begin, cut, end};
        plan.weights = evidence.weights(counts, plan.window);
        plan.repeats = !evidence.knows();
        plan.gradients = gradients;
        plan.seed = seed;
        plan.coarsest_epsilon = [&] {
          return call_python([&] { return coarsest_epsilon().cast<double>(); });
        };
        const auto trial =
            run_trial({std::move(batch), std::move(loss_fn), std::move(around), std::move(splitter),
                       std::move(entries), std::move(keepers), device},
                      parameters, plan);
        evidence.learn(trial);
        return trial.comparable;
      },
      py::kw_only(), py::arg("evidence"), py::arg("counts"), py::arg("window"), py::arg("batch"),
      py::arg("loss_fn"), py::arg("around"), py::arg("parameters"), py::arg("entries"),
      py::arg("device"), py::arg("keepers"), py::arg("splitter"), py::arg("gradients"),
      py::arg("seed"), py::arg("coarsest_epsilon"));
}

}  // namespace brimful
