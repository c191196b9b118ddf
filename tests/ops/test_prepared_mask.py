"""`prepare_mask`: tile bitmasks, results with the same bits, PyTorch's modes."""

import copy
import pickle
from typing import Any

import pytest
import torch
from op_examples import DEVICE, SPECS, backends_of
from torch import Tensor

import fastattn
from fastattn.functional import PreparedMask
from fastattn.ops._select import OPS, explaining
from fastattn.ops.attention.calls import ForwardCall
from fastattn.ops.attention.prepared import KEYS, QUERIES, TILE, WHOLE
from fastattn.testing.spec import Inputs, Sample

SPEC = SPECS["attention"]
PREPARED = [s for s in SPEC.samples if s.name.startswith("prepared")]


# -- tile bitmasks --------------------------------------------------------------------------------
def _bitmask(allowed: Tensor, unchanged: Tensor) -> int:
    """The bitmask of one tile, from its pairs."""
    bitmask = int(unchanged.all()) << WHOLE
    for j in range(allowed.shape[1]):
        bitmask |= int(allowed[:, j].any()) << (KEYS + j)
    for i in range(allowed.shape[0]):
        bitmask |= int(allowed[i].any()) << (QUERIES + i)
    return bitmask


def _values(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """An additive mask that blocks by finfo.min and by -inf, with other values in one corner."""
    if dtype == torch.bool:
        return mask
    blocked = torch.full(mask.shape, torch.finfo(dtype).min, dtype=dtype)
    blocked[..., ::2] = -torch.inf
    values = torch.where(mask, torch.zeros((), dtype=dtype), blocked)
    values[..., :3, :3] += 0.5
    return values


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("M, N", [(1, 37), (33, 1), (1, 1), (40, 50), (16, 32), (0, 5), (5, 0)])
def test_bitmasks_follow_from_the_pairs(M: int, N: int, dtype: torch.dtype) -> None:
    mask = torch.rand(2, 1, M, N, generator=torch.Generator().manual_seed(M + N)) > 0.2
    mask[:, :, :16, 16:32] = True
    mask[:, :, 16:32, :16] = False
    values = _values(mask, dtype)
    tiles = fastattn.prepare_mask(values).tiles
    assert tiles.dtype == torch.int64
    assert tiles.shape == (2, 1, -(-M // TILE), -(-N // TILE))
    # A dimension of size 1 is broadcast.
    lines = [TILE if size == 1 else size for size in (M, N)]
    values = values.expand(2, 1, *lines)
    allowed = values if dtype == torch.bool else values > torch.finfo(dtype).min
    unchanged = values if dtype == torch.bool else values == 0
    for b in range(2):
        for m in range(tiles.shape[2]):
            for n in range(tiles.shape[3]):
                where = (b, 0, slice(TILE * m, TILE * m + TILE), slice(TILE * n, TILE * n + TILE))
                expected = _bitmask(allowed[where], unchanged[where])
                assert int(tiles[b, 0, m, n]) == expected, (b, m, n)


def test_broadcast_dimensions_are_not_expanded() -> None:
    row = torch.rand(4, 1, 1, 70) > 0.3
    few = fastattn.prepare_mask(row)
    expanded = fastattn.prepare_mask(row.expand(4, 8, 70, 70))
    assert few.tiles.shape == expanded.tiles.shape == (4, 1, 1, 5)
    assert torch.equal(few.tiles, expanded.tiles)
    assert fastattn.prepare_mask(row[0, 0, 0]).tiles.shape == (1, 1, 1, 5)
    assert fastattn.prepare_mask(torch.tensor(True)).tiles.shape == (1, 1, 1, 1)


# -- results --------------------------------------------------------------------------------------
def _run(inputs: Inputs, backend: str) -> dict[str, Tensor]:
    outputs = SPEC.function(**inputs, backend=backend)
    wanted = [n for n, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad]
    douts = [torch.where(x.isfinite(), x.detach().sin(), 0) for x in outputs]
    gradients = torch.autograd.grad(outputs, [inputs[n] for n in wanted], douts)
    return dict(zip((*SPEC.results, *wanted), (*outputs, *gradients), strict=True))


@pytest.mark.parametrize("backend", backends_of("attention"))
@pytest.mark.parametrize("sample", PREPARED, ids=lambda s: s.name)
def test_results_have_the_bits_of_the_mask_itself(sample: Sample, backend: str) -> None:
    inputs = sample.inputs(DEVICE, torch.float32)
    with torch.no_grad(), explaining() as choices:
        SPEC.function(**inputs, backend=backend)
    if choices[0].chosen != backend:
        pytest.skip(choices[0].refusals[backend])
    prepared, expected = _run(inputs, backend), _run(inputs | {"prepared": False}, backend)
    for name, value in expected.items():
        torch.testing.assert_close(value, prepared[name], rtol=0, atol=0, equal_nan=True)


def test_attention_weights_accept_it() -> None:
    inputs = next(s for s in PREPARED if s.name == "prepared_mask").inputs(DEVICE, torch.float32)
    q, k, mask = inputs["q"], inputs["k"], inputs["mask"]
    expected = fastattn.attention_weights(q, k, mask=mask, rows=slice(3, 9))
    prepared = fastattn.prepare_mask(mask)
    actual = fastattn.attention_weights(q, k, mask=prepared, rows=slice(3, 9))
    assert torch.equal(actual, expected)


def test_several_calls_share_it() -> None:
    generator = torch.Generator().manual_seed(1)
    mask = torch.randn(1, 1, 20, 30, generator=generator).to(DEVICE).requires_grad_()
    prepared = fastattn.prepare_mask(mask)
    total = 0
    for B, H in ((1, 2), (3, 1)):
        q = torch.randn(B, H, 20, 8, generator=generator).to(DEVICE)
        k = torch.randn(B, H, 30, 8, generator=generator).to(DEVICE)
        actual, expected = (fastattn.attention(q, k, k, mask=m) for m in (prepared, mask))
        assert torch.equal(actual, expected)
        total = total + actual.sin().sum()
    assert torch.autograd.grad(total, mask)[0].abs().sum() > 0


# -- errors ---------------------------------------------------------------------------------------
def _prepared(shape: tuple[int, ...], tiles: Tensor) -> PreparedMask:
    return PreparedMask(torch.ones(shape, dtype=torch.bool), tiles)


@pytest.mark.parametrize(
    "mask, error, message",
    [
        (_prepared((20, 40), torch.zeros(1, 1, 1, 3).long()), None, ""),
        (_prepared((20, 40), torch.zeros(1, 1, 2, 2).long()), ValueError, "mask.tiles must be int"),
        (
            _prepared((20, 40), torch.zeros(2, 3).long()),
            ValueError,
            "mask.tiles must be int64, bro",
        ),
        (_prepared((20, 40), torch.zeros(1, 1, 2, 3)), ValueError, "got torch.float32"),
        (_prepared((20, 40), [1]), TypeError, "mask.tiles must be a tensor, got list"),
        (_prepared((21, 40), torch.zeros(1, 1, 2, 3).long()), ValueError, "mask must be broadcast"),
        (PreparedMask([1], torch.zeros(1)), TypeError, "mask must be a tensor, got list"),
    ],
)
def test_errors_name_the_argument(mask: Any, error: type[Exception] | None, message: str) -> None:
    q, k = torch.randn(1, 1, 20, 8), torch.randn(1, 1, 40, 8)
    if error is None:
        fastattn.attention(q, k, k, mask=mask)
        return
    with pytest.raises(error, match=message):
        fastattn.attention(q, k, k, mask=mask)


def test_prepare_mask_requires_a_mask() -> None:
    with pytest.raises(TypeError, match="mask must be bool or floating, got"):
        fastattn.prepare_mask(torch.ones(3, 3).long())
    with pytest.raises(TypeError, match="mask must be a tensor, got NoneType"):
        fastattn.prepare_mask(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"mask must have at most 4 dimensions, got \[1, 1,"):
        fastattn.prepare_mask(torch.ones(1, 1, 1, 1, 1).bool())


# -- PyTorch's modes ------------------------------------------------------------------------------
def _data(length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(2, 2, length, 8, generator=generator)
    mask = torch.randn(2, 1, length, length, generator=generator)
    return q.requires_grad_(), mask.masked_fill(mask > 0.7, -torch.inf).requires_grad_()


def _attend(q: Tensor, mask: Any) -> Tensor:
    return fastattn.attention(q, q, q, mask=mask)


def _prepare_and_attend(q: Tensor, mask: Tensor) -> Tensor:
    return _attend(q, fastattn.prepare_mask(mask))


@pytest.mark.parametrize("inside", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compile(inside: bool) -> None:
    """One graph for every length, with the mask prepared before or inside it."""
    function = _prepare_and_attend if inside else _attend
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")

    def run(call: Any, length: int) -> tuple[Tensor, ...]:
        q, mask = _data(length)
        out = call(q, mask if inside else fastattn.prepare_mask(mask))
        return out, *torch.autograd.grad(out.sin().sum(), (q, mask))

    try:
        run(compiled, 130)  # no other tensor has as many elements
        with torch.compiler.set_stance("fail_on_recompile"):
            for length in (33, 70):
                pairs = zip(run(compiled, length), run(function, length), strict=True)
                for actual, expected in pairs:
                    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    finally:
        torch._dynamo.reset()


def test_export() -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Tensor, mask: PreparedMask) -> Tensor:
            return _attend(q, mask)

    def inputs(length: int) -> tuple[Tensor, PreparedMask]:
        q, mask = (x.detach() for x in _data(length))
        return q, fastattn.prepare_mask(mask)

    auto = torch.export.Dim.AUTO
    shapes = tuple(dict.fromkeys(range(4), auto) for _ in range(3))
    program = torch.export.export(
        Module(), inputs(20), dynamic_shapes=(shapes[0], PreparedMask(shapes[1], shapes[2]))
    )
    for length in (20, 41):
        q, mask = inputs(length)
        assert torch.equal(program.module()(q, mask), _attend(q, mask))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_functorch() -> None:
    """Prepared outside and passed as an argument, prepared inside, prepared under vmap."""
    q, mask = (x.detach() for x in _data(20))

    def loss(q: Tensor, mask: Any) -> Tensor:
        return _attend(q, mask).sin().sum()

    expected = torch.func.grad(loss, argnums=(0, 1))(q, mask)
    inside = torch.func.grad(lambda q, mask: loss(q, fastattn.prepare_mask(mask)), argnums=(0, 1))(
        q, mask
    )
    outside = torch.func.grad(loss)(q, fastattn.prepare_mask(mask))
    for actual, wanted in zip((*inside, outside), (*expected, expected[0]), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0)

    masks = torch.stack([mask, mask.flip(-1), mask.mT])
    each = torch.func.vmap(_prepare_and_attend, in_dims=(None, 0))(q, masks)
    several = torch.func.vmap(fastattn.prepare_mask)(masks)
    given = torch.func.vmap(_attend, in_dims=(None, 0))(q, several)
    for n in range(3):
        one = _attend(q, masks[n])
        assert torch.equal(each[n], one) and torch.equal(given[n], one)


def test_copies_and_devices() -> None:
    prepared = fastattn.prepare_mask(torch.rand(3, 20) > 0.3)
    for other in (pickle.loads(pickle.dumps(prepared)), copy.deepcopy(prepared)):
        assert isinstance(other, PreparedMask)
        assert torch.equal(other.mask, prepared.mask) and torch.equal(other.tiles, prepared.tiles)
    meta = fastattn.prepare_mask(torch.empty(2, 1, 40, 50, device="meta"))  # reads no value
    assert meta.tiles.shape == (2, 1, 3, 4) and meta.tiles.device.type == "meta"


def test_the_op_gets_the_tiles() -> None:
    """Backends get the prepared tiles, or None."""
    names = OPS["attention_fwd"].arguments
    assert names[names.index("mask") + 1] == "mask_tiles"
    q = torch.randn(1, 1, 20, 8)
    mask = fastattn.prepare_mask(torch.rand(20, 20) > 0.3)
    call = ForwardCall(q, q, q, mask.mask[None, None], mask.tiles, scale=0.5)
    out, _ = torch.ops.fastattn.attention_fwd(*call)
    torch.library.opcheck(torch.ops.fastattn.attention_fwd.default, tuple(call))
    assert torch.equal(out, fastattn.attention(q, q, q, mask=mask.mask, scale=0.5))
