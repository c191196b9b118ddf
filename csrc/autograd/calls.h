// Calls of ops with fixed arguments, made again and again without Python in between: a decoding
// step on the CPU (fastattn/nn/step_graph.py), whose Python would take longer than its ops.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <string>
#include <utility>
#include <vector>

namespace fastattn::autograd {

class Calls {
 public:
  // targets: tensors that the results, if there are targets, are copied into.
  void append(const std::string& name, const std::string& overload, std::vector<at::Tensor> targets,
              const pybind11::tuple& args, const pybind11::kwargs& kwargs) {
    const c10::OperatorHandle op =
        c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
    const torch::jit::ToIValueAllowNumbersAsTensors as_in_python(true);
    torch::jit::Stack arguments = torch::jit::createStackForSchema(
        op.schema(), torch::jit::tuple_slice(args), kwargs, std::nullopt);
    calls_.push_back({op, std::move(arguments), std::move(targets)});
  }

  // Records no gradients, so the Autograd keys are skipped.
  void run() {
    const pybind11::gil_scoped_release release;
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView below;
    torch::jit::Stack stack;
    for (const Call& call : calls_) {
      stack.assign(call.arguments.begin(), call.arguments.end());
      call.op.callBoxed(&stack);
      for (size_t i = 0, result = 0; i < call.targets.size(); ++result) {
        const c10::IValue& value = stack[result];
        const auto tensors = value.isTensorList() ? value.toTensorVector()
                                                  : std::vector<at::Tensor>{value.toTensor()};
        for (const at::Tensor& tensor : tensors) {
          call.targets[i++].copy_(tensor);
        }
      }
    }
  }

 private:
  struct Call {
    c10::OperatorHandle op;
    torch::jit::Stack arguments;
    std::vector<at::Tensor> targets;
  };
  std::vector<Call> calls_;
};

}  // namespace fastattn::autograd
