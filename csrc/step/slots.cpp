#include "slots.hpp"

#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/PythonFallbackKernel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <optional>

#include "node.hpp"

namespace fastclip {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void Slots::begin(std::shared_ptr<void> forward, int64_t rows) {
  auto begun = std::make_shared<Call>(Call{std::move(forward), rows});
  const std::lock_guard<std::mutex> held(mutex_);
  running_.swap(begun);  // the one before is let go of without the lock
  thread_ = std::this_thread::get_id();
}

void Slots::end() {
  std::shared_ptr<Call> ended;
  const std::lock_guard<std::mutex> held(mutex_);
  running_.swap(ended);
  cast.clear();
}

std::shared_ptr<Call> Slots::running() {
  const std::lock_guard<std::mutex> held(mutex_);
  return thread_ == std::this_thread::get_id() ? running_ : nullptr;
}

void Slots::list(Listed&& one) {
  one.versions = one.versions_now();
  const std::lock_guard<std::mutex> held(mutex_);
  listed_.push_back(std::move(one));
}

std::vector<Listed> Slots::take() {
  const std::lock_guard<std::mutex> held(mutex_);
  return std::exchange(listed_, {});
}

at::Tensor LastCast::of(const at::Tensor& x, at::ScalarType kind) {
  if (x.scalar_type() == kind) return x;
  const c10::impl::VirtualGuardImpl device(x.device().type());
  const auto stream = device.getStream(x.device()).id();
  const bool lies = x.const_data_ptr() == lies_ && x.sizes() == c10::IntArrayRef(sizes_) &&
                    x.strides() == c10::IntArrayRef(strides_);
  if (original_ && lies && kind == kind_ && stream == stream_ && x._version() == version_) {
    const auto original = original_->lock(), copy = copy_->lock();
    if (original && copy && original.get() == x.unsafeGetTensorImpl()) {
      auto found = at::Tensor(copy);
      if (found._version() == copied_) return found;
    }
  }
  auto found = x.to(kind).detach();
  original_.emplace(x.getIntrusivePtr()), copy_.emplace(found.getIntrusivePtr());
  lies_ = x.const_data_ptr(), sizes_ = x.sizes().vec(), strides_ = x.strides().vec();
  version_ = x._version(), copied_ = found._version(), kind_ = kind, stream_ = stream;
  return found;
}

bool is_plain() {
  using c10::DispatchKey;
  const bool transformed = c10::impl::tls_is_dispatch_key_included(DispatchKey::FuncTorchDynamicLayerFrontMode) ||
                           c10::impl::tls_is_dispatch_key_included(DispatchKey::FuncTorchDynamicLayerBackMode);
  return at::GradMode::is_enabled() && !transformed && !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
         !at::impl::PythonTorchFunctionTLS::stack_len() && !torch::jit::tracer::isTracing() &&
         !at::SavedTensorDefaultHooks::get_hooks();
}

namespace {

// Whether the running backward pass adds to the gradient of a leaf; autograd.grad asks for it and does not.
bool takes_part(const at::Tensor& leaf) {
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  if (!wanted || wanted->empty()) return true;
  const auto found = wanted->find(torch::autograd::impl::grad_accumulator(leaf).get());
  return found != wanted->end() && found->second.needed_;
}

bool is_like(const at::Tensor& x, const at::Tensor& weight) {
  return !x.defined() || (x.device() == weight.device() && x.layout() == at::kStrided && !x.is_inference() && !x.is_nested());
}

struct LinearNode : public torch::autograd::Function<LinearNode> {
  static at::Tensor forward(AutogradContext* ctx, const c10::intrusive_ptr<Kept<Linear>>& kept, const at::Tensor& x,
                            const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
    ctx->set_materialize_grads(false);
    // Operators in the order of LinearRule: fastclip.samples.runs follows them. The weight is saved in
    // the type in which it was multiplied, as torch's own layer saves it.
    const auto operand = kept->layer.slots->cast.of(x, kept->kind);
    const auto cast = weight.scalar_type() == kept->kind ? weight : weight.to(kept->kind);
    auto out = at::linear(operand, kept->layer.transposed ? cast.t() : cast, bias);
    // With a bias it is a view of its own result, which a following layer may not change in place.
    if (out.is_view()) out = out.variable_data();
    ctx->save_for_backward({weight.requires_grad() ? operand : at::Tensor(), x.requires_grad() ? cast : at::Tensor()});
    ctx->saved_data["type"] = static_cast<int64_t>(x.scalar_type());
    ctx->saved_data["kept"] = c10::IValue::make_capsule(kept);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    const variable_list nothing(4);
    if (!gradients[0].defined()) return nothing;
    const bool keeps_graph = at::GradMode::is_enabled();
    const at::NoGradGuard no_graph;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(at::autocast_dispatch_keyset);
    const auto kept = kept_of<Linear>(ctx);
    const auto saved = ctx->get_saved_variables();
    const auto& layer = kept->layer;
    const auto g = gradients[0].contiguous();
    if (const auto wanted = wanted_of(ctx, *layer.slots, layer.number, kept->weight, kept->bias))
      hand_over(layer, {layer.number, kept->call, saved[0], g, wanted.weight, wanted.bias});
    auto found = nothing;
    if (ctx->needs_input_grad(0)) {
      const auto own = saved[1].scalar_type() == g.scalar_type() ? saved[1] : saved[1].to(g.scalar_type());
      const auto type = static_cast<at::ScalarType>(ctx->saved_data["type"].toInt());
      found[1] = at::matmul(g, layer.transposed ? own.t() : own);
      if (found[1].scalar_type() != type) found[1] = found[1].to(type);
      if (keeps_graph) found[1] = python.tie(found[1], gradients[0]);
    }
    return found;
  }
};

}  // namespace

at::ScalarType kind_of(const at::Tensor& x) {
  const auto device = x.device().type();
  const bool casts = at::autocast::is_autocast_enabled(device) && x.scalar_type() != at::kDouble;
  return casts ? at::autocast::get_autocast_dtype(device) : x.scalar_type();
}

Wanted wanted_of(AutogradContext* ctx, const Slots& slots, int64_t number, const at::Tensor& weight,
                 const at::Tensor& bias) {
  if (slots.paused) return {};
  const auto taking = [ctx](const at::Tensor& x, size_t k) {
    return x.defined() && ctx->needs_input_grad(k) && takes_part(x) ? x : at::Tensor();
  };
  Wanted found{taking(weight, 1), taking(bias, 2)};
  if (found && !slots.opened) python.refuse(slots, number);
  return found;
}

std::shared_ptr<Call> call_of(Slots& slots, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const auto call = slots.running();
  if (!call || slots.paused || x.dim() < 1 || x.size(0) != call->rows || (!x.is_cpu() && !x.is_cuda())) return nullptr;
  const bool alike = is_like(x, weight) && is_like(weight, weight) && is_like(bias, weight);
  return alike && weight.is_floating_point() && (!bias.defined() || bias.is_floating_point()) && is_plain() ? call : nullptr;
}

const Slots* slots_of(torch::autograd::Node* node) {
  const auto* found = slots_of<LinearNode, Linear>(node);
  found = found ? found : slots_of_conv(node);
  found = found ? found : slots_of_norm(node);
  return found ? found : slots_of_lookup(node);
}

at::Tensor Linear::call(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) const {
  const auto call = call_of(*slots, x, weight, bias);
  if (!call || x.dim() < 2 || !x.is_floating_point() || x.size(-1) != weight.size(transposed ? 0 : 1)) return {};
  const auto kind = kind_of(x);
  if (kind_of(weight) != kind) return {};
  const auto own = bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt;
  return LinearNode::apply(c10::make_intrusive<Kept<Linear>>(*this, call, weight, bias, kind), x, weight, own);
}

}  // namespace fastclip
