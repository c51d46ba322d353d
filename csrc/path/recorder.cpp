#include "recorder.hpp"

#include <ATen/core/function_schema.h>

#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <unordered_map>

namespace fastclip {

constexpr int64_t kSmall = 64;  // entries of a constant that is known by its numbers

// How an argument that is a number counts.
enum Kind : int {
  kExact,   // as it is: an axis, a type
  kSize,    // it may follow from the sizes of the inputs
  kNumber,  // whatever it is, it leaves samples where they are
};

struct Operator {
  std::string name;
  uint64_t id = 0;
  bool is_operator = false;  // else a function of Python's with a backward of its own
  bool literal = false;      // it takes over numbers that Python has written
  bool identity = false;     // it returns the numbers that it is given
  bool layer = false;        // a private layer, whose operators count alone: as a node of csrc/step it has no name
  std::vector<int> arguments;
};

namespace {

bool holds(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

int kind_of(const c10::Argument& argument) {
  const auto type = argument.real_type()->annotation_str();
  if (argument.name().rfind("dim", 0) == 0 || argument.name() == "axis" || holds(type, "ScalarType")) return kExact;
  if (holds(type, "number") || holds(type, "Scalar")) return kNumber;
  return holds(type, "int") || holds(type, "SymInt") ? kSize : kExact;
}

Operator operator_of(const at::RecordFunction& call) {
  Operator found;
  found.name = call.name();
  const auto schema = call.operator_schema();
  found.is_operator = schema.has_value();
  found.literal = found.name == "aten::lift_fresh" || found.name == "aten::lift";
  found.identity = found.name == "aten::detach" || found.name == "aten::alias";
  found.layer = found.name == "PrivateLayer" || found.name == "PrivateNode";
  found.id = std::hash<std::string>()(found.name + "." + (schema ? schema->overload_name() : ""));
  if (schema)
    for (const auto& argument : schema->arguments()) found.arguments.push_back(kind_of(argument));
  return found;
}

uint64_t address(const void* of) { return reinterpret_cast<uint64_t>(of); }

bool has_memory(const at::Tensor& x) {
  return x.layout() == at::kStrided && x.has_storage() && !x.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

// A compiler of torch's traces what runs: a later call runs what it has made.
bool is_traced() {
  using c10::impl::TorchDispatchModeKey;
  for (const auto key : {TorchDispatchModeKey::FAKE, TorchDispatchModeKey::PROXY, TorchDispatchModeKey::FUNCTIONAL})
    if (c10::impl::TorchDispatchModeTLS::get_mode(key).has_value()) return true;
  return false;
}

uint64_t address_of_memory(const at::Tensor& x) { return address(x.storage().unsafeGetStorageImpl()); }

uint64_t geometry(const at::Tensor& x) {
  uint64_t key = address_of_memory(x) * 31 + static_cast<uint64_t>(x.storage_offset());
  for (const auto n : x.sizes()) key = key * 1000003 + static_cast<uint64_t>(n);
  for (const auto n : x.strides()) key = key * 1000003 + static_cast<uint64_t>(n);
  return key | 1;  // addresses are even
}

bool is_small_constant(const at::Tensor& x, bool literal) {
  return (literal || !x.is_floating_point()) && has_memory(x) && x.device().is_cpu() && x.numel() > 1 &&
         x.numel() <= kSmall && x.is_contiguous() && x.storage().data();
}

}  // namespace

void Recorder::clear() {
  path = Path();
  numbers_.clear();
  tensors_.clear();
  memories_.clear();
  next_ = 1;
}

void Recorder::set_memory(const at::Tensor& x, uint64_t number) {
  if (!has_memory(x)) return;
  if (numbers_.set(address_of_memory(x), number))
    memories_.emplace_back(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(x.storage().unsafeGetStorageImpl()));
  numbers_.set(geometry(x), number);
}

void Recorder::set(const at::Tensor& x, uint64_t number) {
  if (!x.defined()) return;
  if (numbers_.set(address(x.unsafeGetTensorImpl()), number)) tensors_.emplace_back(x.getIntrusivePtr());
  set_memory(x, number);
}

// Of what no operator has made (a parameter, a constant, what a function of Python's returns) by its
// memory.
uint64_t Recorder::number_of(const at::Tensor& x) {
  if (!x.defined()) return 0;
  if (const auto found = numbers_.find(address(x.unsafeGetTensorImpl()))) return found;
  if (!has_memory(x)) {
    set(x, next_++);
    return next_ - 1;
  }
  if (const auto found = numbers_.find(geometry(x))) return found;
  if (const auto found = numbers_.find(address_of_memory(x))) return found * 31 + static_cast<uint64_t>(x.storage_offset());
  set_memory(x, next_++);
  return next_ - 1;
}

void Recorder::add(const at::Tensor& x, bool literal) {
  if (!x.defined()) return path.mix(3);
  if (x.unsafeGetTensorImpl()->is_wrapped_number()) return path.mix(23);
  path.mix(static_cast<uint64_t>(x.dim()) << 8 | static_cast<uint64_t>(x.scalar_type()));
  const bool made = numbers_.find(address(x.unsafeGetTensorImpl()));
  path.mix(number_of(x));
  if ((!made || literal) && is_small_constant(x, literal))
    path.mix(static_cast<const char*>(x.storage().data()) + x.storage_offset() * x.element_size(), x.nbytes());
}

void Recorder::add(const c10::IValue& value, int kind, bool literal) {
  if (value.isTensor()) return add(value.toTensor(), literal);
  if (value.isInt()) {
    if (kind == kSize) return path.sizes.push_back(value.toInt());
    return path.mix(kind == kNumber ? 5 : static_cast<uint64_t>(value.toInt()) + 7);
  }
  if (value.isBool()) return path.mix(value.toBool() ? 11 : 13);
  if (value.isString()) return path.mix(value.toStringRef().data(), value.toStringRef().size());
  if (value.isIntList()) {
    const auto list = value.toIntVector();
    path.mix(list.size() << 4 | 1);
    for (const auto x : list) add(c10::IValue(x), kind, literal);
    return;
  }
  if (value.isList()) {
    const auto list = value.toListRef();
    path.mix(list.size() << 4 | 2);
    for (const auto& x : list) add(x, kind, literal);
    return;
  }
  path.mix(value.isNone() ? 17 : 19);
}

void Recorder::begins(const Operator& kind, c10::ArrayRef<const c10::IValue> inputs) {
  if (kind.layer) return;
  if (kind.identity) {
    passed_ = inputs.empty() || !inputs[0].isTensor() ? 0 : number_of(inputs[0].toTensor());
    return;
  }
  path.mix(kind.id);
  ++path.operators;
  for (size_t k = 0; k < inputs.size(); ++k)
    add(inputs[k], k < kind.arguments.size() ? kind.arguments[k] : kExact, kind.literal);
}

void Recorder::note(const c10::IValue& value) {
  if (value.isTensor()) return set(value.toTensor(), next_++);
  if (value.isTensorList())
    for (const auto& x : value.toTensorVector()) set(x, next_++);
}

void Recorder::ends(const Operator& kind, const std::vector<c10::IValue>& outputs) {
  for (const auto& x : outputs) {
    if (!kind.identity) note(x);
    else if (passed_ && x.isTensor()) set(x.toTensor(), passed_);
  }
}

namespace {

struct Here {
  std::vector<Recorder*> running;
  std::unordered_map<const char*, Operator> operators;  // by the address of their names
  at::CallbackHandle handle = 0;
  int depth = 0;
  int paused = 0;
  bool alone = true;  // nobody else listens to operators
};

Here& here() {
  static thread_local Here found;
  return found;
}

const Operator& look_up(Here& now, const at::RecordFunction& call) {
  const char* name = call.name();
  const auto found = now.operators.find(name);
  if (found != now.operators.end() && found->second.name == name) return found->second;
  return now.operators[name] = operator_of(call);
}

// What an operator calls inside follows from what it was given: only the outermost is followed.
std::unique_ptr<at::ObserverContext> begins(const at::RecordFunction& call) {
  auto& now = here();
  if (now.paused || is_traced()) return nullptr;
  const auto& kind = look_up(now, call);
  if (!now.depth)
    for (auto* recorder : now.running) recorder->begins(kind, call.inputs());
  if (kind.is_operator && ++now.depth == 1 && now.alone) at::enableRecordFunction(false);
  return nullptr;
}

void ends(const at::RecordFunction& call, at::ObserverContext*) {
  auto& now = here();
  if (now.paused || !now.depth) return;
  const auto& kind = look_up(now, call);
  if (!kind.is_operator || --now.depth) return;
  if (now.alone) at::enableRecordFunction(true);
  for (auto* recorder : now.running) recorder->ends(kind, call.outputs());
}

}  // namespace

void begin(Recorder* recorder) {
  auto& now = here();
  if (now.running.empty()) {
    const auto callback = at::RecordFunctionCallback(begins, ends).needsInputs(true).needsOutputs(true);
    now.handle = at::addThreadLocalCallback(at::RecordFunctionCallback(callback).scopes({at::RecordScope::FUNCTION}));
    now.alone = !at::hasGlobalCallbacks();
  }
  now.running.push_back(recorder);
}

void end(Recorder* recorder) {
  auto& now = here();
  const auto found = std::find(now.running.begin(), now.running.end(), recorder);
  if (found == now.running.end()) return;
  now.running.erase(found);
  if (!now.running.empty()) return;
  at::removeCallback(now.handle);
  if (now.depth && now.alone) at::enableRecordFunction(true);
  now.depth = 0;
}

void pause(int by) { here().paused += by; }

}  // namespace fastclip
