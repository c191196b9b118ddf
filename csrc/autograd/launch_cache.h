// The launch cache of the GPU libraries: calls of an op without Python. In Python, selecting a
// backend, allocating the results and launching take tens of microseconds. If a call does nothing
// but call one op of a GPU library, with its own arguments and results, Python records that, and
// later calls with tensors of the same layouts repeat it from here. Recording takes time, and the
// layouts of some programs never repeat: the second call with a layout is recorded.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/library.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace fastattn::autograd {

using torch::jit::Stack;

// Key by which backends are selected and launched, as numbers: the values of arguments, of tensors
// their dtype, device, sizes, strides and alignment, which of them are the same tensor, and whether
// algorithms must be deterministic.
using CallKey = std::vector<int64_t>;

struct HashOfKey {
  size_t operator()(const CallKey& key) const {
    uint64_t hash = key.size();
    for (int64_t number : key) {
      hash = (hash ^ static_cast<uint64_t>(number)) * 0x9E3779B97F4A7C15u;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

inline void append(CallKey& key, const at::Tensor& x) {
  constexpr uintptr_t kAlignment = 16;  // of the kernels' widest accesses
  const auto address = reinterpret_cast<uintptr_t>(x.const_data_ptr());
  key.insert(key.end(), {static_cast<int64_t>(x.scalar_type()), x.get_device(), x.dim(),
                         static_cast<int64_t>(address % kAlignment), address == 0});
  key.insert(key.end(), x.sizes().begin(), x.sizes().end());
  key.insert(key.end(), x.strides().begin(), x.strides().end());
}

// The first of the values that is this tensor, -1 if none is.
inline int64_t index_in(c10::ArrayRef<c10::IValue> values, const at::Tensor& x) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i].isTensor() && values[i].toTensor().is_same(x)) {
      return static_cast<int64_t>(i);
    }
  }
  return -1;
}

// The key of a call's arguments; empty if one of them has a type that keys do not support.
inline CallKey key_of(c10::ArrayRef<c10::IValue> arguments) {
  // Before the value of an argument that need not be a tensor.
  enum Kind : int64_t { kNone, kTensor, kInt, kDouble, kBool, kString, kBools };
  CallKey key;
  key.reserve(192);
  key.push_back(at::globalContext().deterministicAlgorithms());
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = arguments[i];
    if (value.isNone() || (value.isTensor() && !value.toTensor().defined())) {
      key.push_back(kNone);
    } else if (value.isTensor()) {
      key.insert(key.end(), {kTensor, index_in(arguments, value.toTensor())});
      append(key, value.toTensor());
    } else if (value.isInt()) {
      key.insert(key.end(), {kInt, value.toInt()});
    } else if (value.isDouble()) {
      const double number = value.toDouble();
      int64_t bits;
      static_assert(sizeof bits == sizeof number);
      std::memcpy(&bits, &number, sizeof bits);
      key.insert(key.end(), {kDouble, bits});
    } else if (value.isBool()) {
      key.insert(key.end(), {kBool, value.toBool()});
    } else if (value.isString()) {
      const std::string& text = value.toStringRef();
      key.insert(key.end(), {kString, static_cast<int64_t>(text.size())});
      key.insert(key.end(), text.begin(), text.end());
    } else if (value.isBoolList()) {
      const auto flags = value.toBoolList();
      key.insert(key.end(), {kBools, static_cast<int64_t>(flags.size())});
      key.insert(key.end(), flags.begin(), flags.end());
    } else {
      return {};
    }
  }
  return key;
}

// An op of a GPU library, which writes into results, and where its arguments come from.
struct Launch {
  enum class From { kArgument, kContiguous, kResult, kConstant, kWorkspace };
  struct Source {
    From from;
    int64_t index;         // of the argument, which may have to be made contiguous, or result
    c10::IValue constant;  // neither
  };
  struct Layout {
    std::vector<int64_t> sizes, strides;
    at::ScalarType dtype;
  };

  c10::OperatorHandle op;
  c10::Device device;
  std::vector<Layout> results;
  std::vector<Source> sources;
  int64_t workspace_bytes;

