// The threads of a loop on the host.
#pragma once

#include <algorithm>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace fastclip {

// range(first, last) of stretches that cover 0 to n, on so many threads at most, this one among them.
template <class Range>
void in_stretches(int64_t n, int threads, const Range& range) {
  const int64_t workers = std::max<int64_t>(1, std::min<int64_t>(threads, n));
  std::vector<std::thread> others;
  int64_t begun = 1;
  try {
    for (; begun < workers; ++begun) {
      others.emplace_back(range, n * begun / workers, n * (begun + 1) / workers);
    }
  } catch (const std::system_error&) {  // no more threads: the rest is done here
    range(n * begun / workers, n);
  }
  range(0, n / workers);
  for (std::thread& other : others) other.join();
}

}  // namespace fastclip
