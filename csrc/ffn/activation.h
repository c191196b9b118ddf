// The activations of the feed-forward network, for every backend.
#pragma once

namespace fastattn::ffn {

enum class Activation : int { kRelu = 0, kGelu = 1, kGeluTanh = 2, kSilu = 3 };

}  // namespace fastattn::ffn
