// How a reducer is made: all ranks at the same time.
#include <ATen/ATen.h>
#include <brimful/log.h>
#include <brimful/step/distinct_tensors.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "base/format.h"
#include "base/units.h"
#include "reducer/agree.h"
#include "reducer/at_exit.h"
#include "reducer/device_wait.h"
#include "reducer/host_offer.h"
#include "reducer/owners.h"
#include "reducer/reducer_state.h"
#include "reducer/whole_path.h"

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

/// Neither gloo nor torch's own arithmetic, with which gradients are scaled, has dtypes of 8 bits.
bool is_reduced(c10::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kHalf ||
         dtype == at::kBFloat16;
}

void require_options(const ReducerOptions& options) {
  TORCH_CHECK_VALUE(!is_fixed(options.plan) || options.plan.rfind("[[", 0) == 0,
                    "there is no such plan (plan: ", options.plan,
                    "); choose \"auto\", \"ordered\" or \"registration\", or give what plan() of "
                    "the same model was");
  TORCH_CHECK_VALUE(
      !options.wire_dtype || is_reduced(*options.wire_dtype),
      "gradients cannot be reduced in this dtype (wire_dtype: ", c10::toString(*options.wire_dtype),
      "); choose a real floating one of 16 bits or more, such as torch.bfloat16");
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
         (options.gradient_predivide_factor ? format_number(*options.gradient_predivide_factor)
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

/// A parameter that is registered in two places is reduced once, under its first name. What options say by parameter
/// follows.
void drop_repeated(std::vector<at::Tensor>& parameters, ReducerOptions& options) {
  std::unordered_set<const c10::TensorImpl*> known;
  size_t kept = 0;
  const auto move_up = [&](auto& by_parameter, size_t from) {
    if (from < by_parameter.size()) {
      by_parameter[kept] = by_parameter[from];
    }
  };
  const auto cut = [&](auto& by_parameter) {
    by_parameter.resize(std::min(kept, by_parameter.size()));
  };
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (known.insert(parameters[i].unsafeGetTensorImpl()).second) {
      move_up(parameters, i);
      move_up(options.names, i);
      move_up(options.sparse, i);
      move_up(options.renormalised, i);
      ++kept;
    }
  }
  cut(parameters);
  cut(options.names);
  cut(options.sparse);
  cut(options.renormalised);
  options.frozen = distinct_tensors(std::move(options.frozen));
}

/// All ranks plan alike, or raise. What earlier reducers owe is launched first.
BucketPlan agree_on_plan(GroupLink& link, const BucketSet& layout,
                         const std::vector<at::Tensor>& parameters,
                         const std::vector<at::Tensor>& buffers, const ReducerOptions& options) {
  uint64_t others = 0;  // that go on living
  for (const auto& other : reducers_beside(parameters, link.group.get())) {
    other->settle_owed();
    const auto& theirs = other->engine();
    others += theirs.link().group == link.group && !theirs.layout().shared_with(parameters) ? 1 : 0;
  }
  auto plan = is_fixed(options.plan)
                  ? plan_from_json(options.plan, layout.infos, layout.plan_options)
                  : plan_buckets(layout.infos, layout.plan_options);
  const auto device = plan.buckets.back().device;
  const auto text = to_string(with_devices_in_order(plan), layout.infos) + describe(options);
  const auto own_number = link.next_number();
  HostOffer hosts(link, options.between_hosts.value_or(waits_in_streams(*link.group, device)));
  const auto [offer, hosts_number] = hosts.said();
  uint64_t most_others = 0;
  uint64_t number = 0;
  std::vector<HostOffer::Said> offers;
  for (const auto& said : require_same_model(
           link.group, device, {parameters, options.names, options.frozen, buffers, text},
           {others, own_number, offer, hosts_number})) {
    most_others = std::max(most_others, said[0]);
    number = std::max(number, said[1]);
    offers.push_back({said[2], said[3]});
  }
  link.traffic->several = most_others > 0;
  link.open_board(number, device);
  hosts.settle(offers);
  return plan;
}

/// What the last bucket carries besides its gradients.
Tail make_tail(const GroupLink& link, const BucketPlan& plan, std::vector<at::Tensor> buffers,
               const ReducerOptions& options, size_t parameters) {
  if (!options.broadcast_buffers) {
    buffers.clear();
  }
  std::erase_if(buffers, [&](const auto& buffer) { return buffer.device() != link.device; });
  TailHead::Form form;
  form.parameters = static_cast<int64_t>(parameters);
  form.sparse = std::count(options.sparse.begin(), options.sparse.end(), true);
  form.rank = link.rank;
  form.world_size = link.world_size;
  if (link.world_size == 1 || link.hosts()) {
    const bool has_losses = link.world_size > 1 && !link.device.is_cpu();
    form.place = has_losses ? TailHead::Place::losses : TailHead::Place::nothing;
  }
  return {form, std::move(buffers), c10::toRealValueType(plan.buckets.back().dtype)};
}

/// A trial of smaller buckets would make more collectives than torch's sizes, and a host is slower than its device.
void start_tuner(Engine& engine, const ReducerOptions& options) {
  const auto& link = engine.link();
  const bool may_change = !is_fixed(options.plan) && options.plan != "registration";
  if (link.rank == 0 && link.store && !link.alone && may_change) {
    const bool caps_given = options.bucket_cap_mb || !options.bucket_cap_mb_list.empty();
    engine.tuner().start(options.plan == "auto" && !caps_given && link.device.is_cpu());
  }
}
}  // namespace

