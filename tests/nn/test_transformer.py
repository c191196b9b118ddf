"""The drop-in layers and stacks against torch's: values, gradients, masks, dropout,
compilers; and replaced children.
"""

import copy
import inspect
import math
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from module_equivalence import assert_equivalent, assert_same, random_mask
from torch import Tensor, nn
from transformer_twins import CLASSES, FFN, B, Calls, E, H, S, T, build, causal_mask, inputs, twins

import fastattn.nn as fnn
from fastattn.functional import CAUSAL

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")


@pytest.mark.parametrize("name", ["MultiheadAttention", "LayerNorm", "RMSNorm", *CLASSES])
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
    kinds = {type(module) for module in fast.modules()}
    assert not kinds & {getattr(nn, name) for name in (*CLASSES, "LayerNorm", "MultiheadAttention")}
    copied = pickle.loads(pickle.dumps(copy.deepcopy(fast)))
    assert [type(module) for module in copied.modules()] == [type(m) for m in fast.modules()]


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


def test_an_exported_encoder_takes_masks_of_every_size():
    """As many masks of heads as positions, too, which the example does not have."""
    torch.manual_seed(0)
    encoder = build(fnn, "TransformerEncoder", batch_first=True).eval()

    def inputs(B: int, S: int) -> tuple[Tensor, Tensor]:
        return torch.randn(B, S, E), torch.randn(B * H, S, S)

    auto = torch.export.Dim.AUTO
    shapes = ({0: auto, 1: auto}, dict.fromkeys(range(3), auto))
    program = torch.export.export(encoder, inputs(3, 5), dynamic_shapes=shapes).module()
    for args in (inputs(2, 2 * H), inputs(4, 3)):
        torch.testing.assert_close(program(*args), encoder(*args))


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


# -- children --------------------------------------------------------------------------------------
def tanh_gelu() -> nn.Module:
    return nn.GELU(approximate="tanh")


def label_of_activation(value: object) -> str:
    return repr(value) if isinstance(value, nn.Module) else getattr(value, "__name__", str(value))


@pytest.mark.parametrize(("activation", "fused"), [
    (torch.relu, True), (F.silu, True), (nn.ReLU(inplace=True), True), (nn.SiLU(), True),
    (nn.GELU(), True), (tanh_gelu(), True), (nn.Mish(), False), (lambda x: x.relu(), False),
], ids=label_of_activation)  # fmt: skip
def test_activations(activation, fused):
    torch.manual_seed(0)
    reference, fast = twins("TransformerEncoderLayer", batch_first=True, activation=activation)
    args = inputs("TransformerEncoderLayer")
    assert_equivalent(reference, fast, *args)
    with Calls() as counted:
        fast(*args)
    assert counted.of["ffn"] == fused


CHILDREN = ("self_attn", "dropout1", "norm1", "norm2", "linear1", "dropout", "linear2", "dropout2")


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("child", (*CHILDREN, "multihead_attn", "norm3", "dropout3"))
def test_hooks_on_children_fire(child, norm_first):
    torch.manual_seed(0)
    decoder = child in ("multihead_attn", "norm3", "dropout3")
    name = "TransformerDecoderLayer" if decoder else "TransformerEncoderLayer"
    reference, fast = twins(name, norm_first=norm_first, batch_first=True)
    seen: dict[nn.Module, list] = {reference: [], fast: []}
    for module, log in seen.items():
        target = getattr(module, child)

        def halve(_module, _args, output, log=log):
            log.append("forward")
            if isinstance(output, tuple):
                return (output[0] / 2, *output[1:])
            return output / 2

        target.register_forward_hook(halve)
        target.register_full_backward_hook(lambda *_, log=log: log.append("backward"))
    assert_equivalent(copy.deepcopy(reference), fast, *inputs(name))
    reference(*inputs(name)).sum().backward()
    assert seen[fast] == ["forward", "backward"]
    assert seen[reference][-2:] == seen[fast]


def test_pre_hooks_and_global_hooks_fire():
    torch.manual_seed(0)
    fast = build(fnn, "TransformerEncoderLayer", batch_first=True)
    (x,) = inputs("TransformerEncoderLayer")
    seen = []
    handle = fast.linear1.register_forward_pre_hook(lambda module, args: seen.append(module))
    fast(x)
    assert seen == [fast.linear1]
    handle.remove()
    for register in (
        fast.norm1.register_full_backward_hook,
        fast.norm1.register_full_backward_pre_hook,
    ):
        seen.clear()
        handle = register(lambda module, *_: seen.append(module))
        fast(x).sum().backward()
        assert seen == [fast.norm1]
        handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        fast(x)
    finally:
        handle.remove()
    assert set(seen) >= {fast.self_attn, fast.linear2, fast.norm1, fast.dropout2, fast}


