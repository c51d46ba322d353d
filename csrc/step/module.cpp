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
PyObject* taker = nullptr;
PyObject* tied = nullptr;
PyObject* normaliser = nullptr;

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

std::vector<at::Tensor> normalised(fastclip::Norm::Kind kind, const std::vector<at::Tensor>& operands, bool need_input) {
  const py::gil_scoped_acquire held;
  py::list given;
  for (const auto& x : operands) given.append(x.defined() ? shown(x) : py::none());
  std::vector<at::Tensor> found;
  for (const auto& x : py::handle{normaliser}(static_cast<int>(kind), given, need_input)) found.push_back(tensor_of(x.ptr()));
  return found;
}

// One layer of a private model.
template <class Layer>
class Slot {
 public:
  // settings: attributes of the module that the layer was made of.
  Slot(Layer layer, py::dict parameters, py::dict settings)
      : layer_(std::move(layer)), parameters_(std::move(parameters)), settings_(std::move(settings)) {
    weight_ = parameters_["weight"];
    sizes_ = tensor_of(weight_.ptr()).sizes().vec();
    bias_ = parameters_.contains("bias") ? py::object(parameters_["bias"]) : py::none();
    trained_ = trained();
  }
  // What the layer gives; None where it is to go its usual way.
  //   module: it is not kept: it leads back here.
  py::object call(const py::handle& given, const py::handle& module) const {
    if (!THPVariable_CheckExact(given.ptr()) || !holds(module.attr("__dict__").ptr())) return py::none();
    const auto x = THPVariable_Unpack(given.ptr()), weight = tensor_of(weight_.ptr()), bias = tensor_of(bias_.ptr());
    at::Tensor out;
    {
      const py::gil_scoped_release others;
      out = layer_.call(x, weight, bias);
    }
    return out.defined() ? shown(out) : py::none();
  }

 private:
  // The parameters, their shapes and the settings are those that it was made of, and trained as they were then.
  bool holds(PyObject* held) const {
    const auto* bias = PyDict_GetItemString(parameters_.ptr(), "bias");
    if (PyDict_GetItemString(held, "_parameters") != parameters_.ptr()) return false;
    if (PyDict_GetItemString(held, "weight") || PyDict_GetItemString(held, "bias")) return false;
    for (const auto& [name, setting] : settings_)
      if (PyDict_GetItem(held, name.ptr()) != setting.ptr()) return false;
    return PyDict_GetItemString(parameters_.ptr(), "weight") == weight_.ptr() &&
           (bias ? bias : Py_None) == bias_.ptr() && trained() == trained_ &&
           tensor_of(weight_.ptr()).sizes() == c10::IntArrayRef(sizes_);
  }
  int trained() const {
    const auto weight = tensor_of(weight_.ptr()), bias = tensor_of(bias_.ptr());
    return weight.requires_grad() + 2 * (bias.defined() && bias.requires_grad());
  }

  Layer layer_;
  py::dict parameters_, settings_;
  py::object weight_, bias_;  // held: another parameter must not come to lie where one of them was
  std::vector<int64_t> sizes_;  // of the weight: its data may be replaced
  int trained_;
};

py::object extra_of(const fastclip::Listed& one) {
  return one.extra ? py::reinterpret_borrow<py::object>(static_cast<PyObject*>(one.extra.get())) : py::none();
}

py::tuple told(const fastclip::Listed& one) {
  const auto forward = py::reinterpret_borrow<py::object>(static_cast<PyObject*>(one.call->forward.get()));
  const auto weight = one.weight.defined() ? shown(one.weight) : py::none();
  const auto bias = one.bias.defined() ? shown(one.bias) : py::none();
  return py::make_tuple(one.slot, forward, shown(one.x), shown(one.gradient), weight, bias, extra_of(one));
}

// What all layers have left, as columns; the last of which says whether one of the tensors was written to.
py::tuple taken(fastclip::Slots& slots) {
  py::list numbers, forwards, inputs, gradients, weights, biases, extras;
  bool written = false;
  for (const auto& one : slots.take()) {
    numbers.append(one.slot);
    forwards.append(py::reinterpret_borrow<py::object>(static_cast<PyObject*>(one.call->forward.get())));
    inputs.append(shown(one.x)), gradients.append(shown(one.gradient));
    weights.append(one.weight.defined() ? shown(one.weight) : py::none());
    biases.append(one.bias.defined() ? shown(one.bias) : py::none());
    extras.append(extra_of(one));
    written |= one.versions != one.versions_now();
  }
  return py::make_tuple(numbers, forwards, inputs, gradients, weights, biases, extras, written);
}

