// The extension fastattn._C_autograd, built for one torch and one Python: a short road for the
// calls whose kernel takes no longer than Python's checks and its autograd.Function do.
//
// `road(...)` makes a callable of an op: the backend asked for and the arguments of the public op
// -> the results that have a gradient, with their node in the graph where one is wanted, or None
// where the call is not plain or the native op refuses it; the whole road in Python then serves it,
// or says what is wrong.
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_cpp_function.h>

#include <atomic>

#include "autograd/node.h"
#include "autograd/torch_versions.h"

namespace fastattn::autograd {
namespace {

// Closed roads return None: here for this thread, everywhere for all.
thread_local int closed_here = 0;
int closed_everywhere = 0;  // behind Python's lock

// os.environ's own dictionary while nothing else stands in its place, and the variables that choose
// a backend: where one of them is set, Python decides.
struct Environment {
  PyObject* module = nullptr;  // the dictionary of `os`
  PyObject* name = nullptr;    // "environ"
  PyObject* mapping = nullptr;
  PyObject* data = nullptr;
  PyObject* keys = nullptr;  // a tuple
};
Environment environment;

bool is_open() {
  if (closed_here > 0 || closed_everywhere > 0 ||
      PyDict_GetItem(environment.module, environment.name) != environment.mapping) {
    return false;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(environment.keys); ++i) {
    if (PyDict_GetItem(environment.data, PyTuple_GET_ITEM(environment.keys, i)) != nullptr) {
      return false;
    }
  }
  return true;
}

class WithoutPython {
 public:
  WithoutPython() : state_(PyEval_SaveThread()) {}
  ~WithoutPython() { PyEval_RestoreThread(state_); }
  WithoutPython(const WithoutPython&) = delete;

