"""`torch.vmap` over ops: which calls are batched, and that results equal those of a loop."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from call_recorder import CallRecorder
from torch import Tensor

import fastattn

pytestmark = pytest.mark.filterwarnings("error:There is a performance drop")
W, BIG = torch.linspace(0.5, 1.5, 8), torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
MASK = torch.randn(2, 1, 5, 5, generator=torch.Generator().manual_seed(2))
LENGTHS, QUERIES = torch.tensor([3, 5]), torch.tensor([5, 4])


def _attention(x: Tensor) -> Tensor:
    return fastattn.attention(
        x, x, x, mask=MASK, key_lengths=LENGTHS, query_lengths=QUERIES, causal=True
    )


# (the tensor of one element) -> a tensor.
FUNCTIONS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "layer_norm": ((3, 4, 8), lambda x: fastattn.layer_norm(x, W)),
    "layer_norm of one row": ((3, 8), lambda x: fastattn.layer_norm(x, W)),
    "rms_norm": ((3, 4, 8), lambda x: fastattn.rms_norm(x, W)),
    "add_layer_norm": ((3, 4, 8), lambda x: fastattn.add_layer_norm(x, 2 * x, W)),
    "add_layer_norm of one residual": ((3, 6, 8), lambda x: fastattn.add_layer_norm(x, BIG, W)),
    "ffn": ((3, 4, 8), lambda x: fastattn.ffn(x, BIG, None, BIG.t(), None, "gelu")),
    "linear": ((3, 4, 8), lambda x: fastattn.linear(x, BIG)),
    "attention": ((3, 2, 4, 5, 8), _attention),
    "attention with diagonals of lengths": (
        (3, 2, 4, 5, 8),
        lambda x: fastattn.attention(
            x, x, x, key_lengths=LENGTHS, query_lengths=QUERIES, causal="bottom_right_lengths"
        ),
    ),
    "attention with one mask": (
        (3, 2, 4, 5, 8),
        lambda x: fastattn.attention(x, x, x, mask=MASK[:1]),
    ),
    "one entry": ((1, 4, 8), lambda x: fastattn.layer_norm(x, W)),
}


def _looped(function: Callable[[Tensor], Tensor], x: Tensor, dim: int = 0) -> Tensor:
    return torch.stack([function(entry) for entry in x.unbind(dim)])


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_elements_share_a_call(name: str, dim: int) -> None:
    shape, function = FUNCTIONS[name]
    x = torch.randn(shape).movedim(0, dim)
    with CallRecorder() as recorder:
        found = torch.vmap(function, in_dims=dim)(x)
    torch.testing.assert_close(found, _looped(function, x, dim))
    assert len(recorder.calls) == 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_elements_share_a_call(name: str) -> None:
    shape, function = FUNCTIONS[name]
    x = torch.randn(shape)
    gradient = torch.func.grad(lambda x: function(x).sin().sum())
    with CallRecorder() as recorder:
        found = torch.vmap(gradient)(x)
    torch.testing.assert_close(found, _looped(gradient, x))
    assert len(recorder.calls) == 2


def test_gradients_of_weights_are_computed_in_a_loop() -> None:
    x = torch.randn(3, 4, 8)

    def gradient(x: Tensor) -> Tensor:
        return torch.func.grad(lambda w: fastattn.layer_norm(x, w).sin().sum())(W)

    torch.testing.assert_close(torch.vmap(gradient)(x), _looped(gradient, x))


@pytest.mark.parametrize("masks", [1, 2])
def test_gradients_of_masks_are_computed_in_a_loop(masks: int) -> None:
    q = torch.randn(3, 2, 4, 5, 8)

    def gradient(q: Tensor) -> Tensor:
        def loss(mask: Tensor) -> Tensor:
            return fastattn.attention(q, q, q, mask=mask).sin().sum()

        return torch.func.grad(loss)(MASK[:masks])

    torch.testing.assert_close(torch.vmap(gradient)(q), _looped(gradient, q))


def test_mapped_masks_and_dropout_are_computed_in_a_loop() -> None:
    """Dropout bits depend on the index in the batch; an element has the same bits as alone."""
    q, masks, seed = torch.randn(3, 2, 4, 5, 8), torch.randn(3, 1, 1, 5, 5), torch.tensor([7])

    def function(q: Tensor, mask: Tensor) -> Tensor:
        return fastattn.attention(q, q, q, mask=mask, dropout_p=0.5, dropout_seed=seed)

    with CallRecorder() as recorder:
        found = torch.vmap(function)(q, masks)
    torch.testing.assert_close(found, torch.stack(list(map(function, q, masks))))
    assert len(recorder.calls) == 3


def test_tiles_of_a_mask_are_repeated_with_it() -> None:
    """GPU kernels read both mask and tiles."""
    q, prepared = torch.randn(3, 2, 4, 5, 8), fastattn.prepare_mask(MASK)

    def loss(q: Tensor) -> Tensor:
        return fastattn.attention(q, q, q, mask=prepared).sin().sum()

    with CallRecorder() as recorder:
        torch.vmap(torch.func.grad(loss))(q)
    assert prepared.tiles is not None and prepared.tiles.shape[0] == 2
    for op, args, _ in recorder.calls:
        names = (argument.name for argument in op._schema.arguments)
        given = dict(zip(names, args, strict=False))
        assert given["mask"].shape[0] == given["mask_tiles"].shape[0] == 6


@pytest.mark.parametrize("dropped", ["dropout_p", "output_dropout_p"])
def test_elements_have_the_same_dropout_as_alone(dropped: str) -> None:
    options: dict[str, Any] = {dropped: 0.5, "dropout_seed": torch.tensor([7])}

    def function(x: Tensor) -> Tensor:
        return fastattn.ffn(x, BIG, None, BIG.t(), None, **options)

    x = torch.randn(3, 4, 8)
    for f in (function, torch.func.grad(lambda x: function(x).sin().sum())):
        torch.testing.assert_close(torch.vmap(f)(x), _looped(f, x))


def test_no_elements() -> None:
    for name in ("layer_norm", "attention with one mask"):
        shape, function = FUNCTIONS[name]
        assert torch.vmap(function)(torch.randn(0, *shape[1:])).shape == (0, *shape[1:])
    op = torch.ops.fastattn.layer_norm_fwd
    results = torch.vmap(lambda x: op(x, None, None, 1e-5))(torch.randn(0, 8))
    assert [x.shape for x in results] == [(0, 8), (0,), (0,)]
