#include <limits>
#include <locale>
#include "base/format.h"
#include "base/one_line.h"
#include "base/text_stream.h"
#include "support/catch.h"

namespace test_format {

using brimful::format_bytes;

TEST_CASE("format_bytes picks the largest unit that is at least one", "[base]") {
  CHECK(format_bytes(0) == "0 B");
  CHECK(format_bytes(512) == "512 B");
  CHECK(format_bytes(1023) == "1023 B");
  CHECK(format_bytes(1024) == "1.0 KiB");
  CHECK(format_bytes(1536) == "1.5 KiB");
  CHECK(format_bytes(24536678) == "23.4 MiB");
  CHECK(format_bytes(int64_t{3} << 30) == "3.0 GiB");
  CHECK(format_bytes(int64_t{5} << 39) == "2.5 TiB");
}

TEST_CASE("format_bytes rounds to the nearest tenth and never prints 1024 of a unit", "[base]") {
  CHECK(format_bytes(1024 + 51) == "1.0 KiB");
  CHECK(format_bytes(1024 + 52) == "1.1 KiB");
  CHECK(format_bytes(1024 * 1024 - 1) == "1.0 MiB");
  CHECK(format_bytes(1024 * 1024 - 52) == "1023.9 KiB");
}

TEST_CASE("format_bytes takes every int64_t", "[base]") {
  CHECK(format_bytes(-1536) == "-1.5 KiB");
  CHECK(format_bytes(std::numeric_limits<int64_t>::max()) == "8.0 EiB");
  CHECK(format_bytes(std::numeric_limits<int64_t>::min()) == "-8.0 EiB");
}

TEST_CASE("Seconds have one decimal, however many there are", "[base]") {
  CHECK(brimful::format_seconds(0) == "0.0 s");
  CHECK(brimful::format_seconds(0.96) == "1.0 s");
  CHECK(brimful::format_seconds(12.34) == "12.3 s");
  CHECK(brimful::format_seconds(1800) == "1800.0 s");
}

TEST_CASE("A number is read and written with a point", "[base]") {
  using brimful::format_number;
  using brimful::read_number;
  const auto read = read_number("2.50 GiB");
  REQUIRE(read);
  CHECK(read->value == 2.5);
  CHECK(read->rest == " GiB");
  CHECK(read_number("12")->rest.empty());
  CHECK(read_number("2,50 GiB")->rest == ",50 GiB");
  CHECK_FALSE(read_number(""));
  CHECK_FALSE(read_number(" 2.5"));
  CHECK_FALSE(read_number("inf"));
  CHECK_FALSE(read_number("1e999"));
  CHECK(format_number(0.5) == "0.5");
  CHECK(format_number(8) == "8");
}

TEST_CASE("A text's numbers are those of no locale", "[base]") {
  struct German : std::numpunct<char> {
    char do_decimal_point() const override { return ','; }
    char do_thousands_sep() const override { return '.'; }
    std::string do_grouping() const override { return "\3"; }
  };
  const auto before =
      std::locale::global(std::locale(std::locale::classic(), new German));  // the locale owns it
  brimful::TextStream text;
  text << 1234567 << ' ' << 2.5;
  std::locale::global(before);
  CHECK(text.str() == "1234567 2.5");
}

TEST_CASE("A text becomes UTF-8, with its lines and without NUL", "[base]") {
  using brimful::as_utf8;
  CHECK(as_utf8("caf\xc3\xa9\n\tline") == "caf\xc3\xa9\n\tline");
  CHECK(as_utf8("caf\xe9.jpg") == "caf\\xe9.jpg");
  CHECK(as_utf8(std::string_view("a\0b", 3)) == "a\\x00b");
  CHECK(as_utf8("\xed\xa0\x80") == "\\xed\\xa0\\x80");  // half of a pair
  CHECK(as_utf8("\xe6\x96") == "\\xe6\\x96");           // a part of a character
}

TEST_CASE("Entries are numbered from 1", "[base]") {
  CHECK(brimful::format_numbered({}).empty());
  CHECK(brimful::format_numbered({"this", "that"}) == "1. this; 2. that");
}

}  // namespace test_format
