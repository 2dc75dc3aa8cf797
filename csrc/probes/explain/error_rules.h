#pragma once
#include <optional>
#include <string_view>

namespace brimful::probes {

/// An explanation that the message alone decides. It comes before those by shortage_in() (step/oom.h).
struct ErrorRule {
  std::string_view part;
  std::string_view more;  ///< must be there too; may be empty
  const char* kind;
  std::optional<bool> is_memory;
  const char* cause;
  const char* remedy;
};

/// The first that fits; nullptr if none does.
const ErrorRule* rule_for(std::string_view text);

/// The same where the error's class would decide otherwise.
const ErrorRule* rule_before_types(std::string_view text);

/// Torch's messages for a mistake of the program, in which memory has no part.
bool is_mistake(std::string_view text);

/// A kernel's assertion, which says what was wrong with which input.
struct AssertRule {
  std::string_view assertion;
  const char* kind;
  const char* cause;
  const char* remedy;
};
const AssertRule* assertion_in(std::string_view text);

}  // namespace brimful::probes
