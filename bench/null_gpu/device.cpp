// A CUDA device of PyTorch that computes nothing: an operator allocates its results and is counted.
//
// What remains of a step is what the host does for it. Shapes of results come from PyTorch's own meta
// functions: at once for structured operators, from a table of earlier calls for the others. Memory is
// address space that nobody writes, handed out again by size, as a caching allocator does.

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <unordered_map>

namespace {

using at::Tensor;
using Stack = torch::jit::Stack;

std::mutex lock;
std::map<std::string, int64_t> counts;
bool counting = false;

void count(const std::string& name) {
  if (!counting) return;
  std::lock_guard<std::mutex> guard(lock);
  ++counts[name];
}

// ---- memory ----

std::mutex memory_lock;
std::unordered_map<size_t, std::vector<void*>> unused;
struct Block { void* at; size_t size; };

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  std::lock_guard<std::mutex> guard(memory_lock);
  unused[block->size].push_back(block->at);
  delete block;
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t wanted) override {
    const c10::Device device(c10::kCUDA, 0);
    if (!wanted) return {nullptr, device};
    const size_t size = (wanted + 511) / 512 * 512;
    void* at = nullptr;
    {
      std::lock_guard<std::mutex> guard(memory_lock);
      auto& list = unused[size];
      if (!list.empty()) { at = list.back(); list.pop_back(); }
    }
    if (!at) {
      at = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      TORCH_CHECK(at != MAP_FAILED, "no address space for ", size, " bytes");
    }
    return {at, new Block{at, size}, &release, device};
  }
  void copy_data(void*, const void*, size_t) const override {}
};
Allocator allocator;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::kCUDA;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {c10::kCUDA, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device d) const noexcept override {
    return c10::Stream(c10::Stream::UNSAFE, d, 0);
  }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override { return s; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct NullHooks final : at::CUDAHooksInterface {  // what a build without CUDA asks
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  int getNumGPUs() const override { return 1; }
};

const c10::DispatchKeySet cuda_keys(c10::DispatchKey::CUDA);

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType dtype) {
  return at::detail::empty_strided_generic(size, stride, &allocator, cuda_keys, dtype);
}

// ---- operators without a kernel on any device ----

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
             std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, cuda_keys,
                                   dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}

Tensor empty_strided_op(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                        std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                        std::optional<at::Device>, std::optional<bool>) {
  return empty_strided(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                       dtype.value_or(at::get_default_dtype_as_scalartype()));
}

Tensor view(const Tensor& x, c10::SymIntArrayRef size) {
  return at::native::view(x, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor as_strided(const Tensor& x, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  std::optional<int64_t> at;
  if (offset) at = offset->expect_int();
  return at::native::as_strided_tensorimpl(x, C10_AS_INTARRAYREF_SLOW(size),
                                           C10_AS_INTARRAYREF_SLOW(stride), at);
}

Tensor reshape_alias(const Tensor& x, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return as_strided(x, size, stride, x.storage_offset());
}

Tensor& copy_(Tensor& self, const Tensor& source, bool) {
  count(self.is_cuda() ? (source.is_cuda() ? "aten::copy_" : "host to device") : "SYNCHRONISE");
  return self;
}

at::Scalar item(const Tensor& x) {
  TORCH_CHECK(!counting, "a step looks at a value, which waits for the device");
  return at::Scalar(0);
}

// ---- all others ----

struct Result { std::vector<int64_t> size, stride; at::ScalarType dtype; };
std::unordered_map<std::string, std::vector<std::optional<Result>>> known;

template <class T>
void put(std::string& key, const T& value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void put_tensor(std::string& key, const Tensor& x) {
  if (!x.defined()) { key += 'u'; return; }
  put(key, x.scalar_type());
  for (auto n : x.sizes()) put(key, n);
  for (auto n : x.strides()) put(key, n);
  key += 't';
}

void put_value(std::string& key, const c10::IValue& value) {
  if (value.isTensor()) put_tensor(key, value.toTensor());
  else if (value.isInt()) put(key, value.toInt());
  else if (value.isBool()) put(key, value.toBool());
  else if (value.isDouble()) put(key, value.toDouble());
  else if (value.isNone()) key += 'n';
  else if (value.isGenerator()) key += 'g';
  else if (value.isList()) {
    for (const c10::IValue& each : value.toListRef()) put_value(key, each);
    key += 'l';
  } else if (value.isDevice()) key += 'd';
  else key += c10::str(value);
}

Tensor as_meta(const Tensor& x) {
  if (!x.defined() || !x.is_cuda()) return x;
  return at::empty_strided(x.sizes(), x.strides(), x.options().device(at::kMeta));
}

c10::IValue to_meta(const c10::IValue& value) {
  if (value.isTensor()) return as_meta(value.toTensor());
  if (value.isDevice()) return c10::Device(at::kMeta);
  if (value.isGenerator()) return {};
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& x : value.toTensorVector()) list.push_back(as_meta(x));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& x : value.toOptionalTensorVector())
      list.push_back(x ? std::optional<Tensor>(as_meta(*x)) : std::nullopt);
    return list;
  }
  return value;
}

void flatten(const c10::IValue& value, std::vector<std::optional<Result>>& out) {
  if (value.isTensorList()) {
    for (const Tensor& x : value.toTensorVector()) flatten(x, out);
    return;
  }
  TORCH_CHECK(value.isTensor(), "a result that is no tensor");
  const Tensor& x = value.toTensor();
  if (!x.defined()) out.emplace_back();
  else out.emplace_back(Result{x.sizes().vec(), x.strides().vec(), x.scalar_type()});
}

