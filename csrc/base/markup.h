#pragma once
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace brimful {

/// Text for the content of an element of HTML or XML, or for an attribute in double quotes. Control characters, which XML does
/// not have, are blanks.
std::string escape_markup(const std::string& text);

/// What a template shows: texts by name, and by name the lists for each entry of which it repeats a part.
struct Fields {
  std::map<std::string, std::string, std::less<>> texts{};
  std::map<std::string, std::vector<Fields>, std::less<>> lists{};
};

/// The template with "{{name}}" replaced by that text, escaped, and "{{#name}}part{{/name}}" by the part for each entry of that
/// list, whose fields alone it sees. A line break behind "{{#name}}" or "{{/name}}" belongs to it.
/// @throws c10::ValueError for a name that `fields` lacks, and a part that does not end
std::string fill_markup(std::string_view markup, const Fields& fields);

}  // namespace brimful
