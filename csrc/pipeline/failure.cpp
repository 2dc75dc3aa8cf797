#include "pipeline/failure.h"

#include <brimful/log.h>
#include <brimful/memory/stats.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <typeinfo>

#include "base/format.h"
#include "base/text_stream.h"
#include "pipeline/schedule/action_sentence.h"
#include "step/agreement.h"

namespace brimful::pipeline {

namespace {

/// Of exactly this type; what is derived from it cannot be made anew, and is nested in one.
template <typename Error>
void throw_as(const std::exception& error, const std::string& text) {
  if (typeid(error) == typeid(Error)) {
    throw Error(text);
  }
  if (dynamic_cast<const Error*>(&error) != nullptr) {
    std::throw_with_nested(Error(text));
  }
}

template <typename... Errors>
void throw_as_first_of(const std::exception& error, const std::string& text) {
  (throw_as<Errors>(error, text), ...);
}

/// Within the handler of `error`, if it is one of the standard library's types, or derived from one that has a message.
void throw_standard(const std::exception& error, const std::string& text) {
  if (const auto* system = dynamic_cast<const std::system_error*>(&error)) {
    std::throw_with_nested(std::system_error(system->code(), text));
  }
  throw_as_first_of<std::invalid_argument, std::domain_error, std::length_error, std::out_of_range,
                    std::logic_error, std::range_error, std::overflow_error, std::underflow_error,
                    std::runtime_error>(error, text);
}

/// A schedule by name that holds fewer microbatches in this stage, for as many stages a rank.
bool would_1f1b_help(int stage, const Schedule& schedule) {
  const bool is_alike = schedule.name == "1f1b" || (schedule.name == "zb_h1" && stage == 0);
  return !is_alike && schedule.stages == static_cast<int>(schedule.ranks.size());
}

std::string checkpoint_advice(int stage, StageRung rung) {
  const auto number = std::to_string(stage);
  return is_recomputed(rung)
             ? "checkpoint parts of stage " + number +
                   " within it (torch.utils.checkpoint), whose backward holds all of one microbatch"
             : "checkpoint the activations of stage " + number + " (torch.utils.checkpoint)";
}

/// What to do about its stage.
std::vector<std::string> advice_for(const Tried& tried) {
  const auto& call = tried.call;
  const auto stage = tried.failure.action.stage;
  std::vector<std::string> advice;
  if (call.trains && !is_offloaded(tried.rung)) {
    advice.push_back(checkpoint_advice(stage, tried.rung));
  }
  advice.push_back("move layers from stage " + std::to_string(stage) + " to others, or add stages");
  if (call.trains && would_1f1b_help(stage, call.order)) {
    advice.emplace_back("use a schedule that holds fewer microbatches, such as 1f1b");
  }
  if (tried.options.fixed_schedule) {
    advice.emplace_back(
        "give a schedule of more microbatches, the name of one, or a function that makes one for a "
        "number of microbatches");
  }
  if ((tried.options.recompute || tried.options.offload) && call.trains &&
      tried.options.max_retries == 0 && call.retry.plan().piece_rows <= 1) {
    advice.emplace_back(
        "allow retries, in which stages are recomputed or offloaded (max_retries: 0)");
  }
  return advice;
}
}  // namespace

std::string to_string(const ActionFailure& failure) {
  TextStream text;
  if (failure.index < 0) {
    text << "step of rank " << failure.rank << ", outside its actions";
    return text.str();
  }
  text << to_sentence(failure.action) << " (";
  if (!failure.stage.empty()) {
    text << failure.stage << "; ";
  }
  text << "rank " << failure.rank << ", action " << failure.index << ", inputs: " << failure.shapes
       << ")";
  return text.str();
}

void rethrow(ActionFailure failure) {
  if (failure.index < 0) {
    std::rethrow_exception(std::move(failure.error));
  }
  const auto where = to_string(failure);
  try {
    std::rethrow_exception(std::move(failure.error));
  } catch (c10::Error& error) {
    error.add_context("in the " + where);
    throw;
  } catch (const std::exception& error) {
    throw_standard(error, std::string(error.what()) + " (in the " + where + ")");
    log(LogLevel::error, "a step failed in the " + where);
    throw;
  }
}

Shortfall shortfall_of(const Tried& tried) {
  const memory::Unlimited unlimited;
  const auto& [call, failure, device, options, stages, rung, may_split] = tried;
  auto shortfall = shortfall_on(device, [&tried] {
    std::vector<at::Tensor> parameters;
    std::vector<at::Tensor> buffers;
    for (const auto& stage : tried.stages) {
      parameters.insert(parameters.end(), stage.parameters.begin(), stage.parameters.end());
      buffers.insert(buffers.end(), stage.buffers.begin(), stage.buffers.end());
    }
    return standing_bytes(parameters, buffers, tried.device);
  });
  shortfall.of = Shortfall::Of::stages;
  shortfall.trains = call.trains;
  shortfall.rank = failure.rank;
  shortfall.world_size =
      options.peers ? options.peers->size() : static_cast<int>(std::ssize(options.devices));
  shortfall.rows = call.rows;
  shortfall.max_retries = options.max_retries;
  shortfall.may_split = may_split;
  shortfall.is_fixed = options.fixed_schedule.has_value();
  shortfall.where = to_string(failure);
  shortfall.on_stage = advice_for(tried);
  shortfall.attempts = call.retry.attempts();
  shortfall.last_error = failure.text;
  return shortfall;
}

PeerVerdict with_weight(PeerVerdict all, const std::string& step, int64_t rows) {
  if (all.kind == Status::ok && !(all.weight > 0)) {
    all.kind = Status::error;
    all.rank = -1;
    all.text = nothing_counts(step, all.weight, "rows: " + std::to_string(rows));
  }
  return all;
}

}  // namespace brimful::pipeline
