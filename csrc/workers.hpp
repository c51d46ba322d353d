// The threads of a loop on the host.
#pragma once

#include <algorithm>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <dlfcn.h>
#endif

namespace fastclip {

// The threads of the OpenMP library that PyTorch has loaded, if it has one that speaks as GNU's: new
// ones would compete with those, which wait awake for their next loop.
struct OpenMp {
  using Begin = void (*)(void (*)(void*), void*, unsigned, unsigned);
  using Number = int (*)();
  Begin begin = nullptr;
  Number thread = nullptr, threads = nullptr;

  static const OpenMp& loaded() {
    static const OpenMp found;
    return found;
  }
  explicit operator bool() const { return begin != nullptr && thread != nullptr && threads != nullptr; }

 private:
  OpenMp() {
#if defined(__linux__)
    begin = reinterpret_cast<Begin>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    thread = reinterpret_cast<Number>(dlsym(RTLD_DEFAULT, "omp_get_thread_num"));
    threads = reinterpret_cast<Number>(dlsym(RTLD_DEFAULT, "omp_get_num_threads"));
#endif
  }
};

// range(first, last) of stretches that cover 0 to n, on so many threads at most, this one among them.
// It does not throw.
template <class Range>
void in_stretches(int64_t n, int threads, const Range& range) {
  const int64_t workers = std::max<int64_t>(1, std::min<int64_t>(threads, n));
  if (workers == 1) return range(0, n);
  if (const OpenMp& pool = OpenMp::loaded()) {
    struct Work {
      const Range& range;
      const OpenMp& pool;
      int64_t n;
    } work{range, pool, n};
    auto own = [](void* data) {
      const Work& all = *static_cast<Work*>(data);
      const int64_t count = all.pool.threads(), i = all.pool.thread();  // it may give fewer
      all.range(all.n * i / count, all.n * (i + 1) / count);
    };
    pool.begin(own, &work, static_cast<unsigned>(workers), 0);
    return;
  }
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
