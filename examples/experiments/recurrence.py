"""Linear attention decoded as an RNN, beside softmax attention with a key/value cache."""

import copy
import functools
import math
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

import fastattn
from examples import common
from examples.experiments.experiment import Check, Experiment, Settings, Values, plain
from examples.linear_attention import linear_attention, linear_step
from fastattn import nn as fnn
from fastattn.seq2seq.progress import Progress

HEADS, HEAD_DIM = 8, 64
PREFIXES = (16, 64, 256, 1024, 4096, 16384)


def heads_of(module: fnn.MultiheadAttention, x: Tensor) -> tuple[Tensor, ...]:
    """q, k and v `[B, H, S, D]` of x `[B, S, E]`."""
    projected = F.linear(x, module.in_proj_weight, module.in_proj_bias)
    return projected.unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4).unbind()


def joined(module: fnn.MultiheadAttention, heads: Tensor) -> Tensor:
    return module.out_proj(heads.transpose(1, 2).flatten(-2))  # type: ignore[union-attr]


def recurrent_step(module: fnn.MultiheadAttention, x: Tensor, sums: Tensor) -> Tensor:
    """Linear self-attention of the positions after a prefix with these sums."""
    return joined(module, linear_step(*heads_of(module, x), sums))


def cached_step(module: fnn.MultiheadAttention, x: Tensor, cache: Tensor, length: int) -> Tensor:
    """Softmax self-attention of the position after a prefix of `length`; cache
    `[2, 1, H, capacity, D]`.
    """
    q, k, v = heads_of(module, x)
    cache[0, :, :, length], cache[1, :, :, length] = k[:, :, 0], v[:, :, 0]
    keys, values = cache[:, :, :, : length + 1]
    return joined(module, fastattn.attention(q, keys, values))


def milliseconds(calls: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Processor time of each call on one thread, the least of the means; calls take turns, so that
    whatever else the machine does falls on all of them.
    """
    best = [math.inf] * len(calls)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with Progress("recurrence", rounds) as bar:
            for count in range(1, rounds + 1):
                for i, call in enumerate(calls):
                    call()  # what it reads comes into the caches of the processor
                    begin = time.process_time()
                    for _ in range(10):
                        call()
                    best[i] = min(best[i], 100.0 * (time.process_time() - begin))
                bar.update(count)
    finally:
        torch.set_num_threads(threads)
    return best


@torch.no_grad()
def measure(settings: Settings) -> Values:
    torch.manual_seed(settings.seed)
    size = HEADS * HEAD_DIM
    module = fnn.MultiheadAttention(size, HEADS, batch_first=True).eval()
    shape = HEADS, HEAD_DIM, HEAD_DIM + 1
    x = torch.randn(2, settings.choose(600, 70), size)
    sums = torch.zeros(2, *shape)
    steps = torch.cat([recurrent_step(module, row, sums) for row in x.split(1, dim=1)], dim=1)
    whole = joined(module, linear_attention(*heads_of(module, x)))
    exact = copy.deepcopy(module).double()
    expected = joined(exact, linear_attention(*heads_of(exact, x.double())))
    error = {
        "steps": (steps - expected).abs().max().item() / expected.abs().max().item(),
        "parallel": (whole - expected).abs().max().item() / expected.abs().max().item(),
    }
    prefixes = PREFIXES[: settings.choose(len(PREFIXES), 3)]
    values: Values = {"error": error, "prefix": list(prefixes), "bytes": [], "bytes softmax": []}
    token, calls, cached_calls = torch.randn(1, 1, size), [], []
    for prefix in prefixes:
        sums = torch.zeros(1, *shape)
        recurrent_step(module, torch.randn(1, prefix, size), sums)
        cache = torch.randn(2, 1, HEADS, prefix + 1, HEAD_DIM)
        values["bytes"].append(sums.nbytes)
        values["bytes softmax"].append(cache.nbytes)
        calls.append(functools.partial(recurrent_step, module, token, sums))
        cached_calls.append(functools.partial(cached_step, module, token, cache, prefix))
    times = milliseconds([*calls, *cached_calls], settings.choose(20, 2))
    values["ms"], values["ms softmax"] = times[: len(calls)], times[len(calls) :]
    return values


def check(values: Values) -> list[Check]:
    error, prefixes = values["error"], values["prefix"]
    states, caches = values["bytes"], values["bytes softmax"]
    grows = [values[name][-1] / values[name][0] for name in ("ms", "ms softmax")]
    per_position = 2 * HEADS * HEAD_DIM * 4
    katharopoulos = "Katharopoulos et al. 2020, section 3.4"
    return [
        Check(
            "step by step it computes what it computes in parallel, up to rounding (fp32, < 1e-5)",
            katharopoulos,
            f"steps {error['steps']:.0e}, parallel {error['parallel']:.0e} from fp64",
            max(error.values()) < 1e-5,
        ),
        Check(
            f"the state has {HEADS} × {HEAD_DIM} × {HEAD_DIM + 1} numbers whatever the prefix; the "
            f"cache grows by {per_position:,} bytes a position (exactly)",
            katharopoulos,
            f"{states[0]:,} to {states[-1]:,} bytes; {caches[0]:,} to {caches[-1]:,}",
            set(states) == {4 * HEADS * HEAD_DIM * (HEAD_DIM + 1)}
            and caches == [per_position * (prefix + 1) for prefix in prefixes],
        ),
        Check(
            f"from a prefix of {prefixes[0]} to one of {prefixes[-1]:,} positions the time of a "
            "step stays (at most 1.5 times), with a cache it grows (at least 10 times)",
            katharopoulos,
            f"{grows[0]:.1f} times, {grows[1]:.0f} times",
            grows[0] <= 1.5 and grows[1] >= 10.0,
        ),
    ]


def draw(values: Values) -> Figure:
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, unit, factor in ((left, "ms", 1.0), (right, "bytes", 2.0**-20)):
        for name, key, colour in (
            ("linear attention, state", unit, common.COLOURS[0]),
            ("softmax attention, key/value cache", f"{unit} softmax", common.COLOURS[1]),
        ):
            axes.loglog(values["prefix"], [factor * value for value in values[key]], "o-",
                        color=colour, label=name)  # fmt: skip
        axes.set(xlabel="positions before the step")
        axes.legend(frameon=False)
    left.set(ylabel="ms of one thread", title="time of a step")
    right.set(ylabel="MiB", title="memory of one layer and sequence")
    return plain(figure)


EXPERIMENT = Experiment("Linear attention as an RNN", measure, check, draw)
