#pragma once
#include <brimful/log.h>

#include <exception>
#include <string>

namespace brimful {

/// Tidies up behind an error that is to be rethrown: another one, as of a device that is lost, does not take its place.
/// Returns false where `act` failed.
template <typename Act>
bool behind_error(const Act& act) noexcept {
  try {
    act();
    return true;
  } catch (const std::exception& error) {
    try {
      log(LogLevel::warning, std::string("behind the error of a step: ") + error.what());
    } catch (...) {  // a sink that fails
    }
  } catch (...) {
  }
  return false;
}

}  // namespace brimful
