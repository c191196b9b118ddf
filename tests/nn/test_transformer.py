"""The drop-in layers and stacks against torch's: values, gradients, masks, dropout, compilers."""

import copy
import inspect
import math
import pickle
import warnings

import pytest
import torch
from module_equivalence import assert_equivalent, assert_same, random_mask
from torch import Tensor, nn
from transformer_twins import CLASSES, FFN, B, Calls, E, H, S, T, build, causal_mask, inputs, twins

import fastattn.nn as fnn
from fastattn.functional import CAUSAL

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")


@pytest.mark.parametrize("name", CLASSES)
def test_drop_ins_are_torch_modules(name):
    torch.manual_seed(0)
    reference = build(nn, name)
    torch.manual_seed(0)
    fast = build(fnn, name)
    assert isinstance(fast, getattr(nn, name))
    assert repr(fast) == repr(reference)
    parameters = dict(inspect.signature(type(fast)).parameters)
    positions = parameters.pop("positions", None)  # fastattn's own, by keyword
    assert positions is None or positions.kind is inspect.Parameter.KEYWORD_ONLY
    expected_parameters = inspect.signature(type(reference)).parameters
    for actual, expected in zip(parameters.values(), expected_parameters.values(), strict=True):
        about = [(p.name, p.kind, p.default) for p in (actual, expected)]
        assert about[0] == about[1]
    for (a, x), (b, y) in zip(fast.named_parameters(), reference.named_parameters(), strict=True):
        assert a == b and torch.equal(x, y)
    reference.load_state_dict(fast.state_dict())
    args = inputs(name, batch_first=False)
    expected = fast(*args)
    for copied in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert all(
            type(a) is type(b) for a, b in zip(copied.modules(), fast.modules(), strict=True)
        )
        assert torch.equal(copied(*args), expected)
    kinds = {type(module) for module in fast.modules()}
    assert not kinds & {getattr(nn, name) for name in (*CLASSES, "LayerNorm", "MultiheadAttention")}


def test_attributes_that_torch_keeps():
    layer = fnn.TransformerEncoderLayer(E, H, FFN, activation="gelu", batch_first=True)
    assert layer.activation_relu_or_gelu == 2 and layer.self_attn._qkv_same_embed_dim
    encoder = fnn.TransformerEncoder(layer, 2, mask_check=False)
    assert encoder.enable_nested_tensor and not encoder.use_nested_tensor
    assert not encoder.mask_check and encoder.norm is None and encoder.num_layers == 2
    assert torch.equal(fnn.Transformer.generate_square_subsequent_mask(4), causal_mask(4))


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("padding", [torch.bool, torch.float32])
def test_sequences_of_padding_alone(norm_first, padding):
    """torch may give NaN, depending on its path; here attention adds only its bias."""
    torch.manual_seed(0)
    reference, fast = twins("Transformer", batch_first=True, norm_first=norm_first)
    src, tgt = inputs("Transformer")
    mask = torch.zeros(B, S, dtype=padding)
    mask[1] = True if padding is torch.bool else float("-inf")
    kwargs = {"src_key_padding_mask": mask, "memory_key_padding_mask": mask}
    others = torch.tensor([0, 2])
    for training in (True, False):
        out = fast.train(training)(src, tgt, **kwargs)
        assert torch.isfinite(out).all()
        expected = reference.train(training)(src, tgt, **kwargs)[others]
        assert_same("the others", out[others], expected, expected.double())
        fast.zero_grad()
        out.sum().backward()
        assert all(torch.isfinite(p.grad).all() for p in fast.parameters())