  // Replaces the arguments of a call, the last on the stack, by its results.
  void repeat(Stack* stack, size_t arguments) const {
    const size_t first = stack->size() - arguments;
    const auto options = at::TensorOptions(device);
    const c10::DeviceGuard guard(device);
    const at::AutoDispatchBelowADInplaceOrView below;
    Stack found, call;
    found.reserve(results.size());
    for (const Layout& result : results) {
      found.emplace_back(
          at::empty_strided(result.sizes, result.strides, options.dtype(result.dtype)));
    }
    call.reserve(sources.size());
    for (const Source& source : sources) {
      switch (source.from) {
        case From::kArgument:
          call.push_back((*stack)[first + source.index]);
          break;
        case From::kContiguous:
          call.push_back((*stack)[first + source.index].toTensor().contiguous());
          break;
        case From::kResult:
          call.push_back(found[source.index]);
          break;
        case From::kConstant:
          call.push_back(source.constant);
          break;
        case From::kWorkspace:
          call.push_back(workspace_bytes == 0
                             ? c10::IValue()
                             : c10::IValue(at::empty({workspace_bytes}, options.dtype(at::kByte))));
          break;
      }
    }
    op.callBoxed(&call);
    TORCH_CHECK(call.empty() || call.back().toInt() == 0, op.schema().name(),
                " must need no more workspace than in the call that was recorded");
    torch::jit::drop(*stack, arguments);
    for (c10::IValue& result : found) {
      stack->push_back(std::move(result));
    }
  }
};

// The launches of one op. Those used since the cache was last half full stay when it is full. Every
// 2,048 new layouts, dropping the others takes 1.4 ms of CPU time, 0.7 us for each (AMD EPYC),
// where a call in Python takes tens. The keys that were seen once are dropped together: a layout
// that comes again after that is recorded one call later.
class Launches {
 public:
  // A key that is stored without a launch is that of calls that cannot be repeated.
  struct Found {
    bool is_known;
    std::shared_ptr<const Launch> launch;
  };
  // Whether the key is that of an earlier call, or of equal hash.
  bool was_seen(const CallKey& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (seen_.size() >= kMaxLaunches) {
      seen_.clear();
    }
    return !seen_.insert(HashOfKey{}(key)).second;
  }
  Found find(const CallKey& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (const auto found = launches_.find(key); found != launches_.end()) {
      return {true, found->second};
    }
    const auto found = older_.find(key);
    if (found == older_.end()) {
      return {false, nullptr};
    }
    const Found result = {true, found->second};
    insert(key, result.launch);
    return result;
  }
  void add(CallKey key, std::shared_ptr<const Launch> launch) {
    key.shrink_to_fit();
    const std::lock_guard<std::mutex> lock(mutex_);
    insert(std::move(key), std::move(launch));
  }
  void clear() {
    const std::lock_guard<std::mutex> lock(mutex_);
    seen_.clear();
    launches_.clear();
    older_.clear();
  }

 private:
  void insert(CallKey key, std::shared_ptr<const Launch> launch) {
    if (launches_.size() >= kMaxLaunches / 2) {
      older_ = std::exchange(launches_, {});
    }
    launches_.insert_or_assign(std::move(key), std::move(launch));
  }

  static constexpr size_t kMaxLaunches = 4096;
  std::mutex mutex_;
  std::unordered_set<size_t> seen_;
  std::unordered_map<CallKey, std::shared_ptr<const Launch>, HashOfKey> launches_, older_;
};

// Whether Python should record the call that this thread has passed on.
inline thread_local bool should_record = false;

// The kernel of an op's overload. Calls without a recorded launch run in Python: its kernel is
// registered for all devices, so it is called by the key of one that has no other.
class Cached final : public c10::OperatorKernel {
 public:
  explicit Cached(Launches& launches) : launches_(launches) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    const size_t arguments = op.schema().arguments().size();
    const CallKey key = key_of(torch::jit::last(*stack, arguments));
    const Launches::Found found = launches_.find(key);
    if (found.launch) {
      found.launch->repeat(stack, arguments);
      return;
    }
    struct Ends {
      ~Ends() { should_record = false; }
    } ends;
    should_record = !found.is_known && !key.empty() && launches_.was_seen(key);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), stack);
  }

 private:
  Launches& launches_;  // lives as long as the process
};

