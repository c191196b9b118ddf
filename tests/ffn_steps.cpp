// The steps of the feed-forward network on std::thread, for ThreadSanitizer: plain numbers pass
// from task to task as panels and blocks do, so that a missing wait is a race, and another result
// than that of one worker. Prints how many runs agreed; the exit status says whether all did.
#include "ffn/steps.h"

#include <cstdio>
#include <thread>
#include <vector>

using fastattn::ffn::Steps;

namespace {

using Numbers = std::vector<int64_t>;

// So many blocks of rows, in the first product tasks for each, in the second, and panels.
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

// What a forward and the gradient of a weight do: panels, a product, a second one in turns with it,
// the first one's panels again, and a product of everything.
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
    steps.draw_in_turns(first, lag);
  }
  const int packed_again = steps.add(kPanels, 1, {first}, pack(7));
  steps.add(kPanels, kPanels, {packed_again, second}, [&](int64_t task, float*) {
    gradient[task] = sum(panels, 0, kPanels) + sum(out, 0, kBlocks * kSecond) * task;
  });

  steps.share_out(workers);
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

}  // namespace

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
  std::printf("%d of %d agreed\n", agreed, runs);
  return agreed == runs ? 0 : 1;
}
