// checkpoint() against the same without it, bit for bit.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <brimful/ladder/checkpoint_sequential.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/modules/transformercoder.h>
#include <torch/nn/modules/transformerlayer.h>
#include "support/catch.h"
#include "support/tensors.h"

#include <brimful/sizer/autocast.h>

#include <functional>
#include <string>
#include <tuple>
#include <vector>

namespace test_activation_checkpoint {

using namespace brimful;
using namespace brimful::test;
namespace nn = torch::nn;
using at::Tensor;
using Tensors = std::vector<Tensor>;

namespace {
void seed() {
  at::detail::getDefaultCPUGenerator().get<at::CPUGeneratorImpl>()->set_current_seed(7);
}

Tensor generator_now() {
  return at::detail::getDefaultCPUGenerator().get_state();
}

/// No view: autocast keeps no casts of those.
Tensor leaf(at::IntArrayRef sizes, double salt) {
  return filled(sizes, salt).clone().set_requires_grad(true);
}

/// Calls functions, through checkpoint() or not.
struct Through {
  bool checkpoints;

  template <typename Fn, typename... Inputs>
  auto operator()(Fn fn, Inputs... inputs) const {
    if (checkpoints) {
      return checkpoint(fn, inputs...);
    }
    return brimful::detail::call_function(fn, inputs...);
  }
};

void add_module(Tensors& found, const nn::Module& module) {
  for (const auto& parameter : module.parameters()) {
    found.push_back(parameter.grad());
  }
  for (const auto& buffer : module.buffers()) {
    found.push_back(buffer.clone());
  }
}

/// Gradients and buffers of modules; tensors; and the generator.
template <typename... Modules>
Tensors all_of(Tensors found, const Modules&... modules) {
  (add_module(found, *modules), ...);
  found.push_back(generator_now());
  return found;
}

nn::Sequential block() {
  return nn::Sequential(nn::Linear(4, 6), nn::BatchNorm1d(6), nn::Dropout(0.4), nn::Tanh(),
                        nn::Linear(6, 4));
}

struct Case {
  const char* name;
  std::function<Tensors(const Through&)> run;
};

Tensors with_block(const Through& through, const Tensor& x,
                   const std::function<void(nn::Sequential&)>& prepare = {}) {
  auto model = block();
  if (prepare) {
    prepare(model);
  }
  const auto y = through(model, x);
  y.square().sum().backward();
  return all_of({y, x.grad()}, model);
}

Tensors two_outputs(const Through& through, bool second) {
  nn::Linear first(4, 3);
  nn::Linear other(4, 2);
  const auto x = leaf({5, 4}, 1);
  const auto fn = [=](Tensor a) mutable { return std::make_tuple(first(a), other(a).tanh()); };
  const auto [y, z] = through(fn, x * 2);
  (second ? z : y).square().sum().backward();
  return all_of({y, z, x.grad()}, first, other);
}

Tensors tied(const Through& through) {
  const auto w = leaf({4, 4}, 2);
  const auto x = leaf({3, 4}, 1);
  const auto fn = [=](Tensor a) { return at::linear(at::linear(a, w).tanh(), w).mul(w[0]); };
  const auto before = at::linear(x, w);
  const auto y = at::linear(through(fn, before).tanh() + before, w);
  (y * y).sum().backward();
  return {y, w.grad(), x.grad()};
}

Tensors twice(const Through& through) {
  auto model = block();
  const auto x = leaf({5, 4}, 1);
  const auto y = through(model, through(model, x));
  y.square().sum().backward();
  return all_of({y, x.grad()}, model);
}

Tensors views_and_inputs(const Through& through) {
  const auto w = leaf({4}, 2);
  const auto x = leaf({3, 4}, 1);
  const auto h = x * 2;
  const auto fn = [=](Tensor a) {
    const auto b = a * w;
    return Tensors{b.t(), a, a.view({4, 3}), w, b, b.argmax(1), b.detach(), b};
  };
  const auto y = through(fn, h);
  auto loss = y[0].mul(y[0]).sum() + y[1].sum() + y[2].square().sum() + (y[3] * 3).sum();
  loss = loss + y[4].sum() + y[7].square().sum();
  loss.backward();
  auto found = y;
  found.insert(found.end(),
               {w.grad(), x.grad(), at::scalar_tensor(y[5].requires_grad()),
                at::scalar_tensor(y[6].requires_grad()), at::scalar_tensor(y[4].is_same(y[7])),
                at::scalar_tensor(y[1].is_same(h))});
  return found;
}

Tensors retained(const Through& through) {
  auto model = block();
  const auto x = leaf({5, 4}, 1);
  const auto y = through(model, x).square().sum();
  torch::autograd::backward({y}, {}, /*retain_graph=*/true);
  torch::autograd::backward({y}, {});
  return all_of({y, x.grad()}, model);
}

Tensors nested(const Through& through) {
  auto inner = block();
  auto outer = block();
  const auto x = leaf({5, 4}, 1);
  const auto fn = [=](Tensor a) mutable {
    return through(outer,
                   through(inner, a).relu() + through([](Tensor b) { return b.sin() * b; }, a));
  };
  const auto y = through(fn, x * 1.5);
  y.square().sum().backward();
  return all_of({y, x.grad()}, inner, outer);
}

struct CheckpointedImpl : nn::Module {
  CheckpointedImpl(nn::Sequential inner, Through how)
      : model(register_module("model", std::move(inner))), through(how) {}
  Tensor forward(const Tensor& x) { return through(model, x); }
  nn::Sequential model;
  Through through;
};
TORCH_MODULE(Checkpointed);

Tensors sequential_of_checkpoints(const Through& through) {
  nn::Sequential model(Checkpointed(block(), through), Checkpointed(block(), through),
                       nn::Linear(4, 2));
  return [&] {
    const auto x = leaf({5, 4}, 1);
    const auto y = model->forward(x);
    y.square().sum().backward();
    return all_of({y, x.grad()}, model);
  }();
}

/// A weight that is cast for what comes before, inside and after.
Tensors in_autocast(const Through& through, bool keep_casts) {
  const auto w = leaf({4, 4}, 2);
  const auto v = leaf({4, 4}, 3);
  const auto x = leaf({3, 4}, 1);
  Tensor y;
  {
    const Autocast autocast(at::kCPU, at::kBFloat16, true, keep_casts);
    const auto fn = [=](Tensor a) {
      return at::linear(at::linear(at::linear(at::linear(a, w).tanh(), v), v).tanh(), w);
    };
    y = at::linear(at::linear(through(fn, at::linear(x, w)), v), w);
  }
  y.to(at::kFloat).square().sum().backward();
  return {y, w.grad(), v.grad(), x.grad()};
}

/// As a network that makes another's weights.
Tensors captured_in_graph(const Through& through) {
  const auto code = leaf({16}, 3);
  const auto x = leaf({3, 4}, 1);
  const auto w = code.sin().view({4, 4});
  const auto y = through([=](Tensor a) { return at::linear(a, w).tanh(); }, x) + w.sum();
  y.square().sum().backward();
  return {y, code.grad(), x.grad()};
}

Tensors second_order(const Through& through) {
  const auto w = leaf({4, 4}, 2);
  const auto x = leaf({3, 4}, 1);
  const auto fn = [=](Tensor a) { return at::linear(a, w).tanh(); };
  const auto y = through(fn, x * 2).square().sum();
  const auto gradient = torch::autograd::grad({y}, {x}, {}, {}, /*create_graph=*/true)[0];
  gradient.square().sum().backward();
  return {y, gradient, w.grad(), x.grad()};
}

Tensors in_place_inside(const Through& through) {
  const auto w = leaf({4}, 2);
  const auto x = leaf({3, 4}, 1);
  const auto fn = [=](Tensor a) {
    auto h = a * w;
    h[0].add_(w);
    h.narrow(1, 0, 2).mul_(2);
    return h.tanh_().mul(h);
  };
  const auto y = through(fn, x.sin());
  y.square().sum().backward();
  return {y, w.grad(), x.grad()};
}

Tensors changed_outputs(const Through& through) {
  const auto x = leaf({3, 4}, 1);
  auto y = through([](Tensor a) { return (a * 2).t(); }, x.sin());
  y.mul_(3).relu_();
  y.square().sum().backward();
  return {y, x.grad()};
}

Tensors backward_inside(const Through& through) {
  const auto w = leaf({4}, 2);
  const auto x = leaf({3, 4}, 1);
  const auto fn = [=](Tensor a) {
    const auto energy = (a * w).sin().sum();
    return torch::autograd::grad({energy}, {a}, {}, {}, /*create_graph=*/true)[0] * w;
  };
  const auto y = through(fn, x * 2);
  y.square().sum().backward();
  return {y, w.grad(), x.grad()};
}

Tensors hooks(const Through& through) {
  const auto w = leaf({4, 4}, 2);
  const auto x = leaf({3, 4}, 1);
  int calls = 0;
  w.register_hook([&](const Tensor& gradient) {
    ++calls;
    return gradient * 2;
  });
  const auto h = x * 2;
  h.register_hook([](const Tensor& gradient) { return gradient * 3; });
  through([=](Tensor a) { return at::linear(a, w).tanh(); }, h).square().sum().backward();
  return {w.grad(), x.grad(), at::scalar_tensor(calls)};
}

Tensors own_state(const Through& through) {
  const auto mean = at::zeros({4});
  const auto count = at::zeros({}, at::kLong);
  const auto x = leaf({3, 4}, 1);
  const auto fn = [=](Tensor a) {
    mean.mul_(0.9).add_(a.detach().mean(0), 0.1);
    count.add_(1);
    return (a - mean.clone()) * count.clone();
  };
  const auto y = through(fn, through(fn, x * 2));
  y.square().sum().backward();
  return {y, x.grad(), mean, count};
}

Tensors lstm(const Through& through) {
  nn::LSTM model(nn::LSTMOptions(4, 3).num_layers(2).dropout(0.3));
  const auto x = leaf({5, 2, 4}, 1);
  const auto h = leaf({2, 2, 3}, 2);
  const auto start = std::make_optional(std::make_tuple(h * 1, h.sin()));
  const auto [y, state] = through(model, x, start);
  (y.square().sum() + std::get<1>(state).sum()).backward();
  return all_of({y, std::get<0>(state), std::get<1>(state), x.grad(), h.grad()}, model);
}

Tensors embedding(const Through& through, bool sparse) {
  nn::Embedding model(nn::EmbeddingOptions(7, 4).sparse(sparse));
  const auto y = through(model, at::arange(6).remainder(4));
  y.square().sum().backward();
  const auto gradient = model->weight.grad();
  return {y, gradient.is_sparse() ? gradient.to_dense() : gradient};
}

struct SquareImpl : torch::autograd::Function<SquareImpl> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                        const Tensor& w) {
    context->save_for_backward({x, w});
    return x * x * w;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const auto& [x, w] = std::tie(saved[0], saved[1]);
    return {2 * gradients[0] * x * w, (gradients[0] * x * x).sum(0)};
  }
};

