#include "base/markup.h"
#include <c10/util/Exception.h>

namespace brimful {
namespace {

template <typename Named>
const auto& field(const Named& fields, std::string_view name) {
  const auto found = fields.find(name);
  TORCH_CHECK_VALUE(found != fields.end(), "the template names what is not there (name: ", name,
                    ")");
  return found->second;
}

/// Removes the text up to `mark`, and the mark; returns that text.
std::string_view take_until(std::string_view& text, std::string_view mark) {
  const auto place = text.find(mark);
  TORCH_CHECK_VALUE(place != std::string_view::npos, "the template does not end (missing: ", mark,
                    ")");
  const auto before = text.substr(0, place);
  text.remove_prefix(place + mark.size());
  return before;
}

void drop_line_break(std::string_view& text) {
  if (text.starts_with('\n')) {
    text.remove_prefix(1);
  }
}

void fill(std::string_view markup, const Fields& fields, std::string& out) {
  for (auto open = markup.find("{{"); open != std::string_view::npos; open = markup.find("{{")) {
    out += take_until(markup, "{{");
    auto name = take_until(markup, "}}");
    if (!name.starts_with('#')) {
      out += escape_markup(field(fields.texts, name));
      continue;
    }
    name.remove_prefix(1);
    auto part = take_until(markup, "{{/" + std::string(name) + "}}");
    drop_line_break(part);
    drop_line_break(markup);
    for (const Fields& entry : field(fields.lists, name)) {
      fill(part, entry, out);
    }
  }
  out += markup;
}

}  // namespace

std::string escape_markup(const std::string& text) {
  std::string safe;
  for (const char c : text) {
    switch (c) {
      case '&':
        safe += "&amp;";
        break;
      case '<':
        safe += "&lt;";
        break;
      case '>':
        safe += "&gt;";
        break;
      case '"':
        safe += "&quot;";
        break;
      default:
        safe += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
    }
  }
  return safe;
}

std::string fill_markup(std::string_view markup, const Fields& fields) {
  std::string out;
  fill(markup, fields, out);
  return out;
}

}  // namespace brimful
