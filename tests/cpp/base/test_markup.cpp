#include "base/markup.h"
#include "support/catch.h"

namespace test_markup {

using brimful::Fields;
using brimful::fill_markup;
using Catch::Contains;

TEST_CASE("A template is filled with texts, which are escaped", "[base]") {
  CHECK(fill_markup("", {}).empty());
  CHECK(fill_markup("a } b", {}) == "a } b");
  CHECK(fill_markup("<b id=\"{{id}}\">{{name}}</b>{{name}}",
                    {{{"id", "\"&"}, {"name", "<i>\x01"}}}) ==
        "<b id=\"&quot;&amp;\">&lt;i&gt; </b>&lt;i&gt; ");
  CHECK(fill_markup("{{a}}", {{{"a", "{{b}}"}, {"b", "no"}}}) == "{{b}}");
}

TEST_CASE("A template repeats a part for each entry of a list", "[base]") {
  Fields fields{{{"x", "outside"}}};
  fields.lists["none"];
  fields.lists["rows"] = {{{{"x", "1"}}}, {{{"x", "2"}}}};
  for (Fields& row : fields.lists["rows"]) {
    row.lists["cells"] = {{{{"y", row.texts["x"] + "a"}}}, {{{"y", "b"}}}};
  }
  CHECK(fill_markup("{{#none}}never{{/none}}{{x}}", fields) == "outside");
  CHECK(fill_markup("{\n{{#rows}}\nrow {{x}}:\n{{#cells}}\n {{y}},\n{{/cells}}\n{{/rows}}\n}\n",
                    fields) == "{\nrow 1:\n 1a,\n b,\nrow 2:\n 2a,\n b,\n}\n");
}

TEST_CASE("A template that does not fit its fields is an error", "[base]") {
  const Fields fields{{{"x", ""}}, {{"rows", {{}}}}};
  CHECK_THROWS_WITH(fill_markup("{{y}}", fields), Contains("(name: y)"));
  CHECK_THROWS_WITH(fill_markup("{{#x}}{{/x}}", fields), Contains("(name: x)"));
  CHECK_THROWS_WITH(fill_markup("{{#rows}}{{x}}{{/rows}}", fields), Contains("(name: x)"));
  CHECK_THROWS_WITH(fill_markup("{{#rows}}", fields), Contains("(missing: {{/rows}})"));
  CHECK_THROWS_WITH(fill_markup("{{x", fields), Contains("(missing: }})"));
}

}  // namespace test_markup
