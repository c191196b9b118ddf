"""The drop-in layers and stacks against torch's: values, gradients, and what people hook into."""

import contextlib
import copy
import inspect
import math
import pickle
import warnings
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from module_equivalence import assert_equivalent, assert_same, random_mask
from torch import Tensor, nn
from torch.nn.utils import parametrize

import fastattn.nn as fnn
from fastattn import functional

E, H, FFN = 16, 4, 24
B, S, T = 3, 7, 5
CLASSES = (
    "TransformerEncoderLayer",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerDecoder",
    "Transformer",
)
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")


def build(package, name: str, **kwargs) -> nn.Module:
    """One of CLASSES with two layers where it has several."""
    kwargs = {"dropout": 0.0, **kwargs}
    if name.endswith("Layer"):
        return getattr(package, name)(E, H, FFN, **kwargs)
    if name == "Transformer":
        return package.Transformer(E, H, 2, 2, FFN, **kwargs)
    layer = getattr(package, name + "Layer")(E, H, FFN, **kwargs)
    norm = package.LayerNorm(E) if kwargs.get("norm_first") else None
    return getattr(package, name)(layer, 2, norm)


def twins(name: str, **kwargs) -> tuple[nn.Module, nn.Module]:
    """torch's module and ours, with the same parameters, biases and norms away from their start."""
    theirs, ours = build(nn, name, **kwargs), build(fnn, name, **kwargs)
    for parameter in theirs.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=0.5, std=0.3)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs(name: str, *, batch_first: bool = True) -> tuple[Tensor, ...]:
    """src, tgt, or both, as the class takes them."""

    def sequence(length: int) -> Tensor:
        return torch.randn(B, length, E) if batch_first else torch.randn(length, B, E)

    if name == "Transformer":
        return sequence(S), sequence(T)
    return (sequence(T), sequence(S)) if "Decoder" in name else (sequence(S),)


def causal_mask(size: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(size)


def tanh_gelu() -> nn.Module:
    return nn.GELU(approximate="tanh")


def label_of_activation(value: object) -> str:
    return repr(value) if isinstance(value, nn.Module) else getattr(value, "__name__", str(value))


@pytest.mark.parametrize("name", CLASSES)
def test_drop_ins_are_torch_modules(name):
    torch.manual_seed(0)
    theirs = build(nn, name)
    torch.manual_seed(0)
    ours = build(fnn, name)
    assert isinstance(ours, getattr(nn, name))
    assert repr(ours) == repr(theirs)
    assert inspect.signature(type(ours)) == inspect.signature(type(theirs))
    for (a, x), (b, y) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert a == b and torch.equal(x, y)
    theirs.load_state_dict(ours.state_dict())
    args = inputs(name, batch_first=False)
    expected = ours(*args)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert all(type(a) is type(b) for a, b in zip(twin.modules(), ours.modules(), strict=True))
        assert torch.equal(twin(*args), expected)
    kinds = {type(module) for module in ours.modules()}
    assert not kinds & {getattr(nn, name) for name in (*CLASSES, "LayerNorm", "MultiheadAttention")}


def test_attributes_that_torch_keeps():
    layer = fnn.TransformerEncoderLayer(E, H, FFN, activation="gelu", batch_first=True)
    assert layer.activation_relu_or_gelu == 2 and layer.self_attn._qkv_same_embed_dim
    encoder = fnn.TransformerEncoder(layer, 2, mask_check=False)
    assert encoder.enable_nested_tensor and not encoder.use_nested_tensor
    assert not encoder.mask_check and encoder.norm is None and encoder.num_layers == 2
    assert torch.equal(fnn.Transformer.generate_square_subsequent_mask(4), causal_mask(4))


class Calls:
    """Counts the calls of the public ops."""

    def __init__(self) -> None:
        self.of: dict[str, int] = {}
        self.arguments: list[dict] = []

    def __enter__(self) -> "Calls":
        self.stack = contextlib.ExitStack()
        for name in ("attention", "layer_norm", "add_layer_norm", "ffn"):
            self.of[name] = 0
            self.stack.enter_context(mock.patch.object(functional, name, self.counting(name)))
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def counting(self, name: str):
        function = getattr(functional, name)

        def counted(*args, **kwargs):
            self.of[name] += 1
            self.arguments.append({"op": name, **kwargs})
            return function(*args, **kwargs)

        return counted


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("name", "norm_first", "calls"),
    [
        ("TransformerEncoderLayer", False, (1, 0, 2, 1)),
        ("TransformerEncoderLayer", True, (1, 1, 1, 1)),
        ("TransformerDecoderLayer", False, (2, 0, 3, 1)),
        ("TransformerDecoderLayer", True, (2, 1, 2, 1)),
    ],
)
def test_plain_layers_run_fused(name, norm_first, calls, training):
    ours = build(fnn, name, norm_first=norm_first, batch_first=True).train(training)
    with (
        Calls() as counted,
        torch.no_grad(),
        mock.patch("torch._transformer_encoder_layer_fwd", side_effect=AssertionError),
        mock.patch("torch._native_multi_head_attention", side_effect=AssertionError),
        mock.patch.object(F, "multi_head_attention_forward", side_effect=AssertionError),
    ):
        ours(*inputs(name))
    wanted = dict(zip(("attention", "layer_norm", "add_layer_norm", "ffn"), calls, strict=True))
    assert counted.of == wanted


