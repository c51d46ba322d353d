// What the nodes of all kinds of layers share.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <memory>
#include <utility>

#include "slots.hpp"

namespace fastclip {

// What a node keeps of its layer and of its call.
template <class Layer>
struct Kept : torch::CustomClassHolder {
  Kept(Layer layer, std::shared_ptr<Call> call, at::Tensor weight, at::Tensor bias, at::ScalarType kind)
      : layer(std::move(layer)), call(std::move(call)), weight(std::move(weight)), bias(std::move(bias)), kind(kind) {}
  const Layer layer;
  const std::shared_ptr<Call> call;
  const at::Tensor weight, bias;
  const at::ScalarType kind;  // in which it computes
};

template <class Layer>
c10::intrusive_ptr<Kept<Layer>> kept_of(torch::autograd::AutogradContext* ctx) {
  return c10::static_intrusive_pointer_cast<Kept<Layer>>(ctx->saved_data["kept"].toCapsule());
}

// Whose a node is, if it is one of this kind; else null.
template <class Node, class Layer>
const Slots* slots_of(torch::autograd::Node* node) {
  auto* own = dynamic_cast<torch::autograd::CppNode<Node>*>(node);
  if (!own || !own->ctx_.saved_data.count("kept")) return nullptr;
  return kept_of<Layer>(&own->ctx_)->layer.slots.get();
}

// Parameters of a layer that take part in the pass that runs: undefined where one does not.
struct Wanted {
  at::Tensor weight, bias;
  explicit operator bool() const { return weight.defined() || bias.defined(); }
};

// Raises an error where a pass reaches them that nobody has opened.
//   weight, bias: their numbers among what the node was given.
Wanted wanted_of(torch::autograd::AutogradContext* ctx, const Slots& slots, int64_t number, const at::Tensor& weight,
                 const at::Tensor& bias);

// Of a layer whose operands may be held to the end of the pass.
template <class Layer>
void hand_over(const Layer& layer, Listed&& one) {
  if (layer.at_once) {
    python.take(*layer.slots, one);
  } else {
    layer.slots->list(std::move(one));
  }
}

// In which type torch's autocast multiplies a tensor here.
at::ScalarType kind_of(const at::Tensor& x);

// The pass that a layer's call belongs to; null where the call is not for a bare node.
std::shared_ptr<Call> call_of(Slots& slots, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

const Slots* slots_of_conv(torch::autograd::Node* node);
const Slots* slots_of_norm(torch::autograd::Node* node);
const Slots* slots_of_lookup(torch::autograd::Node* node);

}  // namespace fastclip
