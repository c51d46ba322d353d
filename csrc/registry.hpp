// Every source that offers functions to Python registers itself: module.cpp has no list to maintain.
#pragma once

#include <pybind11/pybind11.h>

namespace fastclip {

// A static object of a source file; its function adds that file's part to the module.
//
//     static const Binding binding([](pybind11::module_& m) { m.def("name", &function); });
class Binding {
 public:
  using Function = void (*)(pybind11::module_&);

  explicit Binding(Function function) : function_(function), next_(first()) { first() = this; }
  Binding(const Binding&) = delete;

  static void bind_all(pybind11::module_& module) {
    for (const Binding* it = first(); it != nullptr; it = it->next_) it->function_(module);
  }

 private:
  // A function's static exists before the first registration, in whatever order files start up.
  static const Binding*& first() {
    static const Binding* head = nullptr;
    return head;
  }

  Function function_;
  const Binding* next_;
};

}  // namespace fastclip
