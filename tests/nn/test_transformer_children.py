"""User changes to the drop-in layers: hooks, parametrizations, replaced children and weights."""

import copy
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from module_equivalence import assert_equivalent, assert_same, random_mask
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformer_twins import FFN, B, Calls, E, H, S, build, inputs, twins

import fastattn.nn as fnn

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")


def tanh_gelu() -> nn.Module:
    return nn.GELU(approximate="tanh")


def label_of_activation(value: object) -> str:
    return repr(value) if isinstance(value, nn.Module) else getattr(value, "__name__", str(value))


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
def test_unmodified_layers_run_fused(name, norm_first, calls, training):
    fast = build(fnn, name, norm_first=norm_first, batch_first=True).train(training)
    with (
        Calls() as counted,
        torch.no_grad(),
        mock.patch("torch._transformer_encoder_layer_fwd", side_effect=AssertionError),
        mock.patch("torch._native_multi_head_attention", side_effect=AssertionError),
        mock.patch.object(F, "multi_head_attention_forward", side_effect=AssertionError),
    ):
        fast(*inputs(name))
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


class LowRank(nn.Module):
    """As in adapters: a weight plus a trained product."""

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
    reference, fast = twins("TransformerEncoderLayer", batch_first=True)
    for module in (reference, fast):
        torch.manual_seed(1)
        target = module.get_submodule(child)
        weight = getattr(target, parameter)
        rule = LowRank(weight) if weight.dim() == 2 else nn.Softplus()
        parametrize.register_parametrization(target, parameter, rule)
    assert_equivalent(
        reference.train(training), fast.train(training), *inputs("TransformerEncoderLayer")
    )


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


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("TransformerEncoderLayer", "_sa_block"),
        ("TransformerEncoderLayer", "_ff_block"),
        ("TransformerDecoderLayer", "_sa_block"),
        ("TransformerDecoderLayer", "_mha_block"),
        ("TransformerDecoderLayer", "_ff_block"),
    ],
)
def test_blocks_of_one_instance(name, block):
    torch.manual_seed(0)
    reference, fast = twins(name, batch_first=True)
    for module in (reference, fast):
        setattr(module, block, lambda x, *_, **__: x.sin())
    assert_equivalent(reference, fast, *inputs(name))


@pytest.mark.parametrize("norm_first", [True, False])
def test_an_eps_that_the_ops_refuse(norm_first):
    torch.manual_seed(0)
    reference, fast = twins("TransformerEncoderLayer", batch_first=True, norm_first=norm_first)
    for module in (reference, fast):
        module.norm2.eps = float("inf")
    assert_equivalent(reference, fast, *inputs("TransformerEncoderLayer"))


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
