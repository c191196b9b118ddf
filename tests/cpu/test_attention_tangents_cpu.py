"""Attention in forward mode by its CPU kernel, beyond the samples of test_forward_mode.py: every
instruction set, several tiles, which calls use the kernel, and its derivatives.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from call_recorder import CallRecorder
from cpu_library import assert_threads_change_no_bit, every_isa, needs_library, slower_isas
from forward_mode import assert_tangents, check_tangents, computed
from op_examples import as_tuple
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp

import fastattn
from fastattn.testing.poison import poisoned_results
from fastattn.testing.spec import Inputs, Sample, all_specs

SPEC, PACKED = (all_specs()[name] for name in ("attention", "attention_varlen"))
pytestmark = [needs_library, pytest.mark.usefixtures("no_request")]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def _randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _tensors(
    M: int, N: int, D: int, E: int, dtype: torch.dtype = torch.float32, B: int = 2
) -> tuple[Inputs, dict[str, Tensor]]:
    """(q, k and v of 4 heads in groups of 2, their tangents)."""
    shapes = {"q": (B, 4, M, D), "k": (B, 2, N, D), "v": (B, 2, N, E)}
    inputs, tangents = (
        {name: _randn(*x, dtype=dtype, seed=seed + i) for i, (name, x) in enumerate(shapes.items())}
        for seed in (1, 4)
    )
    return inputs | {"return_lse": True}, tangents


# -- values ---------------------------------------------------------------------------------------
TYPICAL = ("odd_sizes", "d80", "gqa", "both_lengths_causal", "bool_mask_rows", "bias_row",
           "bias_fp32", "all_restrictions", "extreme_logits", "dropout")  # fmt: skip


@slower_isas
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sample", [s for s in SPEC.samples if s.name in TYPICAL], ids=lambda sample: sample.name
)
def test_sample(isa: str, sample: Sample, dtype: torch.dtype) -> None:
    check_tangents(SPEC, sample, dtype)


def _restrictions(M: int, N: int) -> dict[str, dict[str, Any]]:
    bias = _randn(2, 4, M, N, seed=8)
    return {
        "unrestricted": {},
        "causal": {"causal": "bottom_right"},
        "window": {"window": (70, 30)},
        "lengths": {"key_lengths": torch.tensor([N, 129]), "query_lengths": torch.tensor([5, M])},
        "lengths of queries": {"key_lengths": torch.arange(2 * M).view(2, M) % (N + 1)},
        "mask": {"mask": bias > 0.5},
        "bias": {"mask": bias},
        "bias of keys": {"mask": bias[:1, :1, :1].bfloat16()},
        "bias of queries": {"mask": bias[:, :, :, :1].double()},
        "transposed bias": {"mask": bias.transpose(2, 3).contiguous().transpose(2, 3).half()},
        "alibi": {"alibi_slopes": torch.tensor([0.0, 0.1, 0.02, 1.0]), "causal": "bottom_right"},
        "alibi and bias": {"alibi_slopes": torch.tensor([0.0, 0.1, 0.02, 1.0]), "mask": bias},
        "sinks": {"sinks": torch.tensor([1.0, -torch.inf, 8.0, 0.0])},
        "sinks and dead rows": {
            "sinks": torch.tensor([1.0, -torch.inf, 3.0, 0.0]),
            "mask": bias.masked_fill(
                (torch.arange(M)[:, None] % 7 == 2) | (bias > 0.5), -torch.inf
            ),
            "query_lengths": torch.tensor([5, M]),
        },
        "dropout": {
            "dropout_p": 0.3,
            "dropout_seed": torch.tensor([9, 1, 3, 32, 2**33 - 16]),
            "causal": "top_left",
        },
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", _restrictions(1, 1))
def test_several_tiles(name: str, dtype: torch.dtype) -> None:
    """All tangents, then each alone, with partial tiles of queries and keys and odd dims."""
    inputs, tangents = _tensors(101, 300, 41, 24, dtype)
    inputs |= _restrictions(101, 300)[name]
    for x in ("mask", "sinks"):
        if x in inputs and inputs[x].is_floating_point():
            tangents[x] = _randn(*inputs[x].shape, seed=7).to(inputs[x].dtype)
            inputs[x].requires_grad_()
    for given in (tangents, *({n: t} for n, t in tangents.items())):
        assert_tangents(SPEC, inputs, given)


@each_dtype
def test_mean_tangent_of_scores_differs_between_tiles(dtype: torch.dtype) -> None:
    """out' is small beside the tangents of the scores, which are nearly the same in a tile."""
    inputs, tangents = _tensors(40, 400, 16, 16, dtype)
    tile = torch.arange(400) // 128
    tangents["k"] = tangents["k"] / 8 + torch.tensor([40.0, -90.0, 60.0, 10.0])[tile, None]
    tangents["k"] = tangents["k"].to(dtype)
    inputs["q"] = (inputs["q"].abs() / 4).to(dtype)
    assert_tangents(SPEC, inputs, {"k": tangents["k"]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_scores(dtype: torch.dtype) -> None:
    inputs, tangents = _tensors(20, 300, 32, 32, dtype)
    assert_tangents(SPEC, inputs | {"q": inputs["q"] * 64}, tangents)


@each_dtype
@pytest.mark.parametrize("M, N", [(1, 3000), (1, 70), (3, 3000), (130, 257)])
@pytest.mark.parametrize("options", [{}, {"causal": "bottom_right", "window": (90, -1)}])
def test_results_have_the_bits_of_the_forward(
    M: int, N: int, options: dict[str, Any], dtype: torch.dtype
) -> None:
    inputs, tangents = _tensors(M, N, 40, 24, dtype)
    inputs |= options
    expected = SPEC.function(**inputs)
    for given in (tangents, {"v": tangents["v"]}):
        with forward_ad.dual_level(), poisoned_results():
            duals = {n: forward_ad.make_dual(inputs[n], t) for n, t in given.items()}
            found = [forward_ad.unpack_dual(x) for x in as_tuple(SPEC.function(**inputs | duals))]
        assert all(torch.equal(x.primal, y) for x, y in zip(found, expected, strict=True))
    assert_tangents(SPEC, inputs, tangents)


def _packed(dtype: torch.dtype) -> tuple[Inputs, dict[str, Tensor]]:
    """Heads first. Sequences of one or three queries, of no query, of no key, and a row of no
    sequence.
    """
    queries, keys = [0, 1, 1, 120, 240, 243], [0, 200, 201, 471, 471, 474]
    offsets = {
        "cu_seqlens_q": torch.tensor(queries, dtype=torch.int32),
        "cu_seqlens_k": torch.tensor(keys, dtype=torch.int32),
    }
    shapes = {"q": (4, 244, 40), "k": (2, 475, 40), "v": (2, 475, 24)}
    inputs, tangents = (
        {name: _randn(*x, dtype=dtype, seed=seed + i) for i, (name, x) in enumerate(shapes.items())}
        for seed in (1, 4)
    )
    longest = {"max_seqlen_q": 120, "max_seqlen_k": 270}
    return inputs | offsets | longest | {"causal": "bottom_right"}, tangents


@each_dtype
def test_packed_sequences(dtype: torch.dtype) -> None:
    inputs, tangents = _packed(dtype)
    for given in (tangents, *({n: t} for n, t in tangents.items())):
        assert_tangents(PACKED, inputs, given)
    with forward_ad.dual_level(), poisoned_results():
        duals = {n: forward_ad.make_dual(inputs[n], t) for n, t in tangents.items()}
        found = [forward_ad.unpack_dual(x) for x in as_tuple(PACKED.function(**inputs | duals))]
    expected = PACKED.function(**inputs)
    assert all(torch.equal(x.primal, y) for x, y in zip(found, expected, strict=True))


@each_dtype
def test_threads_change_no_bit(dtype: torch.dtype) -> None:
    inputs, tangents = _tensors(260, 300, 40, 24, dtype)
    inputs |= {
        "mask": _randn(1, 4, 1, 300),
        "key_lengths": torch.tensor([300, 150]),
        "query_lengths": torch.tensor([260, 255]),
        "causal": "bottom_right",
        "dropout_p": 0.1,
        "dropout_seed": torch.tensor([5]),
    }
    assert_threads_change_no_bit(lambda: computed(SPEC, inputs, tangents))
    assert_threads_change_no_bit(lambda: computed(PACKED, *_packed(dtype)))


# -- dead positions -------------------------------------------------------------------------------
def _dead_by(what: str) -> tuple[dict[str, Any], slice, slice]:
    """(restrictions of 130 queries and 140 keys, the dead rows and keys of the last entry)."""
    mask = torch.ones(2, 1, 130, 140, dtype=torch.bool)
    mask[1, :, 100:110] = False
    mask[1, :, :, 30:60] = False
    lengths = torch.full((2, 130), 140)
    lengths[1] = 70
    lengths[1, 90:] = 0
    return {
        "lengths": (
            {"key_lengths": torch.tensor([140, 70]), "query_lengths": torch.tensor([130, 97])},
            slice(97, 130),
            slice(70, 140),
        ),
        "lengths of queries": ({"key_lengths": lengths}, slice(90, 130), slice(70, 140)),
        "mask": ({"mask": mask}, slice(100, 110), slice(30, 60)),
        "bias": (
            {"mask": torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)},
            slice(100, 110),
            slice(30, 60),
        ),
    }[what]


@each_dtype
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("what", ["lengths", "lengths of queries", "mask", "bias"])
def test_dead_positions_may_hold_anything(what: str, value: float, dtype: torch.dtype) -> None:
    """In inputs and tangents: the bits as if they held 0."""
    restrictions, rows, keys = _dead_by(what)
    dead = {"q": rows, "k": keys, "v": keys}

    def results(value: float) -> tuple[Tensor, ...]:
        inputs, tangents = _tensors(130, 140, 64, 64, dtype)
        inputs |= restrictions
        for name, positions in dead.items():
            inputs[name][1, :, positions] = value
            tangents[name][1, :, positions] = value
        if what == "bias":
            blocked = restrictions["mask"].isinf()
            tangents["mask"] = _randn(*blocked.shape).masked_fill(blocked, value)
        with poisoned_results():
            return computed(SPEC, inputs, tangents)

    zeros, found = results(0.0), results(value)
    for x, y in zip(found, zeros, strict=True):
        assert torch.equal(x, y) and x.isfinite().all()
        assert (x[1, :, rows] == 0).all()


def test_nan_in_a_live_tangent_propagates() -> None:
    for name in "qkv":
        inputs, tangents = _tensors(130, 140, 16, 16)
        tangents[name][0, 1, 129, 3] = torch.nan
        out, lse = computed(SPEC, inputs, tangents)
        expected = torch.zeros(out.shape, dtype=torch.bool)
        if name == "q":
            expected[0, 1, 129] = True
        elif name == "k":
            expected[0, 2:] = True  # the group of this key head
        else:
            expected[0, 2:, :, 3] = True
        assert torch.equal(out.isnan(), expected)
        assert torch.equal(lse.isnan(), expected.all(-1) if name != "v" else lse.isinf())


# -- which calls ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, "attention_jvp.default"),
        ({"backend": "cpu"}, "attention_jvp.backend"),
        ({"backend": "torch"}, "attention_fwd.backend"),
        ({"backend": "reference"}, "attention_fwd.backend"),
        ({"dtype": torch.float64}, "attention_fwd.default"),
        ({"softcap": 5.0}, "attention_fwd.default"),
        ({"alibi_slopes": torch.ones(4)}, "attention_jvp.default"),
        ({"sinks": torch.zeros(4)}, "attention_jvp.default"),
    ],
)
@pytest.mark.parametrize("recorded", [False, True])
def test_one_call_computes_results_and_tangents(
    options: dict[str, Any], expected: str, recorded: bool
) -> None:
    options = dict(options)
    inputs, tangents = _tensors(5, 6, 8, 8, options.pop("dtype", torch.float32))
    given = {n: x for n, x in inputs.items() if n != "return_lse"}
    with CallRecorder() as recorder, forward_ad.dual_level():
        duals = [
            forward_ad.make_dual(x.requires_grad_(recorded), tangents[n]) for n, x in given.items()
        ]
        out = fastattn.attention(*duals, **options)
        assert forward_ad.unpack_dual(out).tangent is not None  # type: ignore[arg-type]
    calls = [f"{op._schema.name[10:]}.{op._overloadname}" for op, _, _ in recorder.calls]
    assert calls == [expected]


