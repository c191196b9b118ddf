// The derivative of an op, as fastattn/ops/_autograd.py reads it from the schemas of its forward
// and backward: all that a node needs except the tensors of one call.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <utility>
#include <vector>

namespace fastattn::autograd {

// The version of the extension's functions, also in fastattn/ops/_native.py: an extension with
// another version is not used.
constexpr int kInterface = 6;

// Where the backward op's arguments come from.
enum class From { kSaved, kConstant, kDtype, kNeeds, kGradient };

struct Source {
  From from;
  int index;
};

// A tensor kept for the backward.
struct Saved {
  int position;              // among the arguments followed by the results
  std::vector<int> read_by;  // arguments whose gradients need it; empty: always saved
};

// If both are wanted, result `copied` is taken from result `computed` when constant `zero` is 0 and
// the inputs at positions x and y have one dtype.
struct EqualGradients {
  int copied, computed, x, y, zero;
};

struct Derivative {
  std::string name;
  c10::OperatorHandle backward;
  int arguments = 0;         // of the forward op
  std::vector<int> tensors;  // positions of its tensors: the node has an edge for each
  int differentiable = 0;    // the number of leading results that have a gradient
  std::vector<Saved> saved;
  std::vector<int> constants;  // positions among the arguments
  std::vector<int> dtypes;     // positions of the tensors whose dtype is kept
  std::vector<Source> sources;
  std::vector<int> gradients;               // for each backward result an index into `tensors`
  std::vector<std::pair<int, int>> passed;  // (index into `tensors`, result with the same gradient)
  std::vector<EqualGradients> equal;

  bool is_differentiable_result(const Saved& tensor) const {
    return tensor.position >= arguments && tensor.position - arguments < differentiable;
  }
};

}  // namespace fastattn::autograd
