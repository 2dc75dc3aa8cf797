#pragma once
#include <ATen/core/ivalue.h>

#include <utility>
#include <vector>

// What lists, tuples and dicts of TorchScript hold: a dict's values, without its keys.
namespace brimful {

template <typename See>
void for_each_entry(const c10::IValue& part, const See& see) {
  if (part.isList()) {
    for (const auto& item : part.toListRef()) {
      see(item);
    }
  } else if (part.isTuple()) {
    for (const auto& item : part.toTupleRef().elements()) {
      see(item);
    }
  } else if (part.isGenericDict()) {
    for (const auto& entry : part.toGenericDict()) {
      see(entry.value());
    }
  }
}

/// The same with each entry replaced by what `replace` makes of it; what has no entries is shared.
template <typename Replace>
c10::IValue with_entries(const c10::IValue& part, const Replace& replace) {
  if (part.isTuple()) {
    const auto& tuple = part.toTupleRef();
    std::vector<c10::IValue> items;
    for (const auto& item : tuple.elements()) {
      items.push_back(replace(item));
    }
    return c10::ivalue::Tuple::createNamed(std::move(items), tuple.type());
  }
  if (part.isList()) {
    const auto whole = part.toList();
    c10::impl::GenericList list(whole.elementType());
    for (const auto& item : part.toListRef()) {
      list.push_back(replace(item));
    }
    return list;
  }
  if (part.isGenericDict()) {
    const auto whole = part.toGenericDict();
    c10::impl::GenericDict dict(whole.keyType(), whole.valueType());
    for (const auto& entry : whole) {
      dict.insert(entry.key(), replace(entry.value()));
    }
    return dict;
  }
  return part;
}

}  // namespace brimful
