"""Dropout in every op: which weights are dropped, by which seed and stream."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from op_examples import DEVICE, SPECS, backends_of
from torch import Tensor

import fastattn
from fastattn.testing import dropout_mask


def _seed(value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.int64)


# -- the ops --------------------------------------------------------------------------------------
def _run(op: str, backend: str, **inputs: Any) -> Any:
    inputs = {n: x.to(DEVICE) if isinstance(x, Tensor) else x for n, x in inputs.items()}
    explanation = fastattn.explain(op, **inputs, backend=backend)
    if explanation.chosen != backend:
        pytest.skip(explanation.refusals[backend])
    results = SPECS[op].function(**inputs, backend=backend)
    return results.cpu() if isinstance(results, Tensor) else tuple(x.cpu() for x in results)


def _dropout(seed: int, stream: int, p: float) -> dict[str, Any]:
    return {"dropout_p": p, "dropout_seed": _seed(seed), "dropout_stream": stream}


@pytest.mark.parametrize("backend", backends_of("attention"))
def test_attention_drops_the_mask(backend: str) -> None:
    """With v the identity, the output is the weights after dropout, all 0 or scaled 1 / N."""
    B, H, M, N, p = 2, 4, 50, 64, 0.3
    inputs = {"q": torch.zeros(B, H, M, 32), "k": torch.ones(B, 2, N, 32)}
    inputs["v"] = torch.eye(N).expand(B, 2, N, N).contiguous()
    weights = _run("attention", backend, **inputs, **_dropout(77, 5, p))
    keep = dropout_mask(_seed(77), 5, p, (B, H, M, N))
    assert torch.equal(weights != 0, keep)
    torch.testing.assert_close(weights, keep * torch.tensor(256 / (256 - 77) / N))


_PARTS = 4


def _parts(
    axis: str, seed: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """q, k, v and the dropout seed of each part."""
    of_q, of_k, place = {
        "sequences": (0, 0, 1), "heads": (1, 1, 2), "queries": (2, None, 3), "keys": (None, 2, 4),
    }[axis]  # fmt: skip
    queries = [q] * _PARTS if of_q is None else q.chunk(_PARTS, of_q)
    keys, values = ([x] * _PARTS if of_k is None else x.chunk(_PARTS, of_k) for x in (k, v))
    first = 0
    for q_part, k_part, v_part in zip(queries, keys, values, strict=True):
        origin = [first if n == place else 0 for n in range(1, 5)]
        yield q_part, k_part, v_part, torch.cat([seed, seed.new_tensor(origin)])
        dim = place - 1 if place < 4 else 2
        first += (q_part if place < 4 else k_part).shape[dim]


def _joined(axis: str, parts: list[Tensor], lses: list[Tensor]) -> Tensor:
    if axis != "keys":
        return torch.cat(parts, {"sequences": 0, "heads": 1, "queries": 2}[axis])
    lse = torch.stack(lses)
    weights = torch.exp(lse - torch.logsumexp(lse, 0))
    return (torch.stack(parts) * weights[..., None]).sum(0)


@pytest.mark.parametrize("backend", backends_of("attention"))
@pytest.mark.parametrize("axis", ["sequences", "heads", "queries", "keys"])
def test_parts_drop_what_the_whole_drops(axis: str, backend: str) -> None:
    """With an origin, a quarter of an attention drops the same pairs as the whole; the quarters
    have its results and gradients.
    """
    generator = torch.Generator().manual_seed(1)
    shapes = ((4, 8, 64, 32), (4, 4, 64, 32), (4, 4, 64, 64))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    dout = torch.randn(4, 8, 64, 64, generator=generator)
    inputs = [x.to(DEVICE).requires_grad_() for x in (q, k, v)]
    options = {"return_lse": True, **_dropout(77, 5, 0.3), "backend": backend}
    options["dropout_seed"] = seed = options["dropout_seed"].to(DEVICE)
    if fastattn.explain("attention", *inputs, **options).chosen != backend:
        pytest.skip("does not run this call")

    def parts(q: Tensor, k: Tensor, v: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        found = [
            fastattn.attention(*x, **options | {"dropout_seed": own})
            for *x, own in _parts(axis, seed, q, k, v)
        ]
        return [out for out, _ in found], [lse for _, lse in found]

    out, _ = fastattn.attention(*inputs, **options)
    joined = _joined(axis, *parts(*inputs))
    torch.testing.assert_close(joined, out)
    gradients, wanted = (torch.autograd.grad(x, inputs, dout.to(DEVICE)) for x in (joined, out))
    torch.testing.assert_close(gradients, wanted)

    q, k = (torch.zeros_like(x) for x in inputs[:2])
    v = torch.eye(64, device=DEVICE).expand(4, 4, 64, 64).contiguous()
    dropped = _joined(axis, *parts(q, k, v)) == 0  # with v the identity, of every pair
    keep = dropout_mask(seed.cpu(), 5, 0.3, (4, 8, 64, 64))
    assert torch.equal(dropped.cpu(), ~keep)


@pytest.mark.parametrize("backend", backends_of("add_layer_norm"))
def test_add_layer_norm_drops_the_mask(backend: str) -> None:
    """With x = 1 and residual = 0, z is the mask times the scale; leading dimensions are rows."""
    x = torch.ones(3, 5, 130)
    _, z = _run(
        "add_layer_norm",
        backend,
        x=x,
        residual=torch.zeros_like(x),
        return_sum=True,
        **_dropout(-8, 2**31 - 1, 0.25),
    )
    keep = dropout_mask(_seed(-8), 2**31 - 1, 0.25, (15, 130)).view(x.shape)
    assert torch.equal(z, keep * torch.tensor(256 / 192, dtype=torch.float32))


@pytest.mark.parametrize("backend", backends_of("ffn"))
@pytest.mark.parametrize("where", ["hidden", "output"])
def test_ffn_drops_the_mask(backend: str, where: str) -> None:
    """The first layer gives ones, which the second passes on; either has dropout."""
    rows, F, stream = (4, 9), 48, 6
    dropout = _dropout(13, stream, 0.5 if where == "hidden" else 0.0)
    dropout["output_dropout_p"] = 0.0 if where == "hidden" else 0.5
    y = _run(
        "ffn",
        backend,
        x=torch.zeros(*rows, 16),
        w1=torch.zeros(F, 16),
        b1=torch.ones(F),
        w2=torch.eye(F),
        b2=torch.zeros(F),
        **dropout,
    )
    stream += 0 if where == "hidden" else 2**31
    keep = dropout_mask(_seed(13), stream, 0.5, (36, F)).view(*rows, F)
    assert torch.equal(y, keep * 2.0)


# -- seeds ----------------------------------------------------------------------------------------
def _dropped(**dropout: Any) -> Tensor:
    x = torch.ones(40, 64, device=DEVICE)
    _, z = fastattn.add_layer_norm(
        x, torch.zeros_like(x), return_sum=True, dropout_p=0.5, **dropout
    )
    return z


def test_manual_seed_determines_the_drawn_seeds() -> None:
    torch.manual_seed(5)
    first, second = _dropped(), _dropped()
    torch.manual_seed(5)
    assert torch.equal(_dropped(), first) and torch.equal(_dropped(), second)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("where", ["dropout_p", "output_dropout_p"])
def test_a_network_draws_its_seed(where: str) -> None:
    x, w = torch.ones(4, 16, device=DEVICE), torch.ones(16, 16, device=DEVICE)

    def dropped(**seed: Tensor) -> Tensor:
        torch.manual_seed(5)
        options: dict[str, Any] = {where: 0.5, **seed}
        return fastattn.ffn(x, w, None, w, None, **options)

    torch.manual_seed(5)
    given = dropped(dropout_seed=fastattn.new_dropout_seed(DEVICE))
    assert torch.equal(dropped(), given)


def test_a_seed_and_a_stream_repeat_a_call() -> None:
    seed = fastattn.new_dropout_seed(DEVICE)
    assert torch.equal(_dropped(dropout_seed=seed), _dropped(dropout_seed=seed))
    other = _dropped(dropout_seed=seed, dropout_stream=1)
    assert not torch.equal(_dropped(dropout_seed=seed), other)


def test_a_given_seed_draws_nothing() -> None:
    generator = torch.cuda if DEVICE.type == "cuda" else torch
    state = generator.get_rng_state()
    _dropped(dropout_seed=_seed(1).to(DEVICE))
    x = torch.ones(3, 4, device=DEVICE)
    fastattn.add_layer_norm(x, x)
    assert torch.equal(generator.get_rng_state(), state), "nor does p = 0"


def test_calls_with_any_origin_share_a_compiled_graph() -> None:
    q = torch.ones(1, 1, 20, 8, device=DEVICE)

    def dropped(seed: Tensor) -> Tensor:
        return fastattn.attention(q, q, q, dropout_p=0.5, dropout_seed=seed)

    compiled = torch.compile(dropped, fullgraph=True, backend="aot_eager")
    seeds = [torch.tensor([1, b, 0, 16 * b, 0], device=DEVICE) for b in range(3)]
    compiled(seeds[0])
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed in seeds:
            assert torch.equal(compiled(seed), dropped(seed))


def test_an_origin_must_be_a_multiple_of_16() -> None:
    q = torch.ones(1, 1, 4, 8)
    with pytest.raises(ValueError, match="must have multiples of 16 as the index"):
        fastattn.attention(q, q, q, dropout_p=0.1, dropout_seed=torch.tensor([1, 3, 3, 0, 8]))


def test_only_attention_takes_an_origin() -> None:
    x = torch.ones(4, 8, device=DEVICE)
    seed = torch.zeros(5, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"must be int64 \[1\], got torch.int64 \[5\]"):
        fastattn.add_layer_norm(x, x, dropout_p=0.1, dropout_seed=seed)


def test_new_seeds() -> None:
    torch.manual_seed(0)
    seeds = torch.cat([fastattn.new_dropout_seed(DEVICE) for _ in range(200)])
    assert seeds.dtype == torch.int64 and seeds.device.type == DEVICE.type
    assert seeds.unique().numel() == 200
    means = torch.stack([(seeds >> i & 1).double().mean() for i in range(64)])
    # All 64 bits vary: 5 sigma of a fair coin over 200 draws is 0.18.
    assert float((means - 0.5).abs().max()) < 0.18
    assert fastattn.new_dropout_seed(str(DEVICE)).shape == (1,)


def test_dropped_attention_keeps_its_expectation() -> None:
    """The mean over many streams approximates the output without dropout."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 4, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    outs = [
        fastattn.attention(q, k, v, dropout_p=0.3, dropout_seed=_seed(1), dropout_stream=s)
        for s in range(1000)
    ]
    samples = torch.stack(outs)
    error = samples.mean(0) - fastattn.attention(q, k, v)
    sigma = samples.std(0) / len(outs) ** 0.5
    assert float((error / sigma).abs().max()) < 5
