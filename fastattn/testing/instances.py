"""Runs the smallest case of every kernel instance, each in a process that is killed if it hangs.

    python -m fastattn.testing.instances [--device cuda] [--json FILE.jsonl [--resume]]

Run this on a new GPU before the equivalence suite. An instance is a kernel as it is compiled: of
the CUDA libraries each row of their tables, of Triton each tiling of the architecture, of the CPU
library each instruction set. A hang, a crash or a wrong result is reported by the instance's name,
and the next one runs. Cases of a backward take the results of the reference's forward. Exit code 1
if any fails, or if none passes.
"""

import argparse
import contextlib
import dataclasses
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastattn.ops import _env, _native
from fastattn.ops._op import OPS
from fastattn.ops.attention.spec import SCORES
from fastattn.ops.attention.spec_inputs import make_inputs as attention_inputs
from fastattn.ops.attention.spec_varlen import make_inputs as varlen_inputs
from fastattn.ops.ffn.spec import make_inputs as ffn_inputs
from fastattn.ops.layer_norm.spec import make_inputs as norm_inputs
from fastattn.ops.linear.spec import make_inputs as linear_inputs
from fastattn.testing import check, lines
from fastattn.testing.isolation import Lost, run_isolated
from fastattn.testing.oracle import Oracle
from fastattn.testing.spec import Inputs, Sample, all_specs

# Seconds after which a case counts as hanging. The first is for compiled libraries: kernels take
# microseconds, the rest is the start of CUDA. The second is for other backends, which may compile.
_LIMIT_S, _COMPILING_LIMIT_S = 20.0, 120.0
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_NORMS = ("layer_norm", "add_layer_norm", "rms_norm")


def make_attention(
    generator: torch.Generator, dtype: torch.dtype, page: int | None = None, **options: Any
) -> Inputs:
    """page: number of keys and values of a page."""
    inputs = attention_inputs(generator, dtype, **options)
    return inputs if page is None else inputs | {"page": page}


_MAKE: dict[str, Callable[..., Inputs]] = {
    "attention": make_attention,
    "attention_varlen": varlen_inputs,
    "ffn": ffn_inputs,
    "linear": linear_inputs,
}
# Two tiles of rows, or two warpgroups, and two blocks of keys; rows of an additive mask are
# multiples of 16 bytes, as TMA reads them.
_SIZES = {"B": 1, "H": 2, "M": 70, "N": 136}
_PACKED = {"queries": [65, 0, 7], "keys": [70, 3, 136]}
# Enough keys for split-KV; sequences of so many and so different lengths that they are sorted.
_DECODING = {"B": 1, "H": 2, "M": 1, "N": 2100}
_UNEQUAL = {"queries": [1100, *[33] * 70], "keys": None}
# More tiles of 128 x 128 than two for each multiprocessor.
_MANY_TILES = {"rows": (4096,), "D": 64, "hidden": 2048}
_PAGES: dict[str, Any] = {"page": 16, "N": 144, "causal": "bottom_right"}
# The variants of the Hopper kernels (kFull ... in csrc/attention/attention.h) as options.
_VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "bounded": {"causal": "bottom_right"},
    "dropout": {"dropout_p": 0.2},
    "mask": {"mask": "bool BHMN"},
    "bias": {"mask": "float HMN"},
    "mask_dropout": {"mask": "bool BHMN", "dropout_p": 0.2},
    "bias_dropout": {"mask": "float HMN", "dropout_p": 0.2},
    "sinks": {"causal": "bottom_right", "sinks": 0.0},
    "paged": _PAGES | {"sinks": 0.0},
    "scores": SCORES | {"causal": "bottom_right"},
    "scores_dropout": SCORES | {"dropout_p": 0.2},
    "scores_dense": SCORES | {"mask": "float HMN", "dropout_p": 0.2},
    "paged_scores": _PAGES | SCORES,
}
# The backward of the first two is that of "bounded", of the third that of "scores"; there is none
# for pages.
_WITHOUT_BACKWARD = ("full", "sinks", "scores_dropout", "paged", "paged_scores")
_SIMPLE_VARIANTS = ("full", "bounded", "dropout", "mask", "bias")


@dataclass(frozen=True)
class Instance:
    """options: of the op's inputs. instruction_set: of the CPU library."""

    name: str
    op: str
    direction: str
    backend: str
    dtype: str
    options: dict[str, Any]
    instruction_set: str = ""