// An out= of no entries yet (arange) gets its size and memory.
void grow(const c10::OperatorHandle& op, const Stack& stack, size_t start, const Tensor& out) {
  Stack meta;
  for (size_t i = start; i < stack.size(); ++i) meta.push_back(to_meta(stack[i]));
  op.callBoxed(&meta);
  const Tensor& found = meta.back().toTensor();
  if (!found.numel()) return;
  auto* impl = out.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(empty_strided(found.sizes(), found.strides(), out.scalar_type()).storage());
  impl->set_sizes_and_strides(found.sizes(), found.strides());
}

void nothing(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto& returns = schema.returns();
  const size_t given = schema.arguments().size(), start = stack->size() - given;
  count(schema.name());
  if (returns.empty()) { torch::jit::drop(*stack, given); return; }
  if (returns[0].alias_info() && returns[0].alias_info()->isWrite()) {  // in place, or out=
    std::vector<c10::IValue> results;
    for (const auto& result : returns)
      for (size_t i = 0; i < given; ++i) {
        const auto* alias = schema.arguments()[i].alias_info();
        if (alias && alias->beforeSets() == result.alias_info()->beforeSets()) {
          const auto& result = (*stack)[start + i];
          if (returns.size() == 1 && result.isTensor() && !result.toTensor().numel())
            grow(op, *stack, start, result.toTensor());
          results.push_back(result);
          break;
        }
      }
    torch::jit::drop(*stack, given);
    for (auto& result : results) stack->push_back(std::move(result));
    return;
  }
  std::string key = schema.name();
  key += schema.overload_name();
  for (size_t i = 0; i < given; ++i) put_value(key, (*stack)[start + i]);
  std::vector<std::optional<Result>> found;
  {
    std::lock_guard<std::mutex> guard(lock);
    auto entry = known.find(key);
    if (entry != known.end()) found = entry->second;
  }
  if (found.empty()) {
    Stack meta;
    for (size_t i = 0; i < given; ++i) meta.push_back(to_meta((*stack)[start + i]));
    op.callBoxed(&meta);
    for (const auto& value : meta) flatten(value, found);
    std::lock_guard<std::mutex> guard(lock);
    known[key] = found;
  }
  torch::jit::drop(*stack, given);
  auto tensor = [](const std::optional<Result>& r) {
    return r ? empty_strided(r->size, r->stride, r->dtype) : Tensor();
  };
  if (returns.size() == 1 && returns[0].type()->kind() == c10::TypeKind::ListType) {
    c10::List<Tensor> list;
    for (const auto& r : found) list.push_back(tensor(r));
    stack->push_back(list);
    return;
  }
  for (const auto& r : found) stack->push_back(tensor(r));
}

Tensor like(const Tensor& x) { return at::empty_strided(x.sizes(), x.strides(), x.options()); }

// PyTorch's meta functions forget the memory format, which cuDNN keeps.
Tensor convolution(const Tensor& x, const Tensor& weight, const std::optional<Tensor>&,
                   at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                   bool transposed, at::IntArrayRef, int64_t) {
  TORCH_CHECK(!transposed, "a transposed convolution");
  count("aten::convolution");
  std::vector<int64_t> sizes = {x.size(0), weight.size(0)}, strides(x.dim());
  for (int64_t i = 2; i < x.dim(); ++i) {
    const int64_t reach = dilation[i - 2] * (weight.size(i) - 1) + 1;
    sizes.push_back((x.size(i) + 2 * padding[i - 2] - reach) / stride[i - 2] + 1);
  }
  const bool last = x.dim() == 4 && (x.is_contiguous(at::MemoryFormat::ChannelsLast) ||
                                     weight.is_contiguous(at::MemoryFormat::ChannelsLast));
  int64_t step = 1;
  std::vector<int64_t> order;
  if (last) order = {1, 3, 2, 0};
  else for (int64_t i = x.dim() - 1; i >= 0; --i) order.push_back(i);
  for (int64_t i : order) { strides[i] = step; step *= sizes[i]; }
  return at::empty_strided(sizes, strides, x.options());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& g, const Tensor& x, const Tensor& weight, at::OptionalIntArrayRef, at::IntArrayRef,
    at::IntArrayRef, at::IntArrayRef, bool, at::IntArrayRef, int64_t, std::array<bool, 3> wanted) {
  count("aten::convolution_backward");
  return {wanted[0] ? like(x) : Tensor(), wanted[1] ? like(weight) : Tensor(),
          wanted[2] ? at::empty_strided({g.size(1)}, {1}, g.options()) : Tensor()};
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&nothing>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided_op);
  m.impl("view", &view);
  m.impl("as_strided", &as_strided);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("copy_", &copy_);
  m.impl("convolution", &convolution);
  m.impl("convolution_backward", &convolution_backward);
  m.impl("_local_scalar_dense", &item);
  // One kernel on a GPU, several operators elsewhere.
  std::vector<std::string> whole = {"native_layer_norm", "native_group_norm", "_fused_rms_norm"};
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames())
    if (name.name.rfind("aten::_foreach_", 0) == 0 && name.name != "aten::_foreach_mm")
      whole.push_back(name.name.substr(6) + (name.overload_name.empty() ? "" : ".") +
                      name.overload_name);
  for (const auto& name : whole)
    m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&nothing>());
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  // PyTorch has looked for hooks when it was imported, and holds an object without any: it becomes one.
  static const NullHooks hooks;
  std::memcpy(const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks()), &hooks,
              sizeof(void*));
  m.def("count", [](bool on) {
    std::lock_guard<std::mutex> guard(lock);
    counting = on;
    auto found = counts;
    counts.clear();
    return found;
  }, "Begin (or stop) to count; what was counted so far, by operator.");
}
