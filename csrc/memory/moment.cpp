// A thread's phase is read off what torch keeps anyway. An autograd node runs: backward, or forward again where gradients
// are recorded (checkpointing). The counter of graph nodes has moved since the last backward, optimizer or step: forward.
// The same counter leads from backward to the forward's line: a forward's allocation notes its site under the number of
// the newest node, which is the node of the operator that allocates.
#include "memory/moment.h"
#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <brimful/memory/categories.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <array>
#include <atomic>
#include <utility>
#include <vector>
#include "memory/sites.h"

namespace brimful::memory {
namespace {

constexpr uint8_t kNoPhase = 0xff;

struct ThreadState {
  uint64_t forward_from = 0;  // the number of the next graph node when no forward had begun
  uint64_t thread = 0;        // torch's number of it, 0: not asked yet
  uint32_t site = kNoSite;    // of the innermost SiteScope
  uint32_t module = kNoSite;  // of the innermost ModuleScope
  uint64_t backward_place = 0;
  uint8_t phase = kNoPhase;  // of the innermost PhaseScope
  uint8_t category = kNoCategory;
  bool in_optimizer = false;
  int graph_task = -1;  // of the last backward
  Phase last = Phase::other;
};
constinit thread_local ThreadState state;
thread_local std::vector<uint32_t> outer_modules;

std::atomic<uint32_t> backwards{0};
std::atomic<uint32_t> steps{0};
std::atomic<bool> any_backward{false};
std::atomic<bool> kept_graphs{false};

// An entry: | 20 bits to check the node by | 24 bits of site | 20 bits of module |. A reader sees a whole entry or none.
constexpr size_t kPlaces = size_t{1} << 15;
constexpr uint64_t kModuleBits = 20;
constexpr uint64_t kPlaceBits = 44;
constinit std::array<std::atomic<uint64_t>, kPlaces> places{};

uint64_t check_of(uint64_t thread, uint64_t node) {
  const uint64_t mixed =
      (node / kPlaces + 1) * 0x9e3779b97f4a7c15ULL ^ thread * 0xc2b2ae3d27d4eb4fULL;
  return (mixed >> kPlaceBits) << kPlaceBits;
}

std::atomic<uint64_t>& place_of(uint64_t thread, uint64_t node) {
  return places[(node + thread * 0x9e3779b9ULL) % kPlaces];
}

void note_place(ThreadState& thread, const Moment& moment) {
  if (thread.thread == 0) {
    thread.thread = at::RecordFunction::currentThreadId();
  }
  const uint64_t node = at::sequence_number::peek() - 1;
  const uint64_t site = moment.site & 0xffffffU;
  const uint64_t module = moment.module & 0xfffffU;
  place_of(thread.thread, node)
      .store(check_of(thread.thread, node) | site << kModuleBits | module,
             std::memory_order_relaxed);
}

// A node that allocated nothing in its forward (a view) takes the place of the nearest one before it; one without a number
// (AccumulateGrad) that of the node that ran before it.
uint64_t place_of_backward(ThreadState& thread, const torch::autograd::Node& node) {
  constexpr uint64_t kNearest = 8;
  const uint64_t number = node.sequence_nr();
  for (uint64_t k = 0; k < kNearest && k <= number; ++k) {
    const uint64_t place = place_of(node.thread_id(), number - k).load(std::memory_order_relaxed);
    if (place != 0 &&
        (place >> kPlaceBits) << kPlaceBits == check_of(node.thread_id(), number - k)) {
      thread.backward_place = place;
      break;
    }
  }
  return thread.backward_place;
}

void enter(ThreadState& thread, Phase phase) {
  if (phase == Phase::backward) {
    // The task too: a thread of autograd's own sees nothing but backwards.
    const int task = torch::autograd::get_current_graph_task_id();
    if (thread.last != Phase::backward || thread.graph_task != task) {
      backwards.fetch_add(1, std::memory_order_relaxed);
      any_backward.store(true, std::memory_order_relaxed);
      if (task >= 0 && torch::autograd::get_current_graph_task_keep_graph()) {
        kept_graphs.store(true, std::memory_order_relaxed);
      }
    }
    thread.graph_task = task;
  }
  thread.last = phase;
}

template <typename NodePointer>
Phase phase_of(ThreadState& thread, const NodePointer& node) {
  if (thread.phase != kNoPhase) {
    return static_cast<Phase>(thread.phase);
  }
  const uint64_t next = at::sequence_number::peek();
  if (!node) {
    if (thread.in_optimizer && !c10::GradMode::is_enabled()) {
      return Phase::optimizer;
    }
    return next == thread.forward_from ? Phase::other : Phase::forward;
  }
  thread.forward_from = next;
  return c10::GradMode::is_enabled() ? Phase::forward : Phase::backward;
}

Moment begin_moment(ThreadState& thread, Phase phase) {
  enter(thread, phase);
  Moment moment;
  moment.phase = phase;
  moment.step = steps.load(std::memory_order_relaxed);
  moment.backwards = backwards.load(std::memory_order_relaxed);
  return moment;
}

}  // namespace

Moment moment_of_death() noexcept {
  auto& thread = state;
  return begin_moment(thread, phase_of(thread, torch::autograd::get_current_node()));
}

Moment moment_of_birth() noexcept {
  auto& thread = state;
  const auto node = torch::autograd::get_current_node();
  Moment moment = begin_moment(thread, phase_of(thread, node));
  moment.category = thread.category;
  moment.module = thread.module;
  const bool in_backward = moment.phase == Phase::backward;
  const auto provider = site_provider();
  if (thread.site != kNoSite && !in_backward) {
    moment.site = thread.site;
  } else if (provider != nullptr) {
    moment.site = provider(node != nullptr);
  }
  if (node && (in_backward || moment.site == kNoSite)) {
    const uint64_t place = place_of_backward(thread, *node);
    if (moment.site == kNoSite) {
      moment.site = static_cast<uint32_t>(place >> kModuleBits & 0xffffffU);
    }
    if (moment.module == kNoSite) {
      moment.module = static_cast<uint32_t>(place & 0xfffffU);
    }
  }
  if (moment.site == kNoSite) {
    moment.site = thread.site;
  }
  if (moment.phase == Phase::forward) {
    note_place(thread, moment);
  }
  return moment;
}

void set_optimizer_phase(bool in_optimizer) noexcept {
  state.in_optimizer = in_optimizer;
  forget_forward();
}

void enter_module(uint32_t name) {
  outer_modules.push_back(std::exchange(state.module, name));
}

void leave_module() noexcept {
  if (!outer_modules.empty()) {
    state.module = outer_modules.back();
    outer_modules.pop_back();
  }
}

void forget_forward() noexcept {
  state.forward_from = at::sequence_number::peek();
  state.last = Phase::other;
}

void next_step() noexcept {
  forget_forward();
  steps.fetch_add(1, std::memory_order_relaxed);
}

void begin_steps() noexcept {
  forget_forward();
  steps.store(0, std::memory_order_relaxed);
  any_backward.store(false, std::memory_order_relaxed);
  kept_graphs.store(false, std::memory_order_relaxed);
}

bool backward_ran() noexcept {
  return any_backward.load(std::memory_order_relaxed);
}

bool graphs_were_kept() noexcept {
  return kept_graphs.load(std::memory_order_relaxed);
}

int64_t current_step() noexcept {
  return steps.load(std::memory_order_relaxed);
}

PhaseScope::PhaseScope(Phase phase) noexcept : outer_(state.phase) {
  state.phase = static_cast<uint8_t>(phase);
}

PhaseScope::~PhaseScope() {
  state.phase = outer_;
  forget_forward();
}

SiteScope::SiteScope(const std::string& name) : SiteScope(site_id({"", 0, name})) {}

SiteScope::SiteScope(uint32_t site) noexcept : outer_(state.site) {
  state.site = site;
}

SiteScope::~SiteScope() {
  state.site = outer_;
}

ModuleScope::ModuleScope(const std::string& name) : ModuleScope(site_id({"", 0, name})) {}

ModuleScope::ModuleScope(uint32_t name) noexcept : outer_(state.module) {
  state.module = name;
}

ModuleScope::~ModuleScope() {
  state.module = outer_;
}

CategoryScope::CategoryScope(Category category) noexcept : outer_(state.category) {
  state.category = static_cast<uint8_t>(category);
}

CategoryScope::~CategoryScope() {
  state.category = outer_;
}

}  // namespace brimful::memory
