#include "node.hpp"

namespace fastclip {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

struct LookupNode : public torch::autograd::Function<LookupNode> {
  static at::Tensor forward(AutogradContext* ctx, const c10::intrusive_ptr<Kept<Lookup>>& kept, const at::Tensor& ids,
                            const at::Tensor& weight) {
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({ids});
    ctx->saved_data["kept"] = c10::IValue::make_capsule(kept);
    return at::embedding(weight, ids, kept->layer.padding);
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    if (gradients[0].defined()) {
      const at::NoGradGuard no_graph;
      const auto kept = kept_of<Lookup>(ctx);
      const auto& layer = kept->layer;
      if (const auto wanted = wanted_of(ctx, *layer.slots, layer.number, kept->weight, {}))
        layer.slots->list({layer.number, kept->call, ctx->get_saved_variables()[0], gradients[0], wanted.weight, {}, layer.extra});
    }
    return variable_list(3);
  }
};

}  // namespace

const Slots* slots_of_lookup(torch::autograd::Node* node) { return slots_of<LookupNode, Lookup>(node); }

at::Tensor Lookup::call(const at::Tensor& ids, const at::Tensor& weight, const at::Tensor& bias) const {
  const auto call = call_of(*slots, ids, weight, bias);
  const auto type = ids.scalar_type();
  if (!call || (type != at::kLong && type != at::kInt) || weight.dim() != 2) return {};
  return LookupNode::apply(c10::make_intrusive<Kept<Lookup>>(*this, call, weight, bias, weight.scalar_type()), ids, weight);
}

}  // namespace fastclip
