// A device for tests, in torch's place for devices from outside (PrivateUse1). Its memory is the host's and its
// kernels are the CPU's, run at once, but a tensor on it is no CPU tensor: operators that mix the two raise, as on a
// GPU. Streams and events do nothing. What they would order is written to a trace, with all memory that operators
// touch; `detector.py` reads it.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <sstream>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::IValue;
using c10::Stream;

constexpr auto kFake = c10::DeviceType::PrivateUse1;
constexpr int kStreams = 32;  // as CUDA has in a pool: who makes more gets the first ones again

// -- the trace ------------------------------------------------------------------------------------------

std::atomic<bool> recording{false};
std::atomic<int> threads{0}, events{0}, streams{0};
thread_local int thread_number = -1;
thread_local c10::StreamId current_stream = 0;
thread_local bool in_kernel = false;  // what an operator does inside of itself is no work of its caller's

std::mutex lock;
std::vector<std::string> trace;
std::map<uintptr_t, size_t> pinned;  // where it begins, and how long it is

using Site = void (*)(char* text, int room);
Site site = nullptr;  // writes which line of Python has come here

int this_thread() {
  if (thread_number < 0) thread_number = threads++;
  return thread_number;
}

void write(const std::string& kind, int64_t stream, const std::string& what, const std::string& touched = "",
           const std::string& where = "") {
  std::ostringstream line;
  line << kind << '\t' << this_thread() << '\t' << stream << '\t' << what << '\t' << touched << '\t' << where;
  std::lock_guard<std::mutex> guard(lock);
  trace.push_back(line.str());
}

std::string line_of_python() {
  char text[256] = "";
  if (site != nullptr) site(text, sizeof text);
  return text;
}

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> guard(lock);
  auto address = reinterpret_cast<uintptr_t>(pointer);
  auto after = pinned.upper_bound(address);
  return after != pinned.begin() && address < std::prev(after)->first + std::prev(after)->second;
}

// Memory that somebody besides the host can reach: the device's, and pinned memory.
struct Touched {
  std::string text;

  void add(char how, const Tensor& tensor) {
    if (!tensor.defined() || tensor.numel() == 0 || !tensor.has_storage()) return;
    auto begin = reinterpret_cast<uintptr_t>(tensor.storage().data());
    if (begin == 0 || (tensor.is_cpu() && !is_pinned(tensor.storage().data()))) return;
    int64_t last = 0;
    for (int64_t dim = 0; dim < tensor.dim(); dim++) last += (tensor.size(dim) - 1) * tensor.stride(dim);
    auto from = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    std::ostringstream one;
    one << how << ':' << begin << ':' << from << ':' << from + (last + 1) * tensor.element_size() << ' ';
    text += one.str();
  }
};

template <typename Each>
void for_tensors(const IValue& value, Each each) {
  if (value.isTensor()) {
    each(value.toTensor());
  } else if (value.isList()) {
    for (const IValue& inner : value.toListRef()) for_tensors(inner, each);
  }
}

bool gives_a_view(const c10::FunctionSchema& schema) {
  return !schema.returns().empty() && schema.returns()[0].alias_info() != nullptr &&
         !schema.returns()[0].alias_info()->isWrite();
}

// -- streams and events -----------------------------------------------------------------------------------

Stream stream_of(c10::StreamId id) { return Stream(Stream::UNSAFE, Device(kFake, 0), id); }

struct Event {
  int number;
  std::chrono::steady_clock::time_point time;
};

