// What autograd needs to know of an op, as fastattn/ops/_autograd.py reads it off the schemas of a
// forward and a backward op: everything that a node needs but the tensors of one call.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <utility>
#include <vector>

namespace fastattn::autograd {

// Goes up with what `differentiate(...)` takes, in fastattn/ops/_native.py too: an extension built
// for another one is not used.
constexpr int kInterface = 2;

// Where the backward op's arguments come from.
enum class From { kSaved, kConstant, kDtype, kNeeds, kGradient };

struct Source {
  From from;
  int index;
};

// A tensor kept for the backward.
struct Saved {
  int position;              // among the arguments and, behind them, the results
  std::vector<int> read_by;  // arguments whose gradients alone read it; empty: kept always
};

// Where both are wanted, result `spared` is result `computed`: when constant `zero` is 0 and the
// inputs at these positions are of one dtype.
struct EqualGradients {
  int spared, computed, x, y, zero;
};

struct Derivative {
  std::string name;
  c10::OperatorHandle backward;
  int arguments = 0;         // of the forward op
  std::vector<int> tensors;  // positions of its tensors: the node has an edge for each
  int differentiable = 0;    // how many results, the first ones, have a gradient
  std::vector<Saved> saved;
  std::vector<int> constants;  // positions among the arguments
  std::vector<int> dtypes;     // positions of the tensors whose dtype is kept
  std::vector<Source> sources;
  std::vector<int> gradients;               // for each backward result an index into `tensors`
  std::vector<std::pair<int, int>> passed;  // (index into `tensors`, the result it takes it from)
  std::vector<EqualGradients> equal;

  bool is_differentiable_result(const Saved& tensor) const {
    return tensor.position >= arguments && tensor.position - arguments < differentiable;
  }
};

}  // namespace fastattn::autograd
