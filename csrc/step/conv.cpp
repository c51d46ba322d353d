#include <ATen/autocast_mode.h>

#include "node.hpp"

namespace fastclip {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

struct ConvNode : public torch::autograd::Function<ConvNode> {
  // Operators in the order of fastclip.rules.conv: fastclip.samples.runs follows them.
  static at::Tensor forward(AutogradContext* ctx, const c10::intrusive_ptr<Kept<Conv>>& kept, const at::Tensor& x,
                            const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
    ctx->set_materialize_grads(false);
    const auto& layer = kept->layer;
    const auto cast = weight.scalar_type() == kept->kind ? weight : weight.to(kept->kind);
    const auto convolve = layer.stride.size() == 1 ? of_one : layer.stride.size() == 2 ? of_two : of_three;
    ctx->save_for_backward({x, x.requires_grad() ? cast : at::Tensor()});
    ctx->saved_data["kept"] = c10::IValue::make_capsule(kept);
    return convolve(x, cast, bias, layer);
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    variable_list found(4);
    if (!gradients[0].defined()) return found;
    const bool keeps_graph = at::GradMode::is_enabled();
    const at::NoGradGuard no_graph;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(at::autocast_dispatch_keyset);
    const auto kept = kept_of<Conv>(ctx);
    const auto saved = ctx->get_saved_variables();
    const auto& layer = kept->layer;
    const auto& g = gradients[0];
    if (auto wanted = wanted_of(ctx, *layer.slots, layer.number, kept->weight, kept->bias))
      hand_over(layer, {layer.number, kept->call, saved[0], g, wanted.weight, wanted.bias, layer.extra});
    if (ctx->needs_input_grad(0)) {
      const std::vector<int64_t> none(layer.stride.size(), 0);
      found[1] = std::get<0>(at::convolution_backward(
          g, like(saved[0], g), like(saved[1], g), std::nullopt, layer.stride, layer.padding, layer.dilation, false, none,
          layer.groups, {true, false, false}));
      found[1] = found[1].to(saved[0].scalar_type());
      if (keeps_graph) found[1] = python.tie(found[1], gradients[0]);
    }
    return found;
  }

 private:
  using Bias = std::optional<at::Tensor>;
  static at::Tensor of_one(const at::Tensor& x, const at::Tensor& weight, const Bias& bias, const Conv& layer) {
    return at::conv1d(x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups);
  }
  static at::Tensor of_two(const at::Tensor& x, const at::Tensor& weight, const Bias& bias, const Conv& layer) {
    return at::conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups);
  }
  static at::Tensor of_three(const at::Tensor& x, const at::Tensor& weight, const Bias& bias, const Conv& layer) {
    return at::conv3d(x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups);
  }
  static at::Tensor like(const at::Tensor& x, const at::Tensor& g) {
    return x.scalar_type() == g.scalar_type() ? x : x.to(g.scalar_type());
  }
};

}  // namespace

const Slots* slots_of_conv(torch::autograd::Node* node) { return slots_of<ConvNode, Conv>(node); }

at::Tensor Conv::call(const at::Tensor& given, const at::Tensor& weight, const at::Tensor& bias) const {
  const auto call = call_of(*slots, given, weight, bias);
  const auto dims = static_cast<int64_t>(stride.size()) + 2;
  if (!call || !given.is_floating_point() || given.dim() != dims || weight.dim() != dims) return {};
  if (given.size(1) != weight.size(1) * groups || !given.size(0)) return {};
  // On a GPU the gradient of channels-last outputs is copied once for all that read it.
  if (!given.is_cpu() && dims == 4 && given.is_contiguous(at::MemoryFormat::ChannelsLast)) return {};
  const auto kind = kind_of(given);
  if (kind_of(weight) != kind) return {};
  const auto x = given.scalar_type() == kind ? given : given.to(kind);
  const auto own = bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt;
  return ConvNode::apply(c10::make_intrusive<Kept<Conv>>(*this, call, weight, bias, kind), x, weight, own);
}

}  // namespace fastclip
