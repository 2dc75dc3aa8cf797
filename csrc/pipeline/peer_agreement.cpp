#include "pipeline/peer_agreement.h"

#include <random>

#include "base/fnv.h"

namespace brimful::pipeline {
namespace {
/// Positive.
int64_t random_link_name() {
  std::random_device device;
  return static_cast<int64_t>((uint64_t{device()} << 32 | device()) >> 1) | 1;
}

/// Never 0.
int64_t number_of(const std::string& text) {
  Fnv<uint64_t> hash;
  hash.add(text);
  return static_cast<int64_t>(hash.value() >> 1) | 1;
}
}  // namespace

void PeerAgreement::regrouped(int64_t progress) {
  progress_ = progress;
  made_ = false;
  broken_ = false;
}

ActionFailure PeerAgreement::failure_outside(std::exception_ptr error) const {
  if (options_.translate) {
    error = options_.translate(std::move(error));
  }
  return ActionFailure(options_.peers ? options_.peers->rank() : 0, -1, std::move(error));
}

PeerVerdict PeerAgreement::agree(const PeerVerdict& own) {
  try {
    auto all = options_.peers ? options_.peers->agree(own) : own;
    broken_ = broken_ || all.broken;
    return all;
  } catch (...) {
    broken_ = true;
    throw;
  }
}

PeerVerdict PeerAgreement::said_in(Call& call, bool may_split,
                                   const std::function<std::string()>& set_up) {
  PeerVerdict own;
  own.rank = options_.peers->rank();
  own.rows = call.rows;
  own.may_split = may_split;
  own.ties = tied_.size();
  own.links = options_.peers->wants_links() ? random_link_name() : 0;
  own.microbatches = call.microbatches();
  try {
    if (call.refused) {
      std::rethrow_exception(call.refused);
    }
    if (!made_) {
      tied_.make_room();
    }
    own.setup = number_of(set_up() + "/" + std::to_string(progress_));
  } catch (...) {
    call.refused = std::current_exception();
    own.kind = Status::error;
    own.text = failure_outside(call.refused).text;
  }
  return own;
}

void PeerAgreement::meet(Call& call, bool may_split, const std::function<std::string()>& set_up,
                         const std::function<std::vector<int>()>& places) {
  const auto own = said_in(call, may_split, set_up);
  PeerVerdict all;
  try {
    all = agree(own);
    if (all.kind == Status::ok && all.ties > 0 && !made_) {
      tied_.meet();
      tied_.drop_room();
    }
  } catch (...) {  // on all ranks: the group broke, or their weights do not belong together
    call.refused = call.refused ? call.refused : std::current_exception();
    call.runs = false;
    return;
  }
  may_split_ = all.may_split;
  any_tied_ = all.ties > 0;
  if (all.microbatches != call.microbatches()) {  // another rank has less memory
    call.retry.set_plan(ExecutionPlan::in_pieces(call.rows, all.microbatches));
  }
  made_ = all.kind == Status::ok;
  read(call, all);
  if (call.runs && all.links > 0) {
    connect(call, all.links, places);
  }
}

void PeerAgreement::connect(Call& call, int64_t name,
                            const std::function<std::vector<int>()>& places) {
  PeerVerdict own;
  own.rank = options_.peers->rank();
  try {
    options_.peers->connect(name, places());
  } catch (...) {
    call.refused = std::current_exception();
    own.kind = Status::error;
    own.text = failure_outside(call.refused).text;
  }
  auto all = own;
  if (options_.peers->is_on_device()) {  // else what fails here is the group, which all will see
    try {
      all = agree(own);
    } catch (...) {
      call.refused = call.refused ? call.refused : std::current_exception();
      all.kind = Status::error;
    }
  }
  if (all.kind != Status::ok) {
    options_.peers->drop_links();
  }
  read(call, all);
}

void PeerAgreement::read(Call& call, const PeerVerdict& all) {
  call.runs = all.kind == Status::ok;
  if (call.runs || call.refused) {
    return;
  }
  call.failed_elsewhere = all.rank >= 0;
  if (!call.failed_elsewhere) {
    call.refused = std::make_exception_ptr(c10::ValueError({"step", "meet", 0}, all.text));
  }
}

}  // namespace brimful::pipeline