@pytest.mark.parametrize(
    ("activation", "fused"),
    [
        (torch.relu, True),
        (F.silu, True),
        (nn.ReLU(inplace=True), True),
        (nn.SiLU(), True),
        (nn.GELU(), True),
        (tanh_gelu(), True),
        (nn.Mish(), False),
        (lambda x: x.relu(), False),
    ],
    ids=label_of_activation,
)
def test_activations(activation, fused):
    torch.manual_seed(0)
    theirs, ours = twins("TransformerEncoderLayer", batch_first=True, activation=activation)
    args = inputs("TransformerEncoderLayer")
    assert_equivalent(theirs, ours, *args)
    with Calls() as counted:
        ours(*args)
    assert counted.of["ffn"] == fused


CHILDREN = ("self_attn", "dropout1", "norm1", "norm2", "linear1", "dropout", "linear2", "dropout2")


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("child", (*CHILDREN, "multihead_attn", "norm3", "dropout3"))
def test_hooks_on_children_fire(child, norm_first):
    torch.manual_seed(0)
    decoder = child in ("multihead_attn", "norm3", "dropout3")
    name = "TransformerDecoderLayer" if decoder else "TransformerEncoderLayer"
    theirs, ours = twins(name, norm_first=norm_first, batch_first=True)
    seen: dict[nn.Module, list] = {theirs: [], ours: []}
    for module, log in seen.items():
        target = getattr(module, child)

        def halve(_module, _args, output, log=log):
            log.append("forward")
            if isinstance(output, tuple):
                return (output[0] / 2, *output[1:])
            return output / 2

        target.register_forward_hook(halve)
        target.register_full_backward_hook(lambda *_, log=log: log.append("backward"))
    assert_equivalent(copy.deepcopy(theirs), ours, *inputs(name))
    theirs(*inputs(name)).sum().backward()
    assert seen[ours] == ["forward", "backward"]
    assert seen[theirs][-2:] == seen[ours]


def test_pre_hooks_and_global_hooks_fire():
    torch.manual_seed(0)
    ours = build(fnn, "TransformerEncoderLayer", batch_first=True)
    (x,) = inputs("TransformerEncoderLayer")
    seen = []
    handle = ours.linear1.register_forward_pre_hook(lambda module, args: seen.append(module))
    ours(x)
    assert seen == [ours.linear1]
    handle.remove()
    for register in (
        ours.norm1.register_full_backward_hook,
        ours.norm1.register_full_backward_pre_hook,
    ):
        seen.clear()
        handle = register(lambda module, *_: seen.append(module))
        ours(x).sum().backward()
        assert seen == [ours.norm1]
        handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        ours(x)
    finally:
        handle.remove()
    assert set(seen) >= {ours.self_attn, ours.linear2, ours.norm1, ours.dropout2, ours}


