#pragma once
#include <brimful/probes/explain.h>
#include <cstdint>
#include <optional>
#include <string_view>

/// What explain_error is made of, one for each kind of error.
namespace brimful::probes {

inline bool contains(std::string_view text, std::string_view words) {
  return text.find(words) != std::string_view::npos;
}

/// Whether the exception's class, or one that it comes from, has this name.
bool is_a(const ErrorText& error, std::string_view type);

/// As a line of the evidence; none where it is not known.
void add_bytes(Explanation& out, const char* what, const std::optional<int64_t>& bytes);

/// An allocator's refusal, by the numbers in its words.
void explain_refusal(const ErrorText& error, const ErrorEvidence& evidence, Explanation& out);
/// A kernel that found its input wrong.
void explain_assertion(const ErrorText& error, const ErrorEvidence& evidence, Explanation& out);
/// A device that no longer answers.
void explain_lost(const ErrorText& error, const ErrorEvidence& evidence, Explanation& out);

}  // namespace brimful::probes
