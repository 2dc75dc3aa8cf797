#include "pipeline/transport/form_bytes.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <cstring>

#include "pipeline/transport/ivalue_form.h"

namespace brimful::pipeline {
namespace {
std::atomic<MakeForm> maker{&ivalue_form};

template <typename Number>
void append(std::string& bytes, Number number) {
  bytes.append(reinterpret_cast<const char*>(&number), sizeof(Number));
}
}  // namespace

void FormWriter::put(int64_t integer) {
  append(bytes_, integer);
}

void FormWriter::put(double real) {
  append(bytes_, real);
}

void FormWriter::put(std::string_view text) {
  append(bytes_, static_cast<int64_t>(text.size()));
  bytes_.append(text);
}

std::string_view FormReader::take(size_t count) {
  TORCH_CHECK_VALUE(count <= left_.size(),
                    "a structure from another process is cut short (bytes left: ", left_.size(),
                    ", needed: ", count, "); run the same version of brimful on all ranks");
  const auto taken = left_.substr(0, count);
  left_.remove_prefix(count);
  return taken;
}

Tag FormReader::tag() {
  return static_cast<Tag>(take(1)[0]);
}

int64_t FormReader::integer() {
  int64_t integer = 0;
  std::memcpy(&integer, take(sizeof(integer)).data(), sizeof(integer));
  return integer;
}

double FormReader::real() {
  double real = 0;
  std::memcpy(&real, take(sizeof(real)).data(), sizeof(real));
  return real;
}

std::string FormReader::text() {
  return std::string(take(static_cast<size_t>(integer())));
}

void set_form_maker(MakeForm wanted) {
  maker = wanted;
}

std::shared_ptr<const Form> make_form(FormReader& reader) {
  return maker.load()(reader);
}

void Form::write(FormWriter& /*writer*/) const {
  TORCH_CHECK_TYPE(false, "a structure of this kind cannot be sent to another process (form: ",
                   to_string(), "); return tensors, or tuples, lists and dicts of them");
}

}  // namespace brimful::pipeline
