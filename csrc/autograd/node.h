// The node that a call leaves in autograd's graph. Its backward runs the native op, without
// Python's lock; what is not plain (a graph of the gradients, transformed or strangely laid out
// gradients, saved tensors that hooks have changed) goes to Python, where every case is handled.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "autograd/plain.h"
#include "autograd/road.h"

namespace fastattn::autograd {

using at::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using Saved = c10::SmallVector<Tensor, 8>;

// The stack's arguments -> results, with no graph.
inline void call_native(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(stack);
}

inline c10::IValue optional_value(const Tensor& tensor) {
  return tensor.defined() ? c10::IValue(tensor) : c10::IValue();
}

class OpNode final : public torch::autograd::Node {
 public:
  OpNode(const Road& road, bool asked_for) : road_(road), asked_for_(asked_for) {}

  std::string name() const override { return road_.name; }

  void save(const Tensor& tensor, bool is_result) { saved_.emplace_back(tensor, is_result); }
  void save_none() { saved_.emplace_back(); }
  void reserve() { saved_.reserve(road_.saved.size()); }
  void keep(c10::IValue constant) { constants_.push_back(std::move(constant)); }
  void keep_dtype(at::ScalarType dtype) { dtypes_.push_back(dtype); }
  void keep_equal(bool holds) { equal_.push_back(holds); }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable& saved : saved_) {
      saved.reset_data();
    }
  }

  variable_list apply(variable_list&& gradients) override {
    const Saved saved = unpacked();
    if (!at::GradMode::is_enabled() && is_plain_thread(road_.casts)) {
      std::optional<variable_list> found = natively(saved, gradients);
      if (found) {
        return std::move(*found);
      }
    }
    return in_python(saved, gradients);
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(static_cast<uint64_t>(reinterpret_cast<uintptr_t>(&road_)));
    args.collect(asked_for_);
    for (size_t i = 0; i < saved_.size(); ++i) {
      args.collect(saved_[i], is_result(i));
    }
    for (const c10::IValue& constant : constants_) {
      if (constant.isDouble()) {
        args.collect(constant.toDouble());
      } else {
        args.collect(constant.toInt());
      }
    }
    for (at::ScalarType dtype : dtypes_) {
      args.collect(dtype);
    }
  }

  variable_list apply_with_saved(const variable_list& gradients,
                                 torch::dynamo::autograd::SwapSavedVariables& swap) override {
    for (SavedVariable& saved : saved_) {
      swap.before(saved);
    }
    variable_list found = in_python(unpacked(), gradients);
    for (SavedVariable& saved : saved_) {
      swap.after(saved);
    }
    return found;
  }

 private:
  bool is_result(size_t i) const {
    const int position = road_.saved[i] - static_cast<int>(road_.arguments.size());
    return position >= 0 && position < road_.differentiable;
  }

  Saved unpacked() {
    std::lock_guard<std::mutex> lock(mutex_);
    Saved saved;
    for (size_t i = 0; i < saved_.size(); ++i) {
      saved.push_back(is_result(i) ? saved_[i].unpack(getptr()) : saved_[i].unpack());
    }
    return saved;
  }

  // Nothing where the call is not plain, or the native op refuses it.
  std::optional<variable_list> natively(const Saved& saved, const variable_list& gradients) {
    variable_list found(road_.tensors.size());
    c10::SmallVector<bool, 8> needed;
    bool any_needed = false, given = false;
    for (int i : road_.gradients) {
      needed.push_back(task_should_compute_output(i));
      any_needed = any_needed || needed.back();
      const bool exists = road_.arguments[road_.tensors[i]].kind != Kind::kNone;
      if (!road_.computes_what_is_needed && exists && !needed.back()) {
        return std::nullopt;
      }
    }
    // Kernels read rows: an expanded gradient (of a sum, say) is written out.
    Saved rows;
    for (size_t i = 0; i < gradients.size(); ++i) {
      const Tensor& gradient = gradients[i];
      if (gradient.defined()) {
        given = true;
        if (!road_.reads[i] || !is_plain_tensor(gradient)) {
          return std::nullopt;
        }
        const bool expanded = gradient.dim() > 0 && gradient.stride(-1) != 1;
        rows.push_back(expanded ? gradient.contiguous() : gradient);
      } else {
        rows.emplace_back();
      }
    }
    if (given && any_needed) {
      for (const Tensor& tensor : saved) {
        if (tensor.defined() && !is_plain_tensor(tensor)) {
          return std::nullopt;
        }
      }
      c10::SmallVector<bool, 8> computed = needed;
      for (size_t i = 0; i < equal_.size(); ++i) {
        const Equal& equal = road_.equal[i];
        if (equal_[i] && needed[equal.spared] && needed[equal.computed]) {
          computed[equal.spared] = false;
        }
      }
      torch::jit::Stack stack;
      stack.reserve(road_.sources.size());
      for (const Source& source : road_.sources) {
        stack.push_back(value_of(source, saved, rows, computed));
      }
      try {
        call_native(road_.backward, stack);
      } catch (const std::exception&) {
        return std::nullopt;
      }
      for (size_t i = 0; i < road_.gradients.size(); ++i) {
        if (computed[i]) {
          found[road_.gradients[i]] = std::move(stack[i]).toTensor();
        }
      }
      for (const Equal& equal : road_.equal) {
        if (needed[equal.spared] && !computed[equal.spared]) {
          found[road_.gradients[equal.spared]] = found[road_.gradients[equal.computed]];
        }
      }
    }
    for (const auto& [tensor, result] : road_.passed) {
      if (task_should_compute_output(tensor)) {
        found[tensor] = gradients[result];
      }
    }
    return found;
  }

  c10::IValue value_of(const Source& source, const Saved& saved, const Saved& gradients,
                       const c10::SmallVector<bool, 8>& computed) const {
    switch (source.from) {
      case From::kSaved:
        return optional_value(saved[source.index]);
      case From::kConstant:
        return constants_[source.index];
      case From::kDtype:
        return dtypes_[source.index];
      case From::kNeeded:
        return static_cast<bool>(computed[source.index]);
      case From::kGradient:
        return optional_value(gradients[source.index]);
    }
    return {};
  }

  variable_list in_python(const Saved& saved, const variable_list& gradients) {
    pybind11::gil_scoped_acquire gil;
    const auto tuple_of = [](const auto& tensors) {
      pybind11::tuple made(tensors.size());
      for (size_t i = 0; i < tensors.size(); ++i) {
        made[i] = pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(tensors[i]));
      }
      return made;
    };
    pybind11::tuple needed(road_.tensors.size());
    for (size_t i = 0; i < needed.size(); ++i) {
      needed[i] = pybind11::bool_(task_should_compute_output(i));
    }
    pybind11::tuple constants(constants_.size() + dtypes_.size());
    for (size_t i = 0; i < constants_.size(); ++i) {
      constants[i] = torch::jit::toPyObject(constants_[i]);
    }
    for (size_t i = 0; i < dtypes_.size(); ++i) {
      constants[constants_.size() + i] = pybind11::reinterpret_borrow<pybind11::object>(
          reinterpret_cast<PyObject*>(torch::getTHPDtype(dtypes_[i])));
    }
    const pybind11::tuple held = tuple_of(saved), given = tuple_of(gradients);
    const pybind11::object backend =
        asked_for_ ? pybind11::object(pybind11::str(kBackend)) : pybind11::none();
    PyObject* const arguments[] = {backend.ptr(), needed.ptr(), held.ptr(), constants.ptr(),
                                   given.ptr()};
    const auto found = pybind11::reinterpret_steal<pybind11::object>(
        PyObject_Vectorcall(road_.in_python, arguments, std::size(arguments), nullptr));
    if (!found) {
      throw_python_error();
    }
    variable_list result;
    for (const pybind11::handle gradient : pybind11::tuple(found)) {
      result.push_back(gradient.is_none() ? Tensor() : THPVariable_Unpack(gradient.ptr()));
    }
    return result;
  }

  [[noreturn]] static void throw_python_error() {
    python_error error;
    error.persist();
    throw std::move(error);
  }

  const Road& road_;
  const bool asked_for_;  // by name
  std::vector<SavedVariable> saved_;
  c10::SmallVector<c10::IValue, 4> constants_;
  c10::SmallVector<at::ScalarType, 2> dtypes_;
  c10::SmallVector<bool, 2> equal_;  // for each of the road's whether it holds
};

}  // namespace fastattn::autograd