@dataclass(frozen=True)
class Row:
    """status: ok, FAIL, refused with a reason, or skipped because there was no time. error,
    allowed: of the result that is worst. seconds: with the compilation. applies_to: a digest of the
    kernels, versions and architecture.
    """

    instance: str
    backend: str
    device: str
    status: str
    message: str = ""
    error: float = 0.0
    allowed: float = 0.0
    seconds: float = 0.0
    applies_to: str = ""


# -- the instances --------------------------------------------------------------------------------
def _attention(
    backend: str, dtype: str, direction: str, dim: int, variant: str, **sizes: Any
) -> Instance:
    name = f"attention_{direction}_{backend}_{dtype}_d{dim}_{variant}"
    options = {**_SIZES, "D": dim, **_VARIANTS.get(variant, {}), **sizes}
    return Instance(name, "attention", direction, backend, dtype, options)


def _packed(backend: str, dtype: str, direction: str, kind: str, **sizes: Any) -> Instance:
    name = f"attention_varlen_{direction}_{backend}_{dtype}_d64_{kind}"
    options = {**_PACKED, "D": 64, **sizes}
    return Instance(name, "attention_varlen", direction, backend, dtype, options)


def _hopper() -> Iterator[Instance]:
    """The rows of INSTANCES in setup.py, then the kernels that serve some calls only; the products
    of the feed-forward network by the calls that launch them.
    """
    attention, packed = partial(_attention, "sm90"), partial(_packed, "sm90")
    for variant in _VARIANTS:
        for direction in ("fwd", "bwd"):
            if direction == "bwd" and variant in _WITHOUT_BACKWARD:
                continue
            for dim in (128, 64, 256, 192):
                for dtype in ("bf16", "fp16"):
                    yield attention(dtype, direction, dim, variant)
    for dtype in ("bf16", "fp16"):
        yield attention(dtype, "fwd", 64, "splits", **_DECODING)
        for direction in ("fwd", "bwd"):
            yield attention(dtype, direction, 64, "scores_mask", mask="bool BHMN", **SCORES)
        yield packed(dtype, "fwd", "packed")
        yield packed(dtype, "bwd", "packed")
        yield packed(dtype, "fwd", "sorted", **_UNEQUAL)
    for direction in ("fwd", "bwd"):  # each launches several products
        for dtype in ("bf16", "fp16"):
            for activation in ("gelu", "swiglu"):
                yield _ffn("sm90", dtype, direction, activation)
        yield _ffn("sm90", "bf16", direction, "gelu", "_tiles", **_MANY_TILES)


def _triton() -> Iterator[Instance]:
    attention, packed = partial(_attention, "triton"), partial(_packed, "triton")
    for variant in _SIMPLE_VARIANTS:
        for direction in ("fwd", "bwd"):
            for dtype in ("bf16", "fp32"):
                for dim in (128, 64, 256):
                    yield attention(dtype, direction, dim, variant)
    for direction in ("fwd", "bwd"):
        for dim in (64, 128, 256):
            yield attention("fp16", direction, dim, "full")
        for dim in (80, 160):  # two tiles of columns
            yield attention("bf16", direction, dim, "full")
        yield packed("bf16", direction, "packed")
    for dim in (64, 128, 256):
        yield attention("bf16", "fwd", dim, "decoding", B=1, H=4, K=2, M=1, N=136)
        for page, N in ((16, 144), (256, 512)):  # pages smaller than a tile, and larger
            for M in (1, 70):
                name, sizes = f"pages_of_{page}_{M}", {"H": 4, "K": 2, "M": M, "N": N}
                yield attention("bf16", "fwd", dim, name, page=page, key_lengths=[N - 7], **sizes)
    for direction in ("fwd", "bwd"):
        for dtype in ("bf16", "fp32"):
            for op in _NORMS:
                for width in (512, 4096, 20_000):  # several rows a tile, one, a part of one
                    yield _rows("triton", op, dtype, direction, width)
            for activation in ("relu", "gelu", "swiglu"):
                yield _ffn("triton", dtype, direction, activation)
    for activation in ("relu", "gelu", "swiglu"):  # the first product in Triton
        yield _ffn("triton", "bf16", "fwd", activation, "_tiles", **_MANY_TILES)


def _cuda() -> Iterator[Instance]:
    """The rows of INSTANCES in setup.py, each with all of its kernels: those of short rows, of
    longer ones, of several parts, and of single elements.
    """
    for direction in ("fwd", "bwd"):
        for dtype in _DTYPES:
            for op in _NORMS:
                for width in (200, 4096, 20_000, 509):
                    yield _rows("cuda", op, dtype, direction, width)
                    if dtype != "fp32":
                        case = _rows("cuda", op, dtype, direction, width)
                        options = {**case.options, "wide_parameters": True}
                        name = f"{case.name}_fp32_parameters"
                        yield dataclasses.replace(case, name=name, options=options)