def test_explain_names_the_kernel() -> None:
    inputs, tangents = _tensors(5, 6, 8, 8)
    with forward_ad.dual_level():
        q = forward_ad.make_dual(inputs["q"], tangents["q"])
        assert fastattn.explain("attention", q, inputs["k"], inputs["v"]).chosen == "cpu"


def _op_arguments(M: int = 9, N: int = 11) -> list[Any]:
    """Of attention_jvp, with every restriction."""
    inputs, tangents = _tensors(M, N, 8, 16)
    mask = _randn(4, 1, N).reshape(1, 4, 1, N)
    lengths = torch.tensor([N, 4]), torch.tensor([M, 5])
    options = [
        None,
        torch.tensor([0.5, 1.0, -1.0, 0.0]),
        0.0,
        2,
        6,
        -1,
        0.3,
        0.2,
        torch.tensor([3]),
        1,
    ]
    return [
        *(inputs[n] for n in "qkv"), mask, None, *lengths, *options,
        *(tangents[n] for n in "qkv"), _randn(1, 4, 1, N, seed=3), None,
        _randn(4, seed=2),
    ]  # fmt: skip


def _packed_arguments() -> list[Any]:
    inputs, tangents = _packed(torch.float32)
    offsets = inputs["cu_seqlens_q"], inputs["cu_seqlens_k"]
    return [
        *(inputs[n].transpose(0, 1) for n in "qkv"), *offsets, 120, 270, None, None, 0.0, 2, -1, -1,
        0.2, 0.0, None, 0, *(tangents[n].transpose(0, 1) for n in "qkv"), None, None,
    ]  # fmt: skip


_QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize(
    "name, overload, tests",
    [
        ("attention_jvp", "default", _QUICK),
        ("attention_jvp", "backend", _QUICK),
        ("attention_varlen_jvp", "default", _QUICK),
        ("attention_varlen_jvp", "backend", _QUICK),
        # Tracing the derivative takes seconds.
        pytest.param("attention_jvp", "default", ("test_aot_dispatch_dynamic",),
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_opcheck(name: str, overload: str, tests: tuple[str, ...]) -> None:
    arguments = _op_arguments() if name == "attention_jvp" else _packed_arguments()
    fresh = [
        x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for x in arguments
    ]
    named = ["cpu"] if overload == "backend" else []
    op = getattr(getattr(torch.ops.fastattn, name), overload)
    torch.library.opcheck(op, (*fresh, *named), test_utils=tests)


@pytest.mark.parametrize("name", ["attention_jvp", "attention_varlen_jvp"])
def test_overloads_have_the_same_bits(name: str) -> None:
    packet = getattr(torch.ops.fastattn, name)
    arguments = _op_arguments(130, 150) if name == "attention_jvp" else _packed_arguments()
    expected = packet.default(*arguments)
    with poisoned_results():
        named = packet.backend(*arguments, "cpu")
        given = {
            result.name: torch.full_like(x, torch.nan)
            for result, x in zip(packet.default._schema.returns, expected, strict=True)
        }
        returned = packet.out(*arguments, **given)
    for x, *others in zip(expected, named, given.values(), returned, strict=True):
        assert all(torch.equal(x, y) for y in others)


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
        lambda x: torch.cat([x, x], -1)[..., : x.shape[3]],
        lambda x: x[:1].expand_as(x),
    ],
)
def test_layouts(layout: Callable[[Tensor], Tensor]) -> None:
    arguments = _op_arguments(130, 150)
    strided = [layout(x) if i in (0, 1, 2, 17, 18, 19) else x for i, x in enumerate(arguments)]
    dense = [x.contiguous() if isinstance(x, Tensor) else x for x in strided]
    op = torch.ops.fastattn.attention_jvp
    for x, y in zip(op(*strided), op(*dense), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    "position, value, message",
    [
        (17, torch.zeros(2, 4, 9, 7), r"q_tangent must be .* \[2, 4, 9, 8\]"),
        (18, torch.zeros(2, 2, 11, 8).half(), "k_tangent must be"),
        (19, torch.zeros(2, 4, 11, 16), "v_tangent must be"),
        (20, torch.zeros(1, 1, 1, 11), "mask_tangent must have the sizes"),
        (22, torch.zeros(3), "sinks_tangent must be a contiguous CPU tensor of 4"),
        (20, torch.zeros(1, 4, 1, 11).half(), "mask_tangent must have the sizes and the type"),
    ],
)
def test_library_protects_memory(position: int, value: Tensor, message: str) -> None:
    arguments = _op_arguments()
    arguments[position] = value
    with pytest.raises(RuntimeError, match=message):
        torch.ops.fastattn.attention_jvp(*arguments)


def test_fp64_is_refused() -> None:
    arguments = [
        x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for x in _op_arguments()
    ]
    with pytest.raises(NotImplementedError, match="has kernels for fp32, bf16 and fp16"):
        torch.ops.fastattn.attention_jvp.backend(*arguments, "cpu")


# -- derivatives ----------------------------------------------------------------------------------
def _attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return fastattn.attention(q, k, v, causal="bottom_right", return_lse=True)  # type: ignore[return-value]


def _loss(*tensors: Tensor) -> Tensor:
    out, lse = _attention(*tensors)
    return out.sin().sum() + lse.sin().sum()


def _small(dtype: torch.dtype) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    inputs, tangents = _tensors(5, 7, 8, 4)
    return tuple(inputs[n].to(dtype) for n in "qkv"), tuple(t.to(dtype) for t in tangents.values())


def _products(dtype: torch.dtype) -> dict[str, Any]:
    tensors, tangents = _small(dtype)
    every = (0, 1, 2)

    def directional(*tensors: Tensor) -> Tensor:
        return jvp(_loss, tensors, tangents)[1]

    def of_tangents(*tangents: Tensor) -> Tensor:
        return sum(x.sin().sum() for x in jvp(_attention, tensors, tangents)[1])  # type: ignore[return-value]

    def dot(*tensors: Tensor) -> Tensor:
        pairs = zip(grad(directional, every)(*tensors), tangents, strict=True)
        return sum((g * t).sum() for g, t in pairs)  # type: ignore[return-value]

    return {
        "jacfwd": jacfwd(_attention, every)(*tensors),
        "hessian": hessian(_loss)(*tensors),
        "reverse over forward": grad(directional, every)(*tensors),
        "reverse over tangents": grad(of_tangents, every)(*tangents),
        "forward over reverse": jvp(grad(_loss, every), tensors, tangents)[1],
        "forward over forward": jvp(directional, tensors, tangents)[1],
        "reverse twice over forward": grad(dot, every)(*tensors),
    }


def test_transforms() -> None:
    """In fp32 by the kernel, in fp64 by PyTorch's operators."""
    found, expected = _products(torch.float32), _products(torch.float64)
    for name in expected:
        x, y = torch.utils._pytree.tree_leaves(found[name]), expected[name]
        for a, b in zip(x, torch.utils._pytree.tree_leaves(y), strict=True):
            torch.testing.assert_close(a, b.float(), atol=2e-5, rtol=2e-5, msg=name)


def _recorded_products(dtype: torch.dtype) -> list[Tensor]:
    """Without functorch: gradients of results and tangents, and tangents of gradients."""
    tensors, tangents = _small(dtype)
    leaves = [x.requires_grad_() for x in (*tensors, *tangents)]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(leaves[:3], leaves[3:], strict=True)]
        results = [forward_ad.unpack_dual(x) for x in _attention(*duals)]
        values = [y.sin().sum() for x in results for y in (x.primal, x.tangent)]
        gradients = torch.autograd.grad(sum(values), leaves)  # type: ignore[arg-type]
        loss = _loss(*duals)
        of_loss = torch.autograd.grad(loss, leaves[:3])
        of_gradients = [forward_ad.unpack_dual(x).tangent for x in of_loss]
    return [*gradients, *of_gradients]  # type: ignore[list-item]


