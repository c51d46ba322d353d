#include "cuda_call.hpp"

namespace fastclip {
namespace {

// Launches do not wait, so these codes, which tell of a kernel that went wrong while it ran, cannot
// be about the call that returns them. CUDA returns them from every call that follows.
bool from_earlier_work(cudaError_t code) {
  switch (code) {
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorIllegalInstruction:
    case cudaErrorHardwareStackError:
    case cudaErrorAssert:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
      return true;
    default:
      return false;
  }
}

bool nothing_to_run_on(cudaError_t code) {
  return code == cudaErrorNoDevice || code == cudaErrorInsufficientDriver ||
         code == cudaErrorStubLibrary;
}

}  // namespace

void check(cudaError_t code, const char* function, const std::string& what) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // it is told now; the next call must not tell it again as its own
  std::string message = std::string(function) + " returned " + cudaGetErrorName(code) + " (" +
                        cudaGetErrorString(code) + ") at: " + what;
  if (from_earlier_work(code)) {
    message +=
        ". The failure is of an earlier asynchronous operation of this process, not of this call; "
        "CUDA_LAUNCH_BLOCKING=1 finds it. The process cannot use the device any more";
  }
  throw CudaError(message);
}

DeviceGuard::DeviceGuard(int device, const std::string& what) : device_(device) {
  check(cudaGetDevice(&before_), "cudaGetDevice", what);
  if (before_ != device_) check(cudaSetDevice(device_), "cudaSetDevice", what);
}

DeviceGuard::~DeviceGuard() {
  // A destructor cannot throw. If this fails the context is lost, and the next call says so.
  if (before_ != device_) cudaSetDevice(before_);
}

int device_count() {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (nothing_to_run_on(code)) {
    cudaGetLastError();
    return 0;
  }
  check(code, "cudaGetDeviceCount", "counting devices");
  return count;
}

int driver_version() {
  int version = 0;
  check(cudaDriverGetVersion(&version), "cudaDriverGetVersion", "asking for the driver's version");
  return version;
}

}  // namespace fastclip
