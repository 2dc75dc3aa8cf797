#pragma once
// Python has a struct's fields by their names in C++, which stand once.
//   py::class_<Leak>(m, "Leak").BRIMFUL_FIELDS(def_readonly, Leak, steps, bytes)
// is .def_readonly("steps", &Leak::steps).def_readonly("bytes", &Leak::bytes). At most 27 of them.
#define BRIMFUL_FIELDS(method, Type, ...) BRIMFUL_EXPAND(BRIMFUL_FIELD(method, Type, __VA_ARGS__))
#define BRIMFUL_FIELD(method, Type, field, ...) \
  method(#field, &Type::field)                  \
      __VA_OPT__(.BRIMFUL_NEXT_FIELD BRIMFUL_PARENTHESES(method, Type, __VA_ARGS__))
#define BRIMFUL_NEXT_FIELD() BRIMFUL_FIELD
#define BRIMFUL_PARENTHESES ()
#define BRIMFUL_EXPAND(...) BRIMFUL_EXPAND_9(BRIMFUL_EXPAND_9(BRIMFUL_EXPAND_9(__VA_ARGS__)))
#define BRIMFUL_EXPAND_9(...) BRIMFUL_EXPAND_3(BRIMFUL_EXPAND_3(BRIMFUL_EXPAND_3(__VA_ARGS__)))
#define BRIMFUL_EXPAND_3(...) BRIMFUL_EXPAND_1(BRIMFUL_EXPAND_1(BRIMFUL_EXPAND_1(__VA_ARGS__)))
#define BRIMFUL_EXPAND_1(...) __VA_ARGS__