Tensors own_function(const Through& through) {
  const auto w = leaf({4}, 2);
  const auto x = leaf({3, 4}, 1);
  const auto fn = [=](Tensor a) {
    return SquareImpl::apply(SquareImpl::apply(a.sin(), w).cos(), w);
  };
  const auto y = through(fn, x * 2);
  y.square().sum().backward();
  return {y, w.grad(), x.grad()};
}

Tensors transformer(const Through& through) {
  nn::TransformerEncoder model(nn::TransformerEncoderOptions(
      nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(16).dropout(0.2), 2));
  const auto x = leaf({5, 3, 8}, 1);
  const auto y = through(model, through(model, x), Tensor(), Tensor());
  y.square().sum().backward();
  return all_of({y, x.grad()}, model);
}

/// torch multiplies by folding or by batches, as a factor has a gradient or not.
Tensors products(const Through& through) {
  const auto w = leaf({6, 5}, 2);
  const auto x = leaf({7, 3, 6}, 1);
  const auto fn = [=](Tensor a) {
    return at::matmul(at::matmul(a, w * 2), w.t().contiguous().sin());
  };
  const auto y = through(fn, x.transpose(0, 1));
  y.square().sum().backward();
  return {y, w.grad(), x.grad()};
}

const std::vector<Case>& cases() {
  static const std::vector<Case> all{
      {"a module by its holder",
       [](const Through& through) {
         return with_block(through, leaf({5, 4}, 1));
       }},
      {"an input without gradient",
       [](const Through& through) {
         return with_block(through, filled({5, 4}, 1));
       }},
      {"a module in evaluation",
       [](const Through& through) {
         return with_block(through, leaf({5, 4}, 1), [](auto& model) { model->eval(); });
       }},
      {"frozen parameters",
       [](const Through& through) {
         return with_block(through, leaf({5, 4}, 1), [](auto& model) {
           for (auto& parameter : model->parameters()) {
             parameter.set_requires_grad(parameter.dim() > 1);
           }
         });
       }},
      {"everything frozen",
       [](const Through& through) {
         return with_block(through, leaf({5, 4}, 1), [](auto& model) {
           for (auto& parameter : model->parameters()) {
             parameter.set_requires_grad(false);
           }
         });
       }},
      {"a module by shared_ptr",
       [](const Through& through) {
         const auto model = block().ptr();
         const auto x = leaf({5, 4}, 1);
         const auto y = through(model, x * 2);
         y.square().sum().backward();
         return all_of({y, x.grad()}, model);
       }},
      {"any module",
       [](const Through& through) {
         nn::Linear model(4, 3);
         const auto x = leaf({5, 4}, 1);
         const auto y = through(nn::AnyModule(model), x);
         y.square().sum().backward();
         return all_of({y, x.grad()}, model);
       }},
      {"a function that captures modules",
       [](const Through& through) {
         auto model = block();
         const auto x = leaf({5, 4}, 1);
         const auto y = through([=](Tensor a) mutable { return model->forward(a * 2).cos(); }, x);
         y.square().sum().backward();
         return all_of({y, x.grad()}, model);
       }},
      {"several inputs, the same one among them",
       [](const Through& through) {
         const auto x = leaf({3, 4}, 1);
         const auto y = through(
             [](Tensor a, const Tensor& b, double c) {
               a = a * b;
               return a.mul(b) * c;
             },
             x, x, 3.0);
         y.square().sum().backward();
         return Tensors{y, x.grad()};
       }},
      {"the first output alone",
       [](const Through& through) { return two_outputs(through, false); }},
      {"the second output alone",
       [](const Through& through) { return two_outputs(through, true); }},
      {"a vector of tensors",
       [](const Through& through) {
         const auto x = leaf({3, 4}, 1);
         const std::function<Tensors(Tensors)> fn = [](Tensors all) {
           return Tensors{all[0] * all[1], all[1].sin()};
         };
         const auto y = through(fn, Tensors{x, x * 2});
         (y[0].square().sum() + y[1].sum()).backward();
         return Tensors{y[0], y[1], x.grad()};
       }},
      {"tied weights", tied},
      {"a module that is called twice", twice},
      {"views, inputs and parameters as outputs", views_and_inputs},
      {"backward twice", retained},
      {"nested checkpoints", nested},
      {"a Sequential of checkpoints", sequential_of_checkpoints},
      {"autocast", [](const Through& through) { return in_autocast(through, true); }},
      {"autocast that keeps no casts",
       [](const Through& through) { return in_autocast(through, false); }},
      {"a captured tensor with a graph", captured_in_graph},
      {"operations in place inside", in_place_inside},
      {"operations in place on outputs", changed_outputs},
      {"a backward inside", backward_inside},
      {"hooks", hooks},
      {"tensors of the program's own that change", own_state},
      {"an LSTM with its state", lstm},
      {"a function of autograd of the program's own", own_function},
      {"a TransformerEncoder", transformer},
      {"products of more dimensions", products},
      {"an embedding", [](const Through& through) { return embedding(through, false); }},
      {"a sparse embedding", [](const Through& through) { return embedding(through, true); }},
      {"no gradient wanted",
       [](const Through& through) {
         const at::NoGradGuard no_grad;
         auto model = block();
         const auto y = through(model, leaf({5, 4}, 1));
         return all_of({y, at::scalar_tensor(y.requires_grad())}, model);
       }},
  };
  return all;
}

