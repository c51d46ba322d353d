#include <ATen/autocast_mode.h>

#include "node.hpp"

namespace fastclip {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

struct NormNode : public torch::autograd::Function<NormNode> {
  // Operators in the order of the rules in fastclip.rules.norm: fastclip.samples.runs follows them.
  static at::Tensor forward(AutogradContext* ctx, const c10::intrusive_ptr<Kept<Norm>>& kept, const at::Tensor& x,
                            const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
    ctx->set_materialize_grads(false);
    const auto& layer = kept->layer;
    at::Tensor out, mean, rstd;
    if (layer.kind == Norm::kLayer) {
      std::tie(out, mean, rstd) = at::native_layer_norm(x, layer.shape, weight, bias, *layer.eps);
    } else if (layer.kind == Norm::kRms) {
      out = at::rms_norm(x, layer.shape, weight, layer.eps);
      rstd = reciprocal(x, layer);
    } else {
      const auto c = x.size(1), size = x.numel() / std::max<int64_t>(1, x.size(0) * c);
      std::tie(out, mean, rstd) = at::native_group_norm(x, weight, bias, x.size(0), c, size, layer.shape[0], *layer.eps);
    }
    ctx->save_for_backward({x, mean, rstd, weight});
    ctx->saved_data["kept"] = c10::IValue::make_capsule(kept);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    variable_list found(4);
    if (!gradients[0].defined()) return found;
    const bool keeps_graph = at::GradMode::is_enabled(), need_input = ctx->needs_input_grad(0);
    const at::NoGradGuard no_graph;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(at::autocast_dispatch_keyset);
    const auto kept = kept_of<Norm>(ctx);
    const auto& layer = kept->layer;
    const auto wanted = wanted_of(ctx, *layer.slots, layer.number, kept->weight, kept->bias);
    if (!wanted && !need_input) return found;
    const auto saved = ctx->get_saved_variables();
    const auto [x, g] = std::pair(rows_of(saved[0], layer), rows_of(gradients[0], layer));
    const auto own = saved[3].reshape({-1});
    const auto given = python.normalised(layer.kind, {x, g, statistic(saved[1], x, layer), statistic(saved[2], x, layer), own}, need_input);
    if (wanted) {
      const auto of_weight = given[1].reshape(sizes_by_sample(x, saved[3]));
      const auto of_bias = given[2].defined() ? given[2].reshape(sizes_by_sample(x, saved[3])) : of_weight;
      layer.slots->list({layer.number, kept->call, of_weight, of_bias, wanted.weight, wanted.bias});
    }
    if (need_input) {
      found[1] = given[0].reshape(saved[0].sizes()).to(saved[0].scalar_type());
      if (keeps_graph) found[1] = python.tie(found[1], gradients[0]);
    }
    return found;
  }

 private:
  static at::Tensor reciprocal(const at::Tensor& x, const Norm& layer) {
    const auto wide = x.scalar_type() == at::kDouble ? x.to(at::kDouble) : x.to(at::kFloat);
    std::vector<int64_t> axes;
    for (auto k = -static_cast<int64_t>(layer.shape.size()); k < 0; ++k) axes.push_back(k);
    const auto eps = layer.eps.value_or(x.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon()
                                        : x.scalar_type() == at::kHalf ? 0x1p-10
                                        : x.scalar_type() == at::kBFloat16 ? 0x1p-7
                                                                           : std::numeric_limits<float>::epsilon());
    return at::rsqrt(at::mean(wide.square(), axes) + eps);
  }

  // x as [b, t, c], or [b, c, t] of kGroup.
  static at::Tensor rows_of(const at::Tensor& x, const Norm& layer) {
    const auto b = x.size(0);
    if (layer.kind == Norm::kGroup) return x.reshape({b, x.size(1), x.numel() / std::max<int64_t>(1, b * x.size(1))});
    const auto c = c10::multiply_integers(layer.shape);
    return x.reshape({b, b ? x.numel() / (b * c) : 0, c});
  }

  static at::Tensor statistic(const at::Tensor& given, const at::Tensor& rows, const Norm& layer) {
    if (!given.defined() || layer.kind == Norm::kGroup) return given;
    return given.reshape({rows.size(0), rows.size(1)});
  }

  static std::vector<int64_t> sizes_by_sample(const at::Tensor& rows, const at::Tensor& weight) {
    auto found = weight.sizes().vec();
    found.insert(found.begin(), rows.size(0));
    return found;
  }
};

bool ends_in(const at::Tensor& x, const std::vector<int64_t>& shape) {
  const auto sizes = x.sizes();
  return sizes.size() > shape.size() && sizes.slice(sizes.size() - shape.size()) == c10::IntArrayRef(shape) &&
         c10::multiply_integers(shape) > 0;
}

}  // namespace

const Slots* slots_of_norm(torch::autograd::Node* node) { return slots_of<NormNode, Norm>(node); }

at::Tensor Norm::call(const at::Tensor& given, const at::Tensor& weight, const at::Tensor& bias) const {
  const auto call = call_of(*slots, given, weight, bias);
  if (!call || !given.is_floating_point() || given.dim() < 2) return {};
  const auto device = given.device().type();
  auto x = given;
  const auto type = device != at::kCPU && at::autocast::is_autocast_enabled(device) ? at::kFloat : x.scalar_type();
  if (kind == kGroup) {
    // On a GPU a kernel may serve, of which nothing is known here.
    if (!x.is_cpu() || x.dim() < 3 || x.size(1) != weight.size(0) || !x.size(1)) return {};
    if (!x.is_contiguous(at::MemoryFormat::ChannelsLast)) x = x.to(type).contiguous();
    x = x.to(type);
    if (!x.is_contiguous(at::MemoryFormat::ChannelsLast)) x = x.contiguous();
  } else if (ends_in(x, shape)) {
    x = x.to(type);
  } else {
    return {};
  }
  const auto own = bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt;
  return NormNode::apply(c10::make_intrusive<Kept<Norm>>(*this, call, weight, bias, type), x, weight, own);
}

}  // namespace fastclip
