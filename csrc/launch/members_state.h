#pragma once
#include <brimful/launch/members.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launch/member_list.h"
#include "launch/pulse.h"
#include "reducer/owners.h"

namespace brimful {
namespace launch {
/// Of one list.
struct Groups {
  c10::intrusive_ptr<c10d::ProcessGroup> replicas;  ///< the same rank of each pipeline
  c10::intrusive_ptr<c10d::ProcessGroup> pipeline;  ///< null where it is there already
};

[[noreturn]] void throw_store_lost(const std::string& cause);

/// What fails in it is the store.
template <typename Work>
auto asked(const Work& work) {
  try {
    return work();
  } catch (const std::exception& e) {
    throw_store_lost(e.what());
  }
}

std::string key_of(const std::string& what, int64_t epoch);
}  // namespace launch

class Members::State {
 public:
  State(const c10::intrusive_ptr<c10d::Store>& store, std::string name, MembersOptions given);

  Membership enter(const std::string& model, const std::string& part);
  bool meet(const std::string& place, bool ready);
  int pipeline_size() const { return options_.pipeline_size; }
  void leave() noexcept { pulse_->leave(); }

 private:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
  using StorePtr = c10::intrusive_ptr<c10d::Store>;
  using Member = launch::Member;
  using MemberList = launch::MemberList;
  // members.cpp: who is in the next group
  std::optional<MemberList> list_of(int64_t epoch);
  int64_t latest_epoch();
  void require_model(const std::string& theirs, const std::string& whose) const;
  void require_part(const std::string& part);
  void announce(int64_t epoch);
  std::vector<Member> entrants(int64_t epoch);
  MemberList await_list(int64_t epoch, const std::vector<Member>& before, bool member);
  std::vector<Member> living(const std::vector<Member>& entered) const;
  bool all_came(int64_t epoch, const std::vector<Member>& before,
                const std::vector<Member>& entered) const;
  bool is_broken(const std::vector<Member>& replica) const;
  [[noreturn]] void throw_not_let_in(int64_t epoch, size_t entered) const;
  bool have_gone(const std::vector<Member>& before,
                 std::chrono::steady_clock::time_point begun) const;
  [[noreturn]] static void throw_has_ended(int64_t epoch, const std::vector<Member>& before);
  [[noreturn]] void throw_left_out(int64_t epoch, const std::vector<Member>& before);

  // members_form.cpp: its ranks connect
  std::optional<Membership> form(const MemberList& list, int64_t epoch, const StorePtr& connection);
  launch::Groups await_groups(std::future<launch::Groups> connecting, const MemberList& list,
                              int64_t epoch);
  void watch_dead(const MemberList& list, const Group& group);
  std::optional<Member> dead_of(const MemberList& list) const;

  MembersOptions options_;
  StorePtr store_;
  StorePtr shared_;                        ///< the program's, of which connections are made
  std::future<StorePtr> next_connection_;  ///< for the next group
  Member self_;
  std::string model_;
  std::shared_ptr<launch::Pulse> pulse_;
  int64_t epoch_ = 0;  ///< of which this process was a member
  std::optional<MemberList> current_;
  double waited_ms_ = 0;                   ///< for the last list
  std::shared_ptr<GroupTraffic> traffic_;  ///< has is_dead until a reducer of the group is made
  Group pipeline_;
};

}  // namespace brimful
