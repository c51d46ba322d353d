// fastclip._step: private layers as nodes of autograd's graph, of which Python hears when a pass ends.
//
// It is compiled against the torch that is installed, and serves no other. fastclip.backward.bare says
// what it is for.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/version.h>

#include "linear_group.hpp"
#include "slots.hpp"

namespace {

namespace py = pybind11;

PyObject* refusal = nullptr;
PyObject* tied = nullptr;

std::vector<at::Tensor> tensors_of(const std::vector<py::object>& given) {
  std::vector<at::Tensor> found;
  found.reserve(given.size());
  for (const auto& x : given) found.push_back(THPVariable_Unpack(x.ptr()));
  return found;
}

at::Tensor tensor_of(PyObject* x) { return x && THPVariable_Check(x) ? THPVariable_Unpack(x) : at::Tensor(); }

py::object shown(const at::Tensor& x) { return py::reinterpret_steal<py::object>(THPVariable_Wrap(x)); }

int64_t address_of(const fastclip::Slots& slots) { return reinterpret_cast<int64_t>(&slots); }

void refuse(const fastclip::Slots& slots, int64_t slot) {
  const py::gil_scoped_acquire held;
  py::handle{refusal}(address_of(slots), slot);
}

// An object of Python's that may be let go of by any thread.
std::shared_ptr<void> shared(py::object given) {
  return {given.release().ptr(), [](void* x) {
            if (!Py_IsInitialized()) return;
            const py::gil_scoped_acquire held;
            Py_DECREF(static_cast<PyObject*>(x));
          }};
}

at::Tensor tie(const at::Tensor& gradient, const at::Tensor& to) {
  const py::gil_scoped_acquire held;
  return tensor_of(py::handle{tied}(shown(gradient), shown(to)).ptr());
}

// One linear layer of a private model.
class Slot {
 public:
  Slot(std::shared_ptr<fastclip::Slots> slots, int64_t number, py::dict parameters, bool transposed)
      : layer_{std::move(slots), number, transposed, false}, parameters_(std::move(parameters)) {
    weight_ = parameters_["weight"];
    bias_ = parameters_.contains("bias") ? py::object(parameters_["bias"]) : py::none();
    layer_.biased = tensor_of(bias_.ptr()).defined();
    trained_ = trained();
  }
  // What the layer gives; None where it is to go its usual way.
  //   held: the module's __dict__, which is not kept: it leads back here.
  py::object call(const py::handle& given, const py::dict& held) const {
    if (!THPVariable_CheckExact(given.ptr()) || !holds(held.ptr())) return py::none();
    const auto x = THPVariable_Unpack(given.ptr()), weight = tensor_of(weight_.ptr()), bias = tensor_of(bias_.ptr());
    at::Tensor out;
    {
      const py::gil_scoped_release others;
      out = layer_.call(x, weight, bias);
    }
    return out.defined() ? shown(out) : py::none();
  }

 private:
  // The parameters are those that it was made of, and trained as they were then.
  bool holds(PyObject* held) const {
    const auto* bias = PyDict_GetItemString(parameters_.ptr(), "bias");
    if (PyDict_GetItemString(held, "_parameters") != parameters_.ptr()) return false;
    if (PyDict_GetItemString(held, "weight") || PyDict_GetItemString(held, "bias")) return false;
    return PyDict_GetItemString(parameters_.ptr(), "weight") == weight_.ptr() &&
           (bias ? bias : Py_None) == bias_.ptr() && trained() == trained_;
  }
  int trained() const {
    const auto weight = tensor_of(weight_.ptr()), bias = tensor_of(bias_.ptr());
    return weight.requires_grad() + 2 * (bias.defined() && bias.requires_grad());
  }

