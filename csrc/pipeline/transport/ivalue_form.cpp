#include "pipeline/transport/ivalue_form.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/jit_type.h>

namespace brimful::pipeline {
namespace {

/// Containers of TorchScript know their elements' type; one that is not in this list is Any.
c10::TypePtr type_of(const std::string& name) {
  const std::vector<c10::TypePtr> known{c10::TensorType::get(), c10::IntType::get(),
                                        c10::FloatType::get(), c10::BoolType::get(),
                                        c10::StringType::get()};
  for (const auto& type : known) {
    if (type->str() == name) {
      return type;
    }
  }
  return c10::AnyType::get();
}

void write(FormWriter& writer, const c10::IValue& part) {
  if (part.isTensor()) {
    writer.put(Tag::tensor);
  } else if (part.isNone()) {
    writer.put(Tag::none);
  } else if (part.isBool()) {
    writer.put(part.toBool() ? Tag::yes : Tag::no);
  } else if (part.isInt()) {
    writer.put(Tag::integer);
    writer.put(part.toInt());
  } else if (part.isDouble()) {
    writer.put(Tag::real);
    writer.put(part.toDouble());
  } else if (part.isComplexDouble()) {
    writer.put(Tag::complex);
    writer.put(part.toComplexDouble().real());
    writer.put(part.toComplexDouble().imag());
  } else if (part.isString()) {
    writer.put(Tag::text);
    writer.put(part.toStringRef());
  } else if (part.isTuple()) {
    const auto& elements = part.toTupleRef().elements();
    writer.put(Tag::tuple);
    writer.put(static_cast<int64_t>(elements.size()));
    for (const auto& element : elements) {
      write(writer, element);
    }
  } else if (part.isList()) {
    writer.put(Tag::list);
    writer.put(part.toList().elementType()->str());
    writer.put(static_cast<int64_t>(part.toListRef().size()));
    for (const auto& element : part.toListRef()) {
      write(writer, element);
    }
  } else if (part.isGenericDict()) {
    const auto dict = part.toGenericDict();
    writer.put(Tag::dict);
    writer.put(dict.keyType()->str());
    writer.put(dict.valueType()->str());
    writer.put(static_cast<int64_t>(dict.size()));
    for (const auto& entry : dict) {
      write(writer, entry.key());
      write(writer, entry.value());
    }
  } else {
    TORCH_CHECK_TYPE(
        false,
        "messages between processes hold tensors, numbers, texts, and tuples, lists and "
        "dicts of them (found: ",
        part.tagKind(), "); return those");
  }
}

c10::IValue read(FormReader& reader);

c10::IValue read_list(FormReader& reader) {
  c10::impl::GenericList list(type_of(reader.text()));
  for (auto left = reader.integer(); left > 0; --left) {
    list.push_back(read(reader));
  }
  return list;
}

c10::IValue read_dict(FormReader& reader) {
  const auto keys = type_of(reader.text());
  const auto values = type_of(reader.text());
  // Another language's dict does not say; TorchScript's keys have a type.
  c10::impl::GenericDict dict(
      keys->kind() == c10::TypeKind::AnyType ? c10::TypePtr(c10::StringType::get()) : keys, values);
  for (auto left = reader.integer(); left > 0; --left) {
    auto key = read(reader);
    dict.insert(std::move(key), read(reader));
  }
  return dict;
}

c10::IValue read_record(FormReader& reader) {
  reader.text();
  reader.text();
  std::vector<c10::IValue> values;
  for (auto left = reader.integer(); left > 0; --left) {
    read(reader);
    values.push_back(read(reader));
  }
  return c10::ivalue::Tuple::create(std::move(values));
}

c10::IValue read_tuple(FormReader& reader) {
  std::vector<c10::IValue> values;
  for (auto left = reader.integer(); left > 0; --left) {
    values.push_back(read(reader));
  }
  return c10::ivalue::Tuple::create(std::move(values));
}

c10::IValue read(FormReader& reader) {
  switch (const auto tag = reader.tag()) {
    case Tag::tensor:
      return at::Tensor();
    case Tag::none:
      return {};
    case Tag::yes:
      return true;
    case Tag::no:
      return false;
    case Tag::integer:
      return reader.integer();
    case Tag::real:
      return reader.real();
    case Tag::complex: {
      const double real = reader.real();
      return c10::complex<double>(real, reader.real());
    }
    case Tag::text:
      return reader.text();
    case Tag::tuple:
      return read_tuple(reader);
    case Tag::list:
      return read_list(reader);
    case Tag::dict:
      return read_dict(reader);
    case Tag::record:
      return read_record(reader);
    default:
      TORCH_CHECK_TYPE(false,
                       "a structure from another process has a part that C++ has no type "
                       "for (tag: ",
                       static_cast<char>(tag), "); pass numbers, texts and tensors");
  }
}
}  // namespace

void IValueForm::write(FormWriter& writer) const {
  pipeline::write(writer, skeleton_);
}

std::shared_ptr<const Form> ivalue_form(FormReader& reader) {
  return std::make_shared<IValueForm>(read(reader));
}

}  // namespace brimful::pipeline
