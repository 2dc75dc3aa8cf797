#pragma once
#include <brimful/probes/explain.h>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

/// What explain_error is made of, one for each kind of error.
namespace brimful::probes {

inline bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

/// The error's own line: the first, or the one behind the last traceback in a log.
std::string said_by(const std::string& text);
/// Names of classes that a log has before an error's message, of those that decide what an error is.
std::vector<std::string> types_in(const std::string& text);
/// What `begin` begins, up to the end of the line; nothing if it is not there.
std::optional<std::string> line_behind(const std::string& text, std::string_view begin);

/// Whether the exception's class, or one that it comes from, has this name.
bool is_a(const ErrorText& error, std::string_view type);

/// A line of the evidence; none where it is not known.
void add_bytes(std::vector<std::string>& evidence, const char* what,
               const std::optional<int64_t>& bytes);

/// A class of Python's that stands for a mistake of the program: TypeError, KeyError.
bool is_mistake_by_type(const ErrorText& error);
/// The line in which a BatchTooLarge says what does not fit; nothing if there is none.
std::optional<std::string> too_large_in(const std::string& text);
/// Whether the message is that of a host's allocator (NumPy's, the operating system's), with no exception type.
bool is_refusal_of_host(std::string_view text);
/// A library's status that stands for anything: a broken context, a shape, or a shortage.
bool is_vague_status(std::string_view text);

/// BatchTooLarge: nothing that was tried fits.
Explanation explain_too_large(const ErrorText& error);
/// An allocator's refusal, by the numbers in its message.
Explanation explain_refusal(const ErrorText& error, const ErrorEvidence& evidence);
/// A kernel that found its input wrong.
Explanation explain_assertion(const ErrorText& error, const ErrorEvidence& evidence);
/// A device that no longer answers.
Explanation explain_lost(const ErrorText& error, const ErrorEvidence& evidence);

/// A library's status that may stand for a shortage, or (`certain`) does.
Explanation explain_library(const ErrorText& error, const ErrorEvidence& evidence, bool certain);
Explanation explain_nccl(const ErrorText& error);

}  // namespace brimful::probes