def malformed_calls() -> dict[str, tuple[str, tuple, dict]]:
    x = torch.randn(B, S, E)
    tgt = torch.randn(B, T, E)
    layer, stack, decoder = (
        "TransformerEncoderLayer",
        "TransformerEncoder",
        "TransformerDecoderLayer",
    )
    byte = torch.zeros(B, S, dtype=torch.uint8)
    return {
        "features": (layer, (x[..., :8],), {}),
        "1-D": (layer, (x[0, 0],), {}),
        "4-D": (layer, (x[None],), {}),
        "uint8 padding": (layer, (x,), {"src_key_padding_mask": byte}),
        "uint8 padding of a stack": (stack, (x,), {"src_key_padding_mask": byte}),
        "long mask of a stack": (stack, (x,), {"mask": torch.zeros(S, S, dtype=torch.long)}),
        "mask size": (layer, (x,), {"src_mask": torch.zeros(S, T)}),
        "padding size": (layer, (x,), {"src_key_padding_mask": torch.zeros(B, T).bool()}),
        "hint without mask": (layer, (x,), {"is_causal": True}),
        "hint without mask in a decoder": (decoder, (tgt, x), {"tgt_is_causal": True}),
        "memory features": (decoder, (tgt, x[..., :8]), {}),
        "memory batch": (decoder, (tgt, x[:2]), {}),
        "memory unbatched": (decoder, (tgt, x[0]), {}),
        "memory mask size": (decoder, (tgt, x), {"memory_mask": torch.zeros(S, T)}),
        "batch of src and tgt": ("Transformer", (x, tgt[:2]), {}),
        "features of tgt": ("Transformer", (x, tgt[..., :8]), {}),
        "dtype": (layer, (x.double(),), {}),
    }


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("call", malformed_calls())
def test_malformed_calls_raise_what_torch_raises(call, norm_first):
    name, args, kwargs = malformed_calls()[call]
    reference, fast = twins(name, batch_first=True, norm_first=norm_first)
    with pytest.raises((AssertionError, RuntimeError, ValueError)) as expected:
        reference(*args, **kwargs)
    with pytest.raises(expected.type) as got:
        fast(*args, **kwargs)
    messages = {"hint without mask": "attn_mask", "hint without mask in a decoder": "attn_mask"}
    if call != "dtype":  # the first product that raises differs
        assert messages.get(call, str(expected.value)) in str(got.value)


def test_masks_of_different_types_warn_once():
    fast = build(fnn, "TransformerEncoder", batch_first=True)
    (x,) = inputs("TransformerEncoder")
    with pytest.warns(UserWarning, match="src_key_padding_mask is torch.bool") as caught:
        fast(x, torch.zeros(S, S), torch.zeros(B, S, dtype=torch.bool))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast(x, torch.zeros(S, S, dtype=torch.bool), torch.zeros(B, S, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("name", ["TransformerEncoder", "TransformerDecoder"])
def test_causal_masks_are_detected(name, dtype):
    fast = build(fnn, name, batch_first=True)
    args = inputs(name)
    argument, size = ("mask", S) if name == "TransformerEncoder" else ("tgt_mask", T)
    mask = causal_mask(size)
    mask = mask < 0 if dtype is torch.bool else mask
    with Calls() as counted:
        fast(*args, **{argument: mask})
    causal = [call["causal"] for call in counted.arguments if call["op"] == "attention"]
    top_left = CAUSAL["top_left"]
    assert causal == ([top_left] * 2 if name == "TransformerEncoder" else [top_left, 0] * 2)
    assert all(call["mask"] is None for call in counted.arguments if call["op"] == "attention")
    hints = []
    fast.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: hints.append(kwargs), with_kwargs=True
    )
    key = "is_causal" if name == "TransformerEncoder" else "tgt_is_causal"
    other = mask.clone()
    other[0, -1] = False if dtype is torch.bool else 0.0
    for given, hint, wanted in ((mask, None, True), (other, None, False), (mask, False, False)):
        fast(*args, **{argument: given, key: hint})
        assert hints[-1][key] is wanted
    assert not hints[-1].get("memory_is_causal", False)


def test_other_layers_get_torchs_masks():
    (x,) = inputs("TransformerEncoder")
    seen = []

    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn = nn.MultiheadAttention(E, H, batch_first=True)
            self.norm = nn.LayerNorm(E)

        def forward(self, src, src_mask, is_causal, src_key_padding_mask):
            seen.append((src_mask, is_causal, src_key_padding_mask))
            return self.norm(src)

    class Derived(fnn.TransformerEncoderLayer):
        def forward(self, src, src_mask, src_key_padding_mask, is_causal):
            seen.append((src_mask, is_causal, src_key_padding_mask))
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)

    encoder = fnn.TransformerEncoder(Custom(), 2, enable_nested_tensor=False)
    assert type(encoder.layers[0].norm) is fnn.LayerNorm
    derived = fnn.TransformerEncoder(Derived(E, H, FFN, batch_first=True), 2)
    blocked = causal_mask(S) < 0
    for stack in (encoder, derived):
        stack(x, blocked, torch.zeros(B, S, dtype=torch.bool))
        mask, is_causal, padding = seen[-1]
        assert torch.equal(mask, causal_mask(S)) and is_causal is True
        assert torch.equal(padding, torch.zeros(B, S))


