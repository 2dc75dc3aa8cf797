// Collectives besides the buckets: of an attempt before them, as a step's prologue needs them, and between steps.
#include "reducer/gather.h"

#include <ATen/ATen.h>
#include <brimful/memory/stats.h>

#include <cstring>
#include <functional>
#include <utility>

#include "reducer/group_calls.h"

namespace brimful {
namespace {
// Times that a rank's failure is found posted while it does not come: it does not know that it is waited for here.
constexpr int kPatience = 3;

void call_in_attempt(Engine& engine,
                     const std::function<c10::intrusive_ptr<c10d::Work>()>& collective) {
  auto& link = engine.link();
  const memory::UnlimitedEverywhere unlimited;  // the others wait in it
  const auto step = engine.attempt().step();
  const bool is_open = engine.gate().open();
  link.begin_wait();
  TORCH_CHECK(link.is_broken() || is_open,
              "another rank begins a step of another model; call the same steps on every rank");
  int found = 0;
  const auto listen = [&] {
    const auto failure = link.board->find_other(step, link.rank, link.world_size);
    TORCH_CHECK(!failure || ++found < kPatience, "another rank failed, and does not come");
  };
  if (!link.is_broken()) {
    link.call([&] {
      link.require(link.device);
      c10::intrusive_ptr<c10d::Work> work;
      {
        const WithoutPythonObjects without;
        work = collective();
      }
      link.wait_for(*work, link.device, listen);
    });
  }
  link.require_whole(step, "an exchange of embeddings");
}
}  // namespace

std::vector<at::Tensor> gather(Engine& engine, const at::Tensor& own) {
  const auto& link = engine.link();
  if (link.world_size == 1) {
    return {own};
  }
  std::vector<std::vector<at::Tensor>> outputs(1);
  call_in_attempt(engine, [&] {
    std::vector<at::Tensor> inputs{own.to(link.device).contiguous()};
    for (int rank = 0; rank < link.world_size; ++rank) {
      outputs[0].push_back(at::empty_like(inputs[0]));
    }
    return link.group->allgather(outputs, inputs);
  });
  if (own.device() != link.device) {
    const memory::Unlimited unlimited;
    for (auto& output : outputs[0]) {
      output = output.to(own.device());
    }
  }
  return std::move(outputs[0]);
}

void sum(Engine& engine, at::Tensor& tensor) {
  const auto& link = engine.link();
  if (link.world_size == 1) {
    return;
  }
  std::vector<at::Tensor> tensors(1);
  call_in_attempt(engine, [&] {
    tensors[0] = tensor.to(link.device).contiguous();
    return link.group->allreduce(tensors);
  });
  if (!tensors[0].is_same(tensor)) {
    tensor.copy_(tensors[0]);
  }
}

std::vector<std::vector<uint8_t>> gather_bytes(Engine& engine, const std::vector<uint8_t>& own,
                                               const char* what) {
  engine.open_exchange(/*settles=*/true);
  const memory::Unlimited unlimited;
  return engine.link().exchange(own, engine.attempt().step(), what);
}

std::vector<ControlRecord> exchange_records(Engine& engine, const ControlRecord& record) {
  const auto own = encode(record);
  std::vector<ControlRecord> records;
  for (const auto& bytes :
       gather_bytes(engine, {own.begin(), own.end()}, "the exchange before a loop")) {
    records.push_back(decode_first(bytes));
  }
  return records;
}

}  // namespace brimful
