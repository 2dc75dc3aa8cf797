#pragma once

/// Marks what libbrimful.so gives to its users; everything else in it is hidden.
#define BRIMFUL_API __attribute__((visibility("default")))
