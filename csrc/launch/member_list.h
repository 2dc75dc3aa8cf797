#pragma once
#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

/// Who is in a group, as it lies in the store: plain data.
namespace brimful::launch {

struct Member {
  int64_t id = 0;  ///< of the process, never given again
  std::string name;
  std::string replica{};  ///< of which pipeline the process is a rank
  int pipeline_rank = 0;  ///< in it
};

struct MemberList {
  std::string model;
  std::vector<Member> members;  ///< by rank
};

/// For texts that are a line of a list.
inline std::string one_line(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < ' '; }, ' ');
  return text;
}

inline std::string encode_members(const MemberList& list) {
  std::string text = list.model + "\n";
  for (const auto& member : list.members) {
    text += std::to_string(member.id) + " " + std::to_string(member.pipeline_rank) + " " +
            member.replica + "\t" + member.name + "\n";
  }
  return text;
}

inline MemberList decode_members(const std::string& text) {
  std::istringstream lines(text);
  MemberList list;
  std::getline(lines, list.model);
  Member member;
  while (lines >> member.id >> member.pipeline_rank) {
    lines.get();
    std::getline(lines, member.replica, '\t');
    std::getline(lines, member.name);
    list.members.push_back(member);
  }
  return list;
}

inline std::vector<int64_t> ids_of(const std::vector<Member>& members) {
  std::vector<int64_t> ids;
  ids.reserve(members.size());
  for (const auto& member : members) {
    ids.push_back(member.id);
  }
  return ids;
}

inline bool has(const std::vector<Member>& members, int64_t id) {
  return std::any_of(members.begin(), members.end(),
                     [&](const Member& member) { return member.id == id; });
}

/// -1: it is not in the list.
inline int rank_of(const MemberList& list, int64_t id) {
  const auto found = std::find_if(list.members.begin(), list.members.end(),
                                  [&](const Member& member) { return member.id == id; });
  return found == list.members.end() ? -1 : static_cast<int>(found - list.members.begin());
}

}  // namespace brimful::launch
