"""`prepare_mask`: tile bitmasks, results with the same bits, PyTorch's modes. Masks that are not
plain tensors: causal biases, subclasses of tensors, other objects.
"""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from op_examples import DEVICE, SPECS, backends_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.bias import CausalVariant, causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask
from torch.testing._internal.two_tensor import TwoTensor

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


@pytest.mark.parametrize("mask, error, message", [
    (_prepared((20, 40), torch.zeros(1, 1, 1, 3).long()), None, ""),
    (_prepared((20, 40), torch.zeros(1, 1, 2, 2).long()), ValueError, "mask.tiles must be int"),
    (_prepared((20, 40), torch.zeros(2, 3).long()), ValueError, "mask.tiles must be int64, bro"),
    (_prepared((20, 40), torch.zeros(1, 1, 2, 3)), ValueError, "got torch.float32"),
    (_prepared((20, 40), [1]), TypeError, "mask.tiles must be a tensor, got list"),
    (_prepared((21, 40), torch.zeros(1, 1, 2, 3).long()), ValueError, "mask must be broadcast"),
    (PreparedMask([1], torch.zeros(1)), TypeError, "mask must be a tensor, got list"),
])  # fmt: skip
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


# -- objects ---------------------------------------------------------------------------------------
M, N = 5, 9
ALIGNED = [(causal_lower_right, "bottom_right"), (causal_upper_left, "top_left")]


class Annotated(Tensor):
    """A subclass with the default `__torch_function__`."""


class Functions(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def _inputs(queries: int = M, keys: int = N) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return (torch.randn(2, 4, queries, 8), torch.randn(2, 2, keys, 8), torch.randn(2, 2, keys, 8))


@pytest.mark.parametrize("function, causal", ALIGNED)
@pytest.mark.parametrize("sizes", [(M, N), (N, N), (1, N)])
def test_a_causal_bias_is_an_alignment(function: Any, causal: Any, sizes: Any) -> None:
    q, k, v = _inputs(*sizes)
    bias = function(*sizes)
    expected = F.scaled_dot_product_attention(q, k, v, bias._materialize(), enable_gqa=True)
    torch.testing.assert_close(fastattn.attention(q, k, v, mask=bias), expected)
    weights = fastattn.attention_weights(q, k, mask=bias)
    torch.testing.assert_close(weights @ v.repeat_interleave(2, 1), expected)
    compiled = torch.compile(
        lambda *args: fastattn.attention(*args, mask=bias), fullgraph=True, backend="eager"
    )
    torch.testing.assert_close(compiled(q, k, v), expected)


@pytest.mark.parametrize("function, causal", ALIGNED)
@pytest.mark.parametrize("options", [
    {"window": (2, 0)},
    {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.1])},
    {"key_lengths": [9, 4]},
    {"dropout_p": 0.5, "dropout_seed": torch.tensor([3])},
], ids=lambda options: next(iter(options)))  # fmt: skip
def test_a_causal_bias_beside_other_arguments(function: Any, causal: Any, options: Any) -> None:
    q, k, v = _inputs()
    expected = fastattn.attention(q, k, v, causal=causal, **options)
    for given in (False, causal):
        actual = fastattn.attention(q, k, v, mask=function(M, N), causal=given, **options)
        assert torch.equal(actual, expected)


def test_a_causal_bias_that_does_not_fit() -> None:
    q, k, v = _inputs()
    for causal in ("top_left", "bottom_right_lengths", True):
        with pytest.raises(ValueError, match=r'causal must be False or "bottom_right" with mask='):
            fastattn.attention(q, k, v, mask=causal_lower_right(M, N), causal=causal)
    with pytest.raises(ValueError, match=r"5 queries and 9 keys, got causal_upper_left\(9, 9\)"):
        fastattn.attention_weights(q, k, mask=causal_upper_left(N, N))
    square = _inputs(N, N)
    for causal in (True, "top_left", "bottom_right"):
        mask = causal_lower_right(N, N)
        actual = fastattn.attention(*square, mask=mask, causal=causal)
        assert torch.equal(actual, fastattn.attention(*square, causal=True))


