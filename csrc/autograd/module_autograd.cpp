// The extension fastattn._C_autograd, built for one torch and one Python: the derivative of every
// op in C++, as a kernel at the dispatcher's Autograd keys, the launch cache of the GPU libraries,
// calls from Python, and calls that are replayed. Without it, and at the other Autograd keys, the
// same derivative is in Python (fastattn/ops/_autograd.py).
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/library.h>

#include "autograd/calls.h"
#include "autograd/eager_call.h"
#include "autograd/launch_cache.h"
#include "autograd/node.h"
#include "autograd/torch_versions.h"

namespace fastattn::autograd {
namespace {

// Runs the op below the Autograd keys and adds a node to the graph if a gradient is needed.
class Differentiable final : public c10::OperatorKernel {
 public:
  Differentiable(const Derivative& derivative, pybind11::handle in_python)
      : derivative_(derivative), in_python_(in_python.inc_ref()) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    const size_t first = stack->size() - derivative_.arguments;
    if (has_tangents(*stack, first)) {
      run_in_python(op, stack, first);
      return;
    }
    const bool graph = at::GradMode::is_enabled() && requires_grad(*stack, first);
    std::vector<c10::IValue> values;
    torch::autograd::edge_list edges;
    if (graph) {
      values.reserve(derivative_.arguments + op.schema().returns().size());
      values.assign(stack->begin() + static_cast<ptrdiff_t>(first), stack->end());
      edges = edges_of(values);
    }
    {
      at::AutoDispatchBelowADInplaceOrView below;
      op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
    }
    if (!graph) {
      return;
    }
    auto node = make_node<OpNode>(derivative_);
    node->set_next_edges(std::move(edges));
    for (int r = 0; r < derivative_.differentiable; ++r) {
      torch::autograd::set_history((*stack)[first + r].toTensor(), node);
    }
    values.insert(values.end(), stack->begin() + static_cast<ptrdiff_t>(first), stack->end());
    node->save(values);
  }

 private:
  bool requires_grad(const torch::jit::Stack& stack, size_t first) const {
    return std::any_of(derivative_.tensors.begin(), derivative_.tensors.end(), [&](int i) {
      const c10::IValue& value = stack[first + i];
      return value.isTensor() && value.toTensor().requires_grad();
    });
  }

  torch::autograd::edge_list edges_of(const std::vector<c10::IValue>& values) const {
    torch::autograd::edge_list edges;
    edges.reserve(derivative_.tensors.size());
    for (int i : derivative_.tensors) {
      edges.push_back(values[i].isTensor()
                          ? torch::autograd::impl::gradient_edge(values[i].toTensor())
                          : torch::autograd::Edge());
    }
    return edges;
  }

  bool has_tangents(const torch::jit::Stack& stack, size_t first) const {
    if (!torch::autograd::ForwardADLevel::try_get_by_idx(0)) {
      return false;
    }
    return std::any_of(derivative_.tensors.begin(), derivative_.tensors.end(), [&](int i) {
      const c10::IValue& value = stack[first + i];
      return value.isTensor() && torch::autograd::isFwGradDefined(value.toTensor());
    });
  }

  // Forward mode: the derivative in Python computes the tangents and records the graph.
  void run_in_python(const c10::OperatorHandle& op, torch::jit::Stack* stack, size_t first) const {
    const pybind11::gil_scoped_acquire gil;
    pybind11::tuple args(derivative_.arguments);
    for (int i = 0; i < derivative_.arguments; ++i) {
      args[i] = torch::jit::toPyObject((*stack)[first + i]);
    }
    const pybind11::object found = in_python_(*args);
    torch::jit::drop(*stack, derivative_.arguments);
    const auto& returns = op.schema().returns();
    if (returns.size() == 1) {
      stack->push_back(torch::jit::toIValue(found, returns[0].type()));
      return;
    }
    const auto results = found.cast<pybind11::tuple>();
    for (size_t r = 0; r < returns.size(); ++r) {
      stack->push_back(torch::jit::toIValue(results[r], returns[r].type()));
    }
  }

