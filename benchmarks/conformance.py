"""How implementations of the field do on the equivalence suite's samples:

    python -m benchmarks.conformance [--match REGEX] [--out FILE]

Each is a function with the arguments that it supports, as docs/pages/test-your-kernel.md describes.
The file has a row per implementation, dtype and kind of check, and per failure; the page
docs/pages/conformance.md shows `benchmarks/results/conformance/cpu.jsonl`.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from benchmarks.implementations import can_import, package_version
from fastattn.ops import _env
from fastattn.testing import Report, check_implementation, dense_mask, lines
from fastattn.testing.report import status_counts
from fastattn.testing.rows import Row

# Name -> op, attribute of this module, the package that it needs besides torch.
IMPLEMENTATIONS = {
    "scaled_dot_product_attention": ("attention", "sdpa", ""),
    "scaled_dot_product_attention, dense mask": ("attention", "sdpa_masked", ""),
    "scaled_dot_product_attention, math backend, dense mask": ("attention", "sdpa_math", ""),
    "flex_attention, not compiled": ("attention", "flex", ""),
    "nn.MultiheadAttention": ("attention", "multihead", ""),
    "nn.MultiheadAttention, need_weights=True": ("attention", "multihead_weights", ""),
    "transformers, eager attention of Llama": ("attention", "llama", "transformers"),
    "transformers, eager attention of Gemma 2": ("attention", "gemma2", "transformers"),
    "transformers, eager attention of gpt-oss": ("attention", "gpt_oss", "transformers"),
    "F.layer_norm": ("layer_norm", "layer_norm", ""),
    "F.rms_norm": ("rms_norm", "rms_norm", ""),
    "F.linear": ("linear", "linear", ""),
}


def _heads_differ(q: Tensor, k: Tensor) -> bool:
    return q.shape[1] != k.shape[1]


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Any = None, causal: Any = False, scale: Any = None
) -> Tensor:
    if causal not in (False, True, "top_left") or (causal and mask is not None):
        raise NotImplementedError("takes a mask, or causality aligned with the top left")
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=bool(causal), scale=scale, enable_gqa=_heads_differ(q, k)
    )


def sdpa_masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Any = None,
    key_lengths: Any = None,
    query_lengths: Any = None,
    causal: Any = False,
    window: Any = None,
    scale: Any = None,
) -> Tensor:
    mask = dense_mask(q, k, mask=mask, key_lengths=key_lengths, query_lengths=query_lengths,
                      causal=causal, window=window)  # fmt: skip
    if mask is not None and mask.dtype not in (torch.bool, q.dtype):
        raise NotImplementedError("takes masks of q's dtype")
    return F.scaled_dot_product_attention(
        q, k, v, mask, scale=scale, enable_gqa=_heads_differ(q, k)
    )


def sdpa_math(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Any = None,
    key_lengths: Any = None,
    query_lengths: Any = None,
    causal: Any = False,
    window: Any = None,
    scale: Any = None,
) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa_masked(q, k, v, mask=mask, key_lengths=key_lengths, scale=scale,
                           query_lengths=query_lengths, causal=causal, window=window)  # fmt: skip


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Any = None,
    key_lengths: Any = None,
    query_lengths: Any = None,
    causal: Any = False,
    window: Any = None,
    scale: Any = None,
    softcap: Any = None,
) -> Tensor:
    """Without a block mask, by a score modification that reads a dense mask."""
    given = dense_mask(q, k, mask=mask, key_lengths=key_lengths, query_lengths=query_lengths,
                       causal=causal, window=window)  # fmt: skip
    if given is not None:
        given = given.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])

    def change(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        s = s if softcap is None else torch.tanh(s / softcap) * softcap
        if given is None:
            return s
        if given.dtype == torch.bool:
            return torch.where(given[b, h, i, j], s, -torch.inf)
        return s + given[b, h, i, j]

    out = flex_attention(q, k, v, change, scale=scale, enable_gqa=_heads_differ(q, k))
    assert isinstance(out, Tensor)
    return out


def _multihead(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, key_lengths: Any, causal: Any, need_weights: bool
) -> Tensor:
    """The module with projections by 1, which are exact."""
    if q.shape[1] != k.shape[1] or v.shape != k.shape:
        raise NotImplementedError("takes equal numbers of heads and equal head dims")
    if mask is not None and mask.dim() == 4 and mask.shape[1] > 1:
        raise NotImplementedError("takes masks by head, but its projection mixes the heads")
    if causal == "bottom_right_lengths":
        raise NotImplementedError("takes no diagonal that lengths define")
    B, H, M, D = q.shape
    N = k.shape[2]
    blocked = dense_mask(q, k, mask=mask, causal=causal)
    if blocked is not None:
        blocked = ~blocked if blocked.dtype == torch.bool else blocked
        blocked = blocked.expand(B, H, M, N).reshape(B * H, M, N)
    padding = None
    if key_lengths is not None:
        if key_lengths.dim() == 2:
            raise NotImplementedError("takes a length per sequence")
        padding = torch.arange(N, device=k.device) >= key_lengths[:, None]
    module = nn.MultiheadAttention(H * D, H, bias=False, batch_first=True).to(q.device, q.dtype)
    with torch.no_grad():
        eye = torch.eye(H * D, device=q.device, dtype=q.dtype)
        module.in_proj_weight.copy_(eye.repeat(3, 1))
        module.out_proj.weight.copy_(eye)
    module.requires_grad_(False)
    inputs = (x.transpose(1, 2).reshape(B, x.shape[2], H * D) for x in (q, k, v))
    out, _ = module(*inputs, key_padding_mask=padding, attn_mask=blocked, need_weights=need_weights)
    return out.unflatten(2, (H, D)).transpose(1, 2)


def multihead(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Any = None,
    key_lengths: Any = None,
    causal: Any = False,
) -> Tensor:
    return _multihead(q, k, v, mask, key_lengths, causal, need_weights=False)


def multihead_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Any = None,
    key_lengths: Any = None,
    causal: Any = False,
) -> Tensor:
    return _multihead(q, k, v, mask, key_lengths, causal, need_weights=True)


def _eager(
    model: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    scale: Any,
    sinks: Any = None,
    **options: Any,
) -> Tensor:
    """The function with which models of transformers compute attention. Blocked pairs are
    finfo.min, as in the masks that these models make.
    """
    import importlib

    name = f"transformers.models.{model}.modeling_{model}"
    function = importlib.import_module(name).eager_attention_forward
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
    groups = q.shape[1] // k.shape[1] if k.shape[1] else 1
    module = SimpleNamespace(num_key_value_groups=groups, training=False, sinks=sinks)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return function(module, q, k, v, mask, scaling=scale, dropout=0.0, **options)[0].transpose(1, 2)


def llama(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Any = None, key_lengths: Any = None,
    causal: Any = False, window: Any = None, scale: Any = None,
) -> Tensor:  # fmt: skip
    mask = dense_mask(q, k, mask=mask, key_lengths=key_lengths, causal=causal, window=window)
    return _eager("llama", q, k, v, mask, scale)


def gemma2(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Any = None, key_lengths: Any = None,
    causal: Any = False, window: Any = None, scale: Any = None, softcap: Any = None,
) -> Tensor:  # fmt: skip
    mask = dense_mask(q, k, mask=mask, key_lengths=key_lengths, causal=causal, window=window)
    return _eager("gemma2", q, k, v, mask, scale, softcap=softcap)


def gpt_oss(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *, mask: Any = None, key_lengths: Any = None,
    causal: Any = False, window: Any = None, scale: Any = None,
) -> Tensor:  # fmt: skip
    if sinks is None:
        raise NotImplementedError("has sinks")
    mask = dense_mask(q, k, mask=mask, key_lengths=key_lengths, causal=causal, window=window)
    return _eager("gpt_oss", q, k, v, mask, scale, sinks)


def layer_norm(x: Tensor, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rms_norm(x: Tensor, weight: Any = None, eps: float | None = None) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def linear(x: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
    return F.linear(x, weight, bias)


def summary(name: str, report: Report, version: str) -> dict[str, Any]:
    """One line of the file: counts by kind of check, the median ratio of errors to the allowed ones
    in each dtype, reasons of refusals, and failures.
    """
    checks: dict[str, list[Row]] = {}
    ratios: dict[str, list[float]] = {}
    for row in report.rows:
        if row.status not in ("refused", "left out", "skipped", "raised"):
            checks.setdefault(row.kind, []).append(row)
            if row.allowed and row.status != "FAIL":
                ratios.setdefault(row.dtype, []).append(row.error / row.allowed)
    return {
        "implementation": name,
        "op": report.rows[0].op,
        "versions": version,
        "device": _env.device_name(report.device),
        "checks": {kind: status_counts(rows) for kind, rows in checks.items()},
        "median": {dtype: round(median(found), 3) for dtype, found in ratios.items()},
        **{
            status: Counter(row.message for row in report.rows if row.status == status)
            for status in ("refused", "raised")
        },
        "failures": [
            [row.dtype, row.sample, row.kind, row.result, row.message]
            for row in report.rows
            if row.status == "FAIL"
        ],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conformance")
    parser.add_argument("--match", default="", metavar="REGEX", help="only names that match")
    parser.add_argument("--out", type=Path, default=Path("build/conformance.jsonl"))
    options = parser.parse_args(arguments)
    for name, (op, attribute, package) in IMPLEMENTATIONS.items():
        if not re.search(options.match, name):
            continue
        if package and not can_import(package):
            print(f"absent: {name} needs {package}", file=sys.stderr)
            continue
        report = check_implementation(f"benchmarks.conformance:{attribute}", op, device="cpu")
        version = f"torch {torch.__version__}"
        version += f", {package} {package_version(package)}" if package else ""
        lines.append(options.out, [summary(name, report, version)])
        print(report.table(), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
