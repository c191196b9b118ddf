"""Tables that modules compute: built on the meta device, moved, converted, copied, compiled."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from seq2seq_samples import random_examples, small_model
from torch import Tensor, nn

import fastattn.nn as fnn
from fastattn.nn.positional import sinusoids
from fastattn.seq2seq.data import collate

E, H = 24, 3


class Sinusoids(fnn.SinusoidalPositionalEncoding):
    def __init__(self) -> None:
        super().__init__(E, 50)


def _layer(kind: Any) -> Callable[[], nn.Module]:
    return lambda: fnn.TransformerEncoderLayer(E, H, 32, 0.0, batch_first=True, positions=kind)


MODULES = {"sinusoids": Sinusoids, **{kind: _layer(kind) for kind in ("alibi", "t5", "rotary")}}


def _on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def _assigned(make: Callable[[], nn.Module], state: dict[str, Tensor]) -> nn.Module:
    module = _on_meta(make)
    module.load_state_dict(state, assign=True)
    return module


def _emptied(make: Callable[[], nn.Module], state: dict[str, Tensor]) -> nn.Module:
    module = _on_meta(make)
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory with NaN
    try:
        module.to_empty(device="cpu")
    finally:
        torch.use_deterministic_algorithms(False)
    module.load_state_dict(state)
    return module


WAYS: dict[str, Callable[..., nn.Module]] = {
    "assigned": _assigned,
    "emptied": _emptied,
    "assigned, copied": lambda *a: copy.deepcopy(_assigned(*a)),
    "assigned, pickled": lambda *a: pickle.loads(pickle.dumps(_assigned(*a))),
    "assigned, converted": lambda *a: _assigned(*a).double().float(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODULES)
def test_modules_built_on_the_meta_device(name: str, way: str) -> None:
    make = MODULES[name]
    original = make().eval()
    x = torch.randn(2, 5, E)
    expected = original(x)
    state = {key: value.clone() for key, value in original.state_dict().items()}
    with torch.inference_mode():
        first = WAYS[way](make, state).eval()(x)
    torch.testing.assert_close(first.clone(), expected)
    module = WAYS[way](make, state).eval()
    torch.testing.assert_close(module(x), expected)
    assert not any(b.is_meta for b in module.buffers()) and not module.state_dict().keys() - state
    compiled: Any = torch.compile(WAYS[way](make, state).eval(), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), expected)


@pytest.mark.parametrize("name", MODULES)
def test_modules_on_the_meta_device_describe_results(name: str) -> None:
    module = _on_meta(MODULES[name])
    assert module(torch.empty(2, 5, E, device="meta")).is_meta
    assert all(b.is_meta for b in module.buffers())


def test_first_use_in_inference_mode() -> None:
    """Its table is a normal one, which later calls save for their backward."""
    module = _assigned(MODULES["alibi"], MODULES["alibi"]().state_dict())
    with torch.inference_mode():
        module(torch.randn(2, 5, E))
    module(torch.randn(2, 5, E)).sum().backward()
    assert all(not buffer.is_inference() for buffer in module.buffers())


def test_sinusoids_keep_their_values_when_a_model_is_converted() -> None:
    module = Sinusoids().half()
    x = torch.zeros(1, 9, E)
    assert torch.equal(module(x.half())[0], sinusoids(9, E).half())
    assert torch.equal(module.float()(x)[0], sinusoids(9, E))
    assert torch.equal(module.double().table, sinusoids(50, E))


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "alibi", "t5", "rotary"])
def test_token_models_built_on_the_meta_device(positions: str) -> None:
    model = small_model(positions=positions).eval()
    batch = collate(random_examples(4))
    inputs = batch.source, batch.target_in, batch.source_padding
    for way in (_assigned, _emptied):
        module = way(lambda: small_model(positions=positions), model.state_dict()).eval()
        torch.testing.assert_close(module(*inputs), model(*inputs))