  const Derivative& derivative_;
  const pybind11::handle in_python_;  // lives as long as the process
};

PyTypeObject node_type = {};

using Indices = std::vector<int>;

// Registers the derivative of an overload of `forward` for CPU and CUDA. The positions are those of
// fastattn/ops/_autograd.py, which reads them from the schemas; `in_python` is the derivative
// there.
void differentiate(const std::string& name, const std::string& forward, const std::string& overload,
                   const std::string& backward, const Indices& tensors, int differentiable,
                   const std::vector<std::pair<int, Indices>>& saved, const Indices& constants,
                   const Indices& dtypes, const std::vector<std::pair<int, int>>& sources,
                   const Indices& gradients, const std::vector<std::pair<int, int>>& passed,
                   const std::vector<std::array<int, 5>>& equal,
                   const pybind11::function& in_python) {
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  const auto op = [&](const std::string& op_name) {
    return dispatcher.findSchemaOrThrow(("fastattn::" + op_name).c_str(), overload.c_str());
  };
  const auto edge = [&](int argument) {
    return static_cast<int>(std::find(tensors.begin(), tensors.end(), argument) - tensors.begin());
  };
  auto* derivative = new Derivative{name, op(backward)};
  derivative->arguments = static_cast<int>(op(forward).schema().arguments().size());
  derivative->tensors = tensors;
  derivative->differentiable = differentiable;
  for (const auto& [position, read_by] : saved) {
    derivative->saved.push_back({position, read_by});
  }
  derivative->constants = constants;
  derivative->dtypes = dtypes;
  for (const auto& [from, index] : sources) {
    derivative->sources.push_back({static_cast<From>(from), index});
  }
  for (int argument : gradients) {
    derivative->gradients.push_back(edge(argument));
  }
  for (const auto& [argument, result] : passed) {
    derivative->passed.emplace_back(edge(argument), result);
  }
  for (const auto& [copied, computed, x, y, zero] : equal) {
    derivative->equal.push_back({copied, computed, x, y, zero});
  }
  const std::string full_name = overload.empty() ? forward : forward + "." + overload;
  for (const auto key : {c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA}) {
    static auto* libraries = new std::vector<torch::Library>;  // registered as long as they live
    libraries->emplace_back(torch::Library::IMPL, "fastattn", key, __FILE__, __LINE__);
    libraries->back().impl(full_name.c_str(),
                           torch::CppFunction::makeFromBoxedFunctor(
                               std::make_unique<Differentiable>(*derivative, in_python)));
  }
}

void register_node_type() {
  // Nodes of a type of this name are printed under their own.
  torch::autograd::_initFunctionPyTypeObject(node_type, "fastattn._C_autograd.CppFunction", nullptr,
                                             nullptr);
  torch::autograd::registerCppFunction(typeid(OpNode), &node_type);
  pybind11::module_::import("torch.autograd.graph")
      .attr("Node")
      .attr("register")(pybind11::handle(reinterpret_cast<PyObject*>(&node_type)));
}

}  // namespace
}  // namespace fastattn::autograd

PyMODINIT_FUNC PyInit__C_autograd() {
  HANDLE_TH_ERRORS
  using namespace fastattn::autograd;
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "fastattn._C_autograd", nullptr, -1,
                                   nullptr};
  PyObject* created = PyModule_Create(&definition);
  if (created == nullptr) {
    return nullptr;
  }
  register_node_type();
  auto m = pybind11::reinterpret_borrow<pybind11::module_>(created);
  m.attr("interface") = kInterface;
  m.def("differentiate", &differentiate);
  m.def("eager_call", &EagerCall::make);
  m.def("cache_launches", &cache_launches);
  m.def("should_record_launch", [] { return should_record; });
  m.def("record_launch", &record_launch);
  m.def("clear_launches", &clear_launches);
  pybind11::class_<Calls>(m, "Calls")
      .def(pybind11::init<>())
      .def("append", &Calls::append)
      .def("run", &Calls::run);
  return created;
  END_HANDLE_TH_ERRORS
}
