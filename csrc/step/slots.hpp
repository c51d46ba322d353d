// A private layer's call as one node of autograd's graph: it computes what the layer computes, returns
// its input's gradient, and lists what the clipped sums need, without a line of Python.
#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace torch::autograd {
struct Node;
}

namespace fastclip {

// One forward pass of the model.
struct Call {
  std::shared_ptr<void> forward;  // as Python knows it
  int64_t rows;
};

// What one layer has left in a backward pass.
struct Listed {
  int64_t slot;
  std::shared_ptr<Call> call;
  at::Tensor x, gradient;   // its input and its output's gradient; of Norm samples' gradients of weight and bias
  at::Tensor weight, bias;  // with which it computed; undefined where they take no part
  std::shared_ptr<void> extra{};  // what Python knows of how it computed
  int64_t versions = 0;
  // Of its tensors, counted when it was listed: another number tells that one was written to.
  int64_t versions_now() const {
    return (x.defined() ? x._version() : 0) + gradient._version();
  }
};

// The input that a forward pass has cast last: queries, keys and values share one copy, as they do where
// Python casts (fastclip.rules.contribution.LastCast).
class LastCast {
 public:
  at::Tensor of(const at::Tensor& x, at::ScalarType kind);
  void clear() { original_.reset(), copy_.reset(); }

 private:
  std::optional<c10::weak_intrusive_ptr<at::TensorImpl>> original_, copy_;
  const void* lies_ = nullptr;
  std::vector<int64_t> sizes_, strides_;
  int64_t version_ = 0, copied_ = 0;
  at::ScalarType kind_ = at::kFloat;
  c10::StreamId stream_ = 0;
};

// What the slots of one model share.
class Slots {
 public:
  // A forward pass of this thread begins, whose layers may be bare.
  void begin(std::shared_ptr<void> forward, int64_t rows);
  void end();
  // The pass that runs on this thread; null where layers are to go their usual way.
  std::shared_ptr<Call> running();

  void list(Listed&& one);
  std::vector<Listed> take();

  LastCast cast;
  std::atomic<bool> opened{false};  // a backward pass runs, at whose end somebody takes what is listed
  std::atomic<bool> paused{false};  // what runs contributes nothing

 private:
  std::shared_ptr<Call> running_;
  std::thread::id thread_;
  std::mutex mutex_;  // backward passes of several devices have threads of their own
  std::vector<Listed> listed_;
};

// A linear layer, y = x W^T + b, or x W + b with W [d, p].
//
// `call` of it and of the others gives their output; undefined where the call is not for a bare node.
struct Linear {
  std::shared_ptr<Slots> slots;
  int64_t number;
  bool at_once;  // what it contributes is taken in the backward pass, and no operand is held
  bool transposed;

  at::Tensor call(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) const;
};

// A convolution over x [b, c, *space], with symmetric zeros around it.
struct Conv {
  std::shared_ptr<Slots> slots;
  int64_t number;
  std::shared_ptr<void> extra;
  bool at_once;
  std::vector<int64_t> stride, padding, dilation;
  int64_t groups;

  at::Tensor call(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) const;
};

// A layer that normalises.
struct Norm {
  enum Kind { kLayer, kRms, kGroup };
  std::shared_ptr<Slots> slots;
  int64_t number;
  Kind kind;
  std::vector<int64_t> shape;  // over which it normalises; of kGroup the number of groups
  std::optional<double> eps;

  at::Tensor call(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) const;
};

// A table of embeddings.
struct Lookup {
  std::shared_ptr<Slots> slots;
  int64_t number;
  std::shared_ptr<void> extra;
  int64_t padding;  // a row without a gradient; -1: none

  at::Tensor call(const at::Tensor& ids, const at::Tensor& weight, const at::Tensor& bias) const;
};

// Whether operations of this thread are as they are written: nobody transforms, traces or replaces them,
// and their graph is kept in memory as it is.
bool is_plain();

// Whose a node of the graph is; null if it is none of these.
const Slots* slots_of(torch::autograd::Node* node);

// What Python does for a node: it raises an error; it takes what a layer has left; it ties a gradient to one
// that has no derivative; it gives the gradient of a Norm's input, where that is needed, and those of its
// weight and bias by sample.
struct Python {
  void (*refuse)(const Slots& slots, int64_t slot);
  void (*take)(const Slots& slots, const Listed& one);
  at::Tensor (*tie)(const at::Tensor& gradient, const at::Tensor& to);
  std::vector<at::Tensor> (*normalised)(Norm::Kind kind, const std::vector<at::Tensor>& operands, bool need_input);
};
extern Python python;

}  // namespace fastclip
