// Products of tensor cores, one warpgroup's in the order of their issue: matrices are decoded from
// descriptors, registers belong to a product from its issue to the wait for it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "engine/memory.h"

namespace on_host {
namespace {

constexpr int kProductRows = 64, kProductK = 16, kMaxColumns = 256;

float as_float(uint16_t bits, bool half) {
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  if (half) {
    const uint32_t sign = wide & 0x80000000u, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 0) {
      const float tiny = static_cast<float>(fraction) * 0x1p-24f;
      std::memcpy(&wide, &tiny, sizeof(wide));
      wide |= sign;
    } else {
      const uint32_t shifted = exponent == 31 ? 255 : exponent + 112;
      wide = sign | shifted << 23 | fraction << 13;
    }
  }
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

// The 16-byte pieces of a matrix behind a descriptor with the 128-byte swizzle, of `lines` rows of
// A or columns of B and 16 of k: visit(address, line, k, whether the piece goes along k).
template <class Visit>
void visit_pieces(uint64_t descriptor, bool lines_contiguous, int first, int lines, Visit visit) {
  const uint32_t start = (descriptor & 0x3FFF) << 4;
  const uint32_t leading = (descriptor >> 16 & 0x3FFF) << 4;
  const uint32_t stride = (descriptor >> 32 & 0x3FFF) << 4;
  constexpr int kElements = kBoxPiece / 2;
  if (lines_contiguous) {
    for (int k = 0; k < kProductK; ++k) {
      for (int line = first; line < first + lines; line += kElements) {
        visit(swizzled(start + line / 64 * leading + k / 8 * stride + k % 8 * 128 + line % 64 * 2),
              line, k);
      }
    }
  } else {
    for (int line = first; line < first + lines; ++line) {
      for (int k = 0; k < kProductK; k += kElements) {
        visit(swizzled(start + line / 8 * stride + line % 8 * 128 + k * 2), line, k);
      }
    }
  }
}

// k-major copy: result[k * lines + line].
void gather(const Block& block, uint64_t descriptor, bool lines_contiguous, int lines, bool half,
            float* result) {
  visit_pieces(descriptor, lines_contiguous, 0, lines, [&](uint32_t address, int line, int k) {
    uint16_t bits[kBoxPiece / 2];
    std::memcpy(bits, block.memory + address, sizeof(bits));
    for (int i = 0; i < static_cast<int>(kBoxPiece) / 2; ++i) {
      const int at = lines_contiguous ? k * lines + line + i : (k + i) * lines + line;
      result[at] = as_float(bits[i], half);
    }
  });
}

void check_product(Block& block, const Wgmma& product, int group) {
  const WgmmaQueue& queue = block.products[group];
  const Access access =
      access_of(block, kFirstWgmma + group, queue.base + queue.complete + 1, product.where);
  for (int warp = 0; warp < kWarpsPerGroup && failure.empty(); ++warp) {
    const Actor actor = {access, product.clocks[warp].get(), true};
    const auto check = [&](const char* reads) {
      return [&, reads](uint32_t address, int, int) {
        if (failure.empty() && !outside(address, kBoxPiece, block, access)) {
          report(block.shadow.read(address, kBoxPiece, actor, instrumented), access, reads, address,
                 kBoxPiece);
        }
      };
    };
    if (!product.form.a[0]) {
      constexpr int kRows = kProductRows / kWarpsPerGroup;
      visit_pieces(product.form.a_descriptor, product.form.a_rows_contiguous, warp * kRows, kRows,
                   check("reads A in"));
    }
    visit_pieces(product.form.b_descriptor, product.form.b_columns_contiguous, 0,
                 product.form.columns, check("reads B in"));
  }
}

bool product_is_ready(const WgmmaQueue& queue) {
  return !queue.waiting.empty() && queue.waiting.front().issued == kWarpgroup;
}
void advance_products(Block& block, int group) {
  WgmmaQueue& queue = block.products[group];
  const Wgmma& product = queue.waiting.front();
  const int columns = product.form.columns;
  check_product(block, product, group);
  static float a[kProductK * kProductRows], b[kProductK * kMaxColumns];
  gather(block, product.form.b_descriptor, product.form.b_columns_contiguous, columns,
         product.form.half, b);
  if (!product.form.a[0]) {
    gather(block, product.form.a_descriptor, product.form.a_rows_contiguous, kProductRows,
           product.form.half, a);
  } else {
    for (int thread = 0; thread < kWarpgroup; ++thread) {
      for (int i = 0; i < 4; ++i) {
        const int row = thread / 32 * 16 + thread % 32 / 4 + i % 2 * 8;
        const int k = thread % 4 * 2 + i / 2 * 8;
        const uint32_t pair = *product.a[thread][i];
        a[k * kProductRows + row] = as_float(static_cast<uint16_t>(pair), product.form.half);
        a[(k + 1) * kProductRows + row] =
            as_float(static_cast<uint16_t>(pair >> 16), product.form.half);
      }
    }
  }
  for (int row = 0; row < kProductRows; ++row) {
    // Four threads share a row: each has two of every eight columns.
    float sums[kMaxColumns];
    const int first = row / 16 * 32 + row % 8 * 4, half = row / 8 % 2;
    for (int i = 0; i < columns; ++i) {
      sums[i] = product.form.accumulate ? product.d[first + i % 8 / 2][i / 8 * 4 + half * 2 + i % 2]
                                        : 0.0f;
    }
    for (int k = 0; k < kProductK; ++k) {
      const float factor = a[k * kProductRows + row];
      const float* line = b + k * columns;
      for (int i = 0; i < columns; ++i) {
        sums[i] += factor * line[i];
      }
    }
    for (int i = 0; i < columns; ++i) {
      product.d[first + i % 8 / 2][i / 8 * 4 + half * 2 + i % 2] = sums[i];
    }
  }
  // Reads before a warp issued the product are over when the product is complete.
  auto reads = std::make_shared<WgmmaQueue::Reads>();
  std::memset(reads->times, 0, sizeof(reads->times));
  for (const std::shared_ptr<Clock>& clock : product.clocks) {
    take_later(reads->times, clock->known[block.segment]);
  }
  queue.reads.push_back(reads);
  queue.waiting.pop_front();
  ++queue.complete;
}

}  // namespace

ON_HOST_ENTRY void wgmma(const Product& product) {
  const uint32_t where = ON_HOST_WHERE;
  Thread& thread = *current;
  const int group = thread.index / kWarpgroup, member = thread.index % kWarpgroup;
  const int warp = member / kWarpLanes;
  WgmmaQueue& queue = thread.block->products[group];
  if (thread.fences == 0) {
    fail_here(where, "no wgmma.fence before the first wgmma");
  }
  // Its place in the queue, which it may be the first to ask for.
  if (thread.issued == queue.enqueued()) {
    queue.waiting.emplace_back();
    queue.waiting.back().form = product;
    queue.waiting.back().where = where;
  }
  Wgmma& entry = queue.waiting[thread.issued - queue.complete];
  const Product& form = entry.form;
  if (form.columns != product.columns || form.accumulate != product.accumulate ||
      form.b_descriptor != product.b_descriptor ||
      form.a_rows_contiguous != product.a_rows_contiguous ||
      form.b_columns_contiguous != product.b_columns_contiguous || !form.a[0] != !product.a[0] ||
      (!form.a[0] && form.a_descriptor != product.a_descriptor)) {
    fail_here(where, "the threads of a warpgroup disagree on a wgmma");
  }
  ++thread.issued;
  const auto registers = [&](const void* first) {
    return thread.registers +
           (static_cast<const char*>(first) - static_cast<const char*>(thread.stack)) / 4;
  };
  const auto check = [&](const Register& word, const char* what) {
    if (word.touched == thread.fences + 1) {
      fail_here(where,
                std::string("no wgmma.fence between an access to ") + what + " and the wgmma");
    }
    if (word.loose) {
      fail_here(where, std::string("nothing keeps the compiler from writing ") + what +
                           " behind the wgmma.fence (pin before the fence)");
    }
  };
  Register* word = registers(product.d);
  thread.lowest = std::min(thread.lowest, static_cast<size_t>(word - thread.registers));
  for (int i = 0; i < product.columns / 2; ++i, ++word) {
    check(*word, "an accumulator");
    if (word->a_of > thread.completed) {
      fail_here(where, "an accumulator is still the operand of another wgmma");
    }
    word->d_of = thread.issued;
  }
  for (int i = 0; i < 4 && product.a[0]; ++i) {
    Register& operand = *registers(product.a[i]);
    check(operand, "an operand");
    if (operand.d_of > thread.completed) {
      fail_here(where, "an operand is still the accumulator of another wgmma");
    }
    operand.a_of = thread.issued;
    entry.a[member][i] = product.a[i];
  }
  entry.d[member] = product.d;
  // Threads of a warp issue together: what happened before one happened before the product.
  std::shared_ptr<Clock>& known = queue.clocks[warp];
  if (queue.versions[member] != thread.version) {
    if (!known || known.use_count() > 1) {
      std::shared_ptr<Clock> fresh = clocks().take();
      if (known) {
        fresh->join(*known);
      }
      known = fresh;
    }
    known->join(*thread.clock);
    tick(thread);
    queue.versions[member] = thread.version;
  }
  if (++entry.warp_issued[warp] == kWarpLanes) {
    entry.clocks[warp] = known;
  }
  ++entry.issued;
  yield();
}
ON_HOST_ENTRY void wgmma_fence() {
  if (!commits(Fault::kNoWgmmaFence, ON_HOST_WHERE)) {
    ++current->fences;
  }
}
ON_HOST_ENTRY void wgmma_commit_group() {
  if (!commits(Fault::kNoWgmmaCommit, ON_HOST_WHERE)) {
    current->commits.push_back(current->issued);
  }
}
ON_HOST_ENTRY void wgmma_wait_group(int pending) {
  const uint32_t where = ON_HOST_WHERE;
  if (commits(Fault::kNoWgmmaWait, where)) {
    return;
  }
  if (commits(Fault::kWgmmaWaitForOneLess, where)) {
    ++pending;
  }
  Thread& thread = *current;
  const int groups = static_cast<int>(thread.commits.size()) - pending;
  if (groups <= 0) {
    return;
  }
  const uint32_t products = thread.commits[groups - 1];
  const int group = thread.index / kWarpgroup;
  const WgmmaQueue& queue = thread.block->products[group];
  wait_for({Wait::kWgmma, &queue, products, 0, where});
  thread.completed = std::max(thread.completed, products);
  const int segment = thread.block->segment;
  thread.clock->known[segment][kFirstWgmma + group] = queue.base + thread.completed;
  if (products) {
    take_later(thread.clock->read[segment], queue.reads[products - 1]->times);
    thread.clock->reads |= 1u << segment;
  }
  ++thread.version;
}
ON_HOST_ENTRY void pin(const void* first, size_t bytes) {
  if (commits(Fault::kNoPin, ON_HOST_WHERE)) {
    return;
  }
  Thread& thread = *current;
  Register* word = thread.registers + (static_cast<const char*>(first) - thread.stack) / 4;
  for (size_t i = 0; i < bytes / 4; ++i, ++word) {
    if (word->d_of <= thread.completed) {
      word->d_of = 0;
    }
    if (word->a_of <= thread.completed) {
      word->a_of = 0;
    }
    if (word->loose) {
      word->loose = false;
      word->touched = thread.fences + 1;
    }
  }
}

}  // namespace on_host