class LowRank(nn.Module):
    """What adapters do: a weight plus a trained product."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(weight.shape[0], 2))
        self.b = nn.Parameter(torch.randn(2, weight.shape[1]))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b


@pytest.mark.parametrize(
    ("child", "parameter"),
    [
        ("linear1", "weight"),
        ("self_attn.out_proj", "weight"),
        ("self_attn", "in_proj_weight"),
        ("norm2", "weight"),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_parametrized_children(child, parameter, training):
    torch.manual_seed(0)
    theirs, ours = twins("TransformerEncoderLayer", batch_first=True)
    for module in (theirs, ours):
        torch.manual_seed(1)
        target = module.get_submodule(child)
        weight = getattr(target, parameter)
        rule = LowRank(weight) if weight.dim() == 2 else nn.Softplus()
        parametrize.register_parametrization(target, parameter, rule)
    assert_equivalent(
        theirs.train(training), ours.train(training), *inputs("TransformerEncoderLayer")
    )


def test_replaced_children_and_overridden_blocks():
    torch.manual_seed(0)
    theirs, ours = twins("TransformerDecoderLayer", batch_first=True)
    args = inputs("TransformerDecoderLayer")
    for module in (theirs, ours):
        torch.manual_seed(1)
        module.norm2 = nn.RMSNorm(E)
        module.linear2 = nn.Sequential(nn.Linear(FFN, 8), nn.Linear(8, E))
    assert_equivalent(theirs, ours, *args)

    theirs, ours = twins("TransformerDecoderLayer", batch_first=True)
    for module in (theirs, ours):
        plain = module.self_attn.forward
        module.self_attn.forward = lambda *a, plain=plain, **k: (plain(*a, **k)[0] * 2, None)
        module._mha_block = lambda x, memory, *_: memory[:, : x.shape[1]]
    expected, got = theirs(*args), ours(*args)
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

    theirs, ours = with_weights(nn), with_weights(fnn)
    kwargs = {"src_mask": random_mask(S, S), "src_key_padding_mask": random_mask(B, S)}
    assert_equivalent(theirs, ours, *inputs("TransformerEncoderLayer"), **kwargs)
    assert_same("weights", ours.weights, theirs.weights, theirs.weights.double())


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
    theirs, ours = twins("TransformerEncoderLayer", batch_first=True)
    for module in (theirs, ours):
        weight = module.linear1.weight.detach().as_subclass(Wrapped)
        module.linear1.weight = nn.Parameter(weight)
        assert type(module.linear1.weight) is Wrapped
    (x,) = inputs("TransformerEncoderLayer")
    expected = theirs(x)
    assert_same("wrapped", ours(x), expected, expected.double())


def test_tied_and_frozen_parameters():
    torch.manual_seed(0)
    theirs, ours = twins("Transformer", batch_first=True)
    for model in (theirs, ours):
        model.encoder.layers[1].linear1.weight = model.encoder.layers[0].linear1.weight
        model.decoder.layers[0].self_attn = model.encoder.layers[0].self_attn
        model.decoder.layers[1].requires_grad_(False)
        model.encoder.layers[0].norm1.weight.requires_grad_(False)
        model.encoder.layers[1].self_attn.in_proj_weight.requires_grad_(False)
    assert_equivalent(theirs, ours, *inputs("Transformer"))
    frozen = [name for name, p in ours.named_parameters() if not p.requires_grad]
    assert len(frozen) > 2 and all(ours.get_parameter(name).grad is None for name in frozen)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("padding", [torch.bool, torch.float32])
def test_sequences_of_padding_alone(norm_first, padding):
    """torch gives NaN, or not, as its path has it; here attention adds nothing but its bias."""
    torch.manual_seed(0)
    theirs, ours = twins("Transformer", batch_first=True, norm_first=norm_first)
    src, tgt = inputs("Transformer")
    mask = torch.zeros(B, S, dtype=padding)
    mask[1] = True if padding is torch.bool else float("-inf")
    kwargs = {"src_key_padding_mask": mask, "memory_key_padding_mask": mask}
    living = torch.tensor([0, 2])
    for training in (True, False):
        out = ours.train(training)(src, tgt, **kwargs)
        assert torch.isfinite(out).all()
        expected = theirs.train(training)(src, tgt, **kwargs)[living]
        assert_same("the others", out[living], expected, expected.double())
        ours.zero_grad()
        out.sum().backward()
        assert all(torch.isfinite(p.grad).all() for p in ours.parameters())


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
    theirs, ours = twins(name, batch_first=True, norm_first=norm_first)
    with pytest.raises((AssertionError, RuntimeError, ValueError)) as expected:
        theirs(*args, **kwargs)
    with pytest.raises(expected.type) as got:
        ours(*args, **kwargs)
    said = {"hint without mask": "attn_mask", "hint without mask in a decoder": "attn_mask"}
    if call != "dtype":  # the first product that notices differs
        assert said.get(call, str(expected.value)) in str(got.value)


def test_masks_of_different_types_warn_once():
    ours = build(fnn, "TransformerEncoder", batch_first=True)
    (x,) = inputs("TransformerEncoder")
    with pytest.warns(UserWarning, match="src_key_padding_mask is torch.bool") as caught:
        ours(x, torch.zeros(S, S), torch.zeros(B, S, dtype=torch.bool))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours(x, torch.zeros(S, S, dtype=torch.bool), torch.zeros(B, S, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("name", ["TransformerEncoder", "TransformerDecoder"])
def test_causal_masks_are_detected(name, dtype):
    ours = build(fnn, name, batch_first=True)
    args = inputs(name)
    argument, size = ("mask", S) if name == "TransformerEncoder" else ("tgt_mask", T)
    mask = causal_mask(size)
    mask = mask < 0 if dtype is torch.bool else mask
    with Calls() as counted:
        ours(*args, **{argument: mask})
    causal = [call["causal"] for call in counted.arguments if call["op"] == "attention"]
    assert causal == (["top_left"] * 2 if name == "TransformerEncoder" else ["top_left", False] * 2)
    assert all(call["mask"] is None for call in counted.arguments if call["op"] == "attention")
    hints = []
    ours.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: hints.append(kwargs), with_kwargs=True
    )
    key = "is_causal" if name == "TransformerEncoder" else "tgt_is_causal"
    other = mask.clone()
    other[0, -1] = False if dtype is torch.bool else 0.0
    for given, hint, wanted in ((mask, None, True), (other, None, False), (mask, False, False)):
        ours(*args, **{argument: given, key: hint})
        assert hints[-1][key] is wanted
    assert not hints[-1].get("memory_is_causal", False)


def test_layers_of_others_get_what_torch_gives_them():
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

    encoder = fnn.TransformerEncoder(Custom(), 2, enable_nested_tensor=False)
    assert type(encoder.layers[0].norm) is fnn.LayerNorm
    blocked = causal_mask(S) < 0
    encoder(x, blocked, torch.zeros(B, S, dtype=torch.bool))
    mask, is_causal, padding = seen[-1]
    assert torch.equal(mask, causal_mask(S)) and is_causal is True
    assert torch.equal(padding, torch.zeros(B, S))


def test_nested_tensors_go_to_torch():
    torch.manual_seed(0)
    theirs, ours = twins("TransformerEncoder", batch_first=True)
    theirs.norm, ours.norm = nn.LayerNorm(E), fnn.LayerNorm(E)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are in prototype stage
        nested = torch.nested.nested_tensor([torch.randn(3, E), torch.randn(5, E)])
    with torch.no_grad():
        expected, got = theirs.eval()(nested), ours.eval()(nested)
    assert got.is_nested
    for a, b in zip(got.unbind(), expected.unbind(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(AssertionError, match="NestedTensor"):
        fnn.TransformerDecoderLayer(E, H, batch_first=True)(nested, nested)


@pytest.mark.parametrize("name", ["TransformerEncoderLayer", "TransformerDecoderLayer"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_dropout_repeats_under_manual_seed(name, norm_first):
    ours = build(fnn, name, norm_first=norm_first, batch_first=True, dropout=0.3)
    args = inputs(name)

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return ours(*args)

    first = run(1)
    assert torch.equal(first, run(1))
    assert not torch.equal(first, run(2))
    assert not torch.equal(first, ours(*args))
    ours.eval()
    state = torch.get_rng_state()
    assert torch.equal(ours(*args), ours(*args))
    assert torch.equal(state, torch.get_rng_state())  # evaluation draws nothing


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("which", ["dropout", "dropout1", "dropout2"])
def test_dropout_rates_are_the_childrens(which, norm_first):
    """With sublayers that give 1 everywhere, what a layer adds to its input shows the dropout."""
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
    # Behind a norm, too, kept ones are positive; no row of 64 is kept or dropped as a whole.
    kept = (out > 0).double().mean().item()
    assert abs(kept - 0.75) < 5 * (0.25 * 0.75 / out.numel()) ** 0.5


def test_dropouts_of_one_layer_are_independent():
    """Three sublayers that give 1 everywhere: what is added is a binomial number of kept ones."""
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
    theirs, ours = twins(name, norm_first=norm_first, batch_first=True)
    args = inputs(name)
    truth = copy.deepcopy(theirs).double()(*[x.double() for x in args])
    for dtype in (torch.float32, torch.bfloat16):
        moved = tuple(x.to(dtype) for x in args)
        with torch.autocast("cpu", torch.bfloat16):
            expected, got = theirs(*moved), ours(*moved)
        assert got.dtype == expected.dtype
        cost = (expected.double() - truth).abs().max()
        assert (got.double() - truth).abs().max() <= 2 * cost
        got.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in ours.parameters())


@pytest.mark.filterwarnings("ignore:.*mask:UserWarning")
def test_torch_compile_in_one_graph_for_all_sizes():
    torch.manual_seed(0)
    name = "TransformerEncoderLayer"
    theirs, ours = twins(name, batch_first=True)
    kwargs = {"src_mask": causal_mask(S), "src_key_padding_mask": random_mask(B, S)}
    eager = copy.deepcopy(ours)
    ours.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    (x,) = inputs(name)
    assert_equivalent(theirs, ours, x, **kwargs)
    kwargs["src_key_padding_mask"] = kwargs["src_key_padding_mask"][:2]
    with torch._dynamo.config.patch(error_on_recompile=True):
        got = ours(x[:2].requires_grad_(), **kwargs)
    expected = eager(x[:2], **kwargs)
    assert_same("another batch", got, expected, expected.double())


@pytest.mark.parametrize("norm_first", [True, False])
def test_compiled_decoder_takes_its_mask_as_it_is_and_drops(norm_first):
    torch.manual_seed(0)
    ours = build(fnn, "TransformerDecoder", batch_first=True, norm_first=norm_first, dropout=0.5)
    args = *inputs("TransformerDecoder"), causal_mask(T)
    expected = ours.eval()(*args)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        got = compiled(*args)
        assert_same("compiled", got, expected, expected.double())
        ours.train()
        assert not torch.equal(compiled(*args), compiled(*args))


def test_transforms_and_export():
    torch.manual_seed(0)
    ours = build(fnn, "TransformerEncoderLayer", batch_first=True)
    parameters = {name: p.detach() for name, p in ours.named_parameters()}
    (x,) = inputs("TransformerEncoderLayer")

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(ours, parameters, (x[None],)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for i in range(B):
        ours.zero_grad()
        ours(x[i : i + 1]).square().sum().backward()
        for name, p in ours.named_parameters():
            torch.testing.assert_close(each[name][i], p.grad)
    program = torch.export.export(ours.eval(), (x,))
    assert any("fastattn.attention_fwd" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(x), ours(x))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("memory", ["whole", "padding", "lengths"])
def test_decoding_step_by_step_equals_forward(batch_first, norm_first, memory):
    torch.manual_seed(0)
    theirs, ours = twins("TransformerDecoder", batch_first=batch_first, norm_first=norm_first)
    theirs.eval(), ours.eval()
    tgt, source = inputs("TransformerDecoder", batch_first=batch_first)
    lengths = torch.tensor([S, 3, 1])
    padding = torch.arange(S) >= lengths[:, None]
    given = {
        "whole": {},
        "padding": {"memory_key_padding_mask": padding},
        "lengths": {"memory_lengths": lengths},
    }[memory]
    kwargs = {} if memory == "whole" else {"memory_key_padding_mask": padding}
    kwargs["tgt_mask"] = causal_mask(T)
    expected = theirs(tgt, source, **kwargs).detach()
    truth = theirs.double()(
        tgt.double(), source.double(), **kwargs | {"tgt_mask": causal_mask(T).double()}
    ).detach()

    time = 1 if batch_first else 0
    cache = ours.init_cache(source, max_length=T, **given)
    rows = []
    for i in range(T):
        assert cache.length == i
        rows.append(ours.step(tgt.narrow(time, i, 1), cache))
    assert not rows[0].requires_grad
    assert_same("steps", torch.cat(rows, time), expected, truth)

    cache = ours.init_cache(source, max_length=T + 3, **given)
    prompt = ours.step(tgt.narrow(time, 0, 3), cache)
    rest = ours.step(tgt.narrow(time, 3, T - 3), cache)
    assert_same("prompt", torch.cat((prompt, rest), time), expected, truth)


def test_decoding_goes_on_from_reordered_rows():
    torch.manual_seed(0)
    ours = build(fnn, "TransformerDecoder", batch_first=True).eval()
    tgt, memory = inputs("TransformerDecoder")
    padding = torch.arange(S) >= torch.tensor([S, 3, 1])[:, None]
    rows = torch.tensor([2, 0, 0, 1])
    cache = ours.init_cache(memory, memory_key_padding_mask=padding, max_length=T)
    ours.step(tgt[:, :2], cache)
    cache.reorder(rows)
    assert cache.batch_size == 4 and cache.length == 2
    got = ours.step(tgt[rows, 2:3], cache)
    cache = ours.init_cache(memory[rows], memory_key_padding_mask=padding[rows], max_length=T)
    expected = ours.step(tgt[rows, :3], cache)[:, 2:]
    assert_same("reordered", got, expected, expected.double())


def test_decoding_calls_the_children_it_can():
    torch.manual_seed(0)
    theirs, ours = twins("TransformerDecoder", batch_first=True)
    tgt, memory = inputs("TransformerDecoder")
    for module in (theirs.eval(), ours.eval()):
        layer = module.layers[1]
        layer.norm1.register_forward_hook(lambda module, args, output: output + 1)
        layer.linear1.register_forward_hook(lambda module, args, output: output * 2)
        layer.dropout2.register_forward_hook(lambda module, args, output: output * 3)
    expected = theirs(tgt, memory, causal_mask(T))
    cache = ours.init_cache(memory, max_length=T)
    got = torch.cat([ours.step(tgt[:, i : i + 1], cache) for i in range(T)], 1)
    assert_same("steps", got, expected, expected.double())


def test_decoding_rejects():
    decoder = build(fnn, "TransformerDecoder", batch_first=True).eval()
    tgt, memory = inputs("TransformerDecoder")
    for kwargs, message in (
        ({"max_length": 0}, "max_length must be at least 1, got 0"),
        ({"memory_key_padding_mask": torch.zeros(B, T).bool()}, r"must be bool \[3, 7\].*\[3, 5\]"),
        ({"memory_key_padding_mask": torch.zeros(B, S)}, r"bool \[3, 7\], got torch.float32"),
        ({"memory_lengths": torch.ones(2)}, r"memory_lengths must be int32 or int64 \[3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            decoder.init_cache(memory, **{"max_length": T, **kwargs})
    with pytest.raises(ValueError, match=r"memory must have 3 dimensions, got \[7, 16\]"):
        decoder.init_cache(memory[0], max_length=T)
    cache = decoder.init_cache(memory, max_length=2)
    with pytest.raises(ValueError, match=r"x must be \[B, 1, E\] with B=3, got \[2, 1, 16\]"):
        decoder.step(tgt[:2, :1], cache)
    with pytest.raises(ValueError, match="max_length=2 positions, got position 4"):
        decoder.step(tgt, cache)
    with pytest.raises(ValueError, match=r"rows must be int32 or int64.*torch.float32"):
        cache.reorder(torch.zeros(3))
    decoder.layers[1].self_attn.register_forward_hook(lambda *_: None)
    with pytest.raises(NotImplementedError, match=r"layers\[1\] has a self_attn .* without hooks"):
        decoder.init_cache(memory, max_length=2)

    class Mine(fnn.TransformerDecoderLayer):
        pass

    with pytest.raises(NotImplementedError, match=r"layers\[0\] is not exactly"):
        fnn.TransformerDecoder(Mine(E, H, FFN, batch_first=True), 1).init_cache(
            memory, max_length=2
        )
