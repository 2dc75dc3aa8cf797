#pragma once
#include <brimful/pipeline/value.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace brimful::pipeline {

/// What a form is made of between processes, whatever language wrote it: one byte each, then what belongs to it.
enum class Tag : char {
  tensor = 'T',  ///< the next one
  none = 'N',
  yes = '1',
  no = '0',
  integer = 'i',  ///< int64
  number = 'n',   ///< a larger integer: text
  real = 'd',     ///< float64
  complex = 'c',  ///< two float64
  text = 's',     ///< its length in bytes, and they
  bytes = 'y',    ///< likewise
  tuple = '(',    ///< how many entries, and they
  list = '[',  ///< the type of its elements (text, where the language has one), how many, and they
  dict = '{',  ///< types of keys and values (texts), how many entries; key and value of each
  record =
      'C',  ///< a type of the program's: two texts that name it, how many entries; key and value of each
  dtype = 'D',   ///< its name: text
  device = 'V',  ///< likewise
};

class BRIMFUL_API FormWriter {
 public:
  void put(Tag tag) { bytes_.push_back(static_cast<char>(tag)); }
  void put(int64_t integer);
  void put(double real);
  void put(std::string_view text);
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

/// @throws c10::ValueError where the bytes end too early
class BRIMFUL_API FormReader {
 public:
  explicit FormReader(std::string_view bytes) : left_(bytes) {}
  Tag tag();
  int64_t integer();
  double real();
  std::string text();
  bool done() const { return left_.empty(); }

 private:
  std::string_view take(size_t count);
  std::string_view left_;
};

using MakeForm = std::shared_ptr<const Form> (*)(FormReader& reader);
/// Who makes the forms that come from other processes; IValues of C++, until it is set.
BRIMFUL_API void set_form_maker(MakeForm maker);
std::shared_ptr<const Form> make_form(FormReader& reader);

}  // namespace brimful::pipeline
