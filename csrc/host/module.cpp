// fastclip._host: loops for the CPU, each in place of a chain of PyTorch's operations.
//
// No header of torch is included and no library linked: addresses cross this boundary as integers. So
// one build serves every torch, and any C++17 compiler makes it.
#include <pybind11/pybind11.h>

#include "registry.hpp"

#ifdef __clang__
#define FASTCLIP_COMPILER __VERSION__
#else
#define FASTCLIP_COMPILER "GCC " __VERSION__
#endif

namespace {

pybind11::dict versions() {
  pybind11::dict found;
  found["compiler"] = FASTCLIP_COMPILER;
  found["sources"] = FASTCLIP_SOURCES;  // fastclip/sources.py
  return found;
}

}  // namespace

PYBIND11_MODULE(_host, module) {
  module.doc() = "The loops of fastclip for the CPU; fastclip.ops.host holds their launchers.";
  module.def("versions", &versions, "The compiler that made it, and the mark of its sources.");
  fastclip::Binding::bind_all(module);
}
