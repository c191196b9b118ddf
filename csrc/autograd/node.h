// The autograd node of every op. Its backward is one call of the backward op through the
// dispatcher, so transforms, tracers and dispatch modes apply to it.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include "autograd/derivative.h"

namespace fastattn::autograd {

using at::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

inline c10::IValue optional_value(const Tensor& tensor) {
  return tensor.defined() ? c10::IValue(tensor) : c10::IValue();
}

class OpNode final : public torch::autograd::Node {
 public:
  explicit OpNode(const Derivative& derivative) : derivative_(derivative) {}

  std::string name() const override { return derivative_.name; }

  // values: the forward's arguments followed by its results.
  void save(const std::vector<c10::IValue>& values) {
    const auto requires_grad = [&](int i) {
      return values[i].isTensor() && values[i].toTensor().requires_grad();
    };
    saved_.reserve(derivative_.saved.size());
    for (const Saved& saved : derivative_.saved) {
      const c10::IValue& value = values[saved.position];
      const bool read = saved.read_by.empty() ||
                        std::any_of(saved.read_by.begin(), saved.read_by.end(), requires_grad);
      if (read && value.isTensor()) {
        saved_.emplace_back(value.toTensor(), derivative_.is_differentiable_result(saved));
      } else {
        saved_.emplace_back();
      }
    }
    for (int i : derivative_.constants) {
      constants_.push_back(values[i]);
    }
    for (int i : derivative_.dtypes) {
      dtypes_.push_back(values[i].toTensor().scalar_type());
    }
    for (const EqualGradients& equal : derivative_.equal) {
      const c10::IValue& zero = values[equal.zero];
      equal_.push_back(zero.isDouble() && zero.toDouble() == 0.0 &&
                       values[equal.x].toTensor().scalar_type() ==
                           values[equal.y].toTensor().scalar_type());
    }
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable& saved : saved_) {
      saved.reset_data();
    }
  }

  variable_list apply(variable_list&& gradients) override { return differentiate(gradients); }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(static_cast<uint64_t>(reinterpret_cast<uintptr_t>(&derivative_)));
    for (size_t i = 0; i < saved_.size(); ++i) {
      args.collect(saved_[i], derivative_.is_differentiable_result(derivative_.saved[i]));
    }
    for (const c10::IValue& constant : constants_) {
      if (constant.isDouble()) {
        args.collect(constant.toDouble());
      } else if (constant.isInt()) {
        args.collect(constant.toInt());
      } else {
        args.collect(constant);
      }
    }
    for (at::ScalarType dtype : dtypes_) {
      args.collect(dtype);
    }
    for (bool equal : equal_) {
      args.collect(equal);
    }
  }

  variable_list apply_with_saved(const variable_list& gradients,
                                 torch::dynamo::autograd::SwapSavedVariables& swap) override {
    for (SavedVariable& saved : saved_) {
      swap.before(saved);
    }
    variable_list found = differentiate(gradients);
    for (SavedVariable& saved : saved_) {
      swap.after(saved);
    }
    return found;
  }

 private:
  variable_list differentiate(const variable_list& gradients) {
    variable_list found(derivative_.tensors.size());
    const size_t count = derivative_.gradients.size();
    c10::SmallVector<bool, 8> needed(count), computed(count);
    bool any_needed = false;
    for (size_t i = 0; i < count; ++i) {
      needed[i] = task_should_compute_output(derivative_.gradients[i]);
      any_needed = any_needed || needed[i];
    }
    const bool given =
        std::any_of(gradients.begin(), gradients.begin() + derivative_.differentiable,
                    [](const Tensor& gradient) { return gradient.defined(); });
    if (given && any_needed) {
      computed = needed;
      for (size_t i = 0; i < equal_.size(); ++i) {
        const EqualGradients& equal = derivative_.equal[i];
        if (equal_[i] && needed[equal.copied] && needed[equal.computed]) {
          computed[equal.copied] = false;
        }
      }
      torch::jit::Stack stack = arguments_of_backward(gradients, computed);
      // In forward mode the backward op's arguments may have tangents.
      if (at::GradMode::is_enabled() || torch::autograd::ForwardADLevel::try_get_by_idx(0)) {
        derivative_.backward.callBoxed(stack);
      } else {  // nothing to record
        at::AutoDispatchBelowADInplaceOrView below;
        derivative_.backward.callBoxed(stack);
      }
      for (size_t i = 0; i < count; ++i) {
        if (computed[i]) {
          found[derivative_.gradients[i]] = std::move(stack[i]).toTensor();
        }
      }
      for (const EqualGradients& equal : derivative_.equal) {
        if (needed[equal.copied] && !computed[equal.copied]) {
          found[derivative_.gradients[equal.copied]] = found[derivative_.gradients[equal.computed]];
        }
      }
    }
    for (const auto& [tensor, result] : derivative_.passed) {
      if (task_should_compute_output(tensor)) {
        found[tensor] = gradients[result];
      }
    }
    return found;
  }

  torch::jit::Stack arguments_of_backward(const variable_list& gradients,
                                          const c10::SmallVector<bool, 8>& needs) {
    c10::SmallVector<Tensor, 8> saved;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (size_t i = 0; i < saved_.size(); ++i) {
        const bool result = derivative_.is_differentiable_result(derivative_.saved[i]);
        saved.push_back(result ? saved_[i].unpack(getptr()) : saved_[i].unpack());
      }
    }
    torch::jit::Stack stack;
    stack.reserve(derivative_.sources.size());
    for (const auto& [from, index] : derivative_.sources) {
      switch (from) {
        case From::kSaved:
          stack.push_back(optional_value(saved[index]));
          break;
        case From::kConstant:
          stack.push_back(constants_[index]);
          break;
        case From::kDtype:
          stack.push_back(dtypes_[index]);
          break;
        case From::kNeeds: {
          c10::List<bool> list;
          list.reserve(needs.size());
          for (bool needed : needs) {
            list.push_back(needed);
          }
          stack.push_back(std::move(list));
          break;
        }
        case From::kGradient:
          stack.push_back(optional_value(gradients[index]));
          break;
      }
    }
    return stack;
  }

  const Derivative& derivative_;  // lives as long as the process
  std::vector<SavedVariable> saved_;
  c10::SmallVector<c10::IValue, 12> constants_;
  c10::SmallVector<at::ScalarType, 2> dtypes_;
  c10::SmallVector<bool, 2> equal_;  // whether each of the derivative's `equal` holds
};

}  // namespace fastattn::autograd