def test_replaced_children_and_overridden_blocks():
    torch.manual_seed(0)
    reference, fast = twins("TransformerDecoderLayer", batch_first=True)
    args = inputs("TransformerDecoderLayer")
    for module in (reference, fast):
        torch.manual_seed(1)
        module.norm2 = nn.RMSNorm(E)
        module.linear2 = nn.Sequential(nn.Linear(FFN, 8), nn.Linear(8, E))
    assert_equivalent(reference, fast, *args)

    reference, fast = twins("TransformerDecoderLayer", batch_first=True)
    for module in (reference, fast):
        original = module.self_attn.forward
        module.self_attn.forward = lambda *a, original=original, **k: (
            original(*a, **k)[0] * 2,
            None,
        )
        module._mha_block = lambda x, memory, *_: memory[:, : x.shape[1]]
    expected, got = reference(*args), fast(*args)
    assert_same("replaced", got, expected, expected.double())

    def with_weights(package):
        class WithWeights(package.TransformerEncoderLayer):
            def _sa_block(self, x, attn_mask, key_padding_mask, is_causal=False):
                assert attn_mask.is_floating_point() and key_padding_mask.is_floating_point()
                x, self.weights = self.self_attn(
                    x, x, x, attn_mask=attn_mask, key_padding_mask=key_padding_mask
                )
                return self.dropout1(x)

        torch.manual_seed(1)
        return WithWeights(E, H, FFN, dropout=0.0, batch_first=True)

    reference, fast = with_weights(nn), with_weights(fnn)
    kwargs = {"src_mask": random_mask(S, S), "src_key_padding_mask": random_mask(B, S)}
    assert_equivalent(reference, fast, *inputs("TransformerEncoderLayer"), **kwargs)
    assert_same("weights", fast.weights, reference.weights, reference.weights.double())


@pytest.mark.parametrize(("name", "block"), [
    ("TransformerEncoderLayer", "_sa_block"),
    ("TransformerEncoderLayer", "_ff_block"),
    ("TransformerDecoderLayer", "_sa_block"),
    ("TransformerDecoderLayer", "_mha_block"),
    ("TransformerDecoderLayer", "_ff_block"),
])  # fmt: skip
def test_blocks_of_one_instance(name, block):
    torch.manual_seed(0)
    reference, fast = twins(name, batch_first=True)
    for module in (reference, fast):
        setattr(module, block, lambda x, *_, **__: x.sin())
    assert_equivalent(reference, fast, *inputs(name))


class Wrapped(Tensor):
    """A weight that computes its products itself, as quantised and sharded ones do."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is F.linear:
            x, weight, bias = args
            return F.linear(x, weight.as_subclass(Tensor) * 2, bias)
        return super().__torch_function__(function, types, args, kwargs)


def test_wrapped_weights_compute_their_own_products():
    torch.manual_seed(0)
    reference, fast = twins("TransformerEncoderLayer", batch_first=True)
    for module in (reference, fast):
        weight = module.linear1.weight.detach().as_subclass(Wrapped)
        module.linear1.weight = nn.Parameter(weight)
        assert type(module.linear1.weight) is Wrapped
    (x,) = inputs("TransformerEncoderLayer")
    expected = reference(x)
    assert_same("wrapped", fast(x), expected, expected.double())


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("child", ["linear1", "linear2"])
@pytest.mark.parametrize("parameter", ["sparse weight", "bias of one element"])
def test_linears_that_the_op_does_not_support(parameter, child, norm_first):
    """`F.linear` computes them."""
    torch.manual_seed(0)
    reference, fast = twins("TransformerEncoderLayer", batch_first=True, norm_first=norm_first)
    for module in (reference, fast):
        linear = module.get_submodule(child)
        if parameter == "sparse weight":
            weight = linear.weight.detach().to_sparse()
            linear.weight = nn.Parameter(weight, requires_grad=False)
        else:
            linear.bias = nn.Parameter(linear.bias.detach()[:1])
    (x,) = inputs("TransformerEncoderLayer")
    expected = reference(x)
    assert_same(parameter, fast(x), expected, expected.double())


def test_tied_and_frozen_parameters():
    torch.manual_seed(0)
    reference, fast = twins("Transformer", batch_first=True)
    for model in (reference, fast):
        model.encoder.layers[1].linear1.weight = model.encoder.layers[0].linear1.weight
        model.decoder.layers[0].self_attn = model.encoder.layers[0].self_attn
        model.decoder.layers[1].requires_grad_(False)
        model.encoder.layers[0].norm1.weight.requires_grad_(False)
        model.encoder.layers[1].self_attn.in_proj_weight.requires_grad_(False)
    assert_equivalent(reference, fast, *inputs("Transformer"))
    frozen = [name for name, p in fast.named_parameters() if not p.requires_grad]
    assert len(frozen) > 2 and all(fast.get_parameter(name).grad is None for name in frozen)