 private:
  PyThreadState* state_;
};

double number(PyObject* object) {
  return PyFloat_CheckExact(object) ? PyFloat_AS_DOUBLE(object) : PyLong_AsDouble(object);
}

// Whether the argument is what the road wants; if so its value, where the native op has one.
bool read(const Argument& argument, PyObject* object, torch::jit::Stack& stack) {
  switch (argument.kind) {
    case Kind::kNone:
      return object == Py_None;
    case Kind::kNumber:
      return (PyFloat_CheckExact(object) || PyLong_CheckExact(object)) &&
             number(object) == argument.number;
    case Kind::kFloat:
      if (!PyFloat_CheckExact(object)) {
        return false;
      }
      stack[argument.native] = PyFloat_AS_DOUBLE(object);
      return true;
    case Kind::kInt: {
      if (!PyLong_CheckExact(object)) {
        return false;
      }
      int overflow = 0;
      stack[argument.native] =
          static_cast<int64_t>(PyLong_AsLongLongAndOverflow(object, &overflow));
      return overflow == 0;
    }
    case Kind::kTensorOrNone:
      if (object == Py_None) {
        return true;
      }
      [[fallthrough]];
    case Kind::kTensor: {
      if (!THPVariable_CheckExact(object)) {
        return false;
      }
      const Tensor& tensor = THPVariable_Unpack(object);
      stack[argument.native] = tensor;
      return is_plain_tensor(tensor);
    }
  }
  return false;
}

const Tensor& tensor_at(PyObject* const* args, int i) {
  static const Tensor none;
  return args[i] == Py_None ? none : THPVariable_Unpack(args[i]);
}

// Joins the results to the graph. Saved-tensor hooks may run Python here, and raise.
void join(const Road& road, bool asked_for, PyObject* const* args,
          const torch::jit::Stack& results) {
  auto node = make_node<OpNode>(road, asked_for);
  torch::autograd::edge_list edges;
  edges.reserve(road.tensors.size());
  for (int i : road.tensors) {
    const Tensor& tensor = tensor_at(args, i);
    edges.push_back(tensor.defined() ? torch::autograd::impl::gradient_edge(tensor)
                                     : torch::autograd::Edge());
  }
  node->set_next_edges(std::move(edges));
  for (int r = 0; r < road.differentiable; ++r) {
    torch::autograd::set_history(results[r].toTensor(), node);
  }
  const int first_result = static_cast<int>(road.arguments.size());
  node->reserve();
  for (int i : road.saved) {
    if (i >= first_result) {
      node->save(results[i - first_result].toTensor(), i - first_result < road.differentiable);
    } else if (args[i] == Py_None) {
      node->save_none();
    } else {
      node->save(THPVariable_Unpack(args[i]), false);
    }
  }
  for (int i : road.constants) {
    if (PyFloat_CheckExact(args[i])) {
      node->keep(PyFloat_AS_DOUBLE(args[i]));
    } else {
      node->keep(static_cast<int64_t>(PyLong_AsLongLong(args[i])));
    }
  }
  for (int i : road.typed) {
    node->keep_dtype(THPVariable_Unpack(args[i]).scalar_type());
  }
  for (const Equal& equal : road.equal) {
    node->keep_equal(number(args[equal.zero]) == 0.0 &&
                     THPVariable_Unpack(args[equal.x]).scalar_type() ==
                         THPVariable_Unpack(args[equal.y]).scalar_type());
  }
}

struct RoadObject {
  PyObject_HEAD vectorcallfunc vectorcall;
  const Road* road;  // nodes refer to it: it lives as long as the process
};

PyObject* take(PyObject* self, PyObject* const* given, size_t flags, PyObject* names) {
  HANDLE_TH_ERRORS
  const Road& road = *reinterpret_cast<RoadObject*>(self)->road;
  const size_t count = road.arguments.size();
  if (names != nullptr || static_cast<size_t>(PyVectorcall_NARGS(flags)) != 1 + count ||
      !is_open() || !is_plain_thread(road.casts)) {
    Py_RETURN_NONE;
  }
  const bool asked_for = given[0] != Py_None;
  if (asked_for && !(PyUnicode_CheckExact(given[0]) &&
                     PyUnicode_CompareWithASCIIString(given[0], kBackend) == 0)) {
    Py_RETURN_NONE;
  }
  PyObject* const* args = given + 1;
  torch::jit::Stack stack(road.forward.schema().arguments().size());
  bool graph = false;
  for (size_t i = 0; i < count; ++i) {
    if (!read(road.arguments[i], args[i], stack)) {
      Py_RETURN_NONE;
    }
  }
  for (int i : road.tensors) {
    const Tensor& tensor = tensor_at(args, i);
    graph = graph || (tensor.defined() && tensor.requires_grad());
  }
  try {
    WithoutPython released;
    call_native(road.forward, stack);
  } catch (const std::exception&) {
    Py_RETURN_NONE;
  }
  if (graph && at::GradMode::is_enabled()) {
    join(road, asked_for, args, stack);
  }
  THPObjectPtr made(PyTuple_New(road.differentiable));
  if (!made) {
    return nullptr;
  }
  for (int r = 0; r < road.differentiable; ++r) {
    PyObject* result = THPVariable_Wrap(std::move(stack[r]).toTensor());
    if (result == nullptr) {
      return nullptr;
    }
    PyTuple_SET_ITEM(made.get(), r, result);
  }
  return made.release();
  END_HANDLE_TH_ERRORS
}

PyTypeObject road_type = {PyVarObject_HEAD_INIT(nullptr, 0)};
PyTypeObject node_type = {};

using Indices = std::vector<int>;

// See fastattn/ops/_road.py, which reads all this off the schemas.
pybind11::object make_road(const std::string& name, const std::string& forward,
                           const std::string& backward,
                           const std::vector<std::tuple<int, double, int>>& arguments,
                           const Indices& saved, const Indices& constants, const Indices& typed,
                           int differentiable, const std::vector<std::pair<int, int>>& sources,
                           const Indices& gradients, const std::vector<std::pair<int, int>>& passed,
                           const std::vector<std::array<int, 5>>& equal, bool casts,
                           pybind11::object in_python) {
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  Road* road = new Road{name, dispatcher.findSchemaOrThrow(forward.c_str(), ""),
                        dispatcher.findSchemaOrThrow(backward.c_str(), "")};
  for (const auto& [kind, value, native] : arguments) {
    const Argument argument = {static_cast<Kind>(kind), value, native};
    if (argument.kind == Kind::kTensor || argument.kind == Kind::kTensorOrNone ||
        argument.kind == Kind::kNone) {
      road->tensors.push_back(static_cast<int>(road->arguments.size()));
    }
    road->arguments.push_back(argument);
  }
  road->saved = saved;
  road->constants = constants;
  road->typed = typed;
  road->differentiable = differentiable;
  road->reads.resize(differentiable);
  for (const auto& [from, index] : sources) {
    const Source source = {static_cast<From>(from), index};
    road->sources.push_back(source);
    road->computes_what_is_needed |= source.from == From::kNeeded;
    if (source.from == From::kGradient) {
      road->reads[index] = true;
    }
  }
  road->gradients = gradients;
  road->passed = passed;
  for (const auto& [spared, computed, x, y, zero] : equal) {
    road->equal.push_back({spared, computed, x, y, zero});
  }
  road->casts = casts;
  road->in_python = in_python.release().ptr();
  RoadObject* made = PyObject_New(RoadObject, &road_type);
  if (made == nullptr) {
    throw pybind11::error_already_set();
  }
  made->vectorcall = take;
  made->road = road;
  return pybind11::reinterpret_steal<pybind11::object>(reinterpret_cast<PyObject*>(made));
}

void watch_environment(const pybind11::dict& module, const pybind11::object& mapping,
                       const pybind11::dict& data, const pybind11::tuple& keys) {
  environment = {pybind11::object(module).release().ptr(), PyUnicode_InternFromString("environ"),
                 pybind11::object(mapping).release().ptr(), pybind11::object(data).release().ptr(),
                 pybind11::object(keys).release().ptr()};
}

bool make_types() {
  road_type.tp_name = "fastattn._C_autograd.Road";
  road_type.tp_basicsize = sizeof(RoadObject);
  road_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
  road_type.tp_vectorcall_offset = offsetof(RoadObject, vectorcall);
  road_type.tp_call = PyVectorcall_Call;
  // Nodes of a type of this name are printed under their own.
  torch::autograd::_initFunctionPyTypeObject(node_type, "fastattn._C_autograd.CppFunction", nullptr,
                                             nullptr);
  torch::autograd::registerCppFunction(typeid(OpNode), &node_type);
  pybind11::module_::import("torch.autograd.graph")
      .attr("Node")
      .attr("register")(pybind11::handle(reinterpret_cast<PyObject*>(&node_type)));
  return PyType_Ready(&road_type) == 0;
}

}  // namespace
}  // namespace fastattn::autograd

PyMODINIT_FUNC PyInit__C_autograd() {
  HANDLE_TH_ERRORS
  using namespace fastattn::autograd;
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "fastattn._C_autograd", nullptr, -1,
                                   nullptr};
  PyObject* created = PyModule_Create(&definition);
  if (created == nullptr || !make_types()) {
    return nullptr;
  }
  auto m = pybind11::reinterpret_borrow<pybind11::module_>(created);
  m.attr("interface") = kInterface;
  m.def("road", &make_road);
  m.def("watch_environment", &watch_environment);
  m.def("close_here", [](int more) { closed_here += more; });
  m.def("close_everywhere", [](int more) { closed_everywhere += more; });
  return created;
  END_HANDLE_TH_ERRORS
}