bool& WholePath::is_on() {
  thread_local bool on = false;
  return on;
}

std::shared_ptr<Reducer::State> Reducer::State::make(std::vector<at::Tensor> parameters,
                                                     std::vector<at::Tensor> buffers,
                                                     const Group& group,
                                                     const ReducerOptions& options) {
  auto state = std::make_shared<State>(group, options);
  auto& link = state->engine.link();
  BucketSet layout;
  layout.names = options.names;
  layout.wire_dtype = options.wire_dtype;
  layout.error_feedback = options.error_feedback;
  layout.infos = infos_of(parameters, options.sparse);
  layout.plan_options = plan_options_of(options);
  auto plan = agree_on_plan(link, layout, parameters, buffers, options);
  if (options.synchronise_at_start) {
    broadcast_from(0, group, parameters);
    broadcast_from(0, group, options.frozen);
    broadcast_from(0, group, buffers);
  }
  std::optional<Updates> updates;
  if (link.world_size > 1 && options.check_updates) {
    updates.emplace(parameters, link.device, options.renormalised, "DistributedDataParallel");
    if (link.hosts() && !link.device.is_cpu()) {
      updates->be_late();
    }
  }
  state->buffers = buffers;
  layout.tail.emplace(make_tail(link, plan, std::move(buffers), options, parameters.size()));
  layout.views.resize(parameters.size());
  layout.parameters = std::move(parameters);
  layout.arenas = Arenas([&link](int64_t numel, const at::TensorOptions& of) {
    return zeros_for(link.group, numel, of);  // the group's one owner here is the link
  });
  state->engine.set_up(std::move(layout), std::move(plan), std::move(updates));
  start_tuner(state->engine, options);
  return state;
}

void Reducer::State::connect(const std::shared_ptr<State>& state) {
  own_parameters(state);
  state->loop.attach(std::shared_ptr<LoopDriver>(state, &state->loop),
                     std::shared_ptr<Engine>(state, &state->engine));
  release_at_exit(&state->loop, [weak = std::weak_ptr<State>(state)] {
    if (const auto alive = weak.lock()) {
      alive->engine.link().release();
    }
  });
  state->connected = true;
}

void Reducer::State::own_parameters(const std::shared_ptr<State>& state) {
  const auto& engine = state->engine;
  own(std::shared_ptr<LoopDriver>(state, &state->loop), engine.layout().parameters,
      engine.link().group.get());
}

void Reducer::State::let_go() {
  if (std::exchange(connected, false)) {
    forget_at_exit(&loop);
    disown(&loop);
    engine.gradient_hooks().remove();
  }
}

Reducer::State::~State() {
  if (connected && std::uncaught_exceptions() > exceptions) {
    loop.announce_unwinding();
  }
  let_go();
}

std::shared_ptr<Reducer> Reducer::create(std::vector<at::Tensor> parameters,
                                         std::vector<at::Tensor> buffers, const Group& group,
                                         const ReducerOptions& given) {
  TORCH_CHECK_VALUE(
      group, "no process group (group: null); call init_process_group or init_from_env first");
  require_parameters(parameters);
  require_options(given);
  auto options = given;
  drop_repeated(parameters, options);
  auto state =
      State::make(std::move(parameters), distinct_tensors(std::move(buffers)), group, options);
  const auto& layout = state->engine.layout();
  for (const auto& other : owners_of(layout.parameters)) {
    const auto& theirs = other->engine().layout();
    other->retire(theirs.name_of(*theirs.shared_with(layout.parameters)));
  }
  State::connect(state);
  std::shared_ptr<Reducer> reducer(new Reducer(std::move(state)));
  reducer->self_ = reducer;
  reducer->s_->loop.belong_to(reducer);
  return reducer;
}

Reducer::Reducer(std::shared_ptr<State> state) : s_(std::move(state)) {}
Reducer::~Reducer() = default;

}  // namespace brimful
