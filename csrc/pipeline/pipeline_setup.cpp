// What a pipeline is made of.
#include <brimful/pipeline/checker.h>
#include <brimful/pipeline/schedules.h>
#include <brimful/sizer/grad_scaler.h>
#include <brimful/step/distinct_tensors.h>

#include <algorithm>
#include <iterator>
#include <unordered_map>

#include "pipeline/pipeline_state.h"
#include "sizer/loss_scale.h"

namespace brimful::pipeline {
namespace {

/// What a step that is undone gives back of the stages, beside its devices' random numbers.
Transaction transaction_of(const std::vector<Stage>& stages,
                           const std::vector<c10::Device>& devices) {
  std::vector<at::Tensor> buffers;
  std::vector<std::shared_ptr<TensorNames>> names;
  for (const auto& stage : stages) {
    if (stage.names) {
      names.push_back(stage.names);
    } else {
      buffers.insert(buffers.end(), stage.buffers.begin(), stage.buffers.end());
    }
  }
  Transaction transaction(std::move(buffers), distinct(devices));
  transaction.follow(names_of(std::move(names)));
  return transaction;
}

/// Tensors that a module lists twice count once.
std::vector<Stage> with_distinct_tensors(std::vector<Stage> stages) {
  for (auto& stage : stages) {
    stage.parameters = distinct_tensors(std::move(stage.parameters));
    stage.buffers = distinct_tensors(std::move(stage.buffers));
  }
  return stages;
}

PipelineOptions with_devices(PipelineOptions options, size_t stages) {
  if (options.devices.empty()) {
    options.devices.assign(options.peers ? 1 : stages, c10::Device(c10::DeviceType::CPU));
  }
  return options;
}

/// Wraps each stage's forward, so that its BatchNorms know which microbatch it is.
std::vector<Stage> with_norms(std::vector<Stage> stages, BatchNormPolicy policy,
                              std::vector<std::shared_ptr<StageNorms>>& all) {
  for (auto& stage : stages) {
    if (stage.batch_norms.empty()) {
      continue;
    }
    auto norms = std::make_shared<StageNorms>(policy, stage.batch_norms);
    all.push_back(norms);
    stage.forward = [norms, inner = std::move(stage.forward)](const Value& input) {
      if (norms->pieces == 0 || runs_again()) {
        return inner(input);
      }
      return norms->norms.forward(norms->next++, norms->pieces, [&] { return inner(input); });
    };
  }
  return stages;
}

/// Whether a schedule of the user's gives this process as many stages as it has, and is for as many ranks.
bool fits(const Schedule& schedule, const PipelineOptions& options, int ranks, int stages) {
  if (std::ssize(schedule.ranks) != ranks || !options.peers) {
    return std::ssize(schedule.ranks) == ranks && schedule.stages == stages;
  }
  const auto placed = rank_of_stage(schedule);
  return std::count(placed.begin(), placed.end(), options.peers->rank()) == stages;
}

/// `stages`: of this process.
Schedule made_schedule(const PipelineOptions& options, int ranks, int stages,
                       int64_t microbatches) {
  if (!options.fixed_schedule && !options.schedule_for) {
    const int here = options.peers ? 1 : ranks;
    TORCH_CHECK_VALUE(
        here > 0 && stages % here == 0,
        "every rank has the same number of stages under a built-in schedule (stages: ", stages,
        ", devices: ", here,
        "); give as many devices as stages, or a divisor, or a schedule of your own");
    return make_schedule(options.schedule, ranks, stages / here, static_cast<int>(microbatches));
  }
  auto made = options.fixed_schedule ? *options.fixed_schedule
                                     : options.schedule_for(static_cast<int>(microbatches));
  TORCH_CHECK_VALUE(made.microbatches == microbatches && fits(made, options, ranks, stages),
                    "the schedule is for another pipeline (", made.name,
                    ": ranks: ", made.ranks.size(), ", stages: ", made.stages,
                    ", microbatches: ", made.microbatches, "; wanted: ", ranks, ", ", stages,
                    options.peers ? " in this process" : "", ", ", microbatches, ")");
  require_valid(
      made, options.peers ? CheckOptions() : CheckOptions{std::nullopt, ChannelKind::by_message});
  return made;
}

/// A parameter is on one device.
void require_unshared(const std::vector<std::vector<at::Tensor>>& parameters,
                      const std::vector<c10::Device>& devices) {
  std::unordered_map<const c10::TensorImpl*, size_t> stage_of;
  for (size_t i = 0; i < parameters.size(); ++i) {
    for (const auto& parameter : parameters[i]) {
      const auto other = stage_of.emplace(parameter.unsafeGetTensorImpl(), i).first->second;
      TORCH_CHECK_VALUE(devices[other] == devices[i],
                        "stages on different devices share a parameter (stages: ", other, " and ",
                        i, ", devices: ", devices[other], " and ", devices[i],
                        "); give each a copy of its own, and tie the copies (tied)");
    }
  }
}

ExecutorOptions executor_options(const PipelineOptions& options) {
  ExecutorOptions result;
  result.devices = options.devices;
  result.peers = options.peers;
  result.threads_per_rank = options.threads_per_rank;
  result.spin = options.spin;
  result.trace = options.trace;
  result.patience = options.patience;
  result.before_action = options.before_action;
  result.translate = options.translate;
  result.thread_scope = options.thread_scope;
  return result;
}
}  // namespace

std::vector<at::Tensor> trained_of(const std::vector<Stage>& stages) {
  std::vector<at::Tensor> trained;
  for (const auto& stage : stages) {
    std::copy_if(stage.parameters.begin(), stage.parameters.end(), std::back_inserter(trained),
                 [](const at::Tensor& parameter) { return parameter.requires_grad(); });
  }
  return distinct_tensors(std::move(trained));
}

std::vector<c10::Device> stage_devices(const PipelineOptions& options,
                                       const std::vector<std::vector<at::Tensor>>& parameters) {
  const auto wanted = with_devices(options, parameters.size());
  std::vector<c10::Device> devices(parameters.size(), wanted.devices[0]);
  if (!wanted.peers) {
    const auto schedule = made_schedule(wanted, static_cast<int>(wanted.devices.size()),
                                        static_cast<int>(parameters.size()), wanted.microbatches);
    const auto ranks = rank_of_stage(schedule);
    for (size_t i = 0; i < devices.size(); ++i) {
      devices[i] = wanted.devices[ranks[i]];
    }
  }
  require_unshared(parameters, devices);
  return devices;
}

std::vector<c10::Device> distinct(const std::vector<c10::Device>& devices) {
  std::vector<c10::Device> result;
  for (const auto device : devices) {
    if (std::find(result.begin(), result.end(), device) == result.end()) {
      result.push_back(device);
    }
  }
  return result;
}

Pipeline::State::State(std::vector<Stage> stages, PipelineOptions wanted)
    : options(with_devices(std::move(wanted), stages.size())), tied(options.tied, options.peers) {
  TORCH_CHECK_VALUE(options.microbatches >= 1,
                    "a step has at least one microbatch (microbatches: ", options.microbatches,
                    ")");
  TORCH_CHECK_VALUE(options.max_retries >= 0,
                    "max_retries must not be negative (max_retries: ", options.max_retries, ")");
  if (options.peers) {
    options.peers->use(options.devices[0]);
  }
  auto transaction = transaction_of(stages, options.devices);
  auto for_executor = executor_options(options);
  for_executor.interrupt = [this] { look_for_interrupt(); };
  auto distinct_stages = with_distinct_tensors(std::move(stages));
  executor = std::make_unique<Executor>(
      with_norms(std::move(distinct_stages), options.batch_norm, norms), std::move(for_executor));
  const auto placed = rank_of_stage(schedule(options.microbatches, true));
  std::vector<int> numbers;  // of this process's stages
  std::vector<c10::Device> devices;
  std::vector<std::vector<at::Tensor>> parameters;
  for (size_t i = 0; i < placed.size(); ++i) {
    const auto rank = options.peers ? placed[i] - options.peers->rank() : placed[i];
    if (rank >= 0 && rank < std::ssize(options.devices)) {  // else another process's
      numbers.push_back(static_cast<int>(i));
      devices.push_back(options.devices[rank]);
      parameters.push_back(executor->stages().at(parameters.size()).parameters);
    }
  }
  require_unshared(parameters, devices);
  recomputing = std::make_unique<Recomputing>(
      options, policies.training, own_stages(executor->stages(), numbers, devices), placed.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    for (const auto& parameter : parameters[i]) {
      TORCH_CHECK_VALUE(parameter.device() == devices[i],
                        "a stage's parameters are not on its device (stage: ", numbers[i],
                        ", parameters: ", parameter.device(), ", device: ", devices[i],
                        "); move them there (stage_devices() says where)");
    }
  }
  replicas = std::make_unique<Replicas>(options.reducers, executor->stages(), numbers);
  if (options.scaler != nullptr && options.scaler->enabled()) {
    const auto device = options.peers ? options.devices[0] : options.devices[placed.back()];
    const auto [scale, tracker] = options.scaler->tensors(device);
    transaction.add(keeper_of({scale, tracker}));
  }
  for (auto& keeper : options.keepers) {
    transaction.add(keeper);
  }
  engine = std::make_unique<StepEngine>(group_of_step(), std::move(transaction), /*local=*/true,
                                        "pipeline");
}

void Pipeline::State::look_for_interrupt() {
  if (cancelled.exchange(false, std::memory_order_acq_rel)) {
    throw Interrupted();
  }
  if (options.interrupt) {
    options.interrupt();
  }
}

Schedule Pipeline::State::schedule(int64_t microbatches, bool training) const {
  auto made = made_schedule(options, executor->ranks(), static_cast<int>(executor->stages().size()),
                            microbatches);
  if (training) {
    return made;
  }
  for (auto& order : made.ranks) {
    std::erase_if(order, [](const Action& action) {
      return action.kind != ActionKind::forward && action.kind != ActionKind::send_forward &&
             action.kind != ActionKind::receive_forward;
    });
  }
  return made;
}

}  // namespace brimful::pipeline
