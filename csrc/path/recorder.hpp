// Which operators a thread calls, on which results, and with which arguments.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace fastclip {

// What identifies a path: its operators, which results or inputs each was given, and its arguments.
struct Path {
  uint64_t hash = 1469598103934665603ull;
  int64_t operators = 0;
  // Integers among the arguments that may follow from the sizes of the inputs, in their order.
  std::vector<int64_t> sizes;

  void mix(uint64_t value) {
    hash ^= value + 0x9e3779b97f4a7c15ull + (hash << 6) + (hash >> 2);
    hash *= 0xff51afd7ed558ccdull;
    hash ^= hash >> 32;
  }
  void mix(const char* data, size_t count) {
    for (; count >= 8; data += 8, count -= 8) {
      uint64_t word;
      std::memcpy(&word, data, 8);
      mix(word);
    }
    uint64_t last = count + 1;
    for (size_t k = 0; k < count; ++k) last = last << 8 | static_cast<unsigned char>(data[k]);
    mix(last);
  }

  // Whether another call, whose inputs have other sizes, has gone this way: the same operators, whose
  // integers are equal, or follow the sizes in both calls alike. mine, its: these sizes.
  bool follows(const Path& other, const std::vector<int64_t>& mine, const std::vector<int64_t>& its) const {
    if (hash != other.hash || sizes.size() != other.sizes.size() || mine.size() != its.size()) return false;
    for (size_t k = 0; k < sizes.size(); ++k)
      if (sizes[k] != other.sizes[k] && !explained(sizes[k], other.sizes[k], mine, its)) return false;
    return true;
  }

 private:
  // As much more than a size that has changed, or a multiple of one, or of two, but for one entry.
  static bool explained(int64_t a, int64_t b, const std::vector<int64_t>& mine, const std::vector<int64_t>& its) {
    for (size_t i = 0; i < mine.size(); ++i) {
      if (mine[i] == its[i]) continue;
      if (a - mine[i] == b - its[i]) return true;
      for (int64_t more = -1; more <= 1; ++more) {
        if ((a + more) * its[i] == (b + more) * mine[i]) return true;
        for (size_t j = 0; j < mine.size(); ++j)
          if ((a + more) * its[i] * its[j] == (b + more) * mine[i] * mine[j]) return true;
      }
    }
    return false;
  }
};

// Numbers by addresses, none of which is 0.
class Table {
 public:
  Table() { clear(); }
  void clear() {
    entries_.assign(1024, {0, 0});
    count_ = 0;
  }
  uint64_t find(uint64_t key) const { return entries_[slot(entries_, key)].second; }
  // Whether the key is new.
  bool set(uint64_t key, uint64_t value) {
    if (2 * count_ >= entries_.size()) grow();
    auto& entry = entries_[slot(entries_, key)];
    const bool fresh = !entry.first;
    count_ += fresh;
    entry = {key, value};
    return fresh;
  }

 private:
  using Entries = std::vector<std::pair<uint64_t, uint64_t>>;
  static size_t slot(const Entries& in, uint64_t key) {
    size_t at = (key * 0x9e3779b97f4a7c15ull >> 32) & (in.size() - 1);
    while (in[at].first && in[at].first != key) at = (at + 1) & (in.size() - 1);
    return at;
  }
  void grow() {
    Entries larger(2 * entries_.size(), {0, 0});
    for (const auto& entry : entries_)
      if (entry.first) larger[slot(larger, entry.first)] = entry;
    entries_ = std::move(larger);
  }
  Entries entries_;
  size_t count_ = 0;
};

// What is asked of each operator once.
struct Operator;

// One path, as it is followed.
class Recorder {
 public:
  Path path;

  void clear();
  // An input: it is known by its number.
  void give(const at::Tensor& x) { set(x, next_++); }
  void begins(const Operator& kind, c10::ArrayRef<const c10::IValue> inputs);
  void ends(const Operator& kind, const std::vector<c10::IValue>& outputs);

 private:
  uint64_t number_of(const at::Tensor& x);
  void set(const at::Tensor& x, uint64_t number);
  void set_memory(const at::Tensor& x, uint64_t number);
  void add(const at::Tensor& x, bool literal);
  void add(const c10::IValue& value, int kind, bool literal);
  void note(const c10::IValue& value);

  // Numbers of tensors, of their memory, and of where in it they lie.
  Table numbers_;
  // While these are held no other tensor or memory gets their address.
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> tensors_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> memories_;
  uint64_t next_ = 1;
  uint64_t passed_ = 0;  // the number of what an operator that changes nothing was given
};

// Follow what this thread calls from now on.
void begin(Recorder* recorder);
// No more.
void end(Recorder* recorder);
void pause(int by);

}  // namespace fastclip