@pytest.mark.parametrize("mask", [torch.rand(M, N) > 0.3, torch.randn(M, N)], ids=["bool", "bias"])
def test_subclasses_whose_data_are_the_mask(mask: Tensor) -> None:
    q, k, v = _inputs()
    expected = fastattn.attention(q, k, v, mask=mask)
    parameter = nn.Parameter(mask, requires_grad=mask.is_floating_point())
    for given in (parameter, nn.Buffer(mask), mask.as_subclass(Annotated)):
        assert torch.equal(fastattn.attention(q, k, v, mask=given), expected)
        assert torch.equal(fastattn.prepare_mask(given).mask, mask)
    mapped = torch.vmap(lambda mask: fastattn.attention(q, k, v, mask=mask))(mask[None])
    torch.testing.assert_close(mapped[0], expected)
    twice: Any = fastattn.attention(q, k, v, mask=TwoTensor(mask, mask))
    assert torch.equal(twice.b, expected)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (q, k, v, mask)]
        assert fastattn.attention(*fake[:3], mask=fake[3]).shape == q.shape


OTHERS: dict[str, Any] = {
    "functions": torch.zeros(M, N).as_subclass(Functions),
    "masked": torch.masked.masked_tensor(torch.zeros(M, N), torch.ones(M, N, dtype=torch.bool)),
    "view of a bias": causal_lower_right(M, N)[:, :1],
    "uninitialized": nn.UninitializedParameter(),
    "variant": CausalVariant.LOWER_RIGHT,
    "block mask": create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu"),
    "sparse": torch.zeros(M, N).to_sparse(),
    "nested": torch.nested.nested_tensor([torch.zeros(M, N)] * 2, layout=torch.jagged),
    "complex": torch.zeros(M, N, dtype=torch.complex64),
    "array": torch.zeros(M, N).numpy(),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_are_refused_by_name(name: str) -> None:
    q, k, v = _inputs()
    mask = OTHERS[name]
    with pytest.raises(TypeError, match="mask must "):
        fastattn.attention(q, k, v, mask=mask)
    with pytest.raises(TypeError, match="mask must "):
        fastattn.attention_weights(q, k, mask=mask)
    with pytest.raises(TypeError, match="mask must "):
        fastattn.prepare_mask(mask)


E, H = 16, 2


def _modules() -> dict[str, tuple[nn.Module, str]]:
    """Modules for one input, and the name of their mask."""
    layer = fastattn.nn.TransformerEncoderLayer(E, H, 16, 0.0, batch_first=True)
    return {
        "attention": (fastattn.nn.MultiheadAttention(E, H, batch_first=True), "attn_mask"),
        "positions": (
            fastattn.nn.PositionalMultiheadAttention(E, H, positions="alibi", batch_first=True),
            "attn_mask",
        ),
        "layer": (layer, "src_mask"),
        "stack": (fastattn.nn.TransformerEncoder(layer, 1), "mask"),
        "decoder": (
            fastattn.nn.TransformerDecoderLayer(E, H, 16, 0.0, batch_first=True), "tgt_mask"
        ),
    }  # fmt: skip


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("name", _modules())
def test_modules_and_mask_objects(name: str, need_weights: bool) -> None:
    """A subclass of tensors is handled by torch, what holds no mask is an error."""
    torch.manual_seed(0)
    module, argument = _modules()[name]
    count = {"attention": 3, "positions": 3, "decoder": 2}.get(name, 1)
    inputs = [torch.randn(1, M, E)] * count
    options = {"need_weights": need_weights} if count == 3 else {}
    values = torch.randn(M, M)
    results = [
        module(*inputs, **{argument: mask}, **options)
        for mask in (values, values.as_subclass(Functions))
        if name != "positions" or type(mask) is Tensor
    ]
    outputs = [y[0] if isinstance(y, tuple) else y for y in results]
    torch.testing.assert_close(outputs[-1].as_subclass(Tensor), outputs[0])
    for mask in (causal_lower_right(M, M), OTHERS["block mask"]):
        with pytest.raises(TypeError, match="mask must "):
            module(*inputs, **{argument: mask}, **options)