  fastclip::Linear layer_;
  py::dict parameters_;
  py::object weight_, bias_;  // held: another parameter must not come to lie where one of them was
  int trained_;
};

py::list taken(fastclip::Slots& slots) {
  py::list found;
  for (auto& one : slots.take()) {
    const auto forward = py::reinterpret_borrow<py::object>(static_cast<PyObject*>(one.call->forward.get()));
    const bool written = one.versions != one.versions_now();
    const auto weight = one.weight.defined() ? shown(one.weight) : py::none();
    const auto bias = one.bias.defined() ? shown(one.bias) : py::none();
    found.append(py::make_tuple(one.slot, forward, shown(one.x), shown(one.gradient), weight, bias, written));
  }
  return found;
}

}  // namespace

namespace fastclip {
Python python{refuse, tie};
}

PYBIND11_MODULE(_step, module) {
  module.doc() = "Private layers as nodes of autograd's graph; fastclip.backward.bare says what for.";
  module.def("versions", [] {
    py::dict found;
    found["torch"] = TORCH_VERSION;
    found["sources"] = FASTCLIP_SOURCES;  // fastclip/sources.py
    return found;
  }, "The torch that it was compiled against, and the mark of its sources.");
  module.def("ask", [](py::object refuse, py::object tie) {
    refusal = refuse.release().ptr();  // for good: a node may outlive the interpreter's other objects
    tied = tie.release().ptr();
  }, py::arg("refuse"), py::arg("tie"),
             "Who raises an error for (address of slots, slot), and who ties a gradient to another one.");
  module.def("slots_of", [](const py::handle& node) {
    const auto* found = fastclip::slots_of(reinterpret_cast<torch::autograd::THPCppFunction*>(node.ptr())->cdata.get());
    return found ? address_of(*found) : 0;
  }, py::arg("node"), "The address of the slots of a node of C++; 0 of another one.");
  module.def("single_norms", [](const std::vector<py::object>& a, const std::vector<py::object>& g, double lost_a, double lost_g) {
    const auto inputs = tensors_of(a), gradients = tensors_of(g);
    at::Tensor found;
    {
      const py::gil_scoped_release others;
      found = fastclip::single_norms(inputs, gradients, lost_a, lost_g);
    }
    return shown(found);
  }, py::arg("a"), py::arg("g"), py::arg("lost_a"), py::arg("lost_g"));
  module.def("scaled_sums", [](const std::vector<py::object>& a, const std::vector<py::object>& g, const py::object& scale, bool any) {
    const auto inputs = tensors_of(a), gradients = tensors_of(g);
    const auto factors = tensor_of(scale.ptr());
    std::vector<at::Tensor> sums;
    {
      const py::gil_scoped_release others;
      sums = fastclip::scaled_sums(inputs, gradients, factors, any);
    }
    py::list found;
    for (const auto& x : sums) found.append(shown(x));
    return found;
  }, py::arg("a"), py::arg("g"), py::arg("scale"), py::arg("any"));
  py::class_<fastclip::Slots, std::shared_ptr<fastclip::Slots>>(module, "Slots")
      .def(py::init<>())
      .def("begin", [](fastclip::Slots& x, py::object forward, int64_t rows) { x.begin(shared(std::move(forward)), rows); },
           py::arg("forward"), py::arg("rows"))
      .def("end", &fastclip::Slots::end)
      .def("take", &taken)
      .def_property("opened", [](const fastclip::Slots& x) { return x.opened.load(); },
                    [](fastclip::Slots& x, bool now) { x.opened = now; })
      .def_property("paused", [](const fastclip::Slots& x) { return x.paused.load(); },
                    [](fastclip::Slots& x, bool now) { x.paused = now; })
      .def_property_readonly("address", &address_of);
  py::class_<Slot>(module, "Linear")
      .def(py::init<std::shared_ptr<fastclip::Slots>, int64_t, py::dict, bool>(), py::arg("slots"),
           py::arg("number"), py::arg("parameters"), py::arg("transposed"))
      .def("__call__", &Slot::call, py::arg("x"), py::arg("held"));
}
