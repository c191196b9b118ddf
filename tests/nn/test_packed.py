"""Packed execution: `src_lengths` and `tgt_lengths` against key padding masks, row by row."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from fastattn import nn as fnn
from fastattn.nn import packing
from fastattn.nn.sharding import SINGLE

E, H = 16, 2
SRC_LENGTHS, TGT_LENGTHS = [7, 3, 0, 1], [2, 5, 4, 0]
STYLES = list(itertools.product((True, False), (True, False)))


@pytest.fixture(autouse=True, params=[1, 8], ids=["rows", "rows8"])
def row_multiple(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """As many rows as there are tokens, or more, as on a GPU."""
    monkeypatch.setitem(packing._ROW_MULTIPLES, "cpu", request.param)
    return request.param  # type: ignore[no-any-return]


def make(kind: type, batch_first: bool, norm_first: bool, **options: Any) -> Any:
    torch.manual_seed(0)
    settings = {"dropout": 0.0, "batch_first": batch_first, "norm_first": norm_first} | options
    if kind is fnn.Transformer:
        return fnn.Transformer(E, H, 2, 2, 32, **settings)
    if kind is fnn.TransformerEncoder:
        return kind(
            fnn.TransformerEncoderLayer(E, H, 32, **settings), 2, nn.LayerNorm(E),
            enable_nested_tensor=False,
        )  # fmt: skip
    return kind(fnn.TransformerDecoderLayer(E, H, 32, **settings), 2)


def batch(S: int, batch_first: bool) -> Tensor:
    x = torch.randn(len(SRC_LENGTHS), S, E, generator=torch.Generator().manual_seed(S))
    return x if batch_first else x.transpose(0, 1).contiguous()


def padding(lengths: list[int], S: int) -> Tensor:
    return torch.arange(S) >= torch.tensor(lengths)[:, None]


def causal(S: int) -> Tensor:
    return torch.ones(S, S, dtype=torch.bool).triu(1)


def padded_call(
    model: Any, *inputs: Tensor, src_lengths: Any = None, tgt_lengths: Any = None, **masks: Any
) -> Tensor:
    """The model's call with padding masks in place of lengths; `masks` prevail."""
    names = {fnn.TransformerEncoder: ["src"], fnn.TransformerDecoder: ["memory"]}
    paddings = {}
    if src_lengths is not None:
        for name in names.get(type(model), ["src", "memory"]):
            paddings[f"{name}_key_padding_mask"] = padding(src_lengths, 7)
    if tgt_lengths is not None:
        paddings["tgt_key_padding_mask"] = padding(tgt_lengths, 5)
    return model(*inputs, **paddings | masks)


def assert_same(
    model: Any, inputs: list[Tensor], lengths: dict[str, Any], masks: Any = (),
    padded_masks: Any = (), batch_first: bool = True,
) -> None:  # fmt: skip
    """A call with lengths equals that with padding masks at real rows, has zeros elsewhere, and
    equal gradients of the parameters and inputs.
    """
    for x in inputs:
        x.requires_grad_()
    varied = [*inputs, *model.parameters()]
    padded = padded_call(model, *inputs, **lengths | dict(masks) | dict(padded_masks))
    actual = model(*inputs, **lengths | dict(masks))
    encodes = type(model) is fnn.TransformerEncoder
    real = lengths["src_lengths"] if encodes else lengths.get("tgt_lengths", [5] * 4)
    pad = padding(real, 7 if encodes else 5)
    pad = pad if batch_first else pad.t()
    torch.testing.assert_close(actual[~pad], padded[~pad], atol=2e-5, rtol=1e-4)
    assert torch.equal(actual[pad], torch.zeros_like(actual[pad]))
    weights = torch.randn(actual.shape, generator=torch.Generator().manual_seed(9))
    expected = torch.autograd.grad((padded * weights)[~pad].sum(), varied, allow_unused=True)
    got = torch.autograd.grad((actual * weights).sum(), varied, allow_unused=True)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=5e-5, rtol=1e-4)


