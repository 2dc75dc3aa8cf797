#include <brimful/probes/oom_report.h>

#include <algorithm>
#include <sstream>

#include "base/format.h"
#include "base/markup.h"
#include "memory/most_bytes_first.h"

namespace brimful::probes {
namespace {

constexpr const char* kStyle =
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
    "color:#1b1f24;background:#fff}h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}"
    "table{border-collapse:collapse;width:100%}td{padding:.2rem .6rem;border-top:1px solid #ddd;"
    "vertical-align:top}td.n{text-align:right;white-space:nowrap}"
    "td.b{width:30%}i{display:block;height:.9rem;margin-top:.3rem;background:#c2571a}"
    "code,pre{font:13px ui-monospace,monospace}pre{white-space:pre-wrap}"
    "@media(prefers-color-scheme:dark){body{color:#e6e6e6;background:#16181b}td{border-color:#333}"
    "}";

void write_row(std::ostream& out, int64_t bytes, int64_t of, const std::string& name,
               const std::string& more) {
  const int64_t percent =
      of > 0 ? std::clamp<int64_t>(100 * (bytes / 1024) / std::max<int64_t>(1, of / 1024), 0, 100)
             : 0;
  out << "<tr><td class=n>" << format_bytes(bytes)
      << "</td><td class=b><i style=\"width:" << percent << "%\"></i></td><td><code>"
      << escape_markup(name) << "</code> " << escape_markup(more) << "</td></tr>\n";
}

void write_causes(std::ostream& out, const OomFacts& facts) {
  out << "<h2>Causes, the most likely first</h2>\n<ol>\n";
  for (const OomFinding& finding : findings(facts)) {
    out << "<li>" << escape_markup(finding.words) << ".<br><b>Try:</b> "
        << escape_markup(finding.advice) << ".</li>\n";
  }
  out << "</ol>\n";
}

void write_tables(std::ostream& out, const OomFacts& facts) {
  out << "<h2>By category</h2>\n<table>\n";
  for (const auto category : memory::most_bytes_first(facts.by_category)) {
    write_row(out, facts.by_category[static_cast<size_t>(category)], facts.used_bytes,
              memory::name_of(category), "");
  }
  out << "</table>\n<h2>By line</h2>\n<table>\n";
  for (const OomSite& site : facts.sites) {
    write_row(out, site.bytes, facts.used_bytes, site.place,
              std::string(memory::name_of(site.phase)) + ", " + std::to_string(site.blocks) +
                  (site.blocks == 1 ? " tensor" : " tensors"));
  }
  out << "</table>\n";
}

}  // namespace

std::string to_html(const OomFacts& facts) {
  std::ostringstream out;
  out << "<!DOCTYPE html>\n<html lang=en><head><meta charset=utf-8><title>Out of memory on "
      << escape_markup(facts.device) << "</title><style>" << kStyle << "</style></head><body>\n"
      << "<h1>Out of memory on " << escape_markup(facts.device) << "</h1>\n<p>"
      << format_bytes(facts.request_bytes) << " were asked for at <code>"
      << escape_markup(facts.place) << "</code>, " << format_bytes(facts.used_bytes)
      << " were in use" << (facts.limit_bytes ? " of " + format_bytes(*facts.limit_bytes) : "")
      << ".</p>\n<p><code>" << escape_markup(to_string(facts.origin)) << "</code></p>\n";
  write_causes(out, facts);
  write_tables(out, facts);
  out << "<h2>All that is known</h2>\n<pre>" << escape_markup(full_text(facts))
      << "</pre>\n</body></html>\n";
  return out.str();
}

}  // namespace brimful::probes
