"""Samples, errors and workloads of attention_varlen.

Here q, k, v and the output are `[heads, tokens, dim]`, so that the slices of the error budget are
heads; the function under test gets them transposed, as `[tokens, heads, dim]`.
"""

import random
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fastattn import functional
from fastattn.ops.attention import spec as padded
from fastattn.ops.attention.spec_drawn import draw
from fastattn.ops.attention.spec_inputs import (
    cancelling_terms,
    dead,
    dead_positions,
    make_scores,
)
from fastattn.ops.attention.spec_workloads import PACKED_WORKLOADS
from fastattn.testing.spec import Entry, ErrorSample, Inputs, OpSpec, Sample, widen

_SEED = 0x7654_3210
# Arguments that the calls of single sequences do not have.
_OF_PACKED = ("cu_seqlens", "max_seqlen", "dropout")
_PARAMETERS = ("alibi_slopes", "sinks", "relative_bias")


def arguments(inputs: Inputs) -> Inputs:
    """Arguments of the public function: tokens first."""
    return inputs | {name: inputs[name].transpose(0, 1) for name in "qkv"}


def by_head(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The outputs of the public function with heads first: out [H, T, E] and lse [H, T]."""
    return outputs[0].transpose(0, 1), *outputs[1:]


def attention_varlen(**inputs: Any) -> tuple[Tensor, ...]:
    return by_head(functional.attention_varlen(**arguments(inputs), return_lse=True))


def make_inputs(
    generator: torch.Generator,
    dtype: torch.dtype,
    *,
    queries: list[int],
    keys: list[int] | None = None,
    H: int = 2,
    K: int | None = None,
    D: int = 32,
    E: int | None = None,
    slack: int = 0,
    longer: int = 0,
    alibi: str | None = None,
    sinks: float | None = None,
    relative: tuple[str, int, int] | None = None,
    dropout_p: float = 0.0,
    origin: tuple[int, ...] = (),
    amplitude: float = 1.0,
    key_amplitude: float = 1.0,
    whole: bool = False,
    cancelling: bool = False,
    **options: Any,
) -> Inputs:
    """slack: rows after the last sequence. longer: added to the maximum lengths. alibi, sinks,
    relative: as in `make_scores`. origin: of the dropout bits. whole: round to whole numbers.
    amplitude, key_amplitude, cancelling, options: as in `make_inputs` of padded sequences.
    """
    keys = queries if keys is None else keys
    K = H if K is None else K

    def data(lengths: list[int], heads: int, dim: int) -> Tensor:
        x = torch.randn(sum(lengths) + slack, heads, dim, generator=generator).to(dtype)
        x = x.round() if whole else x
        x[sum(lengths) :] = float("nan")
        return x.transpose(0, 1)

    def offsets(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).int()

    q, k = data(queries, H, D), data(keys, K, D)
    if cancelling:
        order = [*(torch.arange(1 - n, 1) for n in keys), torch.zeros(slack)]
        q, k = cancelling_terms(q, k, torch.cat(order))
    inputs: Inputs = {
        "q": q if amplitude == 1.0 else q * amplitude,
        "k": k if key_amplitude == 1.0 else k * key_amplitude,
        "v": data(keys, K, D if E is None else E),
        "cu_seqlens_q": offsets(queries),
        "cu_seqlens_k": offsets(keys),
        "max_seqlen_q": max(queries, default=0) + longer,
        "max_seqlen_k": max(keys, default=0) + longer,
        **options,
    }
    inputs |= make_scores(generator, dtype, len(queries), H, alibi, sinks, relative)
    if dropout_p:
        seed = torch.tensor([_SEED, *origin])
        inputs |= {"dropout_p": dropout_p, "dropout_seed": seed, "dropout_stream": 1}
    return inputs


def _s(name: str, reason: str, *tags: str, **options: Any) -> Sample:
    leaves = ("q", "k", "v", *_PARAMETERS)
    return Sample(name, reason, partial(make_inputs, **options), leaves, tags=frozenset(tags))


SAMPLES = (
    _s("one", "one sequence: the same as attention", "interpreter", queries=[70], D=64),
    _s("several", "odd lengths, one of them 1", "interpreter", queries=[65, 1, 33, 127]),
    _s("empty_sequences", "no queries, no keys, neither", "interpreter", queries=[0, 30, 0, 17],
       keys=[20, 0, 0, 40]),
    _s("cross", "queries and keys of different lengths", "interpreter", queries=[40, 65],
       keys=[70, 9]),
    _s("top_left", "more keys than queries", "interpreter", queries=[20, 33], keys=[50, 33],
       causal="top_left"),
    _s("causal", "each sequence has its own diagonal", "interpreter", queries=[65, 130],
       causal=True),
    _s("bottom_right", "by each sequence's own lengths", "interpreter", queries=[20, 70],
       keys=[66, 33], causal="bottom_right"),
    _s("bottom_right_lengths", "the same, as attention calls it", queries=[20, 70], keys=[66, 33],
       causal="bottom_right_lengths", window=(30, -1)),
    _s("window", "relative to the sequence", "interpreter", queries=[70, 130], window=(20, 3)),
    _s("gqa", "grouped queries", queries=[33, 65], H=6, K=2),
    _s("gqa_ragged", "short sequences between long ones", queries=[20, 130, 5, 97], H=4, K=2, D=16,
       keys=[130, 20, 140, 5]),
    _s("one_query_long", "decoding over several splits, beside a longer sequence", queries=[1, 20],
       keys=[2049, 30], H=2, K=1, D=16),
    _s("one_query_each", "only decoding: several splits, one split, no keys, no query",
       queries=[1, 1, 1, 0], keys=[2049, 30, 0, 5], H=2, K=1, D=16),
    _s("few_queries_each", "beams: several splits, one split, no keys, no query",
       queries=[4, 1, 3, 0], keys=[2049, 30, 0, 5], H=4, K=2, D=16, causal="bottom_right"),
    _s("d80", "other tile sizes for wide heads", queries=[65, 20], keys=[70, 33], D=80,
       causal="bottom_right"),
    _s("d128", "other tile sizes for wide heads", queries=[130, 65], H=4, K=2, D=128,
       causal=True, dropout_p=0.2),
    _s("d192", "other tile sizes for wide heads", queries=[65, 9], keys=[129, 40], D=192,
       window=(30, 60)),
    _s("d256", "other tile sizes for wide heads", queries=[65, 70], keys=[129, 20], H=4, K=2,
       D=256, dropout_p=0.2),
    _s("e_differs", "E > D", queries=[33, 17], D=16, E=40),
    _s("slack", "NaN in rows after the last sequence", "interpreter", queries=[33, 17], slack=9),
    _s("loose_bounds", "upper bounds need not be tight", queries=[33, 65], longer=70),
    _s("dropout", "bits depend on positions in the sequence", "interpreter", queries=[65, 40],
       dropout_p=0.25, causal=True),
    _s("dropout_origin", "bits of a part of a larger batch", "interpreter", queries=[33, 20],
       H=4, K=2, dropout_p=0.25, causal=True, origin=(3, 8, 16, 32)),
    _s("no_sequences", "an empty batch", queries=[]),
    _s("scale_negative", "the order of scores is reversed", queries=[33, 20], scale=-0.3),
    replace(
        _s("exact", "scores of up to 1e9, of which some are equal", queries=[33, 1, 20],
           keys=[140, 40, 9], D=16, H=4, K=2, whole=True, scale=2.0**25),
        dtypes=(torch.float32, torch.bfloat16),  # gradients overflow in fp16
        wrong_results=frozenset(("sm90", "triton")),
    ),
    _s("alibi", "distances inside a sequence", "interpreter", queries=[65, 20, 0, 33], causal=True,
       alibi="H"),
    _s("alibi_cross", "slopes of each sequence, from its own diagonal", queries=[20, 70],
       keys=[66, 33], causal="bottom_right", alibi="BH", longer=9),
    _s("relative", "T5's buckets inside a sequence", "interpreter", queries=[65, 33],
       keys=[40, 70], relative=("t5", 16, 40)),
    _s("softcap", "scores of all sizes", queries=[65, 33], D=16, H=4, K=2, softcap=0.7),
    _s("sinks", "rows after the last sequence and without keys", "interpreter",
       queries=[33, 17, 5], keys=[40, 20, 0], slack=7, sinks=0.0),
    _s("one_query_scores", "decoding, with all score modifications", queries=[1, 1, 1, 0],
       keys=[1100, 30, 0, 5], H=2, K=1, D=16, causal="bottom_right", alibi="BH", softcap=2.0,
       sinks=1.0, relative=("t5_causal", 32, 128)),
    _s("all_scores", "all score modifications, with a window and dropout", "interpreter",
       queries=[65, 20, 33], keys=[70, 20, 90], H=4, K=2, causal="bottom_right", window=(40, 0),
       alibi="H", softcap=2.0, sinks=0.5, relative=("clipped", 21, 1), dropout_p=0.2),
)  # fmt: skip


def _drawn(number: int) -> Sample:
    """The options of the padded call that packed sequences have, with lengths of their own."""
    call, r = draw(number), random.Random(number)
    padding = ("B", "M", "N", "layout", "mask", "key_lengths", "query_lengths")
    sizes = {name: call.options[name] for name in "BMN"}
    options = {name: x for name, x in call.options.items() if name not in padding}
    queries, keys = ([r.randint(0, sizes[x]) for _ in range(sizes["B"] + 1)] for x in "MN")
    keys = queries if options["causal"] is True else keys
    return call.sample(make_inputs, queries=queries, keys=keys, **options)


def _sequences(inputs: Inputs) -> list[Inputs]:
    """The inputs of the equivalent calls of `attention`, one for each sequence."""
    calls = []
    queries, keys = (pairwise(inputs[f"cu_seqlens_{x}"].tolist()) for x in "qk")
    for b, ((q0, q1), (k0, k1)) in enumerate(zip(queries, keys, strict=True)):
        slopes = inputs.get("alibi_slopes")
        call = {name: x for name, x in inputs.items() if not name.startswith(_OF_PACKED)}
        call |= {"q": inputs["q"][None, :, q0:q1]}
        call |= {name: inputs[name][None, :, k0:k1] for name in "kv"}
        if slopes is not None and slopes.dim() == 2:
            call["alibi_slopes"] = slopes[b : b + 1]
        if call.get("causal") is True:
            call["causal"] = "top_left"
        calls.append(call)
    return calls


def _joined(results: list[Tensor], like: Tensor, fill: float) -> Tensor:
    """Concatenates results of the sequences, [1, heads, n, ...] each; then `fill` up to like's
    shape.
    """
    real = torch.cat([like[:, :0], *[result[0].to(like.dtype) for result in results]], 1)
    return torch.cat([real, torch.full_like(like[:, real.shape[1] :], fill)], 1)


def _torch_form(inputs: Inputs) -> tuple[Tensor, ...] | None:
    # The dropout bits depend on the index of the sequence, which single calls do not have.
    if inputs.get("dropout_p") or not _sequences(inputs):
        return None
    q, v = inputs["q"], inputs["v"]
    results = [padded.torch_form(call) for call in _sequences(inputs)]
    out_like = q.new_empty(*q.shape[:2], v.shape[2])
    return (
        _joined([out for out, _ in results], out_like, 0.0),
        _joined([lse for _, lse in results], q.new_empty(q.shape[:2]), -torch.inf),
    )


def _magnitudes(inputs: Inputs, douts: tuple[Tensor, ...]) -> dict[str, Tensor]:
    results: dict[str, list[Tensor]] = {name: [] for name in ("out", "lse", "dq", "dk", "dv")}
    parameters = [f"d{name}" for name in _PARAMETERS if name in inputs]
    sums: dict[str, list[Tensor]] = {name: [] for name in parameters}
    start = 0
    for call in _sequences(inputs):
        stop = start + call["q"].shape[2]
        mags = padded.magnitudes(call, tuple(d[None, :, start:stop] for d in douts))
        for name, values in (results | sums).items():
            values.append(mags[name])
        start = stop
    if inputs.get("dropout_p"):  # an upper bound, as if all weights were kept
        factor = 1 / (1 - inputs["dropout_p"])
        results, sums = (
            {name: [factor * x for x in values] for name, values in found.items()}
            for found in (results, sums)
        )
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    like = {
        "out": q.new_empty(*q.shape[:2], v.shape[2]),
        "lse": q.new_empty(q.shape[:2]),
        "dq": q,
        "dk": k,
        "dv": v,
    }
    mags = {name: _joined(results[name], like[name], 0.0) for name in results}
    for name, values in sums.items():
        parameter = inputs[name[1:]]
        by_sequence = name == "dalibi_slopes" and parameter.dim() == 2
        mags[name] = torch.cat(values) if by_sequence else torch.stack(values).sum(0)
    return mags


def _entries(inputs: Inputs) -> tuple[Entry, ...]:
    """Each sequence, with the same upper bounds; with dropout only the first, as the bits depend on
    the index of the sequence.
    """
    bounds = [list(pairwise(inputs[f"cu_seqlens_{x}"].tolist())) for x in "qk"]
    found = []
    for i, ((q0, q1), (k0, k1)) in enumerate(zip(*bounds, strict=True)):
        queries, keys = (slice(None), slice(q0, q1)), (slice(None), slice(k0, k1))
        alone = {"q": inputs["q"][queries], "k": inputs["k"][keys], "v": inputs["v"][keys]}
        for name, length in (("cu_seqlens_q", q1 - q0), ("cu_seqlens_k", k1 - k0)):
            alone[name] = inputs[name].new_tensor([0, length])
        slopes = inputs.get("alibi_slopes")
        if slopes is not None and slopes.dim() == 2:
            alone["alibi_slopes"] = slopes[i : i + 1]
        where = dict.fromkeys(("out", "lse", "dq"), queries) | dict.fromkeys(("dk", "dv"), keys)
        found.append(Entry(f"sequence {i}", inputs | alone, where))
    return tuple(found[:1] if inputs.get("dropout_p") else found) if len(found) > 1 else ()


def _dead_positions(inputs: Inputs) -> dict[str, Tensor]:
    """Dead rows and keys of each sequence, and the rows after the last sequence."""
    found: dict[str, list[Tensor]] = {"q": [], "k": [], "lse": []}
    for call in _sequences(inputs):
        rows, keys = dead(call)
        found["q"].append(rows)
        found["k"].append(keys)
        found["lse"].append(dead_positions(call)["lse"])
    rows, keys, lse = (
        _joined(found[name], torch.zeros_like(inputs[x][..., 0], dtype=torch.bool), True)
        for name, x in (("q", "q"), ("k", "k"), ("lse", "q"))
    )
    rows, keys = rows[..., None], keys[..., None]
    return {"q": rows, "k": keys, "v": keys, "out": rows, "lse": lse}


def _slice_dims(name: str, result: Tensor) -> int:
    """Each head is a slice; all heads together of a parameter with one number for each."""
    return min(1, result.dim() - 1)


def _base(**changes: Any) -> Inputs:
    inputs: Inputs = {name: torch.zeros(4, 6, 8) for name in "qkv"}
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        inputs[name] = torch.tensor([0, 2, 6], dtype=torch.int32)
    return inputs | {"max_seqlen_q": 4, "max_seqlen_k": 4} | changes


def _error(name: str, error: type[Exception], message: str, **changes: Any) -> ErrorSample:
    return ErrorSample(name, partial(_base, **changes), error, message)


ERRORS = (
    _error("integers", TypeError, "q must be fp16", q=torch.zeros(4, 6, 8).int()),
    _error("dimensions", ValueError, "k must have 3 dimensions", k=torch.zeros(1, 4, 6, 8)),
    _error("dtypes", TypeError, "v must have q's dtype", v=torch.zeros(4, 6, 8).half()),
    _error("head_dim", ValueError, "k must have q's head dim 8", k=torch.zeros(4, 6, 16)),
    _error("heads", ValueError, "q must have a multiple", k=torch.zeros(3, 6, 8),
           v=torch.zeros(3, 6, 8)),
    _error("v_like_k", ValueError, r"v must be \[6, 4, E\]", v=torch.zeros(4, 5, 8)),
    _error("offsets_dtype", ValueError, "cu_seqlens_q must be int32",
           cu_seqlens_q=torch.tensor([0, 6])),
    _error("offsets_shape", ValueError, "cu_seqlens_k must have cu_seqlens_q's shape",
           cu_seqlens_k=torch.tensor([0, 6], dtype=torch.int32)),
    _error("maximum", ValueError, "max_seqlen_q must be >= 0", max_seqlen_q=-1),
    _error("maximum_type", TypeError, "max_seqlen_k must be an integer", max_seqlen_k=4.0),
)  # fmt: skip

SPECS = (
    OpSpec(
        "attention_varlen",
        attention_varlen,
        ("out", "lse"),
        SAMPLES,
        ERRORS,
        PACKED_WORKLOADS,
        _torch_form,
        _magnitudes,
        _slice_dims,
        widen,
        _entries,
        dead=_dead_positions,
        drawn=_drawn,
        arguments=arguments,
        outputs=by_head,
    ),
)
