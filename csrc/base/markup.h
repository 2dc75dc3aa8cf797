#pragma once
#include <string>

namespace brimful {

/// Text as the content of an element of HTML or XML.
std::string escape_markup(const std::string& text);

}  // namespace brimful
