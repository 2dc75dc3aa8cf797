#include "base/fnv.h"
#include "support/catch.h"

namespace test_fnv {

template <typename Number>
Number hashed(std::string_view text) {
  brimful::Fnv<Number> hash;
  hash.add(text);
  return hash.value();
}

TEST_CASE("FNV-1a has the published values", "[base]") {
  CHECK(hashed<uint32_t>("") == 0x811c9dc5U);
  CHECK(hashed<uint32_t>("a") == 0xe40c292cU);
  CHECK(hashed<uint32_t>("foobar") == 0xbf9cf968U);
  CHECK(hashed<uint64_t>("") == 0xcbf29ce484222325ULL);
  CHECK(hashed<uint64_t>("a") == 0xaf63dc4c8601ec8cULL);
  CHECK(hashed<uint64_t>("foobar") == 0x85944171f73967e8ULL);
}

TEST_CASE("FNV-1a of a number is that of its eight bytes, the lowest first", "[base]") {
  brimful::Fnv<uint64_t> hash;
  hash.add(uint64_t{0x0807060504030201});
  CHECK(hash.value() == hashed<uint64_t>("\x01\x02\x03\x04\x05\x06\x07\x08"));
}

}  // namespace test_fnv
