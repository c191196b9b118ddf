"""Calls of the drop-ins with random shapes and types: they raise exactly what torch raises.

Faults are drawn from common mistakes: ranks, batch sizes, lengths, features, masks of another shape
or type. If both accept a call, the results are equal.
"""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformer_twins import CLASSES, build

import fastattn.nn as fnn

E, H = 8, 2
DRAWS = 100
MASKS = {
    "MultiheadAttention": ("attn_mask",),
    "TransformerEncoderLayer": ("src_mask",),
    "TransformerDecoderLayer": ("tgt_mask", "memory_mask"),
    "TransformerEncoder": ("mask",),
    "TransformerDecoder": ("tgt_mask", "memory_mask"),
    "Transformer": ("src_mask", "tgt_mask", "memory_mask"),
}
PADDINGS = {
    "MultiheadAttention": ("key_padding_mask",),
    "Transformer": ("src_key_padding_mask", "tgt_key_padding_mask", "memory_key_padding_mask"),
}
# The correct shapes come first, then wrong ones: 3 sequences of 3, two heads.
INPUTS = ((3, 3), (3, 3), (3, 3), (3, 4), (2, 3), (3,), (1, 3, 3), ())
MASK_SHAPES = ((3, 3), (3, 3), (6, 3, 3), (3, 4), (4, 3), (3, 3, 3), (3,), (1, 3, 3))
PADDING_SHAPES = ((3, 3), (3, 3), (3, 4), (2, 3), (3,), (1, 3))
MASK_TYPES = (torch.bool, torch.float32) * 4 + (torch.uint8, torch.int64)


def draw(chooser: random.Random, name: str) -> tuple[list[Tensor], dict[str, Any]]:
    """Arguments of one call; most have one fault, some none."""

    def tensor(shapes: tuple[tuple[int, ...], ...], types: tuple[torch.dtype, ...]) -> Tensor:
        faulty = chooser.random() < 0.15
        shape = chooser.choice(shapes) if faulty else shapes[chooser.randrange(2)]
        x = torch.randn(shape)
        return (x > 0.7 if types[0] is torch.bool else x).to(chooser.choice(types))

    def data() -> Tensor:
        x = tensor(INPUTS, (torch.float32,))
        size = E if chooser.random() < 0.97 else E + 1
        return torch.randn(*x.shape, size)

    count = {"MultiheadAttention": 3, "Transformer": 2}.get(name, 2 if "Decoder" in name else 1)
    args = [data() for _ in range(count)]
    if name == "MultiheadAttention" and chooser.random() < 0.4:
        args[1] = args[0]
    kwargs: dict[str, Any] = {}
    for argument in MASKS[name]:
        if chooser.random() < 0.3:
            kwargs[argument] = tensor(MASK_SHAPES, MASK_TYPES)
    padding_names = tuple(m.replace("mask", "key_padding_mask") for m in MASKS[name])
    padding_names = ("src_key_padding_mask",) if name == "TransformerEncoder" else padding_names
    for argument in PADDINGS.get(name, padding_names):
        if chooser.random() < 0.3:
            kwargs[argument] = tensor(PADDING_SHAPES, MASK_TYPES)
    if name == "MultiheadAttention":
        kwargs["need_weights"] = chooser.random() < 0.5
        kwargs["is_causal"] = chooser.random() < 0.05
    return args, kwargs


def result_or_error(module: nn.Module, args: list[Tensor], kwargs: dict[str, Any]) -> Any:
    try:
        result = module(*args, **kwargs)
    except (AssertionError, RuntimeError, ValueError, IndexError) as error:
        return error
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", ["MultiheadAttention", *CLASSES])
def test_raises_what_torch_raises(name: str, batch_first: bool) -> None:
    torch.manual_seed(0)
    chooser = random.Random(f"{name} {batch_first}")
    options = {"sizes": (E, H, 16), "layers": 1, "batch_first": batch_first}
    options |= {} if name == "MultiheadAttention" else {"norm_first": batch_first}
    reference, fast = (build(package, name, **options) for package in (nn, fnn))
    fast.load_state_dict(reference.state_dict())
    accepted = refused = alike = 0
    for _ in range(DRAWS):
        args, kwargs = draw(chooser, name)
        training = chooser.random() < 0.5
        reference.train(training), fast.train(training)
        expected, got = (
            result_or_error(reference, args, kwargs),
            result_or_error(fast, args, kwargs),
        )
        call = (
            [x.shape for x in args],
            {n: (x.dtype, x.shape) if isinstance(x, Tensor) else x for n, x in kwargs.items()},
        )
        assert isinstance(got, Exception) == isinstance(expected, Exception), (call, expected, got)
        if isinstance(got, Exception):
            refused += 1
            if type(got) is type(expected) and "Need attn_mask" not in str(expected):
                assert str(got) == str(expected), call
            alike += type(got) is type(expected) and bool(str(got))
        else:
            accepted += 1
            finite = expected.isfinite()  # intended difference: rows without a key
            torch.testing.assert_close(got[finite], expected[finite], rtol=1e-4, atol=1e-4)
    assert min(accepted, refused) > DRAWS / 10
    assert alike > refused * 0.8


@pytest.mark.parametrize("need_weights", [True, False])
def test_errors_with_messages_of_their_own(need_weights: bool) -> None:
    x, options = torch.randn(2, 3, E), {"sizes": (E, H, 16), "batch_first": True}
    attention, encoder, decoder = (
        build(fnn, name, **options) for name in ("MultiheadAttention", *CLASSES[:2])
    )
    with pytest.raises(RuntimeError, match="same dtype"):
        attention(*[x.double()] * 3, need_weights=need_weights)
    with pytest.raises(RuntimeError, match="attn_mask"):
        attention(x, x, x, is_causal=True, need_weights=need_weights)
    with pytest.raises(RuntimeError):
        encoder(x.double())
    for module, args, hint in ((encoder, (x,), "is_causal"), (decoder, (x, x), "tgt_is_causal")):
        with pytest.raises(RuntimeError, match="attn_mask"):
            module(*args, **{hint: True})
