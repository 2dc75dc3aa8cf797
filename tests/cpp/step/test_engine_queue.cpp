// What a backward that failed leaves under way in the thread of a CUDA device.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <thread>
#include "step/engine_queue.h"
#include "step/make_node.h"
#include "support/catch.h"
#include "support/gpu.h"

namespace test_engine_queue {

using torch::autograd::Edge;
using torch::autograd::Engine;
using torch::autograd::Node;
using torch::autograd::variable_list;

namespace {
constexpr auto kToFree = std::chrono::milliseconds(300);

struct Ends : Node {
  variable_list apply(variable_list&& /*gradients*/) override { return {}; }
};

struct Fails : Node {
  variable_list apply(variable_list&& /*gradients*/) override {
    throw std::runtime_error("on purpose");
  }
};

struct Forks : Node {
  std::shared_ptr<std::atomic<bool>> freed = std::make_shared<std::atomic<bool>>(false);

  variable_list apply(variable_list&& gradients) override {
    const auto& given = gradients[0];
    auto slow = at::from_blob(
        given.data_ptr(), given.sizes(),
        [given, freed = freed](void* /*data*/) {
          std::this_thread::sleep_for(kToFree);
          *freed = true;
        },
        given.options(), given.device());
    return {at::ones({4}), std::move(slow)};
  }
};

template <typename T>
auto node_on(const at::Tensor& like) {
  auto node = brimful::make_node<T>();
  node->add_input_metadata(like);
  return node;
}
}  // namespace

TEST_CASE("A device's part of a failed backward has ended when its error is raised",
          "[step][gpu]") {
  BRIMFUL_NEEDS_GPUS(1);
  const auto given = at::ones({4}, at::TensorOptions(at::kCUDA));
  std::shared_ptr<std::atomic<bool>> freed;
  const auto backward = [&] {
    (void)node_on<Ends>(
        given);  // a thread's first node is as old as the one that empties its queue
    const auto left = node_on<Ends>(given);            // in the device's thread
    const auto fails = node_on<Fails>(at::ones({4}));  // in this one
    const auto forks = node_on<Forks>(given);
    freed = forks->freed;
    forks->set_next_edges({Edge(fails, 0), Edge(left, 0)});
    Engine::get_default_engine().execute({Edge(forks, 0)}, {given}, false, false, true, {});
  };
  CHECK_THROWS_WITH(brimful::run_backward_cleanly(given.device(), backward), "on purpose");
  CHECK(*freed);
}

}  // namespace test_engine_queue
