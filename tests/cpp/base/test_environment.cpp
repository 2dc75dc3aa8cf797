#include "base/environment.h"
#include "base/thrown_by.h"
#include "support/catch.h"
#include "support/scoped_env.h"

#include <map>
#include <stdexcept>
#include <string>

namespace test_environment {

using brimful::environment;
using brimful::environment_number;

TEST_CASE("A variable that is not set is empty, and its number another", "[base]") {
  constexpr const char* kName = "BRIMFUL_TEST_VARIABLE";
  unsetenv(kName);
  CHECK(environment(kName).empty());
  CHECK(environment_number(kName, 7) == 7);
  for (const auto& [text, number] :
       {std::pair{"42", 42}, {"-1", -1}, {"", 7}, {"x", 7}, {"3x", 3}}) {
    setenv(kName, text, 1);
    CHECK(environment(kName) == text);
    CHECK(environment_number(kName, 7) == number);
  }
  unsetenv(kName);
}

TEST_CASE("The temporary folder is that of the first variable that names one", "[base]") {
  const auto with = [](const std::map<std::string, const char*>& given) {
    std::map<std::string, const char*> values;
    for (const char* const name : {"TMPDIR", "TMP", "TEMP", "TEMPDIR"}) {
      values[name] = given.count(name) != 0 ? given.at(name) : nullptr;
    }
    const brimful::test::ScopedEnv scope(values);
    return brimful::temporary_folder();
  };
  CHECK(with({}) == "/tmp");
  CHECK(with({{"TEMPDIR", "/d"}}) == "/d");
  CHECK(with({{"TEMPDIR", "/d"}, {"TEMP", "/c"}}) == "/c");
  CHECK(with({{"TEMPDIR", "/d"}, {"TEMP", "/c"}, {"TMP", "/b"}}) == "/b");
  CHECK(with({{"TEMPDIR", "/d"}, {"TEMP", "/c"}, {"TMP", "/b"}, {"TMPDIR", "/a"}}) == "/a");
  CHECK(with({{"TMP", "/b"}, {"TMPDIR", ""}}) == "/b");
}

TEST_CASE("What a function throws is returned", "[base]") {
  CHECK(brimful::thrown_by([] {}) == nullptr);
  CHECK_THROWS_AS(std::rethrow_exception(brimful::thrown_by([] { throw std::logic_error("no"); })),
                  std::logic_error);
}

}  // namespace test_environment
