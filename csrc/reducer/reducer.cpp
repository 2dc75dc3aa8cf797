// The life of a bucket: each gradient moves into the flat buffer while the caches still hold it and p.grad becomes a
// view, or stays where it is if it is large (on_gradient, place); what did not come is filled in (fill). Buckets leave in
// order (launch.cpp), and one wait ends the step (finish.cpp).
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/log.h>
#include <brimful/memory/stats.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "base/units.h"
#include "reducer/at_exit.h"
#include "reducer/device_wait.h"
#include "reducer/graph_hooks.h"
#include "reducer/owners.h"
#include "reducer/reducer_state.h"

namespace brimful {
namespace {
constexpr double kDefaultCapMb = 25;

std::vector<ParameterInfo> infos_of(const std::vector<at::Tensor>& parameters,
                                    const std::vector<bool>& sparse) {
  std::vector<ParameterInfo> infos;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& p = parameters[i];
    infos.push_back({p.numel(), p.scalar_type(), p.device(), i < sparse.size() && sparse[i],
                     p.is_non_overlapping_and_dense()});
  }
  return infos;
}

PlanOptions plan_options_of(const ReducerOptions& options) {
  PlanOptions plan;
  const double cap = options.bucket_cap_mb.value_or(kDefaultCapMb);
  plan.first_bucket_bytes = static_cast<int64_t>(options.first_bucket_cap_mb * kMiB);
  plan.bucket_bytes = static_cast<int64_t>(cap * kMiB);
  for (const auto mb : options.bucket_cap_mb_list) {
    plan.bucket_bytes_list.push_back(static_cast<int64_t>(mb * kMiB));
  }
  plan.own_record = options.wire_dtype.has_value();
  return plan;
}

bool is_fixed(const std::string& plan) {
  return plan != "auto" && plan != "ordered" && plan != "registration";
}

void require_options(const ReducerOptions& options) {
  TORCH_CHECK_VALUE(!is_fixed(options.plan) || options.plan.rfind("[[", 0) == 0,
                    "there is no such plan (plan: ", options.plan,
                    "); choose \"auto\", \"ordered\" or \"registration\", or give what plan() of "
                    "the same model was");
  TORCH_CHECK_VALUE(!options.wire_dtype || c10::isFloatingType(*options.wire_dtype),
                    "gradients travel in a real floating dtype (wire_dtype: ",
                    c10::toString(*options.wire_dtype), ")");
  TORCH_CHECK_VALUE(options.wire_dtype || !options.error_feedback,
                    "there is no rounding to feed back (error_feedback: true, wire_dtype: none); "
                    "set wire_dtype, or leave error_feedback out");
  TORCH_CHECK_VALUE(!options.gradient_predivide_factor || *options.gradient_predivide_factor > 0,
                    "the factor must be positive (gradient_predivide_factor: ",
                    *options.gradient_predivide_factor, ")");
}

/// Options that all ranks must share, for the message if they do not.
std::string describe(const ReducerOptions& options) {
  return "plan: " + options.plan + ", reduction dtype: " +
         (options.wire_dtype ? c10::toString(*options.wire_dtype) : "as the gradients") +
         (options.error_feedback ? " with error feedback" : "") +
         ", buffers agree: " + (options.broadcast_buffers ? "yes" : "no") + ", predivided by: " +
         (options.gradient_predivide_factor ? std::to_string(*options.gradient_predivide_factor)
                                            : "world size") +
         "\n";
}

/// Memory that the backend has registered with its communicators, where it offers such (NCCL does).
at::Tensor zeros_for(const Group& group, int64_t numel, const at::TensorOptions& options) {
  const auto device = options.device();
  if (!device.is_cpu()) {
    try {
      const auto backend = group->getBackend(device.type());
      if (backend->supportsTensorAlloc(device.index())) {
        return backend->allocateTensor(numel, options).zero_();
      }
    } catch (const std::exception& e) {
      log(LogLevel::warning,
          std::string("buckets lie in memory that is not registered for communication: ") +
              e.what());
    }
  }
  return at::zeros({numel}, options);
}

void require_parameters(const std::vector<at::Tensor>& parameters) {
  for (const auto& parameter : parameters) {
    TORCH_CHECK_VALUE(
        parameter.defined() && parameter.requires_grad() && parameter.is_leaf(),
        "only leaves that require a gradient can be reduced; leave frozen parameters out");
  }
}
}  // namespace

