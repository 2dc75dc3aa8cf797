#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "reducer/group_link.h"
#include "reducer/host_connector.h"

namespace brimful {

/// Whether a rank can connect its host with the others', which it says when a reducer is made: all ranks do, or none.
class HostOffer {
 public:
  using Said = std::array<uint64_t, 2>;

  /// Of a link that has its store.
  HostOffer(GroupLink& link, bool wanted);
  Said said() const { return {static_cast<uint64_t>(state_), number_}; }
  /// Gives the link the group's hosts, where all ranks can have them. `by_rank`: what each has said. A collective if so, of a
  /// link that has its board.
  void settle(const std::vector<Said>& by_rank);

 private:
  enum class State : uint64_t {
    unwanted,
    impossible,
    possible,
    connected,  ///< for an earlier reducer
  };

  void connect();
  /// All ranks do without.
  void log_why(const std::vector<Said>& by_rank) const;

  GroupLink& link_;
  State state_ = State::unwanted;
  uint64_t number_ = 0;  ///< of the reducer that connected them
  std::optional<HostConnector> connector_;
  std::string why_not_;
};

}  // namespace brimful
