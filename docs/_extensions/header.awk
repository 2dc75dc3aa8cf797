# What doxygen is given of a header: the comment above its namespace is about the header; deduction guides, which it takes
# for variables, are left out; and no comma follows the type of an exception, where it would expect another type.
match($0, /@throws [A-Za-z0-9_:]+,/) { $0 = substr($0, 1, RSTART + RLENGTH - 2) substr($0, RSTART + RLENGTH) }
/^\/\/\// || /^template <.*>$/ { pending = pending $0 "\n"; next }
/^[A-Za-z]+\(.*\) -> / { pending = ""; next }
/^namespace/ && pending != "" { printf "/// @file\n" }
{ printf "%s%s\n", pending, $0; pending = "" }
