// How the workers of a parallel region share its tasks: a Queue of tasks that need nothing of each
// other, and Steps, whose tasks do.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace fastattn {

// -- a queue --------------------------------------------------------------------------------------
// Hands out [0, tasks) in pieces. Fewer pieces keep a worker longer at the same keys.
class Queue {
 public:
  Queue(int64_t tasks, int64_t piece) : tasks_(tasks), piece_(piece < 1 ? 1 : piece) {}

  bool draw(int64_t* first, int64_t* last) {
    *first = next_.fetch_add(piece_, std::memory_order_relaxed);
    *last = *first + piece_ < tasks_ ? *first + piece_ : tasks_;
    return *first < tasks_;
  }

 private:
  std::atomic<int64_t> next_{0};
  int64_t tasks_, piece_;
};

// Calls run(task) for the tasks that this worker draws; it returns the last task that is done with,
// usually its own.
template <class Run>
void for_tasks(Queue& queue, const Run& run) {
  int64_t task, last;
  while (queue.draw(&task, &last)) {
    for (; task < last; ++task) {
      task = run(task);
    }
  }
}

// -- steps ----------------------------------------------------------------------------------------
// The steps that must be over before a task begins; -1: none.
struct Needs {
  int step = -1, other_step = -1;
  int same_group = -1;  // of this one only the group with the task's own number
};

// The steps of an op, whose tasks its workers draw one by one and step by step. A task first waits
// for what it needs. That was drawn before it, so some worker is at it: nobody waits for a worker
// that waits for him, however many of them really run side by side.
//
// Of each step a worker draws from a share of neighbouring tasks, the same one whenever the op
// runs, and then from the others' shares: what it wrote last time may still be in its own cache.
class Steps {
 public:
  using Run = std::function<void(int64_t task, float* scratch)>;

  // Tasks [0, tasks), of which each `group` neighbours make a group; returns the step's number.
  // What a step needs was added before it.
  int add(int64_t tasks, int64_t group, const Needs& needs, Run run) {
    const int64_t groups = (tasks + group - 1) / group;
    steps_.push_back({tasks, group, needs, std::move(run),
                      std::make_unique<std::atomic<int64_t>[]>(groups + 1)});
    const int step = static_cast<int>(steps_.size()) - 1;
    order_.push_back({step, 0, tasks});
    return step;
  }

  // Has the groups of the last step drawn in turns with those of an earlier one, `lag` behind them,
  // so that they find in the cache what these wrote. Between the two no step may need the first.
  void draw_in_turns(int first, int64_t lag) {
    const int second = static_cast<int>(steps_.size()) - 1;
    const auto has_step = [&](const Part& part) {
      return part.step == first || part.step == second;
    };
    order_.erase(std::remove_if(order_.begin(), order_.end(), has_step), order_.end());
    const int64_t groups = groups_of(first);
    for (int64_t g = 0; g < groups + lag; ++g) {
      if (g < groups) {
        order_.push_back(group_of(first, g));
      }
      if (g >= lag && g - lag < groups_of(second)) {
        order_.push_back(group_of(second, g - lag));
      }
    }
  }

  // Called once, before all work: how many workers there will be.
  void share_out(int64_t workers) {
    workers_ = workers;
    int64_t shares = 0;
    for (Part& part : order_) {
      part.first_share = shares;
      shares += shares_of(part);
    }
    shares_ = std::make_unique<Share[]>(shares);
  }

  // A worker's part; returns when there is nothing left to begin.
  void work(int64_t worker, float* scratch) {
    for (const Part& part : order_) {
      const int64_t shares = shares_of(part);
      for (int64_t i = 0; i < shares; ++i) {
        const int64_t owner = (worker + i) % shares;
        const int64_t first = part.tasks * owner / shares;
        const int64_t count = part.tasks * (owner + 1) / shares - first;
        std::atomic<int64_t>& drawn = shares_[part.first_share + owner].drawn;
        while (drawn.load(std::memory_order_relaxed) < count) {
          const int64_t task = drawn.fetch_add(1, std::memory_order_relaxed);
          if (task < count) {
            run(steps_[part.step], part.first_task + first + task, scratch);
          }
        }
      }
    }
  }

 private:
  struct Step {
    int64_t tasks, group;
    Needs needs;
    Run run;
    std::unique_ptr<std::atomic<int64_t>[]> done;  // tasks of the step, then of each group
  };
  struct Part {
    int step;
    int64_t first_task, tasks;
    int64_t first_share = 0;
  };
  // In a line of its own, which no other share's owner takes away.
  struct alignas(64) Share {
    std::atomic<int64_t> drawn{0};
  };

  int64_t shares_of(const Part& part) const { return std::min(workers_, part.tasks); }

  int64_t groups_of(int step) const {
    return (steps_[step].tasks + steps_[step].group - 1) / steps_[step].group;
  }

  Part group_of(int step, int64_t group) const {
    const Step& s = steps_[step];
    return {step, group * s.group, std::min(s.group, s.tasks - group * s.group)};
  }

  void run(const Step& step, int64_t task, float* scratch) {
    const int64_t group = task / step.group;
    for (const int needed : {step.needs.step, step.needs.other_step}) {
      if (needed >= 0) {
        await(steps_[needed].done[0], steps_[needed].tasks);
      }
    }
    if (step.needs.same_group >= 0) {
      const Part needed = group_of(step.needs.same_group, group);
      await(steps_[needed.step].done[1 + group], needed.tasks);
    }
    step.run(task, scratch);
    step.done[1 + group].fetch_add(1, std::memory_order_release);
    step.done[0].fetch_add(1, std::memory_order_release);
  }

  static void await(const std::atomic<int64_t>& done, int64_t tasks) {
    // About what a task takes; after that the thread at it may want this processor.
    constexpr int kSpins = 1 << 14;
    for (int spins = 0; done.load(std::memory_order_acquire) < tasks; ++spins) {
      if (spins >= kSpins) {
        std::this_thread::yield();
        continue;
      }
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  }

  std::vector<Step> steps_;
  std::vector<Part> order_;
  int64_t workers_ = 0;
  std::unique_ptr<Share[]> shares_;
};

}  // namespace fastattn
