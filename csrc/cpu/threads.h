// How the workers of a parallel region share its tasks: Queue for independent tasks, Steps for
// tasks with dependencies. Data that several workers write has cache lines of its own: shared with
// data that others read, a task took up to 0.3 us more (two Zen 5 threads).
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace fastattn {

// -- a queue --------------------------------------------------------------------------------------
// Hands out [0, tasks) in chunks. Larger chunks let a worker use the same keys for more tasks.
class alignas(64) Queue {
 public:
  Queue(int64_t tasks, int64_t chunk) : tasks_(tasks), chunk_(chunk < 1 ? 1 : chunk) {}

  bool take(int64_t* first, int64_t* last) {
    *first = next_.fetch_add(chunk_, std::memory_order_relaxed);
    *last = *first + chunk_ < tasks_ ? *first + chunk_ : tasks_;
    return *first < tasks_;
  }

 private:
  std::atomic<int64_t> next_{0};
  int64_t tasks_, chunk_;
};

// Calls run(task) for the tasks that this worker takes. run returns the last task that is complete,
// usually `task`.
template <class Run>
void for_tasks(Queue& queue, const Run& run) {
  int64_t task, last;
  while (queue.take(&task, &last)) {
    for (; task < last; ++task) {
      task = run(task);
    }
  }
}

// -- steps ----------------------------------------------------------------------------------------
// The steps that must be complete before a task runs; -1: none.
struct Dependencies {
  int step = -1, other_step = -1;
  int same_group = -1;  // of this step only the group with the same number as the task's
};

// The steps of an op. Workers take the tasks one by one, in the order of the steps; a task waits
// for its dependencies before it runs. Workers have taken these before it, so they are complete or
// running: there is no deadlock, whatever the number of threads.
//
// A worker first takes the tasks of its own share of a step, then those of the other shares. A
// share is the same range of tasks in every call, whose data may still be in the worker's cache.
class alignas(64) Steps {
 public:
  using Run = std::function<void(int64_t task, float* workspace)>;

  // Adds tasks [0, tasks) in groups of `group` consecutive tasks and returns the step's number. The
  // steps that it needs must be added before it.
  int add(int64_t tasks, int64_t group, const Dependencies& needs, Run run) {
    const int64_t groups = (tasks + group - 1) / group;
    steps_.push_back(
        {tasks, group, needs, std::move(run), std::make_unique<Counter[]>(groups + 1)});
    const int step = static_cast<int>(steps_.size()) - 1;
    order_.push_back({step, 0, tasks});
    return step;
  }

  // Interleaves the groups of the last step with those of an earlier one, `lag` groups later, so
  // that their inputs are in the cache. No step in between may depend on the first.
  void interleave(int first, int64_t lag) {
    const int second = static_cast<int>(steps_.size()) - 1;
    const auto has_step = [&](const TaskRange& range) {
      return range.step == first || range.step == second;
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

  // Divides the tasks among `workers` workers. Called once, before work().
  void assign_shares(int64_t workers) {
    workers_ = workers;
    int64_t shares = 0;
    for (TaskRange& range : order_) {
      range.first_share = shares;
      shares += shares_of(range);
    }
    shares_ = std::make_unique<Counter[]>(shares);
  }

  // Runs one worker; returns when no task is left to take.
  void work(int64_t worker, float* workspace) {
    for (const TaskRange& range : order_) {
      const int64_t shares = shares_of(range);
      for (int64_t i = 0; i < shares; ++i) {
        const int64_t owner = (worker + i) % shares;
        const int64_t first = range.tasks * owner / shares;
        const int64_t count = range.tasks * (owner + 1) / shares - first;
        std::atomic<int64_t>& taken = shares_[range.first_share + owner].tasks;
        while (taken.load(std::memory_order_relaxed) < count) {
          const int64_t task = taken.fetch_add(1, std::memory_order_relaxed);
          if (task < count) {
            run(steps_[range.step], range.first_task + first + task, workspace);
          }
        }
      }
    }
  }

 private:
  struct alignas(64) Counter {
    std::atomic<int64_t> tasks{0};
  };
  struct Step {
    int64_t tasks, group;
    Dependencies needs;
    Run run;
    std::unique_ptr<Counter[]> done;  // complete tasks of the step, then of each group
  };
  struct TaskRange {
    int step;
    int64_t first_task, tasks;
    int64_t first_share = 0;
  };

  int64_t shares_of(const TaskRange& range) const { return std::min(workers_, range.tasks); }

  int64_t groups_of(int step) const {
    return (steps_[step].tasks + steps_[step].group - 1) / steps_[step].group;
  }

  TaskRange group_of(int step, int64_t group) const {
    const Step& s = steps_[step];
    return {step, group * s.group, std::min(s.group, s.tasks - group * s.group)};
  }

  void run(const Step& step, int64_t task, float* workspace) {
    const int64_t group = task / step.group;
    for (const int needed : {step.needs.step, step.needs.other_step}) {
      if (needed >= 0) {
        await(steps_[needed].done[0].tasks, steps_[needed].tasks);
      }
    }
    if (step.needs.same_group >= 0) {
      const TaskRange needed = group_of(step.needs.same_group, group);
      await(steps_[needed.step].done[1 + group].tasks, needed.tasks);
    }
    step.run(task, workspace);
    // Sequentially consistent, as in await: this worker sees the sleeper, or the sleeper the task.
    step.done[1 + group].tasks.fetch_add(1);
    step.done[0].tasks.fetch_add(1);
    if (sleepers_.load() > 0) {
      const std::lock_guard<std::mutex> lock(mutex_);
      completed_.notify_all();
    }
  }

  // Waits until `tasks` are done: spins for about the time of a task, then sleeps. Where other
  // processes run, the worker that has the task may be waiting for this core.
  void await(const std::atomic<int64_t>& done, int64_t tasks) {
    constexpr int kSpins = 1 << 14;
    for (int spins = 0; spins < kSpins; ++spins) {
      if (done.load(std::memory_order_acquire) >= tasks) {
        return;
      }
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    completed_.wait(lock, [&] { return done.load() >= tasks; });
    sleepers_.fetch_sub(1);
  }

  std::vector<Step> steps_;
  std::vector<TaskRange> order_;
  int64_t workers_ = 0;
  std::unique_ptr<Counter[]> shares_;  // tasks taken of each
  alignas(64) std::mutex mutex_;
  std::condition_variable completed_;
  std::atomic<int> sleepers_{0};
};

}  // namespace fastattn
