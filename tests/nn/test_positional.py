"""Positional encodings compared with their definition."""

import math

import pytest
import torch

import fastattn.nn as fnn
from fastattn.nn.positional import sinusoids

E = 16


@pytest.mark.parametrize("size", [1, 6, 7])
def test_sinusoidal_positions(size):
    module = fnn.SinusoidalPositionalEncoding(size, max_length=50)
    assert not module.state_dict()
    added = module(torch.zeros(2, 9, size), offset=40)
    for position in range(9):
        for column in range(size):
            angle = (40 + position) / 10000 ** (2 * (column // 2) / size)
            wanted = math.cos(angle) if column % 2 else math.sin(angle)
            assert abs(added[1, position, column].item() - wanted) < 1e-7 * max(1, angle)
    x = torch.randn(2, 3, size, dtype=torch.bfloat16)
    assert torch.equal(module(x), x + sinusoids(3, size).bfloat16())


def test_learned_positions():
    module = fnn.LearnedPositionalEncoding(E, max_length=10, dropout=0.5)
    x = torch.randn(2, 4, E)
    module(x)[:, :, :].sum().backward()
    assert (module.weight.grad[4:] == 0).all() and (module.weight.grad[:4] != 0).any()
    module.eval()
    assert torch.equal(module(x, offset=3), x + module.weight[3:7])


@pytest.mark.parametrize("kind", [fnn.SinusoidalPositionalEncoding, fnn.LearnedPositionalEncoding])
def test_positions_reject(kind):
    module = kind(E, 10)
    with pytest.raises(ValueError, match=r"\[0, max_length=10\), got 8 to 11"):
        module(torch.zeros(1, 4, E), offset=8)
    with pytest.raises(ValueError, match=r"\[0, max_length=10\), got -1 to 2"):
        module(torch.zeros(1, 4, E), offset=-1)
    with pytest.raises(ValueError, match=r"x must be \[..., S, 16\], got \[1, 4, 8\]"):
        module(torch.zeros(1, 4, 8))
    with pytest.raises(ValueError, match="at least 1"):
        kind(0, 10)
    with pytest.raises(TypeError, match=r"x must be floating, got torch.int64"):
        module(torch.zeros(1, 4, E, dtype=torch.int64))
    for offset in (1.5, "1", None):
        with pytest.raises(TypeError, match=r"offset must be an integer or int64 \[1\], got"):
            module(torch.zeros(1, 4, E), offset=offset)
    assert torch.equal(
        module.eval()(torch.ones(1, 4, E), offset=torch.tensor(3)),
        module(torch.ones(1, 4, E), offset=3),
    )
    ones = torch.ones(2, 4, dtype=torch.int64)
    for offset in (torch.tensor([1, 2]), torch.tensor([1.0]), ones, ones[:1, :1]):
        with pytest.raises(
            ValueError, match=r"offset must be an integer or integers \[1\] or \[4\], got"
        ):
            module(torch.zeros(1, 4, E), offset=offset)


@pytest.mark.parametrize("kind", [fnn.SinusoidalPositionalEncoding, fnn.LearnedPositionalEncoding])
def test_positions_from_the_meta_device(kind):
    with torch.device("meta"):
        module = kind(E, 10)
    module = module.to_empty(device="cpu")
    module.reset_parameters()
    added = module(torch.zeros(1, 4, E))
    if kind is fnn.SinusoidalPositionalEncoding:
        assert torch.equal(added, kind(E, 10)(torch.zeros(1, 4, E)))
    assert added.isfinite().all() and added.abs().max() <= 1.0