void take(const fastclip::Slots& slots, const fastclip::Listed& one) {
  const py::gil_scoped_acquire held;
  py::handle{taker}(address_of(slots), told(one));
}

}  // namespace

namespace fastclip {
Python python{refuse, take, tie, normalised};
}

PYBIND11_MODULE(_step, module) {
  module.doc() = "Private layers as nodes of autograd's graph; fastclip.backward.bare says what for.";
  module.def("versions", [] {
    py::dict found;
    found["torch"] = TORCH_VERSION;
    found["sources"] = FASTCLIP_SOURCES;  // fastclip/sources.py
    return found;
  }, "The torch that it was compiled against, and the mark of its sources.");
  module.def("ask", [](py::object refuse, py::object take, py::object tie, py::object normalise) {
    refusal = refuse.release().ptr();  // for good: a node may outlive the interpreter's other objects
    taker = take.release().ptr();
    tied = tie.release().ptr();
    normaliser = normalise.release().ptr();
  }, py::arg("refuse"), py::arg("take"), py::arg("tie"), py::arg("normalise"),
             "Who raises an error for (address of slots, slot), who takes (address of slots, what a layer has left), "
             "who ties a gradient to another one, and who gives "
             "gradients for (kind, [x, g, mean, rstd, weight], whether that of x is needed).");
  module.def("slots_of", [](const py::handle& node) {
    const auto* found = fastclip::slots_of(reinterpret_cast<torch::autograd::THPCppFunction*>(node.ptr())->cdata.get());
    return found ? address_of(*found) : 0;
  }, py::arg("node"), "The address of the slots of a node of C++; 0 of another one.");
  module.def("single_norms", [](const std::vector<py::object>& a, const std::vector<py::object>& g,
                                const std::vector<double>& lost_a, const std::vector<double>& lost_g) {
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
  py::class_<fastclip::Slots, std::shared_ptr<fastclip::Slots>>(module, "Slots", py::module_local())
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
  using Shared = std::shared_ptr<fastclip::Slots>;
  using fastclip::Conv, fastclip::Linear, fastclip::Lookup, fastclip::Norm;
  using Numbers = std::vector<int64_t>;
  py::class_<Slot<Linear>>(module, "Linear", py::module_local())
      .def(py::init([](Shared slots, int64_t number, py::dict parameters, py::dict settings, bool at_once, bool transposed) {
        return Slot<Linear>({std::move(slots), number, at_once, transposed}, std::move(parameters), std::move(settings));
      }), py::arg("slots"), py::arg("number"), py::arg("parameters"), py::arg("settings"), py::arg("at_once"),
           py::arg("transposed"))
      .def("__call__", &Slot<Linear>::call, py::arg("x"), py::arg("module"));
  py::class_<Slot<Conv>>(module, "Conv", py::module_local())
      .def(py::init([](Shared slots, int64_t number, py::dict parameters, py::dict settings, py::object extra, bool at_once,
                       Numbers stride, Numbers padding, Numbers dilation, int64_t groups) {
        return Slot<Conv>({std::move(slots), number, shared(std::move(extra)), at_once, std::move(stride), std::move(padding),
                           std::move(dilation), groups},
                          std::move(parameters), std::move(settings));
      }), py::arg("slots"), py::arg("number"), py::arg("parameters"), py::arg("settings"), py::arg("extra"), py::arg("at_once"),
           py::arg("stride"), py::arg("padding"), py::arg("dilation"), py::arg("groups"))
      .def("__call__", &Slot<Conv>::call, py::arg("x"), py::arg("module"));
  py::class_<Slot<Norm>>(module, "Norm", py::module_local())
      .def(py::init([](Shared slots, int64_t number, py::dict parameters, py::dict settings, int kind,
                       Numbers shape, std::optional<double> eps) {
        return Slot<Norm>({std::move(slots), number, static_cast<Norm::Kind>(kind), std::move(shape), eps},
                          std::move(parameters), std::move(settings));
      }), py::arg("slots"), py::arg("number"), py::arg("parameters"), py::arg("settings"), py::arg("kind"),
           py::arg("shape"), py::arg("eps"))
      .def("__call__", &Slot<Norm>::call, py::arg("x"), py::arg("module"));
  py::class_<Slot<Lookup>>(module, "Lookup", py::module_local())
      .def(py::init([](Shared slots, int64_t number, py::dict parameters, py::dict settings, py::object extra, int64_t padding) {
        return Slot<Lookup>({std::move(slots), number, shared(std::move(extra)), padding}, std::move(parameters), std::move(settings));
      }), py::arg("slots"), py::arg("number"), py::arg("parameters"), py::arg("settings"), py::arg("extra"), py::arg("padding"))
      .def("__call__", &Slot<Lookup>::call, py::arg("x"), py::arg("module"));
}
