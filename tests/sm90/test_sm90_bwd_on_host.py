"""The Hopper attention backward, computed without a GPU and judged like any backend.

The kernels run on the simulator in sm90_on_host, like the forward in test_sm90_on_host.py. The
forward is the reference here; launcher, bindings, workspace, strides, descriptors, layouts, masks
and the order of sums are those of a GPU.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sm90_on_host import bindings
from sm90_on_host.build import Machine, build, missing
from torch import Tensor

from fastattn.ops._op import OPS, Op
from fastattn.ops.attention import sm90
from fastattn.ops.attention.spec_inputs import make_inputs
from fastattn.ops.attention.spec_varlen import make_inputs as make_packed
from fastattn.testing.oracle import Oracle, run_op
from fastattn.testing.poison import poisoned_results
from fastattn.testing.properties import deterministic_algorithms
from fastattn.testing.spec import OpSpec, Sample, all_specs

TESTS = Path(__file__).resolve().parent
SPEC = all_specs()["attention"]
_ORIGIN = (3, 2**32 - 1, 48, 2**33 - 64)  # of dropout bits
HEAD_DIMS = (64, 96, 128, 192, 256)  # 96 takes the instance of 128
pytestmark = pytest.mark.slow


def _sample(name: str, **options: object) -> Sample:
    names = (
        *("q", "k", "v"),
        *(("mask",) if name.startswith("bias") else ()),
        *(x for x in ("alibi_slopes", "sinks", "relative_bias") if "scores" in name),
    )
    return Sample(name, "every instance, every restriction", partial(make_inputs, **options), names)


# All of them for the most usual head dims, alternate halves for the others.
OWN = tuple(
    sample
    for D in HEAD_DIMS
    for i, sample in enumerate((
        _sample(f"causal_gqa_{D}", causal="bottom_right", H=4, K=2, M=150, N=200, D=D, B=1),
        _sample(f"lengths_{D}", M=140, N=150, D=D, layout="bshd", query_lengths=[140, 70],
                key_lengths=[33, 150]),
        _sample(f"dropout_{D}", dropout_p=0.3, H=4, K=2, M=140, N=150, D=D, key_lengths=[33, 150],
                origin=_ORIGIN),
        _sample(f"mask_{D}", mask="rows BHMN", H=4, K=2, M=140, N=260, D=D, B=1, causal="top_left"),
        _sample(f"blocks_{D}", mask="blocks BMN", M=270, N=270, D=D, key_lengths=[270, 201], H=1),
        _sample(f"bias_{D}", mask="float HMN", H=4, K=2, M=140, N=260, D=D, key_lengths=[260, 77]),
        _sample(f"mask_dropout_{D}", mask="rows BMN", H=4, K=2, M=140, N=260, D=D, B=1,
                causal="bottom_right", dropout_p=0.3),
        _sample(f"bias_dropout_{D}", mask="float HMN", H=4, K=2, M=140, N=264, D=D,
                key_lengths=[260, 77], dropout_p=0.2),
        _sample(f"bias_fp32_{D}", mask="fp32 BMN", H=4, K=2, M=150, N=264, D=D, dropout_p=0.4,
                causal="top_left", origin=_ORIGIN),
        _sample(f"bias_fp32_odd_{D}", mask="fp32 BMN", H=1, M=140, N=203, D=D),
        _sample(f"bias_row_{D}", mask="float BN", H=4, K=2, M=140, N=264, D=D, dropout_p=0.1),
        _sample(f"bias_fp32_row_{D}", mask="fp32 HN", H=2, M=140, N=264, D=D, window=(60, 30)),
        _sample(f"window_{D}", window=(30, 20), M=140, N=260, D=D, B=1, H=1),
        _sample(f"scores_{D}", alibi="H", softcap=3.0, sinks=0.0, M=150, N=200, D=D, B=1, H=4, K=2,
                causal="bottom_right"),
        _sample(f"scores_dropout_{D}", alibi="BH", M=200, N=140, D=D, dropout_p=0.3, origin=_ORIGIN,
                causal="bottom_right_lengths", key_lengths=[33, 140], query_lengths=[200, 150]),
        _sample(f"scores_mask_{D}", mask="rows BHMN", softcap=2.0, relative=("t5", 16, 40), M=140,
                N=260, D=D, B=1),
        _sample(f"scores_mask_dropout_{D}", mask="rows BMN", alibi="H", softcap=2.0, M=140, N=150,
                D=D, dropout_p=0.2, window=(90, -1)),
        _sample(f"bias_scores_{D}", mask="float HMN", alibi="H", softcap=2.0, sinks=0.0, H=4, K=2,
                M=140, N=264, D=D, key_lengths=[260, 77]),
        _sample(f"bias_scores_fp32_{D}", mask="fp32 BMN", relative=("t5", 16, 40), softcap=2.0,
                M=150, N=203, D=D, dropout_p=0.3, causal="top_left"),
        _sample(f"bias_scores_row_{D}", mask="float BN", alibi="BH", softcap=2.0, M=140, N=264,
                D=D, dropout_p=0.1),
        _sample(f"bias_scores_column_{D}", mask="fp32 HM", sinks=0.0, softcap=2.0, M=140, N=150,
                D=D, B=1),
    ))
    if D in (64, 128) or (i + HEAD_DIMS.index(D)) % 2 == 0
)  # fmt: skip
OWN += (
    _sample("fp32_mask", mask="fp32 MN", M=65, N=130, key_lengths=[65, 130]),
    _sample("bias_column_dropout", mask="float HM", M=140, N=130, dropout_p=0.3),
    _sample("bias_column_min", mask="min BHM", M=140, N=130, key_lengths=[65, 130]),
)
# Samples of the op that run different code of the kernels.
CHOSEN = (
    "dropout", "dropout_all", "dropout_causal_gqa", "plain", "one_by_one", "one_query",
    "one_key", "s257", "d8", "d160", "d192_e128", "d256_e8", "bshd", "packed", "gqa",
    "gqa_window_e", "gqa_lengths", "top_left_tall", "bottom_right_tall", "window_self",
    "window_right", "key_lengths", "key_lengths_zero", "query_lengths", "both_lengths_causal",
    "scale_zero_lengths", "scale_negative", "extreme_logits_causal", "bool_mask",
    "bool_mask_keys", "bool_mask_rows", "bool_mask_dead", "bool_mask_expanded",
    "bool_mask_column", "bool_mask_none", "bool_mask_transposed", "bool_mask_slice",
    "bool_mask_vector", "bool_mask_lengths", "prepared_mask", "prepared_mask_keys",
    "prepared_mask_expanded", "prepared_mask_restricted", "bias", "bias_broadcast", "bias_row",
    "bias_column", "bias_matrix", "bias_transposed", "bias_dead", "bias_dead_keys",
    "bias_dead_window", "bias_min", "bias_min_rows", "bias_min_causal",
    "bias_near_min", "bias_low", "bias_inf", "prepared_bias",
    "prepared_bias_column", "gqa_bias", "own_diagonals_both", "own_diagonals_gqa_window",
    "own_diagonals_queries_window", "own_diagonals_mask", "own_diagonals_bias",
    "own_diagonals_dropout", "own_diagonals_one_query_window",
    "sinks", "sinks_gqa_window", "sinks_dead_rows", "sinks_mask_rows", "sinks_high", "sinks_low",
    "sinks_dropout", "sinks_tall", "sinks_one_query_long", "sinks_one_query_dead", "sinks_no_keys",
    "alibi", "alibi_both_sides", "alibi_batch", "alibi_tall", "alibi_gqa_lengths",
    "alibi_own_diagonals", "alibi_own_diagonals_rows", "alibi_window_dropout", "alibi_one_query",
    "alibi_one_query_own", "relative_t5_cross", "relative_gqa_mask", "relative_own_diagonals",
    "softcap", "softcap_large", "softcap_reached", "softcap_negative", "softcap_gqa_dropout",
    "softcap_one_query", "softcap_relative", "all_scores_own_diagonals",
)  # fmt: skip
PACKED = all_specs()["attention_varlen"]
_SEQUENCES = {"queries": [65, 0, 130, 1, 64], "keys": [40, 30, 200, 0, 129], "slack": 70}
OWN_PACKED = tuple(
    Sample(f"{name}_{D}", "every instance", partial(make_packed, D=D, **_SEQUENCES, **options),
           ("q", "k", "v", *(("alibi_slopes", "sinks") if "scores" in name else ())))
    for D in HEAD_DIMS
    for name, options in (
        ("packed", {"H": 4, "K": 2}), ("packed_causal", {"causal": "bottom_right"}),
        ("packed_dropout", {"dropout_p": 0.5, "origin": _ORIGIN}),
        ("packed_scores", {"alibi": "BH", "softcap": 2.0, "sinks": 0.0, "causal": "bottom_right"}),
    )
)  # fmt: skip

CASES = [
    *((SPEC, s) for s in (*SPEC.samples, *OWN) if s.name in CHOSEN or s in OWN),
    *((PACKED, s) for s in (*PACKED.samples, *OWN_PACKED) if "sm90" not in s.wrong_results),
]


@pytest.fixture(scope="session")
def machine() -> Machine:
    if reason := missing():
        pytest.skip(reason)
    return build(TESTS / "sm90_attention_bwd.cpp")


@pytest.fixture
def simulate(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From then on the reference's backward is the simulated one."""
    bindings.use(monkeypatch, lambda op, problem, _: machine.call(op, ctypes.c_void_p(problem)))

    def replace() -> None:
        monkeypatch.setitem(
            OPS["attention_bwd"]._launchers, "reference", partial(_launch, OPS["attention_bwd"])
        )

    return replace