std::shared_ptr<Reducer> Reducer::create(std::vector<at::Tensor> parameters,
                                         std::vector<at::Tensor> buffers, const Group& group,
                                         const ReducerOptions& options) {
  TORCH_CHECK_VALUE(
      group, "no process group (group: null); call init_process_group or init_from_env first");
  require_parameters(parameters);
  require_options(options);
  auto state = std::make_unique<State>();
  auto& s = *state;
  s.group = group;
  s.rank = group->getRank();
  s.world_size = group->getSize();
  s.alone = s.world_size == 1 && !options.whole_path;
  s.names = options.names;
  s.wire_dtype = options.wire_dtype;
  s.error_feedback = options.error_feedback;
  s.predivide = options.gradient_predivide_factor.value_or(s.world_size);
  s.infos = infos_of(parameters, options.sparse);
  s.plan_options = plan_options_of(options);
  s.announced = options.forwards_announced;
  s.traffic = traffic_of(group.get());
  uint64_t others = 0;  // that go on living
  for (const auto& other : reducers_beside(parameters, group.get())) {
    other->settle_owed();
    others += other->s_->group == group && !other->shared_with(parameters) ? 1 : 0;
  }
  const bool fixed = is_fixed(options.plan);
  auto plan = fixed ? plan_from_json(options.plan, s.infos, s.plan_options)
                    : plan_buckets(s.infos, s.plan_options);
  s.device = plan.buckets.back().device;
  s.watch.set_device(s.device, waits_in_streams(*group, s.device));
  const auto most_others =
      require_same_model(group, s.device,
                         {parameters, options.names, options.frozen, buffers,
                          to_string(with_devices_in_order(plan), s.infos) + describe(options)},
                         others);
  s.traffic->several = most_others > 0;
  if (options.synchronise_at_start) {
    broadcast_from(0, group, parameters);
    broadcast_from(0, group, options.frozen);
    broadcast_from(0, group, buffers);
  }
  if ((s.store = group->getStore())) {
    const auto count = s.store->add("brimful/reducers/" + std::to_string(s.rank), 1);
    s.key = "brimful/" + std::to_string(count) + "/";
    s.number = static_cast<uint64_t>(count);
  } else {
    s.number = static_cast<uint64_t>(++s.traffic->numbers);
  }
  s.board.emplace(s.store, s.key);
  if (!options.broadcast_buffers) {
    buffers.clear();
  }
  std::erase_if(buffers, [&](const auto& buffer) {
    return buffer.device() != s.device || buffer.numel() == 0;
  });
  if (s.world_size > 1) {
    s.updates.emplace(parameters, s.device, options.renormalised);
  }
  const auto count = static_cast<int64_t>(parameters.size());
  s.tail.emplace(count, s.rank, s.world_size, std::move(buffers),
                 c10::toRealValueType(plan.buckets.back().dtype),
                 std::count(options.sparse.begin(), options.sparse.end(), true));
  s.seen.assign(parameters.size(), -1);
  s.used.assign(parameters.size(), 0);
  s.views.resize(parameters.size());
  s.parameters = std::move(parameters);
  s.arenas = Arenas([&s](int64_t numel, const at::TensorOptions& options) {
    return zeros_for(s.group, numel, options);  // the group's one owner here is s.group
  });
  s.lay_out(std::move(plan));
  if (s.rank == 0 && s.store && !s.alone && !fixed && options.plan != "registration") {
    const bool caps_given = options.bucket_cap_mb || !options.bucket_cap_mb_list.empty();
    s.planner =
        std::make_unique<Planner>(s.infos, s.plan_options, options.plan == "auto" && !caps_given);
  }

  for (const auto& other : owners_of(s.parameters)) {
    other->retire(s.parameters);
  }
  std::shared_ptr<Reducer> reducer(new Reducer(std::move(state)));
  reducer->add_hooks();
  own(reducer, reducer->s_->parameters, group.get());
  release_at_exit(reducer.get(), [weak = std::weak_ptr<Reducer>(reducer)] {
    if (const auto alive = weak.lock()) {
      alive->s_->group.reset();
    }
  });
  return reducer;
}

Reducer::Reducer(std::unique_ptr<State> state) : s_(std::move(state)) {}

Reducer::~Reducer() {
  if (std::uncaught_exceptions() > s_->exceptions) {
    announce_unwinding();
  }
  forget_at_exit(this);
  disown(this);
  remove_hooks();
}

void Reducer::add_hooks() {
  for (size_t i = 0; i < s_->parameters.size(); ++i) {
    auto accumulator = torch::autograd::impl::grad_accumulator(s_->parameters[i]);
    auto hook = [weak = weak_from_this(), i](const torch::autograd::variable_list& gradients) {
      if (const auto reducer = weak.lock()) {
        reducer->on_gradient(static_cast<int64_t>(i), gradients[0]);
      }
    };
    s_->hook_keys.push_back(accumulator->add_post_hook(after_node(std::move(hook))));
    s_->accumulators.push_back(std::move(accumulator));
  }
}

void Reducer::remove_hooks() {
  for (size_t i = 0; i < s_->hook_keys.size(); ++i) {
    s_->accumulators[i]->del_post_hook(s_->hook_keys[i]);
  }
  s_->hook_keys.clear();
}

/// One of its parameters has a later reducer: two would take a gradient in turns, and neither would know.
void Reducer::retire(const std::vector<at::Tensor>& taken) {
  disown(this);
  remove_hooks();
  s_->taken = s_->name_of(*shared_with(taken));
}