// -- for Python ----------------------------------------------------------------------------------
// Launches by the overload's name.
inline std::unordered_map<std::string, Launches>& launches_by_op() {
  static auto* launches = new std::unordered_map<std::string, Launches>;
  return *launches;
}

// Registers the cache of an overload of the namespace fastattn, such as layer_norm_fwd or
// layer_norm_fwd.backend, under a dispatch key.
inline void cache_launches(const std::string& op, const std::string& key) {
  static auto* libraries = new std::vector<torch::Library>;  // registered as long as they live
  libraries->emplace_back(torch::Library::IMPL, "fastattn", c10::parseDispatchKey(key), __FILE__,
                          __LINE__);
  libraries->back().impl(op.c_str(), torch::CppFunction::makeFromBoxedFunctor(
                                         std::make_unique<Cached>(launches_by_op()[op])));
}

// The launch of a call with these arguments and results, which called `op` with these arguments and
// nothing else. contiguous: the call's arguments, some of them made contiguous. Null if it cannot
// be repeated: if the library got other tensors than the call has, or not all of its results.
inline std::shared_ptr<const Launch> launch_of(const Stack& call, const Stack& contiguous,
                                               const Stack& results, const c10::OperatorHandle& op,
                                               const Stack& arguments) {
  using From = Launch::From;
  auto launch = std::make_shared<Launch>(Launch{op, results.at(0).toTensor().device(), {}, {}, 0});
  std::vector<bool> is_written(results.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = arguments[i];
    if (op.schema().arguments()[i].name() == "workspace") {
      launch->sources.push_back({From::kWorkspace, 0, {}});
      launch->workspace_bytes = value.isTensor() ? value.toTensor().numel() : 0;
    } else if (!value.isTensor()) {
      launch->sources.push_back({From::kConstant, 0, value});
    } else if (const int64_t result = index_in(results, value.toTensor()); result >= 0) {
      launch->sources.push_back({From::kResult, result, {}});
      is_written[result] = true;
    } else if (const int64_t argument = index_in(call, value.toTensor()); argument >= 0) {
      launch->sources.push_back({From::kArgument, argument, {}});
    } else if (const int64_t copied = index_in(contiguous, value.toTensor()); copied >= 0) {
      launch->sources.push_back({From::kContiguous, copied, {}});
    } else {
      return nullptr;
    }
  }
  for (size_t i = 0; i < results.size(); ++i) {
    const at::Tensor result = results[i].toTensor();
    if (!is_written[i] && result.numel() > 0) {
      return nullptr;
    }
    launch->results.push_back({result.sizes().vec(), result.strides().vec(), result.scalar_type()});
  }
  return launch;
}

// Records what a call of an overload launched: an op of a library with these arguments. An empty
// name: nothing that can be repeated.
inline void record_launch(const std::string& op, const pybind11::tuple& args,
                          const pybind11::tuple& contiguous, const pybind11::tuple& results,
                          const std::string& library_op, const pybind11::tuple& library_args) {
  const auto find = [](const std::string& name, const std::string& overload = "") {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  };
  const auto stack_of = [](const c10::OperatorHandle& handle, const pybind11::tuple& values) {
    return torch::jit::createStackForSchema(handle.schema(), torch::jit::tuple_slice(values), {},
                                            std::nullopt);
  };
  const size_t dot = op.find('.');
  const c10::OperatorHandle own =
      find("fastattn::" + op.substr(0, dot), dot == std::string::npos ? "" : op.substr(dot + 1));
  const Stack call = stack_of(own, args);
  CallKey key = key_of(call);
  if (key.empty()) {
    return;
  }
  std::shared_ptr<const Launch> launch;
  if (!library_op.empty()) {
    Stack found;
    for (const pybind11::handle result : results) {
      found.emplace_back(result.cast<at::Tensor>());
    }
    const c10::OperatorHandle handle = find(library_op);
    launch =
        launch_of(call, stack_of(own, contiguous), found, handle, stack_of(handle, library_args));
  }
  launches_by_op()[op].add(std::move(key), std::move(launch));
}

inline void clear_launches() {
  for (auto& [op, launches] : launches_by_op()) {
    launches.clear();
  }
}

}  // namespace fastattn::autograd
