"""Calls on the CPU for which the memory is not enough: they raise PyTorch's own exception, and free
what they had allocated and the arguments that they hold.
"""

import functools
import json
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_library import needs_library
from torch import Tensor

import fastattn
from fastattn import functional

Call = Callable[[], Any]
MB = 1 << 20
ROWS = 1 << 16  # whose results take 8 MB or more: larger than what malloc keeps
STEP = 2 * MB


def _large(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(size, dtype=dtype, requires_grad=dtype.is_floating_point)


def _attention(M: int, N: int, dtype: torch.dtype = torch.float32, **options: Any) -> Call:
    """Copied arguments: q, k and v have no contiguous rows."""
    q, k, v = (_large(2, 1, 16, n, dtype=dtype).transpose(2, 3) for n in (M, N, N))
    return functools.partial(fastattn.attention, q, k, v, **options)


def _with_weights(average: bool, dtype: torch.dtype) -> Call:
    q, k = _large(1, 2, ROWS // 4, 16, dtype=dtype), _large(1, 2, 128, 16, dtype=dtype)
    call = functools.partial(fastattn.attention_with_weights, q, k, k)
    return functools.partial(call, average=average)


def _varlen() -> Call:
    q, k = _large(ROWS, 2, 16), _large(128, 2, 16)
    offsets_q, offsets_k = (torch.tensor([0, n], dtype=torch.int32) for n in (ROWS, 128))
    return functools.partial(
        fastattn.attention_varlen, q, k, k, offsets_q, offsets_k, ROWS, 128, window=(4, 4)
    )


def _paged() -> Call:
    q, pages = torch.ones(1, 2, ROWS, 16), torch.ones(4, 2, 16, 16)
    table = torch.arange(4, dtype=torch.int32).reshape(1, 4)
    return functools.partial(fastattn.attention, q, pages, pages, block_table=table)


def _lengths() -> Call:
    """Copied arguments that other arguments follow."""
    key_lengths = torch.full((ROWS, 2), 3).t()
    return _attention(ROWS, 4, key_lengths=key_lengths, sinks=torch.zeros(1))


def _rows(op: str, dtype: torch.dtype = torch.float32) -> Call:
    x = _large(64, ROWS // 2, dtype=dtype).t()
    weight, wide = _large(64, dtype=dtype), _large(64, 64, dtype=dtype)
    arguments = {
        "layer_norm": (x, weight, weight), "rms_norm": (x, weight), "linear": (x, wide, weight),
        "add_layer_norm": (x, x, weight, weight), "ffn": (x, wide, weight, wide, weight),
        "topk_logsumexp": (x, 0, 4),
    }  # fmt: skip
    return functools.partial(getattr(functional, op), *arguments[op])


FP64, BF16 = torch.float64, torch.bfloat16
CASES: dict[str, Callable[[], Call]] = {
    "attention": lambda: _attention(ROWS, 16),
    "attention, keys": lambda: _attention(4, ROWS),
    "attention, bf16": lambda: _attention(ROWS, 16, BF16),
    "attention, lengths": _lengths,
    "attention, mask": lambda: _attention(
        ROWS // 2, 64, mask=_large(2, 1, 64, ROWS // 2).transpose(2, 3)
    ),
    "attention, fp64": lambda: _attention(ROWS, 16, FP64),
    "attention_with_weights": lambda: _with_weights(False, torch.float32),
    "attention_with_weights, mean": lambda: _with_weights(True, BF16),
    "attention_varlen": _varlen,
    "attention_paged": _paged,
    **{op: functools.partial(_rows, op) for op in ("layer_norm", "rms_norm", "add_layer_norm")},
    **{op: functools.partial(_rows, op) for op in ("ffn", "linear", "topk_logsumexp")},
    "layer_norm, fp64": lambda: _rows("layer_norm", FP64),
    "linear, fp64": lambda: _rows("linear", FP64),
}


QUICK = ("attention", "linear, fp64")
NO_BACKWARD = ("attention_paged", "topk_logsumexp")
# What PyTorch's operators raise.
TEXT = (
    r"\[enforce fail at alloc_cpu\.cpp:\d+\] err == 0\. DefaultCPUAllocator: can't allocate "
    r"memory: you tried to allocate \d+ bytes\. Error code 12 \(Cannot allocate memory\)"
)


# -- in a process of its own -----------------------------------------------------------------------
def _in_use() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _error_of(call: Call, memory: int) -> tuple[str, ...] | None:
    """(type, text, further arguments) of what the call raises with so many bytes of memory."""
    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_in_use() + memory, unlimited[1]))
    try:
        call()
    except Exception as error:
        resource.setrlimit(resource.RLIMIT_AS, unlimited)
        return (type(error).__qualname__, *map(str, error.args))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, unlimited)
    return None


