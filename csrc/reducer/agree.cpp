#include "reducer/agree.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/error.h>
#include <brimful/memory/stats.h>
#include <brimful/step/control_record.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "base/fnv.h"
#include "base/text_stream.h"
#include "reducer/device_wait.h"
#include "reducer/group_calls.h"
#include "reducer/owners.h"

namespace brimful {
namespace {
constexpr size_t kBroadcastBytes = size_t{25} << 20;
constexpr std::chrono::milliseconds kLookForDead{200};

/// Ends when a rank is known to be dead, where that is watched: one that was stopped closes no connection.
void wait_among_living(const Group& group, c10::Device device, c10d::Work& work) {
  const auto traffic = traffic_of(group.get());
  const auto require_living = [&] {
    TORCH_CHECK(!traffic->knows_dead(group->getSize()), "a rank of the process group is dead");
  };
  if (!device.is_cpu()) {
    wait_on_device(group, device, work, std::chrono::steady_clock::now(), require_living);
    return;
  }
  while (traffic->is_dead) {
    try {
      work.wait(kLookForDead);
      return;
    } catch (const std::exception&) {
      if (work.isCompleted()) {
        break;  // its own error
      }
    }
    require_living();
  }
  work.wait();
}

/// As c10d::broadcast_coalesced, which waits for each rank without looking whether it lives. What is given up may still
/// write into its buffers, and not into the tensors.
void broadcast_among_living(int source, const Group& group,
                            const std::vector<at::Tensor>& tensors) {
  for (size_t begin = 0, end = 0; begin < tensors.size(); begin = end) {
    std::vector<at::Tensor> bytes;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (size_t under_way = 0; end < tensors.size() && under_way < kBroadcastBytes; ++end) {
      const auto own = tensors[end].contiguous().view(-1).view(at::kByte);
      bytes.push_back(group->getRank() == source ? own : at::empty_like(own));
      std::vector<at::Tensor> one{bytes.back()};
      works.push_back(group->broadcast(one, {source}));
      under_way += own.numel();
    }
    for (size_t i = 0; i < bytes.size(); ++i) {
      const auto& tensor = tensors[begin + i];
      wait_among_living(group, tensor.device(), *works[i]);
      if (group->getRank() != source) {
        tensor.copy_(bytes[i].view(tensor.scalar_type()).view(tensor.sizes()));
      }
    }
  }
}

std::vector<std::string> describe_model(const Model& model) {
  std::vector<std::string> lines;
  const auto describe = [&](const char* kind, const auto& tensors,
                            const std::vector<std::string>& names) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      TextStream line;
      line << kind << i << (i < names.size() ? " '" + names[i] + "'" : "") << " is "
           << tensors[i].sizes() << " " << c10::toString(tensors[i].scalar_type());
      lines.push_back(line.str());
    }
  };
  describe("parameter ", model.parameters, model.names);
  describe("frozen parameter ", model.frozen, {});
  describe("buffer ", model.buffers, {});
  lines.push_back("buckets are planned as\n" + model.plan);
  return lines;
}

uint64_t hash_lines(const std::vector<std::string>& lines) {
  Fnv<uint64_t> hash;
  for (const auto& line : lines) {
    hash.add(line);
    hash.add("\n");
  }
  return hash.value();
}

std::vector<std::string> split_records(const std::vector<uint8_t>& bytes) {
  std::vector<std::string> lines(1);
  for (const auto byte : bytes) {
    if (byte == '\0') {
      lines.emplace_back();
    } else {
      lines.back() += static_cast<char>(byte);
    }
  }
  return lines;
}

[[noreturn]] void throw_mismatch(const std::vector<std::vector<std::string>>& models) {
  for (size_t rank = 1; rank < models.size(); ++rank) {
    const auto& mine = models[0];
    const auto& theirs = models[rank];
    for (size_t i = 0; i < std::min(mine.size(), theirs.size()); ++i) {
      if (mine[i] != theirs[i]) {
        throw PlanMismatch("the ranks' models differ: on rank 0 " + mine[i] + ", on rank " +
                           std::to_string(rank) + " " + theirs[i] +
                           "; build the same model on every rank");
      }
    }
  }
  throw PlanMismatch("the ranks' models differ; build the same model on every rank");
}
}  // namespace

