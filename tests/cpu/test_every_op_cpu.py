"""The C++ CPU kernels of every op: samples under each instruction set but the fastest, which
tests/ops/test_ops.py has, and the checks of what would access memory out of bounds.
"""

from typing import Any

import pytest
import torch
from cpu_library import needs_library, slower_isas
from torch import Tensor

from fastattn.ops.attention.calls import ForwardCall
from fastattn.testing.check import check_sample
from fastattn.testing.oracle import Oracle
from fastattn.testing.spec import OpSpec, Sample, all_specs

pytestmark = needs_library
# Full and partial tiles, each kind of restriction, both loops of attention's forward; samples that
# differ in how memory is read.
TYPICAL = {
    "attention": (
        "plain", "one_query", "one_query_odd", "few_queries", "few_queries_window",
        "few_queries_everything", "few_queries_scores", "odd_sizes", "d80", "e_larger", "gqa",
        "window", "key_lengths_rows", "both_lengths_causal", "bool_mask_rows", "bias_row",
        "bias_fp32", "all_restrictions", "extreme_logits", "add_1e9", "add_scores", "exact_1e10",
        "dropout", "no_keys", "sinks_gqa_window", "sinks_dead_rows", "sinks_one_query_long",
        "softcap", "softcap_bias_lengths", "softcap_one_query", "alibi_bias", "alibi_gqa_lengths",
        "alibi_one_query_own", "relative_own_diagonals", "relative_gqa_mask",
    ),
    "attention_varlen": tuple(s.name for s in all_specs()["attention_varlen"].samples),
    "attention_with_weights": (
        "plain", "odd_sizes", "dropout", "bool_mask_rows", "all_scores", "one_query",
    ),
    "ffn": ("gelu_tanh", "reglu", "odd_sizes", "weights_transposed", "no_rows", "fp32_residual"),
    **dict.fromkeys(
        ("layer_norm", "add_layer_norm", "rms_norm"),
        ("model", "odd_width", "three_columns", "row_stride", "dropout", "fp32_residual"),
    ),
}  # fmt: skip


def _samples() -> list[Any]:
    """In fp32 all of the norms; fp16 is slow, whose code differs from bf16's in conversions."""
    return [
        pytest.param(spec, sample, dtype, id=f"{op}-{sample.name}-{str(dtype)[6:]}",
                     marks=[pytest.mark.slow] * (dtype == torch.float16))
        for op, names in TYPICAL.items()
        for spec in [all_specs()[op]]
        for sample in spec.samples
        for dtype in sample.dtypes
        if sample.name in names or ("norm" in op and dtype == torch.float32)
    ]  # fmt: skip


@slower_isas
@pytest.mark.parametrize("spec, sample, dtype", _samples())
def test_sample(isa: str, spec: OpSpec, sample: Sample, dtype: torch.dtype) -> None:
    rows = check_sample(Oracle(spec, sample, dtype), "cpu", torch.device("cpu"))
    assert rows and not [row for row in rows if row.status != "ok"], rows