def test_recorded_calls() -> None:
    expected = _recorded_products(torch.float64)
    for x, y in zip(_recorded_products(torch.float32), expected, strict=True):
        torch.testing.assert_close(x, y.float(), atol=2e-5, rtol=2e-5)


def test_primal_gradients_of_a_recorded_call_are_those_of_the_forward() -> None:
    tensors, tangents = _small(torch.float32)
    leaves = [x.requires_grad_() for x in tensors]
    expected = torch.autograd.grad(_loss(*leaves), leaves)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(leaves, tangents, strict=True)]
        found = torch.autograd.grad(forward_ad.unpack_dual(_loss(*duals)).primal, leaves)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(forward_ad.unpack_dual(x).primal, y)


def test_columns_of_a_jacobian_share_a_call() -> None:
    tensors, _ = _small(torch.float32)
    with CallRecorder() as recorder:
        found = jacfwd(_attention)(*tensors)
    assert recorder.names == ["attention_jvp"]
    for x, y in zip(found, jacrev(_attention)(*tensors), strict=True):
        torch.testing.assert_close(x, y)


def test_vmap_of_mask_tangents() -> None:
    q, mask = _randn(1, 2, 5, 8), _randn(1, 1, 5, 5)
    tangents = _randn(3, 1, 1, 5, 5, seed=1)

    def product(t: Tensor) -> Tensor:
        return jvp(lambda m: fastattn.attention(q, q, q, mask=m), (mask,), (t,))[1]

    torch.testing.assert_close(
        torch.vmap(product)(tangents), torch.stack([*map(product, tangents)])
    )


def test_compiled() -> None:
    tensors, tangents = _small(torch.float32)

    def both(*tensors: Tensor) -> Any:
        return jvp(_attention, tensors, tangents)

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(*tensors), both(*tensors))


@every_isa
def test_linearity(isa: str) -> None:
    """Tangents of a reverse product: <dout, J t> = <J^T dout, t>."""
    inputs, tangents = _tensors(130, 150, 32, 32)
    tensors = tuple(inputs[n] for n in "qkv")
    results, product = jvp(_attention, tensors, tuple(tangents.values()))
    cotangents = tuple(_randn(*x.shape, seed=9) for x in results)
    gradients = vjp(_attention, *tensors)[1](cotangents)
    left = sum((c.double() * x).sum() for c, x in zip(cotangents, product, strict=True))
    right = sum((g.double() * t).sum() for g, t in zip(gradients, tangents.values(), strict=True))
    torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-3)