def test_nested_tensors_use_torchs_forward():
    torch.manual_seed(0)
    reference, fast = twins("TransformerEncoder", batch_first=True)
    reference.norm, fast.norm = nn.LayerNorm(E), fnn.LayerNorm(E)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are in prototype stage
        nested = torch.nested.nested_tensor([torch.randn(3, E), torch.randn(5, E)])
    with torch.no_grad():
        expected, got = reference.eval()(nested), fast.eval()(nested)
    assert got.is_nested
    for a, b in zip(got.unbind(), expected.unbind(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(AssertionError, match="NestedTensor"):
        fnn.TransformerDecoderLayer(E, H, batch_first=True)(nested, nested)


@pytest.mark.parametrize("name", ["TransformerEncoderLayer", "TransformerDecoderLayer"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_dropout_repeats_under_manual_seed(name, norm_first):
    fast = build(fnn, name, norm_first=norm_first, batch_first=True, dropout=0.3)
    args = inputs(name)

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return fast(*args)

    first = run(1)
    assert torch.equal(first, run(1))
    assert not torch.equal(first, run(2))
    assert not torch.equal(first, fast(*args))
    fast.eval()
    state = torch.get_rng_state()
    assert torch.equal(fast(*args), fast(*args))
    assert torch.equal(state, torch.get_rng_state())  # evaluation draws nothing


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("which", ["dropout", "dropout1", "dropout2"])
def test_dropout_rates_are_those_of_the_children(which, norm_first):
    """With sublayers of constant output 1, what a layer adds to its input shows the dropout."""
    torch.manual_seed(0)
    layer = fnn.TransformerEncoderLayer(64, 1, 64, dropout=0.5, norm_first=norm_first)
    for name in ("dropout", "dropout1", "dropout2"):
        getattr(layer, name).p = 0.25
        getattr(layer, name).train(name == which)
    layer.self_attn.eval()
    with torch.no_grad():
        layer.self_attn.out_proj.weight.zero_()
        layer.self_attn.out_proj.bias.fill_(1.0 if which == "dropout1" else 0.0)
        layer.linear1.weight.zero_()
        layer.linear1.bias.fill_(1.0)
        layer.linear2.weight.copy_(torch.eye(64) if which == "dropout" else torch.zeros(64, 64))
        layer.linear2.bias.fill_(1.0 if which == "dropout2" else 0.0)
    out = layer(torch.zeros(100, 20, 64))
    if norm_first:
        assert out.unique().tolist() == pytest.approx([0.0, 4 / 3])
    # Kept elements are positive, also after a norm; no row of 64 is kept or dropped as a whole.
    kept = (out > 0).double().mean().item()
    assert abs(kept - 0.75) < 5 * (0.25 * 0.75 / out.numel()) ** 0.5


def test_dropouts_of_one_layer_are_independent():
    """Three sublayers of constant output 1: the sum is a binomial number of kept elements."""
    torch.manual_seed(0)
    layer = fnn.TransformerDecoderLayer(64, 1, 64, dropout=0.25, norm_first=True)
    with torch.no_grad():
        for linear in (layer.self_attn.out_proj, layer.multihead_attn.out_proj, layer.linear2):
            linear.weight.zero_()
            linear.bias.fill_(1.0)
    with Calls() as counted:
        out = layer(torch.zeros(100, 20, 64), torch.zeros(1, 20, 64))
    for kept in range(4):
        share = math.comb(3, kept) * 0.75**kept * 0.25 ** (3 - kept)
        found = (out - kept * 4 / 3).abs().lt(1e-5).double().mean().item()
        assert abs(found - share) < 5 * (share * (1 - share) / out.numel()) ** 0.5
    dropping = [call for call in counted.arguments if call.get("dropout_p")]
    assert [call["dropout_stream"] for call in dropping] == list(range(5))
    assert all(call["dropout_seed"] is dropping[0]["dropout_seed"] for call in dropping)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("name", CLASSES)
def test_autocast_dtypes_and_values(name, norm_first):
    torch.manual_seed(0)
    reference, fast = twins(name, norm_first=norm_first, batch_first=True)
    args = inputs(name)
    truth = copy.deepcopy(reference).double()(*[x.double() for x in args])
    for dtype in (torch.float32, torch.bfloat16):
        moved = tuple(x.to(dtype) for x in args)
        with torch.autocast("cpu", torch.bfloat16):
            expected, got = reference(*moved), fast(*moved)
        assert got.dtype == expected.dtype
        cost = (expected.double() - truth).abs().max()
        assert (got.double() - truth).abs().max() <= 2 * cost
        got.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in fast.parameters())


@pytest.mark.filterwarnings("ignore:.*mask:UserWarning")
def test_torch_compile_in_one_graph_for_all_sizes():
    torch.manual_seed(0)
    name = "TransformerEncoderLayer"
    reference, fast = twins(name, batch_first=True)
    kwargs = {"src_mask": causal_mask(S), "src_key_padding_mask": random_mask(B, S)}
    eager = copy.deepcopy(fast)
    fast.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    (x,) = inputs(name)
    assert_equivalent(reference, fast, x, **kwargs)
    kwargs["src_key_padding_mask"] = kwargs["src_key_padding_mask"][:2]
    with torch._dynamo.config.patch(error_on_recompile=True):
        got = fast(x[:2].requires_grad_(), **kwargs)
    expected = eager(x[:2], **kwargs)
    assert_same("another batch", got, expected, expected.double())


def test_compiled_decoder_uses_the_mask_and_drops():
    torch.manual_seed(0)
    fast = build(fnn, "TransformerDecoder", batch_first=True, norm_first=True, dropout=0.5)
    args = *inputs("TransformerDecoder"), causal_mask(T)
    expected = fast.eval()(*args)
    compiled = torch.compile(fast, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        got = compiled(*args)
        assert_same("compiled", got, expected, expected.double())
        fast.train()
        assert not torch.equal(compiled(*args), compiled(*args))


def test_transforms_and_export():
    torch.manual_seed(0)
    fast = build(fnn, "TransformerEncoderLayer", batch_first=True)
    parameters = {name: p.detach() for name, p in fast.named_parameters()}
    (x,) = inputs("TransformerEncoderLayer")

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(fast, parameters, (x[None],)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for i in range(B):
        fast.zero_grad()
        fast(x[i : i + 1]).square().sum().backward()
        for name, p in fast.named_parameters():
            torch.testing.assert_close(each[name][i], p.grad)
    program = torch.export.export(fast.eval(), (x,))
    assert any("fastattn.attention_fwd" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(x), fast(x))
