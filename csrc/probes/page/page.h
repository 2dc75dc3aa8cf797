#pragma once
#include <brimful/memory/categories.h>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace brimful::probes {

/// page.html with its style and scripts, and "{{data}}" in the place of its data.
extern const char* const kPage;

/// One HTML page that needs no other file. page.js shows `data` as its "kind" asks: "memory", "difference" or "oom".
std::string page_of(const nlohmann::ordered_json& data);

/// A list of categories and their bytes, the most first, without those that have none.
nlohmann::ordered_json categories_json(const memory::CategoryBytes& bytes);

}  // namespace brimful::probes
