// fastclip._C.testing: the parts of noise that only its tests look at, of the same source.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <tuple>
#include <vector>

#include "noise_tables.hpp"
#include "registry.hpp"

namespace fastclip {
namespace {

// A source that writes down which blocks of bits it is asked for. Its "normals" are their own places
// in the stream: block * normals of a block + place in the block.
struct Recorder {
  static constexpr bool draws = true;
  std::vector<uint64_t>* blocks;
  const Recorder& ready() const { return *this; }
};

template <class Real>
void block_normals(const Recorder& recorder, uint64_t index, Real* values) {
  recorder.blocks->push_back(index);
  for (int i = 0; i < kBlockNormals<Real>; ++i) {
    values[i] = static_cast<Real>(index * kBlockNormals<Real> + i);
  }
}

template <bool guarded>
std::vector<uint64_t> recorded(const NoiseRequest& request) {
  std::vector<uint64_t> blocks;
  const Recorder recorder{&blocks};
  const auto run = [](auto& tables, auto real) {
    return tables.for_each([](const auto& arguments, uint32_t chunks) {
      noise_on_host<decltype(real), guarded>(arguments, chunks, 1);
    });
  };
  NoiseTables<float, guarded, Recorder, LargeTable> floats(request, recorder, 0);
  const uint64_t next = run(floats, float{});
  NoiseTables<double, guarded, Recorder, LargeTable> doubles(request, recorder, next);
  run(doubles, double{});
  return blocks;
}

// (out, values, type) -> the blocks of bits drawn for them; places are written to out.
using Row = std::tuple<uintptr_t, int64_t, int>;

std::vector<uint64_t> recorded_blocks(const std::vector<Row>& rows, bool guarded) {
  NoiseRequest request{{}, 1.0, nullptr, 1.0, guarded, kHost, nullptr, 1};
  for (const auto& [out, size, type] : rows) {
    request.tensors.push_back({nullptr, reinterpret_cast<void*>(out), size,
                               static_cast<Scalar>(type)});
  }
  return guarded ? recorded<true>(request) : recorded<false>(request);
}

std::array<uint32_t, kBlockWords> chacha20(const std::array<uint32_t, 8>& key, uint32_t counter,
                                           const std::array<uint32_t, 3>& nonce) {
  uint32_t key_words[8], nonce_words[3], words[kBlockWords];
  std::copy(key.begin(), key.end(), key_words);
  std::copy(nonce.begin(), nonce.end(), nonce_words);
  chacha20_block(key_words, counter, nonce_words, words);
  std::array<uint32_t, kBlockWords> block;
  std::copy(words, words + kBlockWords, block.begin());
  return block;
}

std::array<uint32_t, 4> philox(const std::array<uint32_t, 4>& counter,
                               const std::array<uint32_t, 2>& key) {
  uint32_t words[4];
  std::copy(counter.begin(), counter.end(), words);
  philox_4x32_10(words, key[0], key[1]);
  return {words[0], words[1], words[2], words[3]};
}

// The words of one block as noise draws them: the cipher's 64-bit index included.
template <class Cipher>
std::array<uint32_t, kBlockWords> block_of(const Cipher& cipher, uint64_t index) {
  uint32_t words[kBlockWords];
  cipher.block(index, words);
  std::array<uint32_t, kBlockWords> block;
  std::copy(words, words + kBlockWords, block.begin());
  return block;
}

std::array<uint32_t, kBlockWords> chacha20_words(const std::array<uint32_t, 8>& key,
                                                 uint64_t index) {
  ChaCha20 cipher;
  std::copy(key.begin(), key.end(), cipher.key);
  return block_of(cipher, index);
}

std::array<uint32_t, kBlockWords> philox_words(const std::array<uint32_t, 4>& seed,
                                               uint64_t index) {
  return block_of(Philox{{seed[0], seed[1]}, {seed[2], seed[3]}}, index);
}

std::tuple<float, float> float_pair(uint32_t x, uint32_t y) {
  float pair[2];
  normal_pair(x, y, pair[0], pair[1]);
  return {pair[0], pair[1]};
}

std::tuple<double, double> double_pair(uint64_t x, uint64_t y) {
  double pair[2];
  normal_pair(x, y, pair[0], pair[1]);
  return {pair[0], pair[1]};
}

std::vector<float> lanes(const std::array<uint32_t, 4>& seed, uint64_t first_block, bool guarded,
                         bool best) {
  std::vector<float> values(8 * kValues);
  normals_in_lanes(Philox{{seed[0], seed[1]}, {seed[2], seed[3]}}, first_block, guarded, best,
                   values.data());
  return values;
}

std::array<float, 16> pairs(const std::array<uint32_t, 8>& x, const std::array<uint32_t, 8>& y,
                            bool best) {
  std::array<float, 16> values;
  pairs_in_lanes(x.data(), y.data(), best, values.data());
  return values;
}

const Binding binding([](pybind11::module_& module) {
  pybind11::module_ testing = module.def_submodule("testing", "What only tests look at.");
  testing.def("recorded_blocks", &recorded_blocks);
  testing.def("chacha20_block", &chacha20);
  testing.def("chacha20_words", &chacha20_words);
  testing.def("philox_4x32_10", &philox);
  testing.def("philox_words", &philox_words);
  testing.def("normals_in_lanes", &lanes);
  testing.def("pairs_in_lanes", &pairs);
  testing.def("normal_pair", &float_pair);
  testing.def("normal_pair_wide", &double_pair);
});

}  // namespace
}  // namespace fastclip
