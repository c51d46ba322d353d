// fastclip._C: the CUDA C++ core.
//
// No header of torch is included: pointers and the stream cross this boundary as integers, and the
// CUDA runtime is linked statically. So one build serves every torch, and the module imports on a
// machine without a driver.
#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>

#include <sstream>

#include "cuda_call.hpp"
#include "registry.hpp"

#define FASTCLIP_QUOTED_(text) #text
#define FASTCLIP_QUOTED(text) FASTCLIP_QUOTED_(text)

namespace {

// What setup.py compiled for, say sm_80/sm_90/compute_90; compute_* is PTX, for what comes after.
pybind11::list architectures() {
  pybind11::list names;
  std::istringstream all(FASTCLIP_QUOTED(FASTCLIP_ARCHITECTURES));
  for (std::string name; std::getline(all, name, '/');) names.append(name);
  return names;
}

pybind11::dict versions() {
  pybind11::dict found;
  found["cudart"] = CUDART_VERSION;
  found["driver"] = fastclip::driver_version();
  found["architectures"] = architectures();
  found["sources"] = FASTCLIP_SOURCES;  // fastclip/sources.py
  return found;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "The CUDA C++ core of fastclip; fastclip.ops.cuda holds its launchers.";
  pybind11::register_exception<fastclip::CudaError>(module, "CudaError", PyExc_RuntimeError);
  module.def("device_count", &fastclip::device_count,
             "Usable devices: 0 without a driver or a GPU, which is no error.");
  module.def("versions", &versions,
             "CUDA versions (1000 major + 10 minor): cudart compiled in, driver or 0; and "
             "architectures compiled; the mark of its sources.");
  fastclip::Binding::bind_all(module);
}
