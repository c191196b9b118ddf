// Differences between the versions of torch that the extension can be built with.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/headeronly/version.h>

#include <memory>
#include <utility>

namespace fastattn::autograd {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13

// Nodes have shared pointers, whose deleter frees long graphs without recursion.
template <class Node, class... Arguments>
std::shared_ptr<Node> make_node(Arguments&&... arguments) {
  return {new Node(std::forward<Arguments>(arguments)...), torch::autograd::deleteNode};
}

#else

template <class Node, class... Arguments>
c10::intrusive_ptr<Node> make_node(Arguments&&... arguments) {
  return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
}

#endif

}  // namespace fastattn::autograd
