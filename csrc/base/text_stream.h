#pragma once
#include <locale>
#include <sstream>

namespace brimful {

/// Writes numbers alike whatever the program's locale: ranks compare such texts, and people and programs read them.
class TextStream : public std::ostringstream {
 public:
  TextStream() { imbue(std::locale::classic()); }
};

}  // namespace brimful
