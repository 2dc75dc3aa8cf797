#include "pipeline/transport/transfer.h"

#include <exception>

namespace brimful::pipeline {

void wait_for(std::vector<Transfer>& sends) noexcept {
  try {
    for (const auto& send : sends) {
      send.work->wait();
    }
  } catch (const std::exception&) {
  }
  sends.clear();
}

}  // namespace brimful::pipeline