SRC, TGT = {"src_lengths": SRC_LENGTHS}, {"tgt_lengths": TGT_LENGTHS}


@pytest.mark.parametrize(("batch_first", "norm_first"), STYLES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("lengths", [SRC_LENGTHS, torch.tensor(SRC_LENGTHS)])
def test_encoder(batch_first: bool, norm_first: bool, masked: bool, lengths: Any) -> None:
    model = make(fnn.TransformerEncoder, batch_first, norm_first)
    masks = {"mask": causal(7) if masked else None}
    src = batch(7, batch_first)
    assert_same(model, [src], {"src_lengths": lengths}, masks, batch_first=batch_first)


@pytest.mark.parametrize(("batch_first", "norm_first"), STYLES)
@pytest.mark.parametrize("lengths", [SRC | TGT, TGT, SRC])
def test_decoder(batch_first: bool, norm_first: bool, lengths: dict[str, Any]) -> None:
    model = make(fnn.TransformerDecoder, batch_first, norm_first)
    masks = {"tgt_mask": causal(5), "tgt_is_causal": True}
    tgt, memory = batch(5, batch_first), batch(7, batch_first)
    assert_same(model, [tgt, memory], lengths, masks, batch_first=batch_first)


@pytest.mark.parametrize("norm_first", [True, False])
def test_blocks_that_are_not_fused(norm_first: bool) -> None:
    """RMSNorm and the dropouts run as modules; some dropouts drop all, the others nothing."""
    model = make(fnn.TransformerDecoder, True, norm_first)
    for i, layer in enumerate(model.layers):
        for name in ("norm1", "norm2", "norm3"):
            setattr(layer, name, nn.RMSNorm(E))
        (layer.dropout1, layer.dropout2)[i].p = 1.0
    assert_same(model, [batch(5, True), batch(7, True)], SRC | TGT)


@pytest.mark.parametrize(("batch_first", "norm_first"), STYLES)
@pytest.mark.parametrize(
    "lengths", [SRC | TGT, TGT | {"src_lengths": [7, 7, 1, 1]}, SRC | {"tgt_lengths": [2, 5, 1, 0]}]
)
def test_transformer(batch_first: bool, norm_first: bool, lengths: dict[str, Any]) -> None:
    model = make(fnn.Transformer, batch_first, norm_first)
    inputs = [batch(7, batch_first), batch(5, batch_first)]
    assert_same(model, inputs, lengths, {"tgt_mask": causal(5)}, batch_first=batch_first)


def test_lengths_on_another_default_device() -> None:
    """`torch.set_default_device("cuda")` moves every tensor that is created without a device."""
    layer = fnn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    stack, x = fnn.TransformerEncoder(layer, 1), torch.randn(2, 4, 16)
    expected = stack(x, src_lengths=[4, 2])
    with torch.device("meta"):
        assert stack(x, src_lengths=[4, 2]).equal(expected)
    numpy = pytest.importorskip("numpy")
    assert stack(x, src_lengths=list(numpy.array([4, 2]))).equal(expected)


def test_layers_receive_packed_rows_and_padding_has_no_effect(row_multiple: int) -> None:
    """Every layer receives only the real tokens, and copies of the last one up to a multiple of
    rows; NaN in the padding has no effect.
    """
    model = make(fnn.TransformerEncoder, True, False)
    src = batch(7, True)
    src[padding(SRC_LENGTHS, 7)] = float("nan")
    sizes = []
    hook = model.layers[0].linear1.register_forward_hook(lambda m, args, y: sizes.append(y.shape))
    out = model(src, src_lengths=SRC_LENGTHS)
    hook.remove()
    total = sum(SRC_LENGTHS)
    assert sizes == [(total if row_multiple == 1 else total + 8 - total % 8, 32)]
    assert out.isfinite().all()


class Doubling(fnn.TransformerEncoderLayer):
    def forward(self, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super().forward(src, *args, **kwargs)


def hooked(model: Any) -> None:
    model.layers[0].register_forward_hook(lambda module, args, y: y + 1)


def hooked_norm(model: Any) -> None:
    model.norm.register_forward_hook(lambda module, args, y: y + y.roll(1, dims=-2))


def subclassed(model: Any) -> None:
    model.layers[1].__class__ = Doubling


def extra_key(**options: Any) -> Any:
    def change(model: Any) -> None:
        model.layers[0].self_attn = fnn.MultiheadAttention(E, H, batch_first=True, **options)

    return change


EXTRA_KEYS = [extra_key(add_zero_attn=True), extra_key(add_bias_kv=True)]


class Smoothing(nn.Module):
    """A module that reads neighbouring rows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y + y.roll(1, dims=-2)


def smoothed(*path: str) -> Any:
    def change(model: Any) -> None:
        parent = model.layers[0] if path[0] == "layers" else model
        inner = getattr(parent, path[-1])
        setattr(parent, path[-1], Smoothing(inner if isinstance(inner, nn.Module) else nn.ReLU()))

    return change


def replaced(block: str) -> Any:
    """A method assigned to the layer that reads neighbouring rows."""

    def change(model: Any) -> None:
        inherited = getattr(model.layers[0], block)
        setattr(
            model.layers[0], block, lambda *args, **kwargs: inherited(*args, **kwargs).roll(1, 1)
        )

    return change


REPLACED = [replaced(block) for block in ("_sa_block", "_ff_block")]
SMOOTHED = [("layers", n) for n in ("linear1", "linear2", "dropout1", "norm1", "activation")]


@pytest.mark.parametrize("change", [
    hooked, hooked_norm, subclassed, *EXTRA_KEYS, *REPLACED, smoothed("norm"),
    *(smoothed(*p) for p in SMOOTHED),
])  # fmt: skip
def test_layers_that_cannot_be_packed_run_padded(change: Any) -> None:
    model = make(fnn.TransformerEncoder, True, False)
    change(model)
    assert_same(model, [batch(7, True)], SRC)


@pytest.mark.parametrize("block", ["_sa_block", "_mha_block", "_ff_block"])
def test_decoder_layers_that_cannot_be_packed_run_padded(block: str) -> None:
    model = make(fnn.TransformerDecoder, True, False)
    replaced(block)(model)
    assert_same(model, [batch(5, True), batch(7, True)], SRC)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_that_cannot_be_packed_run_padded(dtype, recwarn):
    model = make(fnn.Transformer, True, True)
    inputs = [batch(7, True), batch(5, True)]
    blocked, pad = torch.ones(7, 7, dtype=torch.bool).triu(3), padding(SRC_LENGTHS, 7)
    mask = blocked
    if dtype is not torch.bool:
        mask, pad = (torch.zeros(x.shape).masked_fill(x, -torch.inf) for x in (blocked, pad))
    assert_same(model, inputs, SRC, {"src_mask": mask}, {"src_key_padding_mask": pad})
    # Each mask determines the dtype of its padding mask.
    masks = {"tgt_mask": causal(5), "memory_mask": mask[:5]}
    assert_same(model, inputs, SRC, masks, {"memory_key_padding_mask": pad})
    assert not [w for w in recwarn if "different types" in str(w.message)]


def test_dropout_follows_the_seed() -> None:
    model = make(fnn.TransformerEncoder, True, False, dropout=0.5).train()
    src = batch(7, True)

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model(src, src_lengths=SRC_LENGTHS)

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    assert_same(model.eval(), [src], SRC)


def test_empty_batches_and_sequences() -> None:
    model = make(fnn.TransformerEncoder, True, False)
    assert model(torch.zeros(0, 3, E), src_lengths=[]).shape == (0, 3, E)
    assert torch.equal(model(torch.ones(2, 3, E), src_lengths=[0, 0]), torch.zeros(2, 3, E))


@pytest.mark.parametrize("row_multiple", [1], indirect=True)
def test_compiled() -> None:
    model = make(fnn.TransformerEncoder, True, False)
    src = batch(7, True)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for lengths in (SRC_LENGTHS, [1, 2, 3, 4], [2, 3, 1, 2], [7, 7, 1, 1], [5, 4, 3, 3]):
        torch.testing.assert_close(
            compiled(src, src_lengths=lengths), model(src, src_lengths=lengths)
        )
    assert counter.frame_count <= 2


@pytest.mark.parametrize("norm_first", [True, False])
def test_gradients_without_eps(norm_first: bool) -> None:
    """Rows of zeros would have NaN as norms."""
    model = make(fnn.Transformer, True, norm_first, layer_norm_eps=0.0)
    lengths = {"src_lengths": SRC_LENGTHS, "tgt_lengths": TGT_LENGTHS}
    model(batch(7, True), batch(5, True), **lengths).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad.isfinite().all()


def test_batches_have_few_layouts_on_a_gpu() -> None:
    x = torch.randn(4, 40, E)
    multiple = packing.row_multiple(SINGLE, torch.device("cuda"))
    layouts = set()
    for lengths in ([40, 3, 20, 1], [9, 40, 9, 9], [40, 40, 40, 7], [33, 35, 0, 0]):
        packed = packing.Packing.of(x, lengths, True, "x", "lengths")
        longer, rows = packed.extended(packed.pack(x), multiple)
        layouts.add((len(rows), len(longer.cu_seqlens), longer.longest))
        assert len(longer.positions) == len(rows) == longer.cu_seqlens[-1]
    assert layouts == {(128, 5 + 1, 64)}


@pytest.mark.parametrize(("lengths", "error", "message"), [
    ([1, 2], ValueError, "src_lengths must have one length for each of the 4 sequences, got 2"),
    ([1, 2, 3, 8], ValueError, "src_lengths must be between 0 and 7, got 8"),
    ([1, 2, 3, -1], ValueError, "src_lengths must be between 0 and 7, got -1"),
    ([1, 2, 3, 1.5], TypeError, "src_lengths must hold integers, got 1.5"),
    (4, TypeError, "src_lengths must be a list or a CPU tensor, got int"),
    (torch.ones(4), ValueError, "src_lengths must be int32 or int64 .4., got torch.float32"),
    (torch.ones(4, dtype=torch.int64, device="meta"), ValueError, "must be on the CPU"),
])  # fmt: skip
def test_wrong_lengths(lengths: Any, error: type[Exception], message: str) -> None:
    model = make(fnn.TransformerEncoder, True, False)
    with pytest.raises(error, match=message):
        model(batch(7, True), src_lengths=lengths)


HINT = "is_causal=True is a hint about attn_mask"
CONTRADICTIONS: list[Any] = [
    (lambda m, src, tgt: m(src, tgt, src_key_padding_mask=padding(SRC_LENGTHS, 7), **SRC),
     ValueError, "src_key_padding_mask must be None with src_lengths"),
    (lambda m, src, tgt: m.encoder(src[0], src_lengths=[7]),
     ValueError, r"src must be \[B, S, E\] with src_lengths, got \[7, 16\]"),
    (lambda m, src, tgt: m.encoder(src, is_causal=True, **SRC), RuntimeError, HINT),
    (lambda m, src, tgt: m.decoder(tgt, src[:2], src_lengths=[1, 2]),
     ValueError, "memory must have the 4 sequences of tgt, got 2"),
    (lambda m, src, tgt: m.decoder(tgt, src, memory_is_causal=True, **TGT), RuntimeError, HINT),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), CONTRADICTIONS)
def test_contradictory_arguments(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(make(fnn.Transformer, True, False), batch(7, True), batch(5, True))


def test_other_encoders_cannot_be_packed() -> None:
    model = make(fnn.Transformer, True, False)
    model.encoder = nn.Identity()
    with pytest.raises(TypeError, match=r"need encoder to be a fastattn\.nn\.TransformerEncoder"):
        model(batch(7, True), batch(5, True), **SRC)
