// fastclip._host.mersenne_normals: what torch.Tensor.normal_ draws on a CPU, to the bit, in vectors and on
// all threads. Whoever uses it holds a sample of it against normal_ first (fastclip/host/noise.py).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "avx.hpp"
#include "mersenne.hpp"
#include "registry.hpp"
#include "workers.hpp"

namespace py = pybind11;

namespace fastclip {
namespace {

// How torch.Generator.get_state lays a Mersenne Twister out, as far as it is one.
struct State {
  uint64_t seed;
  int32_t left;
  int32_t seeded;
  uint64_t next;
  uint64_t words[Twister::kWords];
};
constexpr size_t kBytes = 5056;  // with what belongs to normals, which words do not touch

State read(const std::string& bytes) {
  State state;
  if (bytes.size() != kBytes) throw py::value_error("no state of a CPU generator of torch");
  std::memcpy(&state, bytes.data(), sizeof state);
  if (state.left < 1 || state.left > Twister::kWords || state.next > Twister::kWords) {
    throw py::value_error("no state of a Mersenne Twister");
  }
  return state;
}

Twister twister_of(const State& state) {
  Twister found;
  std::copy(state.words, state.words + Twister::kWords, found.state);
  found.used = Twister::kWords + 1 - state.left;
  return found;
}

// A tensor's memory and its numbers, 16 or more; and the memory of as many that are added, or 0.
using Run = std::tuple<uintptr_t, int64_t, uintptr_t>;
constexpr int64_t kRow = 16;

// Words of a tensor: one a number, and a row more where the last numbers are not a row.
int64_t words_of(int64_t numbers) { return numbers + (numbers % kRow ? kRow : 0); }

#ifdef FASTCLIP_KNOWS_AVX2
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#pragma GCC optimize("fp-contract=off")
#include "mersenne.inc"
#pragma GCC pop_options

// Whether `draw` runs here.
bool knows() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#else
void go_on(Twister& twister, int64_t words) { twister.skip(words); }
void draw(Twister, const std::vector<Run>&, float, float, int64_t, int64_t) {}
bool knows() { return false; }
#endif

std::string after(const std::string& bytes, int64_t count) {
  if (count < 0) throw py::value_error("a generator does not go back");
  State state = read(bytes);
  Twister twister = twister_of(state);
  go_on(twister, count);
  std::copy(twister.state, twister.state + Twister::kWords, state.words);
  state.left = static_cast<int32_t>(Twister::kWords + 1 - twister.used);
  if (count > 0) state.next = static_cast<uint64_t>(twister.used);
  std::string found = bytes;
  std::memcpy(&found[0], &state, sizeof state);
  return found;
}

void mersenne_normals(const std::string& bytes, const std::vector<Run>& runs, double std, double factor,
                      int threads) {
  if (!knows()) throw py::value_error("this processor has no AVX2");
  const Twister twister = twister_of(read(bytes));
  int64_t rows = 0;
  for (const auto& [address, numbers, added] : runs) {
    if (numbers < kRow || address == 0) throw py::value_error("a run has 16 numbers at least");
    rows += numbers / kRow;
  }
  const py::gil_scoped_release release;
  in_stretches(rows, threads, [&](int64_t first, int64_t last) {
    draw(twister, runs, static_cast<float>(std), static_cast<float>(factor), first, last);
  });
}

const Binding binding([](py::module_& module) {
  module.def(
      "mersenne_advanced",
      [](const std::string& state, int64_t words) { return py::bytes(after(state, words)); },
      "The bytes of torch.Generator.get_state() after so many words of 32 bits.", py::arg("state"),
      py::arg("words"));
  module.def("mersenne_has_normals", &knows, "Whether mersenne_normals runs on this processor.");
  module.def("mersenne_normals", &mersenne_normals,
             "Fill float32 runs (address, numbers, address or 0) as normal_ does from a generator in this state, "
             "and add `factor` times the numbers at the second address.",
             py::arg("state"), py::arg("runs"), py::arg("std"), py::arg("factor"), py::arg("threads"));
});

}  // namespace
}  // namespace fastclip
