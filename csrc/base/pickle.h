#pragma once
#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>

namespace brimful {

/// Writes Python's pickle (protocol 2) of dictionaries, lists, texts and integers, one after the other as they nest:
/// `begin_dict()`, a key, its value, ..., `end_dict()`.
class Pickle {
 public:
  Pickle() : out_("\x80\x02") {}
  void begin_dict() { out_ += "}("; }
  void end_dict() { out_ += 'u'; }
  void begin_list() { out_ += "]("; }
  void end_list() { out_ += 'e'; }
  /// Between two entries, after some hundreds: readers take the entries since the last one in one go.
  void split_list() { out_ += "e("; }
  void begin_tuple() { out_ += '('; }
  void end_tuple() { out_ += 't'; }
  void boolean(bool value) { out_ += value ? '\x88' : '\x89'; }
  void integer(int64_t value);
  void unsigned_integer(uint64_t value);
  /// What is not UTF-8 is replaced. The same text is written once.
  void text(const std::string& value);
  /// The value that was written last can be given again.
  uint32_t keep();
  void again(uint32_t kept);
  std::string finish() { return std::move(out_ += '.'); }

 private:
  void add_bytes(uint64_t value, int count);

  std::string out_;
  uint32_t kept_ = 0;
  std::unordered_map<std::string, uint32_t> texts_;
};

}  // namespace brimful
