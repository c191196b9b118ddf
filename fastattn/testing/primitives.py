"""Runs every hardware primitive of the Hopper kernels alone, on small inputs with known results.

    python -m fastattn.testing.primitives [--json FILE.jsonl [--resume]]

The first thing to run on a new GPU: where a kernel fails or hangs, this names the instruction. Each
primitive is a kernel of csrc/sm90/primitives; it runs in a process with a time limit, so that one
that hangs does not stop the others. Exit code 1 if any fails or none passes, 3 if none can run.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fastattn.ops import _env, _native
from fastattn.testing import lines
from fastattn.testing.isolation import Lost, run_isolated

# Seconds after which a primitive counts as hanging. Each takes microseconds, the first one also the
# start of CUDA and the loading of the library.
_LIMIT_S = 60.0
_ROWS, _DEPTH = 64, 128  # of A in a product

# Names of operands as in the kernels: A from shared memory with k or m contiguous or from
# registers, B with k or n contiguous; and the columns of the instruction.
_PRODUCTS = {
    ("SharedK", "K"): (32, 64, 80, 112, 128, 256),
    ("SharedK", "N"): (64, 128, 256),
    ("SharedM", "K"): (64, 80, 96),
    ("SharedM", "N"): (64, 128, 256),
    ("Registers", "N"): (64, 96, 128, 192, 256),
}


@dataclass(frozen=True)
class Primitive:
    """Inputs, the result's initial and final values, all on the CPU. tolerance: the difference that
    is allowed where bits need not be equal.
    """

    a: Tensor
    b: Tensor
    out: Tensor
    expected: Tensor
    tolerance: Tensor | None = None


def _product(N: int, dtype: torch.dtype) -> Primitive:
    generator = torch.Generator().manual_seed(N)
    # Sums of products of these are exact in fp32.
    a = torch.randint(-4, 5, (_ROWS, _DEPTH), generator=generator).to(dtype)
    b = torch.randint(-4, 5, (_DEPTH, N), generator=generator).to(dtype)
    return Primitive(a, b, torch.full((_ROWS, N), torch.nan), a.float() @ b.float())


def _store_matrix(transposes: bool) -> Primitive:
    registers = torch.arange(32 * 8).to(torch.int16).reshape(8, 4, 4, 2)  # [row, pair, matrix, 2]
    rows = registers.permute(2, 0, 1, 3).reshape(4, 8, 8)  # [matrix, row, column]
    rows = (rows.mT if transposes else rows).contiguous()
    return Primitive(registers, _NOTHING, torch.zeros_like(rows), rows)


def _load_matrix(transposes: bool) -> Primitive:
    store = _store_matrix(transposes)
    return Primitive(store.expected, _NOTHING, torch.zeros_like(store.a), store.a)


def _tensor() -> Tensor:
    """[B, S, H, D] in bf16, every value of which is exact."""
    return (torch.arange(2 * 70 * 3 * 96) % 251).to(torch.bfloat16).reshape(2, 70, 3, 96)


def _tensor_load() -> Primitive:
    tensor = _tensor()
    expected = tensor.new_zeros(_ROWS, 128)
    expected[:30, :96] = tensor[1, 40:, 2]
    return Primitive(tensor, _NOTHING, torch.full_like(expected, torch.nan), expected)


def _tensor_store() -> Primitive:
    tile = (torch.arange(_ROWS * 128) % 241).to(torch.bfloat16).reshape(_ROWS, 128)
    out = _tensor()
    expected = out.clone()
    expected[1, 40:, 2] = tile[:30, :96]
    return Primitive(tile, _NOTHING, out, expected)


def _bulk_copies() -> Primitive:
    a, before = torch.arange(64.0), torch.arange(64.0) * 3
    out = torch.stack([torch.full_like(a, torch.nan), before])
    return Primitive(a, _NOTHING, out, torch.stack([a, before + 2 * a]))


def _filled(count: int, values: list[int]) -> Primitive:
    expected = torch.tensor(values, dtype=torch.int32)
    return Primitive(_NOTHING, _NOTHING, expected.new_full((count,), -1), expected)


def _exponentials() -> Primitive:
    a = torch.linspace(-30.0, 30.0, 128)
    a[:3] = torch.tensor([-torch.inf, 0.0, -1.0])
    b = torch.logspace(-30.0, 30.0, 128, base=2.0)
    b[:3] = torch.tensor([0.0, 1.0, torch.inf])
    expected = torch.stack([a.double().exp2(), b.double().log2(), 1.0 / b.double()]).float()
    # Relative, of the logarithm also absolute near its zero; infinities must be equal.
    tolerance = 1e-6 * expected.abs() + torch.tensor([[0.0], [1e-6], [0.0]])
    tolerance[expected.isinf()] = 0.0
    return Primitive(a, b, torch.full_like(expected, torch.nan), expected, tolerance)


def _semaphore() -> Primitive:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(48, 4, generator=generator) * 10.0 ** torch.randint(
        -4, 5, (48, 4), generator=generator
    )
    total = values[0].clone()
    for value in values[1:]:
        total += value  # rounded after every addition: another order gives other bits
    return Primitive(values, _NOTHING, torch.full((4,), torch.nan), total)


def _dependent_launch() -> Primitive:
    rows = [torch.zeros(256, dtype=torch.int32)]
    for _ in range(3):
        rows.append(2 * rows[-1].flip(0) + torch.arange(256, dtype=torch.int32))
    expected = torch.stack(rows)
    out = torch.full_like(expected, -1)
    out[0] = 0
    return Primitive(_NOTHING, _NOTHING, out, expected)


_NOTHING = torch.zeros(1)

PRIMITIVES: dict[str, Callable[[], Primitive]] = {
    "mbarrier": lambda: _filled(32, [sum(i * i for i in range(100))] * 32),
    "named barriers": lambda: _filled(32, [0, 1] * 16),
    "setmaxnreg 40 232": lambda: _filled(3, [1] * 3),
    "setmaxnreg 24 240": lambda: _filled(3, [1] * 3),
    "setmaxnreg 32 160": lambda: _filled(4, [1] * 4),
    "TMA load": _tensor_load,
    "TMA store": _tensor_store,
    "bulk copies": _bulk_copies,
    "stmatrix": lambda: _store_matrix(False),
    "stmatrix trans": lambda: _store_matrix(True),
    "ldmatrix": lambda: _load_matrix(False),
    "ldmatrix trans": lambda: _load_matrix(True),
    "ex2 lg2 rcp": _exponentials,
    "semaphore": _semaphore,
    "dependent launch": _dependent_launch,
    **{
        f"wgmma {a} {b} n{N} {name}": lambda N=N, dtype=dtype: _product(N, dtype)  # type: ignore[misc]
        for (a, b), columns in _PRODUCTS.items()
        for N in columns
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))
    },
}


def difference(primitive: Primitive, out: Tensor) -> str:
    """Where `out` differs from what is expected; empty if it does not."""
    expected, tolerance = primitive.expected, primitive.tolerance
    right = out == expected
    if tolerance is not None:
        right |= (out - expected).abs() <= tolerance
    wrong = (~right).nonzero()
    if len(wrong) == 0:
        return ""
    first = tuple(wrong[0].tolist())
    low, high = wrong.aminmax(dim=0)
    spans = " x ".join(f"{i} to {j}" for i, j in zip(low.tolist(), high.tolist(), strict=True))
    return (
        f"{len(wrong)} of {out.numel()} values differ, indices {spans}; at "
        f"{list(first)} expected {expected[first].item()}, got {out[first].item()}"
    )


@dataclass(frozen=True)
class Row:
    """status: ok, FAIL with a message, skipped because there was no time, or refused with the
    reason why none can run here. applies_to: a digest of the library, versions and architecture.
    """

    primitive: str
    status: str
    message: str = ""
    applies_to: str = ""


def run(name: str) -> Row:
    """Runs one primitive on the current CUDA device."""
    if reason := unavailable():
        return Row(name, "FAIL", reason)
    primitive = PRIMITIVES[name]()
    a, b, out = (x.cuda() for x in (primitive.a, primitive.b, primitive.out))
    state = torch.zeros(2, dtype=torch.int32, device="cuda")
    try:
        torch.ops.fastattn_sm90.primitive.default(name, a, b, state, out)
        torch.cuda.synchronize()
    except RuntimeError as error:
        return Row(name, "FAIL", str(error).partition("\n")[0])
    message = difference(primitive, out.cpu())
    return Row(name, "FAIL" if message else "ok", message)


def unavailable() -> str | None:
    """Why primitives cannot run here, or None."""
    device = _env.default_device()
    if device.type != "cuda":
        return "there is no CUDA GPU"
    return _env.why_not_on("sm90", device) or _native.unavailable("sm90")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fastattn.testing.primitives", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--json", metavar="FILE", help="write a JSON row a line, as they come")
    parser.add_argument(
        "--resume", action="store_true", help="leave out what FILE has rows of, of the same library"
    )
    parser.add_argument("--seconds", type=float, help="start none after this time")
    options = parser.parse_args(arguments)
    file = Path(options.json) if options.json else None
    if reason := unavailable():
        print(f"primitives were not run: {reason}", file=sys.stderr)
        if file:
            row = Row("all", "refused", reason, lines.applies_to(_env.default_device(), "sm90"))
            lines.append(file, [dataclasses.asdict(row)])
        return lines.CANNOT_RUN
    device = torch.device("cuda")
    print(_env.device_name(device))
    here = lines.applies_to(device, "sm90")
    try:
        before = list(lines.read_as(Row, file)) if file and options.resume else []
    except ValueError as error:
        parser.error(f"--resume: {error}")
    done = [row for row in before if row.applies_to == here and row.status in ("ok", "FAIL")]
    found = {row.primitive: row for row in done}
    names = [name for name in PRIMITIVES if name not in found]
    results = run_isolated(run, names, jobs=1, seconds=options.seconds, limit_s=_LIMIT_S)
    for index, result in results:
        if isinstance(result, Lost):
            result = Row(names[index], "FAIL" if result.reached else "skipped", result.why)
        row = found[names[index]] = dataclasses.replace(result, applies_to=here)
        if row.status != "skipped":
            print(f"{row.status:4} {row.primitive}{': ' if row.message else ''}{row.message}")
        if file:
            lines.append(file, [dataclasses.asdict(row)])
    passed, failed, missed = (
        sum(row.status == status for row in found.values()) for status in ("ok", "FAIL", "skipped")
    )
    print(f"{passed} passed, {failed} failed" + (f", {missed} were not reached" if missed else ""))
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