Tensors run_case(const Case& which, bool checkpoints) {
  seed();
  return which.run(Through{checkpoints});
}

bool same_case(const Tensors& a, const Tensors& b) {
  return a.size() == b.size() && same_bits(a, b);
}
}  // namespace

TEST_CASE("A checkpoint changes no bit", "[ladder][checkpoint]") {
  for (const auto& which : cases()) {
    INFO(which.name);
    const auto plain = run_case(which, false);
    const auto found = run_case(which, true);
    REQUIRE(plain.size() == found.size());
    for (size_t i = 0; i < plain.size(); ++i) {
      INFO("tensor " << i << ": " << plain[i] << " and " << found[i]);
      CHECK(same_bits(plain[i], found[i]));
    }
    CHECK(same_case(plain, run_case(which, false)));  // it can be compared
  }
}

TEST_CASE("Second derivatives go through a checkpoint", "[ladder][checkpoint]") {
  const auto plain = second_order(Through{false});
  const auto found = second_order(Through{true});
  for (size_t i = 0; i < plain.size(); ++i) {  // gradients of gradients are summed in another order
    CHECK(at::allclose(plain[i], found[i], 1e-5, 1e-6));
  }
}

TEST_CASE("What a function changes is as it was then while its backward runs",
          "[ladder][checkpoint]") {
  const auto count = at::zeros({}, at::kLong);
  const auto fn = [=](Tensor a) {
    count.add_(1);
    return a * count;
  };
  const auto x = leaf({3}, 1);
  checkpoint(fn, checkpoint(fn, x)).sum().backward();  // without checkpoint torch refuses it
  CHECK(at::equal(x.grad(), at::full({3}, 2.0)));
  CHECK(count.item<int64_t>() == 2);
}

TEST_CASE("The checkpoints of the tutorial run", "[ladder][checkpoint]") {
  nn::Embedding embedding(9, 4);
  nn::Linear encoder(4, 4);
  nn::Linear head(4, 3);
  const auto tokens = at::arange(6);
  const auto hidden = brimful::checkpoint(encoder, brimful::checkpoint(embedding, tokens));
  const auto scores = brimful::checkpoint(
      [head](const torch::Tensor& x) mutable { return head(torch::relu(x)).log_softmax(-1); },
      hidden);
  scores.sum().backward();
  CHECK(embedding->weight.grad().defined());
  nn::Sequential model = block();
  const auto images = leaf({5, 4}, 1);
  const auto logits = brimful::checkpoint_sequential(model, 3, images);
  logits.sum().backward();
  CHECK(images.grad().defined());
}

}  // namespace test_activation_checkpoint
