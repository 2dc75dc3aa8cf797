// cuSOLVER is not there on a device without arithmetic: each of its functions fails, and torch's error has a sentence.
#include <cusolver_common.h>

#include "without_arithmetic.h"

// torch's own function of this name, whose place it takes, knows the status alone.
namespace at::cuda::solver {

const char* cusolverGetErrorMessage(cusolverStatus_t /*status*/);

const char* cusolverGetErrorMessage(cusolverStatus_t /*status*/) {
  return "simulated CUDA: there is no cuSOLVER on a device without arithmetic: solve and decompose "
         "matrices on the "
         "CPU, as in torch.linalg.eigh(x.cpu())";
}

}  // namespace at::cuda::solver

#define SIM_ABSENT(name) SIM_REFUSES(name, CUSOLVER_STATUS_NOT_SUPPORTED)
#include "absent.inc"
