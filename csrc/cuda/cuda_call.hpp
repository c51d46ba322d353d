// Calls of the CUDA runtime: every return code becomes an exception, launches go where they should.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace fastclip {

// fastclip._C.CudaError in Python, a RuntimeError.
class CudaError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws unless `code` is success. `function` returned it while doing `what`.
void check(cudaError_t code, const char* function, const std::string& what);

// The device is current inside the scope, and the one before it afterwards, errors included.
class DeviceGuard {
 public:
  DeviceGuard(int device, const std::string& what);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int device_;
  int before_ = -1;
};

// Launches a kernel of one argument (a struct, by value) on the current device. The argument is
// read from where it lies: no copy of it stays on this side, which matters where it holds a key.
template <class Arguments>
void launch(void (*kernel)(Arguments), unsigned blocks, unsigned threads,
            const Arguments& arguments, cudaStream_t stream, const std::string& what) {
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))};
  check(cudaPeekAtLastError(), "an earlier CUDA call", what);
  check(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(blocks), dim3(threads),
                         pointers, 0, stream),
        "cudaLaunchKernel", what);
  check(cudaGetLastError(), "cudaGetLastError", what);
}

// Devices that can be used: 0 without a driver or a GPU, which is no error.
int device_count();

// CUDA version of the driver as 1000 major + 10 minor, or 0 without one.
int driver_version();

}  // namespace fastclip
