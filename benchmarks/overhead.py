"""Call overhead: short calls of fastattn and PyTorch.

    python -m benchmarks.overhead [--device cuda] [--json FILE]

The two calls of a row are timed alternately; a row shows the median of each and the median of their
ratios. On the CPU with one thread, in process CPU time, which excludes other processes of the
machine. On a GPU in bf16, the time until all calls are launched: kernels are so short that the GPU
waits for the CPU.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastattn
from fastattn.ops import _env, _native
from fastattn.testing.lines import write_json

ROUNDS = 11
# Calls in a round, fewer if they take longer than _ROUND_S. A GPU's queue holds about a thousand
# launches.
CALLS = {"cpu": 1500, "cuda": 50}
_ROUND_S = 0.15


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
    "ffn 16x64x256": (
        [(16, 64), (256, 64), (256,), (64, 256), (64,)],
        fastattn.ffn,
        lambda x, w1, b1, w2, b2: F.linear(F.linear(x, w1, b1).relu(), w2, b2),
    ),
    "linear 16x64x64": ([(16, 64), (64, 64), (64,)], fastattn.linear, F.linear),
}


# Attention that also returns the averaged weights: batch, queries, keys, width, heads.
WITH_WEIGHTS = (
    (3, 60, 60, 64, 4),
    (8, 128, 128, 256, 4),
    (2, 512, 512, 512, 8),
    (3, 12, 60, 64, 4),
)
MASKS = ("", "padding", "float causal and padding")


class _Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


# Small tensors: shapes of the inputs, PyTorch's module, which `patch` converts.
MODULES: dict[str, tuple[list[tuple[int, ...]], Callable[[], nn.Module]]] = {
    "LayerNorm 1x64": ([(1, 64)], lambda: nn.LayerNorm(64)),
    "LayerNorm 32x256": ([(32, 256)], lambda: nn.LayerNorm(256)),
    "patched SDPA 4x4x6x16": ([(4, 4, 6, 16)] * 3, _Attention),
    "encoder layer 4x6x64": (
        [(4, 6, 64)],
        lambda: nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True),
    ),
    "decoder layer 4x4x64": (
        [(4, 4, 64)] * 2,
        lambda: nn.TransformerDecoderLayer(64, 4, 128, dropout=0.0, batch_first=True),
    ),
}


def measure(device: torch.device) -> list[Row]:
    rows = []
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    cases: list[tuple[str, list[tuple[int, ...]], Any, Any]]
    cases = [(name, *case) for name, case in CASES.items()]
    for name, (shapes, make) in MODULES.items():
        module = make().to(device, dtype)
        patched = copy.deepcopy(module)
        fastattn.patch(patched, quiet=True)
        cases.append((name, shapes, patched, module))
    for name, shapes, *calls in cases:
        inputs = [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]
        rows += _rows(name, inputs, lambda f, x: f(*x), *calls)
    for shape in WITH_WEIGHTS:
        for mask in MASKS:
            rows += _rows_with_weights(shape, mask, device, dtype)
    # As speech models call it: sequence first, with a key and a value of their own.
    return rows + _rows_with_weights(WITH_WEIGHTS[0], "padding", device, dtype, separate=True)


def _rows_with_weights(
    shape: tuple[int, ...],
    mask: str,
    device: torch.device,
    dtype: torch.dtype,
    separate: bool = False,
) -> list[Row]:
    """`MultiheadAttention` with need_weights=True; the loss reads the context. separate: whether
    query, key and value are three tensors, sequence first.
    """
    B, M, N, E, H = shape
    options: dict[str, Any] = {"batch_first": not separate, "device": device, "dtype": dtype}
    pytorch = nn.MultiheadAttention(E, H, **options)
    converted = fastattn.nn.MultiheadAttention(E, H, **options)
    converted.load_state_dict(pytorch.state_dict())
    inputs = [
        torch.randn((n, B, E) if separate else (B, n, E), device=device, dtype=dtype)
        for n in (M, N, N)
    ]
    if not separate:  # the value is the key, in self-attention both are the query
        inputs = inputs[: 1 if M == N else 2]
    masks: dict[str, Tensor] = {}
    if mask:
        blocked = torch.zeros(B, N, dtype=torch.bool, device=device)
        blocked[0, N // 2 :] = True
        masks["key_padding_mask"] = blocked
    if mask.startswith("float"):
        minus = inputs[0].new_full((), -torch.inf)
        masks["key_padding_mask"] = torch.where(blocked, minus, 0)
        masks["attn_mask"] = minus.expand(M, N).triu(1 + N - M)

    def forward(module: Callable[..., Any], x: list[Tensor]) -> Tensor:
        context: Tensor = module(*x, *[x[-1]] * (3 - len(x)), **masks)[0]
        return context

    name = f"weights {B}x{M}x{E}" + (f" over {N}" if M != N else "")
    name += ", separate, sequence first" * separate + (mask and f", {mask}")
    return _rows(name, inputs, forward, converted, pytorch)


def _rows(
    name: str,
    inputs: list[Tensor],
    forward: Callable[[Any, list[Tensor]], Tensor],
    *calls: Callable[..., Any],
) -> list[Row]:
    """Without and with the gradients of the inputs and of the parameters of modules."""
    device = inputs[0].device
    leaves = [x.clone().requires_grad_() for x in inputs]
    gradient = torch.randn_like(forward(calls[1], inputs))
    of = {f: [*leaves, *f.parameters()] for f in calls if isinstance(f, nn.Module)}

    def both(f: Callable[..., Any]) -> None:
        torch.autograd.grad(forward(f, leaves), of.get(f, leaves), gradient)

    with torch.no_grad():
        first = _row(f"{name}, forward", device, partial(forward, x=inputs), *calls)
    return [first, _row(f"{name}, forward + backward", device, both, *calls)]


def _row(
    name: str, device: torch.device, run: Callable[..., Any], *calls: Callable[..., Any]
) -> Row:
    on_cpu = device.type == "cpu"
    clock = time.process_time if on_cpu else time.perf_counter
    run(calls[1])
    start = clock()
    run(calls[1])
    count = max(1, min(CALLS[device.type], int(_ROUND_S / (clock() - start))))
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS + 1):  # the first one is a warm-up
        for f, measured in zip(calls, times, strict=True):
            start = clock()
            for _ in range(count):
                run(f)
            measured.append((clock() - start) / count * 1e6)
            if not on_cpu:
                torch.cuda.synchronize(device)
    fastattn_us, pytorch_us = (measured[1:] for measured in times)
    ratios = [a / b for a, b in zip(fastattn_us, pytorch_us, strict=True)]
    medians = (round(statistics.median(values), 3) for values in (fastattn_us, pytorch_us, ratios))
    return Row(name, *medians)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=CALLS, default="cpu")
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write the rows and their environment"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    rows = measure(device)
    libraries = ("cpu",) if device.type == "cpu" else ("sm90", "cuda")
    reasons = (*map(_native.unavailable, libraries), _native.extension_unavailable())
    missing = "; ".join(filter(None, reasons))
    where = _env.device_name(device)
    print(f"{where}, one thread, torch {_env.torch_version()}")
    print(f"not used: {missing}" if missing else "with the native libraries and the extension")
    print(f"{'':64} fastattn us  PyTorch us  ratio")
    for row in rows:
        print(f"{row.call:64} {row.fastattn_us:11.1f} {row.pytorch_us:11.1f} {row.ratio:6.2f}")
    if options.json:
        report = {"device": where, "versions": _env.versions(), "missing": missing}
        write_json(options.json, report | {"rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