def _cpu() -> Iterator[Instance]:
    if _native.unavailable("cpu"):
        return
    for instruction_set in _native.usable_cpu_isas():
        for direction in ("fwd", "bwd"):
            for dtype in _DTYPES:
                here = [
                    *[_attention("cpu", dtype, direction, 64, v) for v in _SIMPLE_VARIANTS],
                    _packed("cpu", dtype, direction, "packed"),
                    *[_rows("cpu", op, dtype, direction, 512) for op in _NORMS],
                    _ffn("cpu", dtype, direction, "gelu"),
                    Instance(f"linear_{direction}_cpu_{dtype}", "linear", direction, "cpu", dtype,
                             {}),
                ]  # fmt: skip
                for each in here:
                    name = f"{each.name}_{instruction_set}"
                    yield dataclasses.replace(each, name=name, instruction_set=instruction_set)


def _rows(backend: str, op: str, dtype: str, direction: str, width: int) -> Instance:
    name = f"{op}_{direction}_{backend}_{dtype}_{width}"
    return Instance(name, op, direction, backend, dtype, {"op": op, "shape": (3, width)})


def _ffn(
    backend: str, dtype: str, direction: str, activation: str, kind: str = "", **sizes: Any
) -> Instance:
    name = f"ffn_{direction}_{backend}_{dtype}_{activation}{kind}"
    options = {"rows": (70,), "D": 128, "hidden": 192, "activation": activation, "dropout_p": 0.2}
    options |= sizes
    return Instance(name, "ffn", direction, backend, dtype, options)


def instances() -> list[Instance]:
    """Instances of every backend, whether it can run here or not; those of CUDA libraries first."""
    return [*_hopper(), *_cuda(), *_cpu(), *_triton()]


