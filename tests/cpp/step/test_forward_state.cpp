// What a forward may change of modules, in each form.
#include <ATen/ATen.h>
#include <brimful/step/forward_state.h>
#include <c10/core/InferenceMode.h>
#include "support/catch.h"

#include <functional>
#include <string>
#include <vector>

namespace test_forward_state {

using brimful::ForwardState;
using brimful::names_of;

namespace {
struct Form {
  std::string name;
  std::function<void(at::Tensor& buffer)> change;
};

/// A module of torch::nn holds its buffer by a tensor that it does not replace, but for `anew`.
const std::vector<Form> kForms = {
    {"in place", [](at::Tensor& buffer) { buffer.add_(1); }},
    {"behind the version", [](at::Tensor& buffer) { buffer.variable_data().add_(1); }},
    {"anew", [](at::Tensor& buffer) { buffer = buffer + 1; }},
    {"larger",
     [](at::Tensor& buffer) {
       buffer.resize_({2, 4}).fill_(9);
     }},
    {"smaller", [](at::Tensor& buffer) { buffer.resize_({1}).fill_(9); }},
    {"emptied", [](at::Tensor& buffer) { buffer.resize_({0}); }},
    {"transposed", [](at::Tensor& buffer) { buffer.t_().add_(1); }},
    {"other data", [](at::Tensor& buffer) { buffer.set_data(at::ones({5})); }},
    {"other dtype",
     [](at::Tensor& buffer) {
       buffer.set_data(at::ones({2, 2}, at::kLong));
     }},
    {"storage let go", [](at::Tensor& buffer) { buffer.set_(); }},
};

bool is_as(const at::Tensor& tensor, const at::Tensor& other) {
  return tensor.scalar_type() == other.scalar_type() && tensor.strides() == other.strides() &&
         at::equal(tensor, other);
}
}  // namespace

TEST_CASE("A forward's changes are undone, whatever they are", "[step]") {
  const auto form = GENERATE(from_range(kForms));
  const bool waits = GENERATE(true, false);
  CAPTURE(form.name, waits);
  const auto values = at::arange(4, at::kFloat).view({2, 2});
  auto buffer = values.clone();
  ForwardState state({}, names_of([&] { return std::vector<at::Tensor>{buffer, buffer}; }));
  CHECK(state.copies().size() == 1);
  for (int step = 0; step < 3; ++step) {
    state.capture();
    for (int attempt = 0; attempt < 2; ++attempt) {
      form.change(buffer);
      waits ? state.restore() : state.rewind();
      CHECK(is_as(buffer, values));
    }
  }
  form.change(buffer);
  const auto changed = buffer.clone();
  state.capture();
  form.change(buffer);
  state.restore();
  CHECK(is_as(buffer, changed));
}

TEST_CASE("What is made in inference mode is restored outside of it, and the other way", "[step]") {
  auto buffer = at::zeros({2});
  ForwardState state({}, names_of([&] { return std::vector<at::Tensor>{buffer}; }));
  for (const bool first : {true, false}) {
    for (const bool second : {true, false}) {
      CAPTURE(first, second);
      {
        const c10::InferenceMode mode(first);
        buffer = at::ones({2});
        state.capture();
        buffer.add_(1);
        buffer = buffer + 1;
      }
      const c10::InferenceMode mode(second);
      state.restore();
      CHECK(at::equal(buffer, at::ones({2})));
    }
  }
}

TEST_CASE("Sparse, expanded and meta tensors are left where nothing has changed them", "[step]") {
  const auto sparse = at::eye(3).to_sparse();
  const auto expanded = at::ones({1}).expand({4});
  const auto meta = at::empty({2}, at::kMeta);
  ForwardState state({sparse, meta}, names_of([&] { return std::vector<at::Tensor>{expanded}; }));
  state.capture();
  state.restore();
  sparse.mul_(2);
  state.restore();
  CHECK(at::equal(sparse.to_dense(), at::eye(3)));
}

TEST_CASE("A buffer that a module of torch::nn registers late is refused when it is to be undone",
          "[step]") {
  std::vector<at::Tensor> buffers{at::zeros({})};
  ForwardState state({}, names_of([&] { return buffers; }));
  state.capture();
  buffers[0].add_(1);
  buffers.push_back(at::ones({}));
  CHECK_THROWS_WITH(state.restore(),
                    Catch::Contains("registered a buffer in a step that is undone") &&
                        Catch::Contains("buffers: 2, before: 1") &&
                        Catch::Contains("register it before the first step"));
  CHECK(buffers[0].item<float>() == 0);
  state.capture();  // from now on it is one like others
  buffers[1].add_(1);
  state.restore();
  CHECK(buffers[1].item<float>() == 1);
}

}  // namespace test_forward_state
