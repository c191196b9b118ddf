// What an op is to autograd, as fastattn/ops/_road.py reads it off the schemas: everything a node
// of the graph needs to know but the tensors of one call.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/python_headers.h>

#include <string>
#include <vector>

namespace fastattn::autograd {

// Goes up with what `road(...)` takes, in fastattn/ops/_native.py too: built for another one, the
// extension is not used.
constexpr int kInterface = 1;

// The backend that all roads lead to.
constexpr const char* kBackend = "cpu";

// What a forward argument must be for this road.
enum class Kind { kTensor, kTensorOrNone, kFloat, kInt, kNone, kNumber };

struct Argument {
  Kind kind;
  double number;  // kNumber: what the argument must be equal to
  int native;     // its position among the native op's, -1 where it has none
};

// Where the native backward op's arguments come from.
enum class From { kSaved, kConstant, kDtype, kNeeded, kGradient };

struct Source {
  From from;
  int index;
};

// Where both are wanted, result `spared` is result `computed`: when constant `zero` is 0 and the
// inputs at these positions are of one dtype.
struct Equal {
  int spared, computed, x, y, zero;
};

struct Road {
  std::string name;
  c10::OperatorHandle forward, backward;
  std::vector<Argument> arguments;  // of the forward op
  std::vector<int> tensors;         // positions of its tensors: the node has an edge for each
  int differentiable = 0;           // how many results, the first ones, have a gradient
  // Positions among the arguments and, behind them, the results.
  std::vector<int> saved;
  // Positions among the arguments: values, and tensors whose dtype is kept.
  std::vector<int> constants, typed;
  std::vector<Source> sources;
  std::vector<int> gradients;               // for each backward result an index into `tensors`
  std::vector<std::pair<int, int>> passed;  // (index into `tensors`, the result it takes it from)
  std::vector<Equal> equal;
  bool computes_what_is_needed = false;  // else the backward op computes the gradient of all
  std::vector<bool> reads;  // for each differentiable result whether that op reads its gradient
  bool casts = false;       // under autocast the public function casts first: not here
  // (backend, needed, saved, constants, gradients) -> a gradient or None for each of `tensors`.
  PyObject* in_python = nullptr;
};

}  // namespace fastattn::autograd
