"""Behaviours of PyTorch's modules that PyTorch's tests check: nested tensors, TorchScript, warnings
and logs, mocked layers, settings, odd sizes, constructors.
"""

import contextlib
import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from module_equivalence import assert_equivalent, assert_same, random_mask
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastattn.nn as fnn

B, S, E, H, FFN = 2, 5, 12, 3, 16
pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning"),
]


def pair(name: str, *args: Any, **kwargs: Any) -> tuple[nn.Module, nn.Module]:
    """PyTorch's module and fastattn's, with the same parameters."""
    torch.manual_seed(0)
    reference, fast = getattr(nn, name)(*args, **kwargs), getattr(fnn, name)(*args, **kwargs)
    fast.load_state_dict(reference.state_dict())
    return reference, fast


def same(actual: Any, expected: Any) -> None:
    """The results are equal, also in tuples."""
    both = (x if isinstance(x, tuple) else (x,) for x in (actual, expected))
    for got, wanted in zip(*both, strict=True):
        if wanted is None:
            assert got is None
        else:
            torch.testing.assert_close(got, wanted)


# -- nested tensors -------------------------------------------------------------------------------
def nested(*lengths: int) -> Tensor:
    parts = [torch.randn(n, E) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}])
@pytest.mark.parametrize(
    "mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__
)
def test_jagged_tensors(extra: dict[str, bool], mode: Callable[[], Any]) -> None:
    """fastattn's attention has the results and raises the errors of PyTorch's."""
    reference, fast = pair("MultiheadAttention", E, H, batch_first=True, **extra)
    x, keys, values = nested(4, 6), nested(7, 9), nested(7, 9)
    for module in (reference, fast):
        module.eval()
    for args in ((x, x, x), (x, keys, values)):
        answers = []
        for module in (reference, fast):
            try:
                with mode():
                    out = module(*args)[0]
                answers.append([part.detach() for part in out.unbind()])
            except Exception as error:
                answers.append((type(error), str(error)))
        assert type(answers[0]) is type(answers[1])
        if isinstance(answers[0], list):
            for expected, got in zip(*answers, strict=True):
                torch.testing.assert_close(got, expected)
        else:
            assert answers[0] == answers[1]


def test_nested_tensors_without_parts() -> None:
    empty = torch.nested.nested_tensor([])
    messages = []
    for module in pair("MultiheadAttention", E, H, batch_first=True):
        with pytest.raises(AssertionError) as error:
            module.eval()(empty, empty, empty)
        messages.append(str(error.value))
    assert messages[0] == messages[1] and "got 1" in messages[1]


# -- TorchScript and compilers --------------------------------------------------------------------
class CustomLayer(fnn.TransformerEncoderLayer):
    """A subclass without changes."""


def test_torchscript_of_subclasses_and_sizes() -> None:
    torch.manual_seed(0)
    layer = CustomLayer(E, H, FFN, dropout=0.0, batch_first=True)
    x, mask = torch.randn(B, S, E), torch.zeros(S, S, dtype=torch.bool)
    for module, kwargs in (
        (layer, {"src_mask": mask}),
        (fnn.TransformerEncoder(layer, 2), {"mask": mask}),
    ):
        for training in (True, False):
            module.train(training)
            scripted = torch.jit.script(module)
            with torch.no_grad():
                same(scripted(x, **kwargs), module(x, **kwargs))
    attention = fnn.MultiheadAttention(E, H, kdim=6, vdim=6).eval()
    keys = torch.randn(S, B, 6)
    query = torch.randn(S, B, E)
    same(torch.jit.script(attention)(query, keys, keys), attention(query, keys, keys))


def test_compiled_evaluation_with_padding() -> None:
    """One graph for any padding mask."""
    layer = fnn.TransformerEncoderLayer(E, H, FFN, batch_first=True, dtype=torch.float64)
    encoder = fnn.TransformerEncoder(layer, 2).eval()
    compiled = torch.compile(encoder, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 11, E, dtype=torch.float64)
    for first in (True, False):
        padding = torch.rand(1, 11) > 0.5
        padding[..., 0] = first
        padding[..., 1] = False
        same(compiled(x, src_key_padding_mask=padding), encoder(x, src_key_padding_mask=padding))
    torch._dynamo.reset()


