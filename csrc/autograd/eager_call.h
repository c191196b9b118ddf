// Calls of an op from Python by position: PyTorch's own parser of arguments, which serves every
// schema, takes as long as a small kernel. The call goes through the dispatcher as PyTorch's does.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fastattn::autograd {

class EagerCall {
 public:
  // overload: the torch.OpOverload, which takes the calls that `push` does not parse.
  static pybind11::object make(const std::string& name, pybind11::object overload) {
    static PyMethodDef method = {
        "eager_call", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&EagerCall::call)),
        METH_FASTCALL, nullptr};
    const pybind11::capsule self(
        new EagerCall(c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), ""),
                      std::move(overload)),
        [](void* call) { delete static_cast<EagerCall*>(call); });
    return pybind11::reinterpret_steal<pybind11::object>(
        PyCFunction_NewEx(&method, self.ptr(), nullptr));
  }

 private:
  EagerCall(const c10::OperatorHandle& op, pybind11::object overload)
      : op_(op), overload_(std::move(overload)) {
    for (const c10::Argument& argument : op.schema().arguments()) {
      const auto* optional = argument.type()->castRaw<c10::OptionalType>();
      const c10::TypePtr& type = optional ? optional->getElementType() : argument.type();
      kinds_.push_back({type->kind(), optional != nullptr});
    }
  }

  static PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    const auto& call = *static_cast<const EagerCall*>(PyCapsule_GetPointer(self, nullptr));
    torch::jit::Stack stack;
    if (at::impl::torch_function_mode_enabled() || torch::jit::tracer::isTracing() ||
        !call.push(stack, args, count)) {
      return PyObject_Vectorcall(call.overload_.ptr(), args, count, nullptr);
    }
    {
      const pybind11::gil_scoped_release release;
      call.op_.callBoxed(&stack);
    }
    return torch::jit::createPyObjectForStack(std::move(stack)).release().ptr();
    END_HANDLE_TH_ERRORS
  }

  // Pushes the arguments, and returns whether all have exactly the types of the schema.
  bool push(torch::jit::Stack& stack, PyObject* const* args, Py_ssize_t count) const {
    if (count != static_cast<Py_ssize_t>(kinds_.size())) {
      return false;
    }
    stack.reserve(kinds_.size());
    for (const auto& [kind, optional] : kinds_) {
      PyObject* const x = *args++;
      if (optional && x == Py_None) {
        stack.emplace_back();
      } else if (kind == c10::TypeKind::TensorType && THPVariable_CheckExact(x)) {
        stack.emplace_back(THPVariable_Unpack(x));
      } else if ((kind == c10::TypeKind::IntType || kind == c10::TypeKind::SymIntType) &&
                 PyLong_CheckExact(x)) {
        stack.emplace_back(THPUtils_unpackLong(x));
      } else if (kind == c10::TypeKind::FloatType && PyFloat_CheckExact(x)) {
        stack.emplace_back(PyFloat_AS_DOUBLE(x));
      } else if (kind == c10::TypeKind::BoolType && PyBool_Check(x)) {
        stack.emplace_back(x == Py_True);
      } else if (kind == c10::TypeKind::StringType && PyUnicode_CheckExact(x)) {
        stack.emplace_back(THPUtils_unpackString(x));
      } else {
        return false;
      }
    }
    return true;
  }

  struct Kind {
    c10::TypeKind kind;
    bool optional;
  };
  c10::OperatorHandle op_;
  pybind11::object overload_;
  std::vector<Kind> kinds_;
};

}  // namespace fastattn::autograd