Exchange begin_exchange(const Group& group, c10::Device device, const std::vector<uint8_t>& own) {
  auto bytes = at::empty({static_cast<int64_t>(own.size())}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr<uint8_t>(), own.data(), own.size());
  require_no_error(group, device);
  std::vector<at::Tensor> inputs{bytes.to(device)};
  std::vector<std::vector<at::Tensor>> outputs(1);
  for (int rank = 0; rank < group->getSize(); ++rank) {
    outputs[0].push_back(at::empty_like(inputs[0]));
  }
  // Not an all_reduce: a rank that is out of step would match it with a bucket, and gloo kills a process for that.
  const WithoutPythonObjects without;
  auto work = group->allgather(outputs, inputs);
  return {std::move(work), std::move(outputs[0])};
}

std::vector<std::vector<uint8_t>> Exchange::read() const {
  std::vector<std::vector<uint8_t>> result;
  for (const auto& output : outputs) {
    const auto on_host = output.cpu();
    const auto* begin = on_host.const_data_ptr<uint8_t>();
    result.emplace_back(begin, begin + on_host.numel());
  }
  return result;
}

std::vector<std::vector<uint8_t>> exchange_bytes(const Group& group, c10::Device device,
                                                 const std::vector<uint8_t>& own,
                                                 const std::function<void(c10d::Work&)>& wait) {
  const memory::UnlimitedEverywhere unlimited;
  const auto exchange = begin_exchange(group, device, own);
  if (wait) {
    wait(*exchange.work);
  } else {
    wait_among_living(group, device, *exchange.work);
  }
  return exchange.read();
}

BucketPlan with_devices_in_order(BucketPlan plan) {
  std::vector<c10::Device> known;
  for (auto& bucket : plan.buckets) {
    if (bucket.device.is_cpu()) {
      continue;
    }
    auto place = std::find(known.begin(), known.end(), bucket.device);
    if (place == known.end()) {
      place = known.insert(place, bucket.device);
    }
    bucket.device =
        c10::Device(bucket.device.type(), static_cast<c10::DeviceIndex>(place - known.begin()));
  }
  return plan;
}

std::vector<std::array<uint64_t, 4>> require_same_model(const Group& group, c10::Device device,
                                                        const Model& model,
                                                        const std::array<uint64_t, 4>& numbers) {
  const auto lines = describe_model(model);
  std::string text;
  for (const auto& line : lines) {
    text += line + '\0';
  }
  // As long as a control record: gloo ends a process whose peer is elsewhere and sends another size.
  const uint64_t head[] = {hash_lines(lines), text.size(), numbers[0],
                           numbers[1],        numbers[2],  numbers[3]};
  static_assert(sizeof(head) == kRecordBytes);
  std::vector<uint8_t> head_bytes(sizeof(head));
  std::memcpy(head_bytes.data(), head, sizeof(head));
  const auto heads = exchange_bytes(group, device, head_bytes);
  bool same = true;
  uint64_t longest = 0;
  std::vector<std::array<uint64_t, 4>> by_rank;
  for (const auto& bytes_of_rank : heads) {
    uint64_t other[std::size(head)];
    std::memcpy(other, bytes_of_rank.data(), sizeof(other));
    same = same && std::equal(bytes_of_rank.begin(), bytes_of_rank.begin() + 2 * sizeof(uint64_t),
                              heads[0].begin());
    longest = std::max(longest, other[1]);
    by_rank.push_back({other[2], other[3], other[4], other[5]});
  }
  if (same) {
    return by_rank;
  }
  std::vector<uint8_t> bytes(text.begin(), text.end());
  bytes.resize(longest);
  std::vector<std::vector<std::string>> models;
  for (const auto& other : exchange_bytes(group, device, bytes)) {
    models.push_back(split_records(other));
  }
  throw_mismatch(models);
}

void broadcast_from(int source, const Group& group, const std::vector<at::Tensor>& tensors) {
  if (group->getSize() == 1 || tensors.empty()) {
    return;
  }
  const at::NoGradGuard no_grad;
  const WithoutPythonObjects without;
  std::vector<at::Tensor> detached;
  for (const auto& tensor : tensors) {
    if (tensor.numel() > 0) {
      detached.push_back(tensor.detach());
    }
  }
  if (detached.empty()) {
    return;
  }
  if (traffic_of(group.get())->is_dead) {
    broadcast_among_living(source, group, detached);
  } else {
    c10d::broadcast_coalesced(group, detached, kBroadcastBytes, source);
  }
}

}  // namespace brimful
