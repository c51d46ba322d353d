// fastclip._path: the way of a call through torch's operators, followed while it runs.
//
// It is compiled against the torch that is installed, and serves no other. fastclip.samples.runs says
// what it is for.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/version.h>

#include "recorder.hpp"

namespace {

namespace py = pybind11;

// Follows one call after another.
class Recording {
 public:
  void start(const std::vector<py::object>& inputs) {
    recorder_.clear();
    for (const auto& x : inputs)
      if (THPVariable_Check(x.ptr())) recorder_.give(THPVariable_Unpack(x.ptr()));
    fastclip::begin(&recorder_);
  }
  fastclip::Path stop() {
    fastclip::end(&recorder_);
    auto found = std::move(recorder_.path);
    recorder_.clear();
    return found;
  }
  ~Recording() { fastclip::end(&recorder_); }

 private:
  fastclip::Recorder recorder_;
};

}  // namespace

PYBIND11_MODULE(_path, module) {
  module.doc() = "The way of a call through torch's operators; fastclip.samples.runs says what for.";
  module.def("versions", [] {
    py::dict found;
    found["torch"] = TORCH_VERSION;
    found["sources"] = FASTCLIP_SOURCES;  // fastclip/sources.py
    return found;
  }, "The torch that it was compiled against, and the mark of its sources.");
  module.def("pause", &fastclip::pause, py::arg("by"),
             "What this thread runs is no part of any path while the sum of these is above 0.");
  py::class_<fastclip::Path>(module, "Path", py::module_local())
      .def_readonly("operators", &fastclip::Path::operators)
      .def_readonly("sizes", &fastclip::Path::sizes)
      .def_property_readonly("hash", [](const fastclip::Path& x) { return static_cast<int64_t>(x.hash); })
      .def("follows", &fastclip::Path::follows, py::arg("other"), py::arg("mine"), py::arg("its"));
  py::class_<Recording>(module, "Recording", py::module_local())
      .def(py::init<>())
      .def("start", &Recording::start, py::arg("inputs"))
      .def("stop", &Recording::stop);
}
