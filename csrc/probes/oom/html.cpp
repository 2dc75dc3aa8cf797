#include <brimful/probes/oom_report.h>
#include <nlohmann/json.hpp>

#include "probes/page/page.h"

namespace brimful::probes {

std::string to_html(const OomFacts& facts) {
  using Json = nlohmann::ordered_json;
  Json causes = Json::array();
  for (const OomFinding& finding : findings(facts)) {
    causes.push_back({{"cause", finding.text}, {"advice", finding.advice}});
  }
  Json lines = Json::array();
  for (const OomSite& site : facts.sites) {
    lines.push_back({{"line", site.place},
                     {"phase", memory::name_of(site.phase)},
                     {"bytes", site.bytes},
                     {"blocks", site.blocks}});
  }
  return page_of({{"kind", "oom"},
                  {"title", "Out of memory on " + facts.device},
                  {"origin", to_string(facts.origin)},
                  {"place", facts.place},
                  {"request_bytes", facts.request_bytes},
                  {"used_bytes", facts.used_bytes},
                  {"limit_bytes", facts.limit_bytes ? Json(*facts.limit_bytes) : Json()},
                  {"causes", std::move(causes)},
                  {"categories", categories_json(facts.by_category)},
                  {"lines", std::move(lines)},
                  {"text", to_string(facts)}});
}

}  // namespace brimful::probes
