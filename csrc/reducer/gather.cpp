// Collectives of an attempt before its buckets: what a step's prologue needs of other ranks.
#include <ATen/ATen.h>
#include <brimful/error.h>
#include <brimful/memory/stats.h>
#include <brimful/step/oom.h>

#include <utility>

#include "reducer/engine.h"
#include "reducer/group_calls.h"

namespace brimful {
namespace {
// Times that a rank's failure is found posted while it does not come: it does not know that it is waited for here.
constexpr int kPatience = 3;
}  // namespace

void Engine::call_in_attempt(const std::function<c10::intrusive_ptr<c10d::Work>()>& collective) {
  const memory::UnlimitedEverywhere unlimited;  // the others wait in it
  open_turn();
  s_.link.waiting_since = std::chrono::steady_clock::now();
  TORCH_CHECK(s_.link.broken || !s_.turns.ended,
              "another rank begins a step of another model; call the same steps on every rank");
  int found = 0;
  const auto listen = [&] {
    const auto& link = s_.link;
    const auto failure = link.board->find_other(s_.attempt.step, link.rank, link.world_size);
    TORCH_CHECK(!failure || ++found < kPatience, "another rank failed, and does not come");
  };
  if (!s_.link.broken) {
    s_.link.call([&] {
      s_.link.require(s_.link.device);
      c10::intrusive_ptr<c10d::Work> work;
      {
        const WithoutPythonObjects without;
        work = collective();
      }
      s_.link.wait_for(*work, s_.link.device, s_.link.waiting_since, listen);
    });
  }
  if (s_.link.broken) {
    s_.link.throw_broken(s_.attempt.step, "an exchange of embeddings", to_string(s_.link.broken));
  }
}

std::vector<at::Tensor> Engine::gather(const at::Tensor& own) {
  if (s_.link.world_size == 1) {
    return {own};
  }
  std::vector<std::vector<at::Tensor>> outputs(1);
  call_in_attempt([&] {
    std::vector<at::Tensor> inputs{own.to(s_.link.device).contiguous()};
    for (int rank = 0; rank < s_.link.world_size; ++rank) {
      outputs[0].push_back(at::empty_like(inputs[0]));
    }
    return s_.link.group->allgather(outputs, inputs);
  });
  if (own.device() != s_.link.device) {
    const memory::Unlimited unlimited;
    for (auto& output : outputs[0]) {
      output = output.to(own.device());
    }
  }
  return std::move(outputs[0]);
}

void Engine::sum(at::Tensor& tensor) {
  if (s_.link.world_size == 1) {
    return;
  }
  std::vector<at::Tensor> tensors(1);
  call_in_attempt([&] {
    tensors[0] = tensor.to(s_.link.device).contiguous();
    return s_.link.group->allreduce(tensors);
  });
  if (!tensors[0].is_same(tensor)) {
    tensor.copy_(tensors[0]);
  }
}

}  // namespace brimful