# -- one case -------------------------------------------------------------------------------------
class _ForwardByReference(TorchDispatchMode):
    """Inside, the reference computes the forward of a call that asks for another backend. The
    backward still asks for that one.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "fastattn" and func._overloadname == "backend":
            op = OPS[func._schema.name.removeprefix("fastattn::")]
            if not op.is_derivative:
                return func(*args[: len(op.arguments)], "reference")
        return func(*args, **(kwargs or {}))


def run(case: tuple[Instance, str]) -> Row:
    """Checks the case of an instance on a device, as `fastattn check` checks a sample."""
    instance, device = case
    started = time.monotonic()
    spec = all_specs()[instance.op]
    if instance.direction == "bwd":  # the reference's bits depend on the whole batch on a GPU
        spec = dataclasses.replace(spec, entries=None)
    make = _MAKE.get(instance.op, norm_inputs)
    forward = instance.direction == "fwd"
    sample = Sample(
        instance.name,
        "the smallest case of the instance",
        partial(make, **instance.options),
        () if forward else spec.samples[0].gradients,
    )
    if instance.instruction_set:
        _native.use_cpu_isa(instance.instruction_set)
    oracle = Oracle(spec, sample, _DTYPES[instance.dtype])
    with contextlib.nullcontext() if forward else _ForwardByReference():
        rows = check.check_sample(oracle, instance.backend, torch.device(device))
    if not forward:
        rows = [row for row in rows if row.result not in spec.results]
    worst = max(rows, key=lambda row: row.error / row.allowed if row.allowed else 0.0)
    status = next((s for s in ("FAIL", "refused") if any(r.status == s for r in rows)), "ok")
    reasons = [f"{r.result} {r.kind}: {r.message}" for r in rows if r.status == status]
    return Row(
        instance.name,
        instance.backend,
        device,
        status,
        "; ".join(reasons)[:500] if status != "ok" else "",
        worst.error,
        worst.allowed,
        round(time.monotonic() - started, 2),
    )


# -- the command ----------------------------------------------------------------------------------
def unavailable(case: Instance, device: torch.device) -> str | None:
    """Why an instance cannot run on a device, or None."""
    if why := _env.why_not_on(case.backend, device):
        return why
    if case.backend != "triton":
        return _native.unavailable(case.backend)
    if case.dtype == "bf16" and device.type == "cpu":
        return "computes bf16 as integers in Triton's interpreter"
    return None


def _results(
    cases: Sequence[Instance], device: torch.device, jobs: int, seconds: float | None
) -> Iterator[tuple[Instance, Row | Lost]]:
    """One process at a time runs kernels of the Hopper library: if one hung, others on the same GPU
    would exceed their limit. They get at most half of the time.
    """
    end = None if seconds is None else time.monotonic() + seconds
    alone = [case for case in cases if case.backend == "sm90"]
    together = [case for case in cases if case.backend != "sm90"]
    for group, workers, limit, share in (
        (alone, 1, _LIMIT_S, 0.5),
        (together, jobs, _COMPILING_LIMIT_S, 1.0),
    ):
        left = None if end is None else max(0.0, share * (end - time.monotonic()))
        arguments = [(case, device.type) for case in group]
        for index, result in run_isolated(
            run, arguments, jobs=min(workers, max(1, len(group))), seconds=left, limit_s=limit
        ):
            yield group[index], result


def regular_expression(text: str) -> str:
    """A type of arguments for argparse."""
    try:
        re.compile(text)
    except re.error as error:
        message = f"must be a regular expression, got {text!r} ({error})"
        raise argparse.ArgumentTypeError(message) from None
    return text


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fastattn.testing.instances", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default=_env.default_device().type)
    add(
        "--match", type=regular_expression, metavar="REGEX", default="",
        help="only instances whose names match",
    )  # fmt: skip
    add("--json", metavar="FILE", help="write a JSON row a line, as they come")
    add(
        "--resume", action="store_true", help="leave out what FILE has rows of, of the same kernels"
    )
    add("--seconds", type=float, help="start none after this time")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes that compile")
    add("--list", action="store_true", help="print the names and exit")
    options = parser.parse_args(arguments)
    cases = [case for case in instances() if re.search(options.match, case.name)]
    if not cases:
        parser.error(f"--match must match some instance, got {options.match!r}")
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    if options.device == "cuda" and _env.default_device().type != "cuda":
        parser.error("--device cuda needs a GPU that torch can use")
    device = torch.device(options.device)
    file = Path(options.json) if options.json else None
    refusals = {case.name: why for case in cases if (why := unavailable(case, device))}
    digests = {
        backend: lines.applies_to(device, backend) for backend in {case.backend for case in cases}
    }
    found: dict[str, Row] = {}
    if file and options.resume:
        try:
            before = list(lines.read_as(Row, file))
        except ValueError as error:
            parser.error(f"--resume: {error}")
        for row in before:
            if row.applies_to == digests.get(row.backend) and row.status in ("ok", "FAIL"):
                found[row.instance] = row
    print(f"{_env.device_name(device)}: {len(cases)} instances")
    if count := sum(case.name in found for case in cases):
        print(f"{count} of them ran before: {file}")
    for (backend, why), count in Counter(
        (case.backend, refusals[case.name]) for case in cases if case.name in refusals
    ).items():
        print(f"refused: {count} instances: backend {backend} {why}")
        if file:
            row = Row("all", backend, device.type, "refused", why, applies_to=digests[backend])
            lines.append(file, [dataclasses.asdict(row)])
    waiting = [c for c in cases if c.name not in found and c.name not in refusals]
    for case, result in _results(waiting, device, options.jobs, options.seconds):
        if isinstance(result, Lost):
            status = "FAIL" if result.reached else "skipped"
            result = Row(case.name, case.backend, device.type, status, result.why)
        row = found[case.name] = dataclasses.replace(result, applies_to=digests[case.backend])
        print(
            f"{row.status:8}{row.instance} {row.seconds:.1f} s {row.message}".rstrip(), flush=True
        )
        if file:
            lines.append(file, [dataclasses.asdict(row)])
    return _report([case for case in cases if case.name not in refusals], found)


def _report(cases: Sequence[Instance], found: dict[str, Row]) -> int:
    """Prints the failures again and the counts; returns the exit code."""
    rows = [found[case.name] for case in cases if case.name in found]
    for row in rows:
        if row.status == "FAIL":
            print(f"FAIL {row.instance}: {row.message}")
    for backend in dict.fromkeys(case.backend for case in cases):
        count = Counter(row.status for row in rows if row.backend == backend)
        print(
            f"{backend}: {count['ok']} passed, {count['FAIL']} failed, {count['refused']} refused"
            + (f", {count['skipped']} were not reached" if count["skipped"] else "")
        )
    failed = any(row.status == "FAIL" for row in rows)
    return 1 if failed or not any(row.status == "ok" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