def _launch(op: Op, args: Sequence[Any]) -> Sequence[Tensor]:
    results = op.allocate(args)
    bindings.run_simulated(op, args, results)
    return results


@pytest.mark.parametrize(
    ("spec", "sample"), CASES, ids=lambda x: x.name if isinstance(x, Sample) else ""
)
def test_gradients(simulate: Callable[[], None], spec: OpSpec, sample: Sample) -> None:
    """Every second one with additions to dq in the order of the keys."""
    number = CASES.index((spec, sample))
    with deterministic_algorithms(number % 2 == 1):
        _compare(simulate, spec, sample, torch.float16 if number % 3 == 0 else torch.bfloat16)


def _compare(
    simulate: Callable[[], None], spec: OpSpec, sample: Sample, dtype: torch.dtype
) -> None:
    oracle = Oracle(spec, sample, dtype)
    simulate()
    with poisoned_results():
        results = run_op(spec, sample, sample.inputs("cpu", dtype), "reference")
    for gradient in (name for name in results if name not in spec.results):
        comparison = oracle.judge(gradient, results[gradient])
        assert comparison.ok, f"{gradient}: {comparison.message}"


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize(
    "name", ["causal_gqa_64", "blocks_128", "bias_fp32_256", "packed_causal_192"]
)
def test_orders_of_sums(simulate: Callable[[], None], name: str, in_order: bool) -> None:
    """Sums of dq: the first block of keys stores, the others add in any order or in that of the
    keys.
    """
    spec, sample = next((spec, s) for spec, s in CASES if s.name == name)
    with deterministic_algorithms(in_order):
        _compare(simulate, spec, sample, torch.bfloat16)


@pytest.mark.parametrize("name", ["bias_fp32_128", "packed_dropout_64"])
def test_adjacent_sections(simulate: Callable[[], None], name: str) -> None:
    """With the library's own layout of the workspace; other tests have guards between sections."""
    spec, sample = next((spec, s) for spec, s in CASES if s.name == name)
    with bindings.own_layout(), deterministic_algorithms():
        _compare(simulate, spec, sample, torch.bfloat16)


@pytest.mark.parametrize("name", ["bias_transposed", "bias_fp32_odd_64", "bias_fp32_odd_192"])
def test_masks_that_are_fetched(
    simulate: Callable[[], None], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """An additive mask that TMA cannot read and that has not been copied."""
    monkeypatch.setattr(sm90, "as_readable", lambda mask: mask)
    test_gradients(simulate, SPEC, next(s for s in (*SPEC.samples, *OWN) if s.name == name))
