# What doxygen is given of a header: the comment above its namespace is about the header; deduction guides, which it takes
# for variables, are left out; no comma follows the type of an exception, where it would expect another type; and where no
# type comes first, as in "@throws what the stage throws", it is not to take that word for one.
match($0, /@throws [A-Za-z0-9_:]+,/) { $0 = substr($0, 1, RSTART + RLENGTH - 2) substr($0, RSTART + RLENGTH) }
/@throws [a-z]+ / { sub(/@throws /, "@par Throws\n/// ") }
/^\/\/\// || /^template <.*>$/ { pending = pending $0 "\n"; next }
/^[A-Za-z]+\(.*\) -> / { pending = ""; next }
/^namespace/ && pending != "" { printf "/// @file\n" }
{ sub(/ local = /, " local=") } # a keyword of another language, unless it is written so
{ printf "%s%s\n", pending, $0; pending = "" }