std::string number_of(void* event) { return std::to_string(static_cast<Event*>(event)->number); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kFake; }
  Device exchangeDevice(Device) const override { return Device(kFake, 0); }
  Device getDevice() const override { return Device(kFake, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }

  Stream getStream(Device) const override { return stream_of(current_stream); }
  Stream getDefaultStream(Device) const override { return stream_of(0); }
  Stream getNewStream(Device, int) const override { return stream_of(1 + streams++ % kStreams); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    auto before = stream_of(current_stream);
    current_stream = stream.id();
    return before;
  }
  bool queryStream(const Stream& stream) const override {
    synchronizeStream(stream);
    return true;
  }
  void synchronizeStream(const Stream& stream) const override {
    if (recording) write("wait_stream", stream.id(), "");
  }
  void synchronizeDevice(const DeviceIndex) const override {
    if (recording) write("wait_device", 0, "");
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event{events++, {}};
    static_cast<Event*>(*event)->time = std::chrono::steady_clock::now();
    if (recording) write("record", stream.id(), number_of(*event));
  }
  void block(void* event, const Stream& stream) const override {
    if (recording && event != nullptr) write("block", stream.id(), number_of(event));
  }
  bool queryEvent(void* event) const override {
    synchronizeEvent(event);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (recording && event != nullptr) write("wait_event", 0, number_of(event));
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    if (recording) write("read_time", 0, number_of(first)), write("read_time", 0, number_of(second));
    auto seconds = static_cast<Event*>(second)->time - static_cast<Event*>(first)->time;
    return std::chrono::duration<double, std::milli>(seconds).count();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    auto begin = reinterpret_cast<uintptr_t>(data.get());
    if (recording && begin != 0) write("lend", stream.id(), std::to_string(begin));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// -- memory -------------------------------------------------------------------------------------------------

struct DeviceMemory final : c10::Allocator {
  static void release(void* pointer) {
    if (recording) write("free", current_stream, std::to_string(reinterpret_cast<uintptr_t>(pointer)));
    c10::free_cpu(pointer);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = bytes == 0 ? nullptr : c10::alloc_cpu(bytes);
    if (recording && pointer != nullptr)
      write("allocate", current_stream, std::to_string(reinterpret_cast<uintptr_t>(pointer)));
    return {pointer, pointer, &release, Device(kFake, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
DeviceMemory device_memory;
REGISTER_ALLOCATOR(kFake, &device_memory);

struct PinnedMemory final : c10::Allocator {
  static void release(void* pointer) {
    auto begin = reinterpret_cast<uintptr_t>(pointer);
    {
      std::lock_guard<std::mutex> guard(lock);
      pinned.erase(begin);
    }
    if (recording) write("free_pinned", current_stream, std::to_string(begin));
    c10::free_cpu(pointer);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = bytes == 0 ? nullptr : c10::alloc_cpu(bytes);
    if (pointer != nullptr) {
      std::lock_guard<std::mutex> guard(lock);
      pinned[reinterpret_cast<uintptr_t>(pointer)] = bytes;
    }
    return {pointer, pointer, &release, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
PinnedMemory pinned_memory;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto data = device_memory.allocate(bytes);
    auto kept = std::min(bytes, storage.nbytes());
    if (kept > 0) std::memcpy(data.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// -- operators ------------------------------------------------------------------------------------------------

Tensor host_view(const Tensor& tensor) {
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), [tensor](void*) {},
                       tensor.options().device(c10::kCPU));
}

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &device_memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// The host waits, unless it asked not to and its memory is pinned; from pageable memory a copy is staged at once.
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  bool outer = !in_kernel;
  in_kernel = true;
  (to.is_cpu() ? to : host_view(to)).copy_(from.is_cpu() ? from : host_view(from));
  in_kernel = !outer;
  if (recording && outer) {
    bool crosses = from.is_cpu() || to.is_cpu();
    bool pageable_target = to.is_cpu() && !is_pinned(to.const_data_ptr());
    Touched touched;
    touched.add('r', from);
    touched.add('w', to);
    bool waits = crosses && (!non_blocking || pageable_target);
    write(waits ? "launch_and_wait" : "launch", current_stream, "aten::copy_", touched.text, line_of_python());
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const Tensor& tensor) {
  if (recording && !in_kernel) {
    Touched touched;
    touched.add('r', tensor);
    write("launch_and_wait", current_stream, "aten::item", touched.text, line_of_python());
  }
  return at::native::_local_scalar_dense_cpu(host_view(tensor));
}

// Operators whose result has a size, or is a value, that the host must know.
const std::set<std::string> kWaits = {"aten::nonzero",   "aten::masked_select",      "aten::_unique2",
                                      "aten::equal",     "aten::unique_consecutive", "aten::unique_dim",
                                      "aten::bincount",  "aten::repeat_interleave"};
// A GPU takes indices from the host, too: torch copies them first.
const std::set<std::string> kTakesHostIndices = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  auto count = schema.arguments().size();
  Touched touched;
  bool waits = kWaits.count(schema.name()) > 0;
  bool on_device = false, on_host = false;
  for (size_t place = 0; place < count; place++) {
    const auto& argument = schema.arguments()[place];
    bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    for_tensors(torch::jit::peek(*stack, place, count), [&](const Tensor& tensor) {
      if (!tensor.defined()) return;
      on_device |= !tensor.is_cpu();
      on_host |= tensor.is_cpu() && tensor.dim() > 0;  // a number may come from anywhere
      waits |= schema.name() == "aten::index" && place > 0 && tensor.scalar_type() == at::kBool;
      touched.add(written ? 'w' : 'r', tensor);
    });
  }
  TORCH_CHECK(!(on_device && on_host) || in_kernel || kTakesHostIndices.count(schema.name()),
              "Expected all tensors to be on the same device, but ", schema.name(),
              " was given some on the fake device and some on cpu");
  bool outer = !in_kernel;
  in_kernel = true;
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    in_kernel = !outer;
    throw;
  }
  in_kernel = !outer;
  if (recording && outer) {
    for (size_t place = 0; place < schema.returns().size(); place++) {
      if (schema.returns()[place].alias_info() != nullptr) continue;
      for_tensors(torch::jit::peek(*stack, place, schema.returns().size()),
                  [&](const Tensor& tensor) { touched.add('w', tensor); });
    }
    write(waits ? "launch_and_wait" : "launch", current_stream, schema.name(), touched.text, line_of_python());
  }
}

// Whether an operator touches memory itself: the parts of others are seen one by one.
bool is_leaf(const c10::OperatorName& name) {
  auto op = c10::Dispatcher::singleton().findOp(name);
  return op.has_value() && op->hasKernelForDispatchKey(c10::DispatchKey::CPU);
}

// What the host, and gloo for it, do with pinned memory.
std::unique_ptr<at::ObserverContext> on_host(const at::RecordFunction& function) {
  auto schema = function.operator_schema();
  if (!recording || in_kernel || !schema.has_value() || gives_a_view(*schema)) return nullptr;
  bool carries = schema->name().rfind("c10d::", 0) == 0;
  if (!carries && schema->name() != "aten::copy_" && !is_leaf(*function.operator_name())) return nullptr;
  Touched touched;
  bool any_on_device = false;
  for (size_t place = 0; place < function.inputs().size() && place < schema->arguments().size(); place++) {
    const auto& argument = schema->arguments()[place];
    bool written = carries ? schema->name() != "c10d::send" && argument.name().rfind("input", 0) != 0
                           : argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    for_tensors(function.inputs()[place], [&](const Tensor& tensor) {
      any_on_device |= tensor.defined() && !tensor.is_cpu();
      touched.add(written ? 'w' : 'r', tensor);
    });
  }
  if (!any_on_device && !touched.text.empty())
    write(carries ? "carry" : "host", 0, schema->name(), touched.text, line_of_python());
  return nullptr;
}

// -- for Python -------------------------------------------------------------------------------------------------

void record(bool on, int64_t address) {
  static auto callback = at::addGlobalCallback(
      at::RecordFunctionCallback(on_host).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  (void)callback;
  site = reinterpret_cast<Site>(address);
  recording = on;
}

std::vector<std::string> take() {
  std::lock_guard<std::mutex> guard(lock);
  return std::exchange(trace, {});
}

void note(const std::string& kind, const std::string& what) {
  if (recording) write(kind, current_stream, what);
}

// A kernel that somebody else runs, on `host_view`s.
void launch(const std::string& name, const std::vector<Tensor>& read, const std::vector<Tensor>& written) {
  if (!recording) return;
  Touched touched;
  for (const auto& tensor : read) touched.add('r', tensor);
  for (const auto& tensor : written) touched.add('w', tensor);
  write("launch", current_stream, name, touched.text, line_of_python());
}

// What reads a tensor's memory without an operator: numpy, lists.
void read_on_host(const std::string& name, const Tensor& tensor) {
  Touched touched;
  touched.add('r', tensor);
  if (recording && tensor.is_cpu() && !touched.text.empty()) write("host", 0, name, touched.text, line_of_python());
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  // torch would put it together from other operators, whose sums round otherwise than the CPU's kernel does.
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  m.impl("record_stream", [](Tensor& self, Stream stream) {
    Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream);
  });
  m.impl("as_strided", [](const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                          std::optional<c10::SymInt> offset) {
    return at::cpu::as_strided_symint(self, size, stride, offset);
  });
  m.impl("view", [](const Tensor& self, c10::SymIntArrayRef size) {
    return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
  });
  m.impl("_reshape_alias", [](const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
    return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  });
  m.impl("resize_", [](const Tensor& self, c10::SymIntArrayRef size,
                       std::optional<c10::MemoryFormat> format) -> const Tensor& {
    return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
  });
  m.impl("set_.source_Storage_storage_offset",
         [](Tensor& self, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
            c10::SymIntArrayRef stride) -> Tensor& {
           return at::cpu::set_(self, source, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size),
                                C10_AS_INTARRAYREF_SLOW(stride));
         });
  m.impl("set_.source_Storage",
         [](Tensor& self, c10::Storage source) -> Tensor& { return at::cpu::set_(self, source); });
  m.impl("set_.source_Tensor",
         [](Tensor& self, const Tensor& source) -> Tensor& { return at::cpu::set_(self, source); });
}

TORCH_LIBRARY(gradsieve_fake, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("record(bool on, int site) -> ()", &record);
  m.def("take() -> str[]", &take);
  m.def("note(str kind, str what) -> ()", &note);
  m.def("launch(str name, Tensor[] read, Tensor[] written) -> ()", &launch);
  m.def("read_on_host(str name, Tensor tensor) -> ()", &read_on_host);
  m.def("host_view(Tensor tensor) -> Tensor", &host_view);
}
