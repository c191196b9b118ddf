// The steps and products of the feed-forward network on std::thread, for ThreadSanitizer: plain
// numbers pass from task to task as panels and blocks do, so that a missing wait is a race, and
// another result than that of one worker. Prints how many runs agreed and whether a worker that
// waits for a long task sleeps; the exit status says whether all is well.
#include "cpu/threads.h"

#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

#include "ffn/cpu/team.h"

using fastattn::Steps;
using fastattn::ffn::Matrix;
using fastattn::ffn::Panels;
using fastattn::ffn::Product;
using fastattn::ffn::Team;

namespace {

using Numbers = std::vector<int64_t>;

// Numbers of blocks of rows, of tasks for each in the first product and in the second, of panels.
constexpr int kBlocks = 9, kFirst = 3, kSecond = 2, kPanels = 4;

int64_t sum(const Numbers& x, int64_t first, int64_t count) {
  int64_t total = 0;
  for (int64_t i = first; i < first + count; ++i) {
    total += x[i];
  }
  return total;
}

// Takes a while that differs from task to task.
int64_t after_a_while(int64_t task, int64_t value) {
  for (int64_t i = 0; i < task * 37 % 11; ++i) {
    std::this_thread::yield();
  }
  return value;
}

// Steps of a forward and the gradient of a weight: panels, a product, a second one interleaved with
// it, the first one's panels again, and a product of everything.
Numbers results(int workers, int lag) {
  Numbers panels(kPanels), hidden(kBlocks * kFirst), out(kBlocks * kSecond), gradient(kPanels);
  Steps steps;
  const auto pack = [&](int64_t scale) {
    return [&panels, scale](int64_t task, float*) {
      panels[task] = after_a_while(task + 5, scale * (task + 1));
    };
  };
  const int packed = steps.add(kPanels, 1, {}, pack(3));
  const int first = steps.add(kBlocks * kFirst, kFirst, {packed}, [&](int64_t task, float*) {
    hidden[task] = after_a_while(task, sum(panels, 0, kPanels) * (task + 1));
  });
  const int second =
      steps.add(kBlocks * kSecond, kSecond, {-1, -1, first}, [&](int64_t task, float*) {
        out[task] = after_a_while(task, sum(hidden, task / kSecond * kFirst, kFirst) + task);
      });
  if (lag >= 0) {
    steps.interleave(first, lag);
  }
  const int packed_again = steps.add(kPanels, 1, {first}, pack(7));
  steps.add(kPanels, kPanels, {packed_again, second}, [&](int64_t task, float*) {
    gradient[task] = sum(panels, 0, kPanels) + sum(out, 0, kBlocks * kSecond) * task;
  });

  steps.assign_shares(workers);
  std::vector<std::thread> threads;
  for (int worker = 0; worker < workers; ++worker) {
    threads.emplace_back([&steps, worker] { steps.work(worker, nullptr); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  out.insert(out.end(), gradient.begin(), gradient.end());
  return out;
}

// How often this thread has given up its core to wait for something.
long sleeps() {
  rusage usage = {};
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nvcsw;
}

// Whether a worker sleeps while it waits for a task that takes `milliseconds`; false, too, if it
// came so late that it did not wait.
bool sleeps_for(int milliseconds) {
  std::atomic<int> started{0};
  bool slept = false;
  thread_local long before;
  Steps steps;
  const int slow = steps.add(1, 1, {}, [&](int64_t, float*) {
    while (started < 2) {
      std::this_thread::yield();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
    before = sleeps();
  });
  steps.add(1, 1, {slow}, [&](int64_t, float*) { slept = sleeps() > before; });
  steps.assign_shares(2);
  const auto work = [&](int worker) {
    before = sleeps();
    ++started;
    steps.work(worker, nullptr);
  };
  std::thread other(work, 1);
  work(0);
  other.join();
  return slept;
}

// A matrix is a number here, and so is each of its panels.
float number_of(const Matrix& matrix) {
  return *static_cast<const float*>(matrix.data);
}

void pack(const Product& p, int64_t first_panel, int64_t last_panel) {
  for (int64_t panel = first_panel; panel < last_panel; ++panel) {
    p.packed[panel] = after_a_while(panel + 5, number_of(p.b));
  }
}

void multiply(const Product& p, int64_t row_block, int64_t first_panel, int64_t last_panel,
              float*) {
  float* out = static_cast<float*>(p.epilogue.out.data) + row_block * p.b.columns;
  for (int64_t panel = first_panel; panel < last_panel; ++panel) {
    const float right = p.packed ? p.packed[panel] : number_of(p.b);
    out[panel] = after_a_while(row_block + 8, number_of(p.a) * right);
  }
}

constexpr fastattn::ffn::Kernels kNumbers = {1, {}, {}, {}, pack, multiply, nullptr, nullptr};

// Two products write the operands of a third one, whose panels are shared if it has many rows; its
// transpose may be computed in its place.
Numbers product_of_products(int workers, int64_t rows, bool transposed, bool at_once = false) {
  float two = 2, three = 3, left = 0, right = 0, packed[kPanels] = {};
  constexpr int64_t kEach = fastattn::ffn::worker_floats(fastattn::ffn::kBlockRows);
  std::vector<float> out(rows * kPanels), workspace(workers * kEach);
  Panels panels = {packed};
  Team team(workers, workspace.data(), kEach, false, at_once);
  const auto add = [&](float* a, float* b, const Matrix& out, int first, int second) {
    Product p(fastattn::DType::kFloat32);
    p.a = {a, out.rows, 1, 1, 1};
    p.b = {b, 1, out.columns, out.columns, 1};
    p.may_transpose = true;
    p.epilogue.out = out;
    return team.multiply(p, panels, first, second);
  };
  const int first = add(&two, &three, {&left, 1, 1, 1, 1}, -1, -1);
  const int second = add(&three, &three, {&right, 1, 1, 1, 1}, -1, -1);
  const Matrix result = {out.data(), rows, kPanels, kPanels, 1};
  const Matrix across = {out.data(), kPanels, rows, 1, kPanels};
  add(&left, &right, transposed ? across : result, first, second);
  team.run([](int64_t count, const auto& body) {
    std::atomic<int64_t> missing{count};
    std::vector<std::thread> threads;
    for (int64_t worker = 0; worker < count; ++worker) {
      threads.emplace_back([&body, &missing, worker] {
        for (--missing; missing > 0;) {  // begins when all have started
          std::this_thread::yield();
        }
        body(worker);
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  });
  return Numbers(out.begin(), out.end());
}

}  // namespace

namespace fastattn {
Isa active_isa() {
  return Isa::kPortable;
}
namespace ffn {
namespace portable {
const Kernels kKernels = kNumbers;
}
namespace avx2 {
const Kernels kKernels = kNumbers;
}
namespace avx512 {
const Kernels kKernels = kNumbers;
}
namespace avx512_bf16 {
const Kernels kKernels = kNumbers;
}
}  // namespace ffn
}  // namespace fastattn

int main() {
  const Numbers alone = results(1, -1);
  int runs = 0, agreed = 0;
  for (int repeat = 0; repeat < 20; ++repeat) {
    for (const int workers : {1, 2, 5}) {
      for (const int lag : {-1, 0, 1, 4, kBlocks + 1}) {
        ++runs;
        agreed += results(workers, lag) == alone;
      }
    }
  }
  for (const int64_t rows : {1, 200}) {
    for (const bool transposed : {false, true}) {
      const Numbers expected = product_of_products(1, rows, transposed);
      ++runs;
      agreed += product_of_products(1, rows, transposed, true) == expected;
      for (int repeat = 0; repeat < 3; ++repeat) {
        for (const int workers : {2, 3, 5}) {
          ++runs;
          agreed += product_of_products(workers, rows, transposed) == expected;
        }
      }
    }
  }
  bool slept = false;
  for (int milliseconds = 1; milliseconds < 500 && !slept; milliseconds *= 2) {
    slept = sleeps_for(milliseconds);
  }
  std::printf("%d of %d agreed, waiting workers %s\n", agreed, runs, slept ? "sleep" : "spin");
  return agreed == runs && slept ? 0 : 1;
}
