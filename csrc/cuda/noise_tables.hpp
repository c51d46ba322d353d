// From a list of tensors to the tables of launches, each a part of one stream of noise.
#pragma once

#include <limits>
#include <memory>
#include <stdexcept>
#include <type_traits>

#include "erase.hpp"
#include "noise.hpp"
#include "noise_lanes.hpp"
#include "workers.hpp"

namespace fastclip {

// Walks through the tensors of one type of arithmetic. launch(arguments, chunks) takes each table.
template <class Real, bool guarded, class Source, class Table>
class NoiseTables {
 public:
  using Arguments = NoiseArguments<Source, Table::capacity>;

  NoiseTables(const NoiseRequest& request, const Source& source, uint64_t first_block)
      : request_(request), arguments_(new Arguments{}) {
    arguments_->source = source;
    arguments_->first_block = first_block;
    arguments_->device_std = request.device_std;
    arguments_->std = request.std;
    arguments_->divisor = request.divisor;
  }
  NoiseTables(const NoiseTables&) = delete;
  ~NoiseTables() { erase(arguments_.get(), sizeof(Arguments)); }  // a key may be in it

  // Returns the first block of bits that is left for others.
  template <class Launch>
  uint64_t for_each(const Launch& launch) {
    for (const NoisyTensor& tensor : request_.tensors) {
      if ((tensor.type == Scalar::float64) != (sizeof(Real) == sizeof(double))) continue;
      if (tensor.size <= 0) continue;
      const uint64_t chunks = (static_cast<uint64_t>(tensor.size) + kChunk - 1) / kChunk;
      if (chunks > kMostChunks) throw std::length_error("a tensor has more chunks than a grid");
      if (arguments_->table.count == Table::capacity || chunks_ + chunks > kMostChunks) {
        flush(launch);
      }
      add(tensor);
      chunks_ += chunks;
    }
    flush(launch);
    return arguments_->first_block;
  }

 private:
  static constexpr uint64_t kMostChunks = std::numeric_limits<int32_t>::max();  // blocks of a grid

  void add(const NoisyTensor& tensor) {
    Table& table = arguments_->table;
    table.sum[table.count] = tensor.sum;
    table.out[table.count] = tensor.out;
    table.size[table.count] = tensor.size;
    table.type[table.count] = tensor.type;
    table.first_chunk[table.count] = static_cast<uint32_t>(chunks_);
    ++table.count;
  }

  template <class Launch>
  void flush(const Launch& launch) {
    if (chunks_ == 0) return;
    const uint64_t blocks = chunks_ * kThreads * blocks_for<Real>(kValues, guarded);
    // Philox counts four calls a block, and they must not come round either.
    if (arguments_->first_block > (std::numeric_limits<uint64_t>::max() >> 2) - blocks) {
      throw std::length_error("more noise than the counter of one key reaches");
    }
    launch(const_cast<const Arguments&>(*arguments_), static_cast<uint32_t>(chunks_));
    arguments_->first_block += blocks;
    arguments_->table.count = 0;
    chunks_ = 0;
  }

  const NoiseRequest& request_;
  std::unique_ptr<Arguments> arguments_;
  uint64_t chunks_ = 0;  // in the table
};

// What a grid does, one of its threads after the other, or several in lanes.
template <class Real, bool guarded, class Source, int tensors>
void noise_on_host(const NoiseArguments<Source, tensors>& arguments, uint32_t chunks, int threads) {
  in_stretches(chunks, threads, [&arguments](int64_t first, int64_t last) {
    if constexpr (std::is_same_v<Source, PhiloxSeed> && std::is_same_v<Real, float>) {
      noise_in_lanes(arguments, static_cast<uint32_t>(first), static_cast<uint32_t>(last), guarded);
    } else {
      for (int64_t chunk = first; chunk < last; ++chunk) {
        for (int thread = 0; thread < kThreads; ++thread) {
          noise_thread<Real, guarded>(arguments, static_cast<uint32_t>(chunk), thread);
        }
      }
    }
  });
}

}  // namespace fastclip
