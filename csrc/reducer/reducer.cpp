// The life of a bucket: each gradient moves into the flat buffer while the caches still hold it and p.grad becomes a
// view (on_gradient, place), what did not come is filled in (fill), buckets leave in order (launch), the last one only when the step knows its verdict (complete, drain), and one
// wait ends the step (finish).
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/log.h>
#include <brimful/memory/stats.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include <algorithm>
#include <cstring>
#include <sstream>

#include "reducer/at_exit.h"
#include "reducer/reducer_state.h"

namespace brimful {
namespace {
constexpr double kMiB = 1024.0 * 1024.0;

bool is_alias(const at::Tensor& gradient, const at::Tensor& view) {
  return gradient.layout() == at::kStrided && gradient.const_data_ptr() == view.const_data_ptr();
}

std::vector<ParameterInfo> infos_of(const std::vector<at::Tensor>& parameters,
                                    const std::vector<bool>& sparse) {
  std::vector<ParameterInfo> infos;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& p = parameters[i];
    infos.push_back({p.numel(), p.scalar_type(), p.device(), i < sparse.size() && sparse[i]});
  }
  return infos;
}

std::string describe_change(const std::string& name, const at::Tensor& parameter,
                            const at::Tensor& wrapped) {
  std::ostringstream text;
  text << "a parameter changed after its module was wrapped (parameter: " << name << ", wrapped as "
       << wrapped.sizes() << " " << c10::toString(wrapped.scalar_type()) << " on "
       << wrapped.device() << ", now " << parameter.sizes() << " "
       << c10::toString(parameter.scalar_type()) << " on " << parameter.device()
       << "); wrap the module again, on all ranks";
  return text.str();
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
  const auto infos = infos_of(parameters, options.sparse);
  const auto plan = plan_buckets(infos, {static_cast<int64_t>(options.first_bucket_cap_mb * kMiB),
                                         static_cast<int64_t>(options.bucket_cap_mb * kMiB)});

  auto state = std::make_unique<State>();
  auto& s = *state;
  s.group = group;
  s.rank = group->getRank();
  s.world_size = group->getSize();
  s.device = plan.buckets.back().device;
  s.names = options.names;
  s.plan = to_string(plan, infos);
  require_same_model(group, s.device, parameters, options.names, s.plan);
  if (options.synchronise_at_start) {
    broadcast_from_rank_0(group, parameters);
    broadcast_from_rank_0(group, buffers);
  }
  if ((s.store = group->getStore())) {
    const auto count = s.store->add("brimful/reducers/" + std::to_string(s.rank), 1);
    s.key = "brimful/" + std::to_string(count) + "/";
  }
  if (!options.broadcast_buffers) {
    buffers.clear();
  }
  std::erase_if(buffers, [&](const auto& buffer) {
    return buffer.device() != s.device || buffer.numel() == 0;
  });
  const auto count = static_cast<int64_t>(parameters.size());
  s.tail.emplace(count, s.rank, s.world_size, std::move(buffers),
                 c10::toRealValueType(plan.buckets.back().dtype));
  s.slots.resize(parameters.size());
  for (const auto& bucket : plan.buckets) {
    const auto index = static_cast<int64_t>(s.buckets.size());
    const bool last = index + 1 == static_cast<int64_t>(plan.buckets.size());
    s.buckets.push_back(
        make_bucket(bucket, index, last ? s.tail->numel() : 0, parameters, s.slots));
  }
  const auto& last = s.buckets.back().flat;
  s.tail->attach(last.narrow(0, last.numel() - s.tail->numel(), s.tail->numel()));
  s.seen.assign(parameters.size(), -1);
  s.used.assign(parameters.size(), 0);
  s.parameters = std::move(parameters);
  log(LogLevel::debug, "bucket plan\n" + s.plan);

  std::shared_ptr<Reducer> reducer(new Reducer(std::move(state)));
  reducer->add_hooks();
  release_at_exit([weak = std::weak_ptr<Reducer>(reducer)] {
    if (const auto alive = weak.lock()) {
      alive->s_->group.reset();
    }
  });
  return reducer;
}

Reducer::Reducer(std::unique_ptr<State> state) : s_(std::move(state)) {}

Reducer::~Reducer() {
  for (size_t i = 0; i < s_->accumulators.size(); ++i) {
    s_->accumulators[i]->del_post_hook(s_->hook_keys[i]);
  }
}

void Reducer::add_hooks() {
  using torch::autograd::variable_list;
  for (size_t i = 0; i < s_->parameters.size(); ++i) {
    auto accumulator = torch::autograd::impl::grad_accumulator(s_->parameters[i]);
    auto hook = [weak = weak_from_this(), i](const variable_list& outputs,
                                             const variable_list& gradients) {
      if (const auto reducer = weak.lock()) {
        reducer->on_gradient(static_cast<int64_t>(i), gradients[0]);
      }
      return outputs;
    };
    s_->hook_keys.push_back(accumulator->add_post_hook(
        std::make_unique<torch::autograd::utils::LambdaPostHook>(std::move(hook))));
    s_->accumulators.push_back(std::move(accumulator));
  }
}

void Reducer::start_backward(bool launching) {
  auto& s = *s_;
  s.launching = launching;
  ++s.generation;
  for (auto& bucket : s.buckets) {
    bucket.pending = static_cast<int64_t>(bucket.parameters.size());
  }
}

void Reducer::on_gradient(int64_t parameter, const at::Tensor& gradient) {
  auto& s = *s_;
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (s.mode == State::Mode::idle && !begin_plain_backward()) {
    return;
  }
  const auto index = s.slots[parameter].bucket;
  auto& bucket = s.buckets[index];
  if (bucket.left) {
    on_late_gradient(parameter);
  }
  s.reentrant = s.reentrant || (s.mode == State::Mode::managed &&
                                torch::autograd::get_current_graph_task_id() != s.graph_task);
  if (s.seen[parameter] == s.generation) {
    add_again(parameter, gradient);
    return;
  }
  s.seen[parameter] = s.generation;
  place(parameter);
  if (--bucket.pending == 0) {
    advance_early();
  }
}

void Reducer::on_late_gradient(int64_t parameter) {
  auto& s = *s_;
  s.late = true;
  s.launch_late = true;
  const auto name = static_cast<size_t>(parameter) < s.names.size() ? s.names[parameter]
                                                                    : std::to_string(parameter);
  TORCH_CHECK(false,
              "a parameter got a second gradient after its bucket had left (parameter: ", name,
              "); a module used several times under reentrant checkpointing does that. From now on "
              "buckets leave after backward: "
              "repeat the step (a BatchSizer does so by itself), or pass use_reentrant=False to "
              "checkpoint");
}

// A gradient of another shape would be read past its end, or be broadcast without a word.
void Reducer::require_unchanged(int64_t parameter, const at::Tensor& gradient) {
  const auto& s = *s_;
  const auto& slot = s.slots[parameter];
  const auto& wrapped = slot.view.defined() ? slot.view : s.buckets[slot.bucket].sparse_zero;
  const auto& now = s.parameters[parameter];
  if (gradient.sizes() != wrapped.sizes() || now.scalar_type() != wrapped.scalar_type() ||
      now.device() != wrapped.device()) [[unlikely]] {
    const auto index = static_cast<size_t>(parameter);
    const auto text = describe_change(
        index < s.names.size() ? s.names[index] : std::to_string(index), now, wrapped);
    publish_failure(FailureKind::error, text);
    throw PlanMismatch(text);
  }
}

void Reducer::place(int64_t parameter) {
  auto& s = *s_;
  const at::NoGradGuard no_grad;
  auto& gradient = s.parameters[parameter].mutable_grad();
  const auto& slot = s.slots[parameter];
  auto& sparse = s.buckets[slot.bucket].sparse;
  if (!gradient.defined()) {
    if (slot.view.defined()) {
      slot.view.zero_();
    } else {
      sparse = s.buckets[slot.bucket].sparse_zero.clone();
    }
    return;
  }
  s.used[parameter] = 1;
  require_unchanged(parameter, gradient);
  if (!slot.view.defined()) {
    sparse = sparse_scaled(gradient, s.scale);
  } else if (!is_alias(gradient, slot.view)) {
    copy_scaled(slot.view, gradient, s.scale);
    gradient = slot.view;
  } else if (s.scale != 1) {
    slot.view.mul_(s.scale);
  }
}

void Reducer::add_again(int64_t parameter, const at::Tensor& gradient) {
  auto& s = *s_;
  if (s.scale == 1 || !gradient.defined()) {
    return;
  }
  const at::NoGradGuard no_grad;
  const auto& view = s.slots[parameter].view;
  if (view.defined()) {
    view.add_(gradient, s.scale - 1);  // autograd has added it as it is to what was scaled
  } else {
    place(parameter);
  }
}

void Reducer::fill(int64_t index) {
  for (const auto parameter : s_->buckets[index].parameters) {
    if (s_->seen[parameter] != s_->generation) {
      place(parameter);
    }
  }
}

void Reducer::launch(int64_t index) {
  auto& s = *s_;
  auto& bucket = s.buckets[index];
  if (index == s.last()) {
    s.tail->write(s.used, s.record, s.loss_sum, s.buffer_source);
  }
  bucket.left = true;
  ++s.next;
  if (s.broken) {
    return;
  }
  try {
    std::vector<at::Tensor> tensors{bucket.flat.defined() ? bucket.flat : bucket.sparse};
    ++s.counters.launches;
    bucket.work = s.group->allreduce(tensors);
  } catch (...) {
    s.broken = std::current_exception();
  }
}

void Reducer::advance_early() {
  auto& s = *s_;
  if (!s.launching || s.launch_late) {
    return;
  }
  while (s.next < s.last() && s.buckets[s.next].pending == 0 &&
         (s.before == nullptr || s.before->early_left())) {
    launch(s.next);
  }
  if (s.after != nullptr && s.next >= s.last()) {
    s.after->advance();
  }
}

void Reducer::advance() {
  const std::lock_guard<std::mutex> lock(s_->mutex);
  advance_early();
}

bool Reducer::early_left() const {
  return s_->next >= s_->last();
}

void Reducer::begin_attempt(int buffer_source) {
  auto& s = *s_;
  settle();
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.mode = State::Mode::managed;
  s.scale = 1;
  s.buffer_source = buffer_source;
  s.late = false;
  s.reentrant = false;
  s.forward_open = false;
  std::fill(s.used.begin(), s.used.end(), uint8_t{0});
  start_backward(false);
}

void Reducer::begin_piece(bool last) {
  const std::lock_guard<std::mutex> lock(s_->mutex);
  start_backward(last);
}

void Reducer::backward_began(int graph_task) {
  s_->graph_task = graph_task;
}

void Reducer::set_record(const ControlRecord& record, const at::Tensor& loss_sum) {
  s_->record = record;
  s_->loss_sum = loss_sum;
}

bool Reducer::gradients_complete() const {
  const auto done = [](const auto& bucket) { return bucket.pending == 0; };
  return s_->launching && !s_->reentrant &&
         std::all_of(s_->buckets.begin(), s_->buckets.end(), done);
}

void Reducer::complete(Part part) {
  auto& s = *s_;
  const std::lock_guard<std::mutex> lock(s.mutex);
  const memory::Unlimited unlimited;
  const int64_t end = part == Part::early ? s.last() : s.last() + 1;
  while (s.next < end) {
    fill(s.next);
    launch(s.next);
  }
}

void Reducer::drain(Part part) {
  auto& s = *s_;
  const std::lock_guard<std::mutex> lock(s.mutex);
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  const int64_t end = part == Part::early ? s.last() : s.last() + 1;
  while (s.next < end) {
    auto& bucket = s.buckets[s.next];
    if (bucket.flat.defined()) {
      bucket.gradients.zero_();
    } else {
      bucket.sparse = bucket.sparse_zero.clone();
    }
    launch(s.next);
  }
}

void Reducer::wait_for_buckets() {
  auto& s = *s_;
  s.waiting_since = std::chrono::steady_clock::now();
  for (auto& bucket : s.buckets) {
    if (bucket.work && !s.broken) {
      try {
        wait_for(*bucket.work,
                 s.parameters[bucket.parameters.empty() ? 0 : bucket.parameters[0]].is_cpu());
      } catch (...) {
        s.broken = std::current_exception();
      }
    }
    bucket.work.reset();
    bucket.left = false;
  }
  ++s.counters.host_waits;
}

void Reducer::end_attempt() {
  auto& s = *s_;
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.next = 0;
  s.mode = State::Mode::idle;
  s.launching = false;
  s.loss_sum.reset();
  s.before = nullptr;
  s.after = nullptr;
  ++s.step;
  ++s.counters.steps;
}

std::vector<ControlRecord> Reducer::finish() {
  auto& s = *s_;
  wait_for_buckets();
  end_attempt();
  if (s.broken) {
    std::string cause;
    try {
      std::rethrow_exception(s.broken);
    } catch (const c10::Error& e) {
      cause = e.what_without_backtrace();
    } catch (const std::exception& e) {
      cause = e.what();
    }
    throw_broken(s.step - 1, "a step", cause);
  }
  s.tail->read();
  return s.tail->records();
}

void Reducer::accept(double scale, bool keep_unused) {
  auto& s = *s_;
  const at::NoGradGuard no_grad;
  for (auto& bucket : s.buckets) {
    if (scale != 1 && bucket.flat.defined()) {
      bucket.gradients.mul_(scale);
    }
  }
  for (size_t i = 0; i < s.parameters.size(); ++i) {
    const auto& slot = s.slots[i];
    if (slot.view.defined() && s.used[i] != 0) {
      continue;  // its gradient is the view since place()
    }
    auto& gradient = s.parameters[i].mutable_grad();
    if (keep_unused && s.tail->users(static_cast<int64_t>(i)) == 0) {
      gradient.reset();
    } else if (slot.view.defined()) {
      gradient = slot.view;
    } else {
      const auto& sum = s.buckets[slot.bucket].sparse;
      gradient = sum;
      if (scale != 1) {
        gradient._values().mul_(scale);
      }
    }
  }
  for (auto& bucket : s.buckets) {
    bucket.sparse.reset();
  }
  std::fill(s.used.begin(), s.used.end(), uint8_t{0});
  s.tail->write_back_buffers();
}

void Reducer::discard() {
  for (const auto& parameter : s_->parameters) {
    parameter.mutable_grad().reset();
  }
  for (auto& bucket : s_->buckets) {
    bucket.sparse.reset();
  }
  std::fill(s_->used.begin(), s_->used.end(), uint8_t{0});
}

std::vector<ControlRecord> Reducer::exchange(const ControlRecord& record) {
  auto& s = *s_;
  settle();
  const memory::Unlimited unlimited;
  const auto bytes = encode(record);
  auto own = at::empty({kRecordBytes}, at::kByte);
  std::memcpy(own.mutable_data_ptr<uint8_t>(), bytes.data(), bytes.size());
  std::vector<at::Tensor> inputs{own.to(s.device)};
  std::vector<std::vector<at::Tensor>> outputs(1);
  for (int rank = 0; rank < s.world_size; ++rank) {
    outputs[0].push_back(at::empty_like(inputs[0]));
  }
  ++s.counters.exchanges;
  s.waiting_since = std::chrono::steady_clock::now();
  try {
    // Not an all_reduce: a rank that is out of step would match it with a bucket, and gloo kills a process for that.
    wait_for(*s.group->allgather(outputs, inputs), s.device.is_cpu());
  } catch (const std::exception& e) {
    s.broken = std::current_exception();
    throw_broken(s.step, "the exchange before a loop", e.what());
  }
  std::vector<ControlRecord> records;
  for (const auto& output : outputs[0]) {
    const auto on_host = output.cpu();
    RecordBytes theirs{};
    std::memcpy(theirs.data(), on_host.const_data_ptr<uint8_t>(), theirs.size());
    records.push_back(decode(theirs));
  }
  return records;
}

void Reducer::set_order(Participant* before, Participant* after) {
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
bool Reducer::late_gradient() const {
  return s_->late;
}
Reducer::Counters Reducer::counters() const {
  return s_->counters;
}
std::string Reducer::plan() const {
  return s_->plan;
}

}  // namespace brimful
