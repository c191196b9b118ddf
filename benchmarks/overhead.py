"""Call overhead on the CPU: short calls of fastattn and PyTorch, in process CPU time.

    python -m benchmarks.overhead [--json FILE]

One thread. The two calls of a row are timed alternately; a row shows the median of each and the
median of their ratios. Process CPU time excludes other processes of the machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import fastattn
from fastattn.ops import _env, _native
from fastattn.testing.check import write_json

ROUNDS = 11
CALLS = 1500


@dataclass(frozen=True)
class Row:
    call: str
    fastattn_us: float
    pytorch_us: float
    ratio: float


# Shapes of the inputs, fastattn's function, PyTorch's.
CASES: dict[str, tuple[list[tuple[int, ...]], Callable[..., Tensor], Callable[..., Tensor]]] = {
    "layer_norm 64x512": (
        [(64, 512), (512,), (512,)],
        fastattn.layer_norm,
        lambda x, weight, bias: F.layer_norm(x, (512,), weight, bias),
    ),
    "attention 1x4x16x64": (
        [(1, 4, 16, 64)] * 3,
        fastattn.attention,
        F.scaled_dot_product_attention,
    ),
    "linear 16x64x64": ([(16, 64), (64, 64), (64,)], fastattn.linear, F.linear),
}


def measure() -> list[Row]:
    rows = []
    for name, (shapes, fastattn_call, pytorch_call) in CASES.items():
        inputs = [torch.randn(shape) for shape in shapes]
        leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
        gradient = torch.randn_like(pytorch_call(*inputs))

        def forward(f: Callable[..., Tensor], x: list[Tensor] = inputs) -> None:
            f(*x)

        def both(f: Callable[..., Tensor], x: list[Tensor] = leaves, g: Tensor = gradient) -> None:
            torch.autograd.grad(f(*x), x, g)

        for direction, run in (("forward", forward), ("forward + backward", both)):
            rows.append(_row(f"{name}, {direction}", run, fastattn_call, pytorch_call))
    return rows


def _row(name: str, run: Callable[..., None], *calls: Callable[..., Tensor]) -> Row:
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS + 1):  # the first one is a warm-up
        for f, measured in zip(calls, times, strict=True):
            start = time.process_time()
            for _ in range(CALLS):
                run(f)
            measured.append((time.process_time() - start) / CALLS * 1e6)
    fastattn_us, pytorch_us = (measured[1:] for measured in times)
    ratios = [a / b for a, b in zip(fastattn_us, pytorch_us, strict=True)]
    medians = (round(statistics.median(values), 3) for values in (fastattn_us, pytorch_us, ratios))
    return Row(name, *medians)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write the rows and their environment"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure()
    missing = _native.unavailable("cpu") or _native.extension_unavailable()
    where = _env.device_name(torch.device("cpu"))
    print(f"{where}, one thread, torch {_env.torch_version()}")
    print("derivatives in Python: " + missing if missing else "derivatives in C++")
    print(f"{'':40} fastattn us  PyTorch us  ratio")
    for row in rows:
        print(f"{row.call:40} {row.fastattn_us:11.1f} {row.pytorch_us:11.1f} {row.ratio:6.2f}")
    if options.json:
        report = {"device": where, "versions": _env.versions(), "missing": missing}
        write_json(options.json, report | {"rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
