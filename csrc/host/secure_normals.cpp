// fastclip._host.secure_normals: noise that nobody can foresee, in vectors and on all threads, added to sums.
//
// A key serves one call and is erased; every batch of values has blocks of the key stream of its own. Whoever
// uses it holds a sample against another implementation first (fastclip/host/secure_noise.py).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "avx.hpp"
#include "erase.hpp"
#include "registry.hpp"
#include "workers.hpp"

namespace py = pybind11;

namespace fastclip {
namespace {

constexpr int kBlockWords = 16;

struct Key {
  uint32_t words[8];

  explicit Key(const py::buffer& bytes) {
    const py::buffer_info info = bytes.request();
    if (info.size * info.itemsize != sizeof words) throw py::value_error("expected a key of 32 bytes");
    std::memcpy(words, info.ptr, sizeof words);  // RFC 8439 reads little-endian words
  }
  Key(const Key&) = delete;
  ~Key() { erase(words, sizeof words); }
};

// float32 values: where they go, how many, and a sum to which they are added, or 0.
using Run = std::tuple<uintptr_t, int64_t, uintptr_t>;
using Draw = void (*)(const Key&, const std::vector<Run>&, float std, float factor, uint64_t block,
                      int64_t, int64_t);

struct Loops {
  int lanes;
  Draw plain, guarded;
};

#pragma GCC push_options
#pragma GCC optimize("fp-contract=off")
namespace any {
constexpr int kLanes = 8;
#include "normal_lanes.inc"
#include "secure_normals.inc"
}  // namespace any

#ifdef FASTCLIP_KNOWS_AVX2
#pragma GCC push_options
#pragma GCC target("avx2")
#define FASTCLIP_AVX2
namespace avx2 {
constexpr int kLanes = 8;
#include "normal_lanes.inc"
#include "secure_normals.inc"
}  // namespace avx2
#undef FASTCLIP_AVX2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f")
#define FASTCLIP_AVX512
namespace avx512 {
constexpr int kLanes = 16;
#include "normal_lanes.inc"
#include "secure_normals.inc"
}  // namespace avx512
#undef FASTCLIP_AVX512
#pragma GCC pop_options
#endif
#pragma GCC pop_options

// By the name of the instructions, the best first.
std::vector<std::pair<std::string, const Loops*>> found() {
  std::vector<std::pair<std::string, const Loops*>> sets;
#ifdef FASTCLIP_KNOWS_AVX2
  if (__builtin_cpu_supports("avx512f")) sets.emplace_back("avx512", &avx512::kLoops);
  if (__builtin_cpu_supports("avx2")) sets.emplace_back("avx2", &avx2::kLoops);
#endif
  sets.emplace_back("any", &any::kLoops);
  return sets;
}

std::vector<std::string> instructions() {
  std::vector<std::string> names;
  for (const auto& set : found()) names.push_back(set.first);
  return names;
}

void secure_normals(const py::buffer& key, const std::vector<Run>& runs, double std, double factor,
                    bool guarded, const std::string& instructions, int threads, uint64_t block) {
  const Key own(key);
  for (const auto& [name, loops] : found()) {
    if (name != instructions) continue;
    const int64_t each = kBlockWords / (guarded ? 4 : 1) * loops->lanes;
    int64_t batches = 0;
    for (const auto& [address, numbers, added] : runs) {
      if (numbers < 0 || (numbers > 0 && address == 0)) throw py::value_error("a run has no memory");
      batches += (numbers + each - 1) / each;
    }
    const Draw draw = guarded ? loops->guarded : loops->plain;
    const py::gil_scoped_release release;
    in_stretches(batches, threads, [&](int64_t first, int64_t last) {
      draw(own, runs, static_cast<float>(std), static_cast<float>(factor), block, first, last);
    });
    return;
  }
  throw py::value_error("this processor has no such instructions");
}

const Binding binding([](py::module_& module) {
  using py::arg;
  module.def("secure_instructions", &instructions, "Instructions in which secure_normals can be drawn, best first.");
  module.def("secure_normals", &secure_normals,
             "Fill float32 runs (address, numbers, address or 0) with std times normals of ChaCha20 under this "
             "key, and add `factor` times the numbers at the second address; guarded: of half the sums of four. "
             "block: the first of the key stream.",
             arg("key"), arg("runs"), arg("std"), arg("factor"), arg("guarded"), arg("instructions"), arg("threads"),
             arg("block") = 0);
});

}  // namespace
}  // namespace fastclip
