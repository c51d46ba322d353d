// fastclip._C.noise_*: addresses in, noise out. fastclip/cuda/noise.py calls them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "erase.hpp"
#include "noise.hpp"
#include "registry.hpp"

namespace py = pybind11;

namespace fastclip {
namespace {

// sum (or 0), out, values, Scalar of out.
using Row = std::tuple<uintptr_t, uintptr_t, int64_t, int>;

NoiseRequest request_of(const std::vector<Row>& rows, double std, uintptr_t device_std,
                        double divisor, bool guarded, int device, uintptr_t stream, int threads) {
  NoiseRequest request{{},      std,    reinterpret_cast<const double*>(device_std), divisor,
                       guarded, device, reinterpret_cast<cudaStream_t>(stream), threads};
  request.tensors.reserve(rows.size());
  for (const auto& [sum, out, size, type] : rows) {
    if (type < 0 || type > static_cast<int>(Scalar::float64)) {
      throw std::invalid_argument("expected the number of a Scalar");
    }
    request.tensors.push_back({reinterpret_cast<const void*>(sum), reinterpret_cast<void*>(out),
                               size, static_cast<Scalar>(type)});
  }
  return request;
}

void philox(uintptr_t seed, const std::vector<Row>& rows, double std, uintptr_t device_std,
            double divisor, bool guarded, int device, uintptr_t stream, int threads) {
  const NoiseRequest request =
      request_of(rows, std, device_std, divisor, guarded, device, stream, threads);
  const py::gil_scoped_release release;
  noise_of_philox(request, PhiloxSeed{reinterpret_cast<const uint32_t*>(seed)});
}

// The key is erased here; the CUDA driver's copy among the kernel's parameters is out of reach.
struct ErasedKey {
  ChaCha20 key;
  explicit ErasedKey(const py::buffer& bytes) {
    const py::buffer_info info = bytes.request();
    if (info.size * info.itemsize != sizeof key.key) {
      throw std::invalid_argument("expected a key of 32 bytes");
    }
    std::memcpy(key.key, info.ptr, sizeof key.key);  // RFC 8439 reads little-endian words
  }
  ~ErasedKey() { erase(&key, sizeof key); }
};

void chacha20(const py::buffer& key, const std::vector<Row>& rows, double std, uintptr_t device_std,
              double divisor, bool guarded, int device, uintptr_t stream, int threads) {
  const ErasedKey own(key);
  const NoiseRequest request =
      request_of(rows, std, device_std, divisor, guarded, device, stream, threads);
  const py::gil_scoped_release release;
  noise_of_chacha20(request, own.key);
}

void silent(const std::vector<Row>& rows, double divisor, int device, uintptr_t stream, int threads) {
  const NoiseRequest request =
      request_of(rows, 0.0, 0, divisor, false, device, stream, threads);
  const py::gil_scoped_release release;
  no_noise(request);
}

const Binding binding([](py::module_& module) {
  using py::arg;
  const char* rows =
      "rows: (sum or 0, out, values, type) of each tensor; device -1: the host, on so many threads.";
  module.def("noise_philox", &philox, rows, arg("seed"), arg("rows"), arg("std"), arg("device_std"),
             arg("divisor"), arg("guarded"), arg("device"), arg("stream"), arg("threads") = 1);
  module.def("noise_chacha20", &chacha20, rows, arg("key"), arg("rows"), arg("std"),
             arg("device_std"), arg("divisor"), arg("guarded"), arg("device"), arg("stream"),
             arg("threads") = 1);
  module.def("noise_silent", &silent, rows, arg("rows"), arg("divisor"), arg("device"),
             arg("stream"), arg("threads") = 1);
});

}  // namespace
}  // namespace fastclip