# -- memory ---------------------------------------------------------------------------------------
def _offsets(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def _calls() -> dict[str, dict[str, Any]]:
    """Arguments and results of valid calls, by op."""
    x, rows, matrix = torch.zeros(1, 2, 5, 8), torch.zeros(9, 2, 8), torch.zeros(4, 8)
    padded = ForwardCall(x, x, x)._asdict()
    packed = ForwardCall(rows, rows, rows, max_seqlen_q=5, max_seqlen_k=5)._asdict()
    results = {"out": torch.empty_like(x), "lse": torch.empty(1, 2, 5)}
    return {
        "attention": padded | results,
        "attention_varlen": packed
        | {"cu_seqlens_q": _offsets(4, 5), "cu_seqlens_k": _offsets(4, 5)}
        | {"out": torch.empty_like(rows), "lse": torch.empty(2, 9)},
        "attention_with_weights": padded
        | results
        | {"average": False, "weights": torch.empty(1, 2, 5, 5)},
        "layer_norm": {"x": matrix, "weight": None, "bias": None, "eps": 1e-5}
        | {"y": torch.empty_like(matrix), "mean": torch.empty(4), "rstd": torch.empty(4)},
        "ffn": {"x": matrix, "w1": torch.zeros(16, 8), "b1": None, "w2": torch.zeros(8, 16)}
        | {"b2": None, "residual": None, "activation": "relu", "dropout_p": 0.0}
        | {"output_dropout_p": 0.0, "dropout_seed": None, "dropout_stream": 0}
        | {"y": torch.empty(4, 8), "hidden": torch.empty(4, 16)},
    }


WRONG: dict[str, list[tuple[dict[str, Any], str]]] = {
    "attention": [
        ({"k": torch.zeros(1, 2, 5, 7)}, r"k must be a CPU tensor of shape \[1, 2, 5, 8\]"),
        ({"k": torch.zeros(1, 2, 5, 8).half()}, "and the type of q"),
        ({"k": torch.zeros(1, 3, 5, 8)}, "heads of q must be a multiple"),
        ({"out": torch.zeros(1, 2, 8, 5).mT}, "out must have a contiguous last dimension"),
        ({"out": torch.zeros(1, 2, 4, 8)}, r"out must be a CPU tensor of shape \[1, 2, 5, 8\]"),
        ({"lse": torch.zeros(1, 2, 4)}, "lse must be a contiguous CPU tensor of 10"),
        ({"mask": torch.zeros(1, 2, 5, 4)}, "mask must have size 1 or 5 in dimension 3, got 4"),
        ({"mask": torch.zeros(1, 1, 1, 5).int()}, "mask must be bool"),
        ({"key_lengths": torch.zeros(1)}, "key_lengths must be int32 or int64"),
        ({"key_lengths": torch.zeros(2).int()}, "key_lengths must be a contiguous CPU tensor of 1"),
        ({"dropout_p": 0.5}, "dropout_seed must be given"),
        ({"distance_bias": torch.zeros(1, 2, 8)}, r"distance_bias must be .* \[1 or 1, 2, 9\]"),
        ({"distance_bias": torch.zeros(2, 2, 9)}, r"distance_bias must be .* \[1 or 1, 2, 9\]"),
        ({"distance_bias": torch.zeros(1, 2, 9).half()}, "distance_bias must be .* of fp32"),
        ({"sinks": torch.zeros(1)}, "sinks must be a contiguous CPU tensor of 2"),
        ({"sinks": torch.zeros(2).double()}, "sinks must be .* of the expected type"),
    ],
    "attention_varlen": [
        ({"cu_seqlens_q": torch.tensor([0, 4, 10]).int()}, "must ascend from 0 to at most 9"),
        ({"cu_seqlens_q": torch.tensor([0, 7, 5]).int()}, "cu_seqlens_q must ascend"),
        ({"cu_seqlens_k": torch.tensor([-1, 4, 9]).int()}, "cu_seqlens_k must ascend"),
        ({"cu_seqlens_k": torch.tensor([0, 9]).int()}, "cu_seqlens_k must be a contiguous CPU"),
        ({"cu_seqlens_q": torch.tensor([0, 4, 9])}, "cu_seqlens_q must be a contiguous CPU"),
        ({"cu_seqlens_k": None}, "must be given together"),
        ({"mask": torch.zeros(1, 1, 1, 1)}, "packed sequences take no mask"),
        ({"key_lengths": torch.tensor([4, 5])}, "packed sequences take no mask, lengths"),
        ({"k": torch.zeros(9, 2, 7)}, r"k must be a CPU tensor of shape \[9, 2, 8\]"),
        ({"v": torch.zeros(8, 2, 8)}, r"v must be a CPU tensor of shape \[9, 2, 8\]"),
        ({"out": torch.zeros(9, 8, 2).mT}, "out must have a contiguous last dimension"),
        ({"out": torch.zeros(9, 1, 8)}, "out must be a CPU tensor"),
        ({"lse": torch.zeros(2, 8)}, "lse must be a contiguous CPU tensor of 18"),
        ({"sinks": torch.zeros(1)}, "sinks must be a contiguous CPU tensor of 2"),
        ({"distance_bias": torch.zeros(1, 2, 8)}, r"distance_bias must be .* \[2 or 1, 2, 9\]"),
    ],
    "attention_with_weights": [
        ({"weights": torch.zeros(1, 2, 5, 4)}, "weights must|size"),
        ({"weights": torch.zeros(1, 5, 5)}, "weights must|size"),
        ({"out": torch.zeros(1, 2, 4, 8)}, r"out must be a CPU tensor of shape \[1, 2, 5, 8\]"),
        ({"lse": torch.zeros(1, 2, 4)}, "lse must be a contiguous CPU tensor of 10"),
        ({"k": torch.zeros(1, 2, 5, 7)}, r"k must be a CPU tensor of shape \[1, 2, 5, 8\]"),
    ],
    "layer_norm": [
        ({"y": torch.zeros(4, 7)}, "y must be a CPU tensor of 4 rows of 8"),
        ({"y": torch.zeros(8, 4).t()}, "y must have contiguous rows"),
        ({"y": torch.zeros(4, 8).half()}, "y must be a CPU tensor"),
        ({"mean": torch.zeros(3)}, "mean must be a contiguous CPU tensor of 4"),
        ({"rstd": torch.zeros(8)[::2]}, "rstd must be a contiguous"),
        ({"weight": torch.ones(7)}, "weight must be a contiguous CPU tensor of 8"),
        ({"weight": torch.ones(1, 8)}, "weight must have one dimension, got 2"),
    ],
    "ffn": [
        ({"w2": torch.zeros(8, 400)}, "w1 must have 400 rows"),
        ({"w2": torch.zeros(8, 5)}, "w1 must have 5 rows"),
        ({"activation": "swiglu"}, "w1 must have 32 rows"),
        ({"hidden": torch.empty(0)}, "hidden must be a contiguous CPU tensor of 64"),
        ({"residual": torch.empty(0)}, "residual must be a contiguous CPU tensor of 32"),
        ({"b1": torch.empty(0)}, "b1 must be a contiguous CPU tensor of 16"),
        ({"y": torch.empty(4, 7)}, "y must be a CPU tensor of 4 rows of 8"),
    ],
}


@pytest.mark.parametrize(
    "op, changes, message", [(op, *wrong) for op, table in WRONG.items() for wrong in table]
)
def test_library_protects_memory(op: str, changes: dict[str, Any], message: str) -> None:
    call, name = _calls()[op], op.replace("attention_varlen", "attention")
    write = getattr(torch.ops.fastattn, f"{name}_fwd").out
    write(**call)
    with pytest.raises(RuntimeError, match=message):
        write(**call | changes)
