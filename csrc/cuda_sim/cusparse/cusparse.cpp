// cuSPARSE on a device without arithmetic: handles and descriptors are made, and products, solutions, sums and sorts are done at
// once, without a workspace. How many values a result has is not known: none.
#include <cstddef>
#include <cstdint>

#include "without_arithmetic.h"

namespace {

enum { kSuccess = 0, kInvalidValue = 3, kNotSupported = 10 };
constexpr int kVersion = 12600;

/// Of whatever is made.
struct Made {
  int64_t rows = 0, columns = 0;
};

/// An argument that is not looked at: a pointer or a whole number.
using Any = intptr_t;

int make(void** out, int64_t rows, int64_t columns) {
  *out = new Made{rows, columns};
  return kSuccess;
}

int destroy(void* made) {
  delete static_cast<Made*>(made);
  return kSuccess;
}

}  // namespace

extern "C" {

int cusparseCreateCsr(void** out, int64_t rows, int64_t columns) {
  return make(out, rows, columns);
}

int cusparseCreateCoo(void** out, int64_t rows, int64_t columns) {
  return make(out, rows, columns);
}

int cusparseSpMatGetSize(const Made* of, int64_t* rows, int64_t* columns, int64_t* values) {
  *rows = of->rows;
  *columns = of->columns;
  *values = 0;
  return kSuccess;
}

int cusparseXcoosort_bufferSizeExt(Any, Any, Any, Any, Any, Any, size_t* bytes) {
  *bytes = 0;
  return kSuccess;
}

int cusparseXcsrsort_bufferSizeExt(Any, Any, Any, Any, Any, Any, size_t* bytes) {
  *bytes = 0;
  return kSuccess;
}

int cusparseXcsrgeam2Nnz(Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any,
                         int* values, Any) {
  *values = 0;
  return kSuccess;
}

int cusparseXbsrsv2_zeroPivot(Any, Any, int* position) {
  *position = -1;
  return kSuccess;
}

int cusparseXbsrsm2_zeroPivot(Any, Any, int* position) {
  *position = -1;
  return kSuccess;
}

int cusparseGetVersion(Any, int* version) {
  *version = kVersion;
  return kSuccess;
}

const char* cusparseGetErrorName(int status) {
  return status == kSuccess ? "CUSPARSE_STATUS_SUCCESS" : "CUSPARSE_STATUS_NOT_SUPPORTED";
}

const char* cusparseGetErrorString(int status) {
  return status == kSuccess ? "success" : "not supported by the simulated cuSPARSE";
}
}

#define SIM_MAKES(name)                                   \
  extern "C" int sim_makes_##name(void** out) asm(#name); \
  int sim_makes_##name(void** out) {                      \
    return make(out, 0, 0);                               \
  }
SIM_MAKES(cusparseCreate)
SIM_MAKES(cusparseCreateBsrsm2Info)
SIM_MAKES(cusparseCreateBsrsv2Info)
SIM_MAKES(cusparseCreateDnMat)
SIM_MAKES(cusparseCreateDnVec)
SIM_MAKES(cusparseCreateMatDescr)
SIM_MAKES(cusparseSpGEMM_createDescr)
SIM_MAKES(cusparseSpSM_createDescr)
SIM_MAKES(cusparseSpSV_createDescr)

#define SIM_DESTROYS(name)                                   \
  extern "C" int sim_destroys_##name(void* made) asm(#name); \
  int sim_destroys_##name(void* made) {                      \
    return destroy(made);                                    \
  }
SIM_DESTROYS(cusparseDestroy)
SIM_DESTROYS(cusparseDestroyBsrsm2Info)
SIM_DESTROYS(cusparseDestroyBsrsv2Info)
SIM_DESTROYS(cusparseDestroyDnMat)
SIM_DESTROYS(cusparseDestroyDnVec)
SIM_DESTROYS(cusparseDestroyMatDescr)
SIM_DESTROYS(cusparseDestroySpMat)
SIM_DESTROYS(cusparseSpGEMM_destroyDescr)
SIM_DESTROYS(cusparseSpSM_destroyDescr)
SIM_DESTROYS(cusparseSpSV_destroyDescr)

// What gives the size of a workspace as its tenth argument, its eleventh and so on.
#define SIM_NEEDS_NONE(name, type, ...)                                      \
  extern "C" int sim_needs_none_##name(__VA_ARGS__, type* bytes) asm(#name); \
  int sim_needs_none_##name(__VA_ARGS__, type* bytes) {                      \
    *bytes = 0;                                                              \
    return kSuccess;                                                         \
  }
#define SIM_NINE Any, Any, Any, Any, Any, Any, Any, Any, Any
#define SIM_OF_ALL_TYPES(before, after, type, ...)    \
  SIM_NEEDS_NONE(before##S##after, type, __VA_ARGS__) \
  SIM_NEEDS_NONE(before##D##after, type, __VA_ARGS__) \
  SIM_NEEDS_NONE(before##C##after, type, __VA_ARGS__) \
  SIM_NEEDS_NONE(before##Z##after, type, __VA_ARGS__)
SIM_NEEDS_NONE(cusparseSpMV_bufferSize, size_t, SIM_NINE)
SIM_NEEDS_NONE(cusparseSpSV_bufferSize, size_t, SIM_NINE)
SIM_NEEDS_NONE(cusparseSpMM_bufferSize, size_t, SIM_NINE, Any)
SIM_NEEDS_NONE(cusparseSDDMM_bufferSize, size_t, SIM_NINE, Any)
SIM_NEEDS_NONE(cusparseSpSM_bufferSize, size_t, SIM_NINE, Any)
SIM_NEEDS_NONE(cusparseSpGEMM_workEstimation, size_t, SIM_NINE, Any, Any)
SIM_NEEDS_NONE(cusparseSpGEMM_compute, size_t, SIM_NINE, Any, Any)
SIM_OF_ALL_TYPES(cusparse, bsrsv2_bufferSize, int, SIM_NINE, Any, Any)
SIM_OF_ALL_TYPES(cusparse, bsrsm2_bufferSize, int, SIM_NINE, Any, Any, Any, Any)
SIM_OF_ALL_TYPES(cusparse, csrgeam2_bufferSizeExt, size_t, SIM_NINE, SIM_NINE, Any)

// What computes, and what is set.
#define SIM_DONE(name) SIM_ANSWERS(name, kSuccess)
#include "done.inc"

// The rest fails, with its name.
#define SIM_ABSENT(name) SIM_REFUSES(name, kNotSupported)
#include "absent.inc"