/// The first of its parameters that is one of `others`.
std::optional<int64_t> Reducer::shared_with(const std::vector<at::Tensor>& others) const {
  std::unordered_set<const c10::TensorImpl*> known;
  for (const auto& other : others) {
    known.insert(other.unsafeGetTensorImpl());
  }
  for (size_t i = 0; i < s_->parameters.size(); ++i) {
    if (known.count(s_->parameters[i].unsafeGetTensorImpl()) > 0) {
      return static_cast<int64_t>(i);
    }
  }
  return std::nullopt;
}

void Reducer::require_not_taken() const {
  TORCH_CHECK(s_->taken.empty(),
              "a later DistributedDataParallel reduces a parameter of this one (parameter: ",
              s_->taken, "); use the later one, or wrap one module that holds all parameters");
}

void Reducer::start_backward(bool launching) {
  auto& s = *s_;
  s.launching = launching;
  ++s.generation;
  for (auto& bucket : s.buckets) {
    bucket.pending = static_cast<int64_t>(bucket.parameters.size());
    bucket.stream.reset();
  }
  s.watch.begin_backward(s.buckets.size());
  s.arrivals.clear();
}

// autograd.grad leaves no gradient, and backward(inputs=...) of some parameters is this rank's own. All of them, as far as
// they can be inputs, are what a backward without inputs reaches.
bool Reducer::State::is_whole(
    const std::unordered_map<torch::autograd::Node*, torch::autograd::GraphTask::ExecInfo>&
        selected) {
  if (selected.empty()) {
    return true;
  }
  size_t chosen = 0;
  size_t possible = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto found = selected.find(accumulators[i].get());
    chosen += found != selected.end() && found->second.needed_ ? 1 : 0;
    possible += parameters[i].requires_grad() ? 1 : 0;
  }
  if (chosen > 0 && chosen < possible && !std::exchange(warned, true)) {
    log(LogLevel::warning,
        c10::str("the gradients of a backward of some parameters stay this rank's own (inputs: ",
                 chosen, " of ", possible,
                 " parameters); for gradients of all ranks pass all of them, or no inputs"));
  }
  return chosen > 0 && chosen >= possible;
}

void Reducer::on_gradient(int64_t parameter, const at::Tensor& gradient) {
  auto& s = *s_;
  std::unique_lock<std::mutex> lock(s.mutex);
  if (s.mode == State::Mode::idle && !begin_plain_backward(lock, false)) {
    return;
  }
  try {
    take(parameter, gradient);
  } catch (...) {
    if (s.mode == State::Mode::plain) {
      s.own_error = std::current_exception();  // of a backward that dies nothing else is known
    }
    throw;
  }
}

void Reducer::take(int64_t parameter, const at::Tensor& gradient) {
  auto& s = *s_;
  const auto index = s.slots[parameter].bucket;
  auto& bucket = s.buckets[index];
  if (bucket.left) {
    on_late_gradient(parameter);
  }
  s.reentrant = s.reentrant || (s.mode == State::Mode::managed &&
                                torch::autograd::get_current_graph_task_id() != s.graph_task);
  const auto began = s.watch.gradient(index);
  if (s.planner && !s.planner->done()) {
    s.arrivals.push_back(parameter);
  }
  if (s.seen[parameter] == s.generation) {
    bucket.join_current_stream();
    add_again(parameter, gradient);
    return;
  }
  s.seen[parameter] = s.generation;
  bucket.join_current_stream();
  place(parameter, gradient);
  s.watch.end_copy(began);
  if (--bucket.pending == 0) {
    s.watch.ready(index);
    advance_early();
  }
}

std::string Reducer::State::name_of(int64_t parameter) const {
  return static_cast<size_t>(parameter) < names.size() ? names[parameter]
                                                       : std::to_string(parameter);
}

void Reducer::on_late_gradient(int64_t parameter) {
  auto& s = *s_;
  s.late = true;
  s.launch_late = true;
  TORCH_CHECK(false, "a parameter got a second gradient after its bucket was launched (parameter: ",
              s.name_of(parameter),
              "); a module used several times under reentrant checkpointing does that. From now on "
              "buckets are launched after backward: "
              "repeat the step (a BatchSizer does so by itself), or pass use_reentrant=False to "
              "checkpoint");
}

void Reducer::set_order(ParticipantAttempt* before, ParticipantAttempt* after) {
  s_->before = before;
  s_->after = after;
}

int Reducer::rank() const {
  return s_->rank;
}
int Reducer::world_size() const {
  return s_->world_size;
}
int64_t Reducer::step() const {
  return s_->step;
}
const std::vector<at::Tensor>& Reducer::parameters() const {
  return s_->parameters;
}
int64_t Reducer::launched() const {
  return s_->next;
}
int64_t Reducer::buckets() const {
  return s_->last() + 1;
}
const FailureBoard& Reducer::board() const {
  return *s_->board;
}
Reducer::Counters Reducer::counters() const {
  return s_->counters;
}
const std::vector<std::string>& Reducer::names() const {
  return s_->names;
}
std::vector<StepTimes> Reducer::times() const {
  return s_->watch.steps();
}

}  // namespace brimful