# -- settings, warnings, logs ---------------------------------------------------------------------
def test_torchs_settings_have_no_effect() -> None:
    """The setting of the fast path, and the choice of PyTorch's attention kernels."""
    torch.manual_seed(0)
    fast = fnn.Transformer(E, H, 1, 1, FFN, dropout=0.0, batch_first=True).eval()
    src, tgt = torch.randn(B, S, E), torch.randn(B, S, E)
    expected = fast(src, tgt)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert torch.equal(fast(src, tgt), expected)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.equal(fast(src, tgt), expected)


def test_constructors_warn_as_torchs() -> None:
    layer = fnn.TransformerEncoderLayer(E, 4, bias=False, batch_first=True)
    with pytest.warns(UserWarning, match="encoder_layer.self_attn was passed bias=False"):
        fnn.TransformerEncoder(layer, 1)
    with pytest.warns(UserWarning, match="self_attn was passed bias=False"):
        fnn.Transformer(E, 4, bias=False, batch_first=True)


@pytest.mark.parametrize("name", ["TransformerEncoder", "TransformerDecoder"])
def test_boolean_masks_log_and_warn_nothing(
    name: str, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    layer = getattr(fnn, f"{name}Layer")(E, 4, FFN, batch_first=True)
    stack = getattr(fnn, name)(layer, 2, fnn.LayerNorm(E))
    x = torch.randn(B, S, E)
    causal = torch.ones(S, S, dtype=torch.bool).triu(1)
    padding = torch.arange(S)[None] >= torch.tensor([S, 3])[:, None]
    recwarn.clear()
    with caplog.at_level(logging.DEBUG):
        if name == "TransformerEncoder":
            stack(x, mask=causal, src_key_padding_mask=padding)
        else:
            masks = {"tgt_key_padding_mask": padding, "memory_key_padding_mask": padding}
            stack(x, x, tgt_mask=causal, **masks)
    assert not caplog.records and not recwarn.list


# -- layers and hints -----------------------------------------------------------------------------
def test_mocked_layers_get_torchs_arguments() -> None:
    x = torch.randn(B, S, E)
    causal = torch.ones(S, S, dtype=torch.bool).triu(1)
    encoder = fnn.TransformerEncoder(fnn.TransformerEncoderLayer(E, H, FFN, batch_first=True), 2)
    layer = mock.MagicMock(nn.MultiheadAttention(E, H), return_value=x)
    encoder.layers[1] = layer
    encoder(x, mask=causal)
    layer.assert_called_with(
        mock.ANY, src_mask=mock.ANY, is_causal=True, src_key_padding_mask=mock.ANY
    )
    decoder = fnn.TransformerDecoder(fnn.TransformerDecoderLayer(E, H, FFN, batch_first=True), 2)
    decoder.layers[1] = mock.MagicMock(nn.MultiheadAttention(E, H), return_value=x)
    decoder(x, x, tgt_mask=causal)
    assert decoder.layers[1].call_args.kwargs["tgt_is_causal"] is True


def test_a_true_hint_is_the_mask() -> None:
    reference, fast = pair("TransformerEncoderLayer", 3, 1, 6, batch_first=True)
    reference.eval(), fast.eval()
    x = torch.randn(1, S, 3)
    mask = nn.Transformer.generate_square_subsequent_mask(S)
    hinted = fast(x, src_mask=mask, is_causal=True)
    torch.testing.assert_close(hinted, fast(x, src_mask=mask))
    same(hinted, reference(x, src_mask=mask, is_causal=True))
    assert not torch.allclose(hinted, fast(x))


def test_attention_of_ones() -> None:
    """All backends must give these integers exactly."""
    module = fnn.MultiheadAttention(4, 1)
    module.in_proj_weight = nn.Parameter(torch.ones(12, 4))
    module.out_proj.weight = nn.Parameter(torch.ones(4, 4))
    x = torch.ones(1, 2, 4)
    mask = nn.Transformer.generate_square_subsequent_mask(1)
    for need_weights in (True, False):
        out, _ = module(x, x, x, attn_mask=mask, need_weights=need_weights, is_causal=True)
        assert torch.equal(out, torch.full_like(x, 16.0))


def test_masks_for_each_sequence() -> None:
    """A 3-D mask has the same effect as 2-D masks for the sequences alone."""
    torch.manual_seed(0)
    module = fnn.MultiheadAttention(8, 4)
    query, keys = torch.rand(8, 2, 8), torch.rand(8, 3, 8)
    masks = random_mask(8, 2, 3, dtype=torch.float32)
    together = module(
        *(x.transpose(0, 1) for x in (query, keys, keys)),
        attn_mask=masks.repeat_interleave(4, 0),
    )[0].transpose(0, 1)
    for i in range(8):
        one = module(*(x[i][:, None] for x in (query, keys, keys)), attn_mask=masks[i])[0]
        torch.testing.assert_close(together[i][:, None], one)


@pytest.mark.parametrize("with_grad", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_batches_as_long_as_their_sequences(training: bool, with_grad: bool) -> None:
    reference, fast = pair(
        "TransformerEncoder", nn.TransformerEncoderLayer(4, 2, 16, 0.0, batch_first=True), 2
    )
    x = torch.arange(16.0).reshape(2, 2, 4)
    mask = torch.tensor([[False, True], [False, False]])
    with torch.set_grad_enabled(with_grad):
        same(fast.train(training)(x, mask=mask), reference.train(training)(x, mask=mask))


# -- sizes and types ------------------------------------------------------------------------------
@pytest.mark.parametrize("heads, size", [(1, 1), (7, 14), (5, 15), (3, 33), (2, 10)])
def test_odd_head_dims(heads: int, size: int) -> None:
    reference, fast = pair("MultiheadAttention", size, heads, batch_first=True)
    x = torch.randn(B, S, size)
    assert_equivalent(reference, fast, x, x, x, need_weights=False)
    assert_equivalent(reference, fast, x, x, x, key_padding_mask=random_mask(B, S))


def test_parameters_of_another_dtype() -> None:
    """A bias of another dtype gives PyTorch's result or error."""
    reference, fast = pair("MultiheadAttention", 4, 4, batch_first=True, dtype=torch.float64)
    x = torch.randn(4, 4, 4, dtype=torch.float64)
    answers = []
    for module in (reference, fast):
        module.in_proj_bias = nn.Parameter(module.in_proj_bias.half())
        try:
            with torch.no_grad():
                answers.append(module.eval()(x, x, x)[0])
        except RuntimeError as error:
            answers.append(str(error))
    assert type(answers[0]) is type(answers[1])
    if isinstance(answers[0], Tensor):
        assert_same("result", answers[1], answers[0], answers[0].double())
    else:
        assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "name, args, kwargs",
    [
        ("MultiheadAttention", (5, 2), {}),
        ("MultiheadAttention", (0, 1), {}),
        ("MultiheadAttention", (4, 0), {}),
        ("TransformerEncoderLayer", (5, 2), {}),
        ("TransformerEncoderLayer", (4, 2), {"activation": "tanh"}),
        ("TransformerDecoderLayer", (4, 2), {"activation": "swish"}),
        ("TransformerEncoderLayer", (4, 2), {"dropout": 1.5}),
        ("TransformerDecoderLayer", (4, 2), {"unknown": 1}),
        ("Transformer", (5, 2), {}),
        ("Transformer", (4, 2, 1, 1, 8, -0.5), {}),
        ("LayerNorm", (4,), {"elementwise_afine": True}),
    ],
    ids=str,
)
def test_constructors_raise_what_torchs_raise(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    with pytest.raises(Exception) as expected:
        getattr(nn, name)(*args, **kwargs)
    with pytest.raises(type(expected.value)) as got:
        getattr(fnn, name)(*args, **kwargs)
    assert str(got.value) == str(expected.value)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_unbatched_padding_masks_of_wrong_rank(training: bool, need_weights: bool) -> None:
    row = torch.randn(4, E)
    padding = torch.zeros(1, 4, dtype=torch.bool)
    messages = []
    for module in pair("MultiheadAttention", E, H, batch_first=True):
        with torch.no_grad(), pytest.raises(AssertionError) as error:
            module.train(training)(
                row, row, row, key_padding_mask=padding, need_weights=need_weights
            )
        messages.append(str(error.value))
    assert messages[0] == messages[1] and "`None` or 1-D but found 2-D" in messages[1]


def test_functional_forward_agrees() -> None:
    """PyTorch's functional form with fastattn's parameters, as other code calls it."""
    torch.manual_seed(0)
    fast = fnn.MultiheadAttention(E, H, add_bias_kv=True, add_zero_attn=True).eval()
    x = torch.randn(S, B, E)
    expected = F.multi_head_attention_forward(
        x,
        x,
        x,
        E,
        H,
        fast.in_proj_weight,
        fast.in_proj_bias,
        fast.bias_k,
        fast.bias_v,
        fast.add_zero_attn,
        0.0,
        fast.out_proj.weight,
        fast.out_proj.bias,
        training=False,
    )
    same(fast(x, x, x), expected)


def test_padding_in_training() -> None:
    """Training steps with padded batches and evaluations in between give the same results."""
    torch.manual_seed(0)
    layer = fnn.TransformerEncoderLayer(2, 2, 4, dropout=0.0, batch_first=True, activation="gelu")
    encoder = fnn.TransformerEncoder(layer, 2)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1, momentum=0.9)
    padding = torch.tensor([[True, True, False, False]])
    for _ in range(5):
        x = torch.cat([torch.randn(1, 2, 2), torch.zeros(1, 2, 2)], dim=1)
        optimizer.zero_grad()
        F.mse_loss(encoder(x, src_key_padding_mask=padding)[:, :2], x[:, :2]).backward()
        optimizer.step()
        with torch.no_grad():
            trained = encoder(x, src_key_padding_mask=padding)
            evaluated = encoder.eval()(x, src_key_padding_mask=padding)
            encoder.train()
        assert torch.equal(trained, evaluated)
        for dtype in (torch.uint8, torch.int64):
            with pytest.raises(AssertionError, match="only bool and floating types"):
                encoder(x, src_key_padding_mask=padding.to(dtype))


# -- derivatives ----------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("norm_first", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [
        "MultiheadAttention",
        "TransformerEncoderLayer",
        "TransformerDecoderLayer",
        pytest.param("Transformer", marks=pytest.mark.slow),
    ],
)
def test_derivatives_of_modules(name: str, norm_first: bool) -> None:
    """First and second order by finite differences, for inputs and parameters; batched."""
    torch.manual_seed(0)
    options = {"dropout": 0.0, "batch_first": True, "dtype": torch.float64}
    x, y = (torch.randn(2, n, 4, dtype=torch.float64, requires_grad=True) for n in (3, 2))
    padding = torch.tensor([[False, False, True], [False, False, False]])
    if name == "MultiheadAttention":
        module: nn.Module = fnn.MultiheadAttention(4, 2, add_zero_attn=norm_first, **options)
        args, kwargs = (y, x, x), {"key_padding_mask": padding, "need_weights": not norm_first}
    else:
        options |= {"norm_first": norm_first, "activation": F.gelu, "dim_feedforward": 4}
        layers = {"num_encoder_layers": 1, "num_decoder_layers": 1} if name == "Transformer" else {}
        module = getattr(fnn, name)(4, 2, **layers, **options)
        args = {"TransformerDecoderLayer": (y, x), "Transformer": (x, y)}.get(name, (x,))
        key = "memory_key_padding_mask" if "Decoder" in name else "src_key_padding_mask"
        kwargs = {key: padding}

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        result = module(*tensors[: len(args)], **kwargs)
        result = result if isinstance(result, tuple) else (result,)
        return tuple(part for part in result if part is not None)

    varied = (*args, *module.parameters())  # these are read from the module
    options = {"fast_mode": True, "check_batched_grad": True}
    assert torch.autograd.gradcheck(function, varied, **options)
    assert torch.autograd.gradgradcheck(function, varied, **options)
