#pragma once
// torch's logging defines CHECK, and Catch2 wants that name. Include this after all torch headers.
#include <c10/util/Logging.h>
#undef CHECK
#include <catch2/catch.hpp>
