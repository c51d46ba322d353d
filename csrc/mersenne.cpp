// fastclip._C.mersenne_advanced: a state of PyTorch's CPU generator after so many words, without drawing
// them. Whoever uses it compares what it says with the state that is reached (fastclip/noise/stream.py).
#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "registry.hpp"

namespace py = pybind11;

namespace fastclip {
namespace {

constexpr int64_t kWords = 624, kShift = 397;  // of MT19937
constexpr uint32_t kTwist = 0x9908b0dfu;

// How torch.Generator.get_state lays a Mersenne Twister out, as far as it is one.
struct State {
  uint64_t seed;
  int32_t left;
  int32_t seeded;
  uint64_t next;
  uint64_t words[kWords];
};
constexpr size_t kBytes = 5056;  // with what belongs to normals, which words do not touch

inline uint32_t mixed(uint32_t high, uint32_t low, uint32_t far) {
  const uint32_t both = (high & 0x80000000u) | (low & 0x7fffffffu);
  return far ^ (both >> 1) ^ ((low & 1) ? kTwist : 0);
}

// The next 624 words in place of these.
void renew(uint32_t* words) {
  for (int64_t i = 0; i < kWords - kShift; ++i) words[i] = mixed(words[i], words[i + 1], words[i + kShift]);
  for (int64_t i = kWords - kShift; i < kWords - 1; ++i) {
    words[i] = mixed(words[i], words[i + 1], words[i + kShift - kWords]);
  }
  words[kWords - 1] = mixed(words[kWords - 1], words[0], words[kShift - 1]);
}

py::bytes mersenne_advanced(const std::string& bytes, int64_t count) {
  State state;
  if (bytes.size() != kBytes || count < 0) throw py::value_error("no state of a CPU generator of torch");
  std::memcpy(&state, bytes.data(), sizeof state);
  if (state.left < 1 || state.left > kWords || state.next > kWords) {
    throw py::value_error("no state of a Mersenne Twister");
  }
  const int64_t at_hand = state.left - 1;
  if (count <= at_hand) {
    state.left -= static_cast<int32_t>(count);
    state.next += static_cast<uint64_t>(count);
  } else {
    const py::gil_scoped_release release;
    const int64_t rest = count - at_hand, times = (rest + kWords - 1) / kWords;
    uint32_t words[kWords];
    for (int64_t i = 0; i < kWords; ++i) words[i] = static_cast<uint32_t>(state.words[i]);
    for (int64_t i = 0; i < times; ++i) renew(words);
    for (int64_t i = 0; i < kWords; ++i) state.words[i] = words[i];
    const int64_t used = rest - (times - 1) * kWords;
    state.left = static_cast<int32_t>(kWords + 1 - used);
    state.next = static_cast<uint64_t>(used);
  }
  std::string found = bytes;
  std::memcpy(&found[0], &state, sizeof state);
  return found;
}

const Binding binding([](py::module_& module) {
  module.def("mersenne_advanced", &mersenne_advanced,
             "The bytes of torch.Generator.get_state() after so many words of 32 bits.", py::arg("state"),
             py::arg("words"));
});

}  // namespace
}  // namespace fastclip