def _errors_of(call: Any, backward: bool) -> list[tuple[str, ...]]:
    """(what is wrong, *error) with more and more memory, until the call succeeds."""
    tensors = [x for x in (*call.args, *call.keywords.values()) if isinstance(x, Tensor)]
    wanted = [x for x in tensors if x.requires_grad]

    def error_of(memory: int) -> tuple[str, ...] | None:
        if not backward:
            return _error_of(call, memory)
        results = call()
        results = results if isinstance(results, tuple) else (results,)
        douts = [torch.ones_like(x) for x in results]
        grad = functools.partial(torch.autograd.grad, results, wanted, douts, allow_unused=True)
        return _error_of(grad, memory)

    def held() -> list[int]:
        return [x._use_count() for x in tensors]  # type: ignore[attr-defined]

    found = []
    assert error_of(1 << 36) is None  # imports what it needs
    for memory in range(MB, 256 * MB, STEP):
        error_of(memory)  # PyTorch and Python keep memory that they need again
        before, in_use = held(), _in_use()
        error = error_of(memory)
        if error is None:
            return found
        kept = held() != before or _in_use() > in_use + STEP
        found.append(("something is not freed" if kept else "", *error))
    raise AssertionError("the call takes more than 256 MB")


def _largest_batch(module: torch.nn.Module) -> int:
    """As accelerate's find_executable_batch_size searches for it: half as many sequences after an
    exception that it knows. 0 after another.
    """
    batch = 64
    while batch > 0:
        x = torch.ones(batch, 256, 64)
        error = _error_of(lambda x=x: module(x, x, x)[0].sum().backward(), 24 * MB)  # type: ignore[misc]
        if error is None:
            return batch
        kind, *texts = error
        is_known = kind == "RuntimeError" and len(texts) == 1
        is_known &= "DefaultCPUAllocator: can't allocate memory" in texts[0]
        batch = batch // 2 if is_known else 0
    return batch


def _main(names: Sequence[str]) -> None:
    modules = (torch.nn.MultiheadAttention, fastattn.nn.MultiheadAttention)
    batches = [_largest_batch(module(64, 4, batch_first=True)) for module in modules]
    errors = {
        name + ", backward" * backward: _errors_of(CASES[name](), backward)
        for name in names
        for backward in (False, True)
        if name not in NO_BACKWARD or not backward
    }
    print(json.dumps({"batches": batches, "errors": errors}))


# -- tests -----------------------------------------------------------------------------------------
@functools.cache
def _results(quick: bool) -> Any:
    """The output of `_main` in a process that returns freed memory to the system at once."""
    names = [name for name in CASES if (name in QUICK) == quick]
    variables = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    variables |= {"MALLOC_TOP_PAD_": "0", "PYTHONMALLOC": "malloc", "MALLOC_ARENA_MAX": "1"}
    variables |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, __file__, *names]
    run = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout, run.stderr
    return json.loads(run.stdout)


@needs_library
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES]
)
def test_exceptions_are_those_of_pytorch(name: str, backward: bool) -> None:
    if backward and name in NO_BACKWARD:
        pytest.skip("has no backward")
    errors = _results(name in QUICK)["errors"][name + ", backward" * backward]
    assert errors
    for wrong, kind, *texts in errors:
        assert not wrong
        assert kind == "RuntimeError" and len(texts) == 1
        assert re.fullmatch(TEXT, texts[0]), texts


@needs_library
def test_search_for_the_largest_batch_steps_down() -> None:
    torch_batch, batch = _results(True)["batches"]
    assert 0 < torch_batch <= batch < 64


if __name__ == "__main__":
    threading.stack_size(64 * MB)  # a stack that grows needs memory, too
    threading.Thread(target=_main, args=(sys.argv[1:],)).start()
