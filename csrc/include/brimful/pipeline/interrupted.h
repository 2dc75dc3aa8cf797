#pragma once
#include <brimful/export.h>

#include <stdexcept>

namespace brimful::pipeline {

/// Pipeline::cancel() has ended the call.
class BRIMFUL_API Interrupted : public std::runtime_error {
 public:
  Interrupted() : std::runtime_error("the call was cancelled; everything is as before it") {}
};

}  // namespace brimful::pipeline
