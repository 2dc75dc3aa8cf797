#include <limits>
#include "base/format.h"
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

TEST_CASE("Entries are numbered from 1", "[base]") {
  CHECK(brimful::format_numbered({}).empty());
  CHECK(brimful::format_numbered({"this", "that"}) == "1. this; 2. that");
}

}  // namespace test_format
