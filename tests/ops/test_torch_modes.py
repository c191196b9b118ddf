"""Ops under checkpointing, with jagged tensors, deterministic algorithms, AOTInductor."""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from call_recorder import CallRecorder
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fastattn
from fastattn import nn as fnn

OPS = torch.ops.fastattn


# -- activation checkpointing ----------------------------------------------------------------------
def layer(dropout: float = 0.2) -> nn.Module:
    torch.manual_seed(0)
    return fnn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True)


def gradients(function: Callable[[Tensor], Tensor], module: nn.Module) -> list[Tensor]:
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
    torch.manual_seed(2)
    y = function(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_repeats_the_dropout(reentrant: bool) -> None:
    module = layer()
    expected = gradients(module, module)
    if reentrant:  # its backward is called for parameters alone by .backward()
        x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
        torch.manual_seed(2)
        y = checkpoint(module, x, use_reentrant=True)
        y.square().sum().backward()
        got = [y, x.grad, *(p.grad for p in module.parameters())]
    else:
        got = gradients(lambda x: checkpoint(module, x, use_reentrant=False), module)
    for actual, whole in zip(got, expected, strict=True):
        assert torch.equal(actual, whole)


@pytest.mark.parametrize(
    ("saved", "runs"), [((), 2), ((OPS.attention_fwd.default, OPS.ffn_fwd.default), 1)]
)
def test_selective_checkpointing(saved: tuple[Any, ...], runs: int) -> None:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op in saved
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    module = layer()
    contexts = partial(create_selective_checkpoint_contexts, policy)
    with CallRecorder() as recorder:
        got = gradients(
            lambda x: checkpoint(module, x, use_reentrant=False, context_fn=contexts), module
        )
    for actual, whole in zip(got, gradients(module, module), strict=True):
        assert torch.equal(actual, whole)
    count = recorder.names.count
    assert count("attention_fwd") == count("ffn_fwd") == runs
    assert count("attention_bwd") == count("ffn_bwd") == 1


# -- jagged nested tensors -------------------------------------------------------------------------
def jagged(*shape: int, lengths: tuple[int, ...] = (3, 6, 0, 4)) -> tuple[Tensor, Tensor]:
    """Rows [T, *shape] that require grad, and a nested tensor [B, H, j, D] made from them."""
    rows = torch.randn(sum(lengths), *shape, requires_grad=True)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return rows, torch.nested.nested_tensor_from_jagged(rows, offsets).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True, "bottom_right"])
def test_jagged_attention(causal: Any) -> None:
    torch.manual_seed(0)
    rows = torch.randn(13, 6, 8, requires_grad=True)
    offsets = torch.tensor([0, 3, 9, 9, 13])
    q, k, v = (
        torch.nested.nested_tensor_from_jagged(part, offsets).transpose(1, 2)
        for part in rows.split([2, 2, 2], dim=1)
    )
    out, lse = fastattn.attention(q, k, v, causal=causal, return_lse=True)
    assert out.shape == q.shape
    weights = torch.randn(13, 2, 8)
    (gradient,) = torch.autograd.grad((out.transpose(1, 2).values() * weights).sum(), rows)
    expected = []
    for start, end in itertools.pairwise(offsets.tolist()):
        parts = (x.transpose(0, 1)[None] for x in rows[start:end].split([2, 2, 2], dim=1))
        expected.append(fastattn.attention(*parts, causal=causal)[0].transpose(0, 1))
    whole = torch.cat(expected)
    torch.testing.assert_close(out.transpose(1, 2).values(), whole)
    torch.testing.assert_close(gradient, torch.autograd.grad((whole * weights).sum(), rows)[0])
    assert lse.transpose(1, 2).values().shape == (13, 2)


def test_jagged_queries_and_keys_of_different_lengths() -> None:
    rows_q, q = jagged(4, 8, lengths=(3, 1))
    rows_k, k = jagged(2, 8, lengths=(5, 2))
    out = fastattn.attention(q, k, k)
    first = fastattn.attention(
        *(x.transpose(0, 1)[None] for x in (rows_q[:3], rows_k[:5], rows_k[:5]))
    )
    torch.testing.assert_close(out.transpose(1, 2).values()[:3], first[0].transpose(0, 1))


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("shape", [(8,), (2, 8)])
def test_jagged_linear(shape: tuple[int, ...], compiles: bool) -> None:
    """The same bits as for the rows, and the same sequences as in PyTorch."""
    rows, _ = jagged(*shape)
    weight, bias = torch.randn(5, 8, requires_grad=True), torch.randn(5, requires_grad=True)
    x = torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, 3, 9, 9, 13]))

    def linear(x: Tensor) -> Tensor:
        return fastattn.linear(x, weight, bias)

    if compiles:
        linear = torch.compile(linear, fullgraph=True, backend="aot_eager")
    y, expected = linear(x), fastattn.linear(rows, weight, bias)
    assert y.shape == torch.nn.functional.linear(x, weight, bias).shape
    assert torch.equal(y.values(), expected)
    factors = torch.randn_like(expected)
    found, wanted = (
        torch.autograd.grad((results * factors).sum(), (rows, weight, bias))
        for results in (y.values(), expected)
    )
    for gradient, like in zip(found, wanted, strict=True):
        assert torch.equal(gradient, like)


def test_jagged_linear_of_a_named_backend() -> None:
    _, x = jagged(8)
    for backend in ("torch", "reference"):
        explanation = fastattn.explain(
            "linear", x.transpose(1, 2), torch.randn(5, 8), backend=backend
        )
        assert explanation.chosen == backend


def test_jagged_linear_in_autocast() -> None:
    _, x = jagged(8)
    weight = torch.randn(5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y = fastattn.linear(x.transpose(1, 2), weight, backend="reference")
    rows = x.transpose(1, 2).values()
    assert torch.equal(y.values(), torch.nn.functional.linear(rows.bfloat16(), weight.bfloat16()))


def test_jagged_errors() -> None:
    _, q = jagged(2, 8)
    with pytest.raises(TypeError, match="x must be dense or a contiguous jagged tensor, got"):
        fastattn.linear(q, torch.randn(5, 8))
    dense = torch.randn(4, 2, 6, 8)
    with pytest.raises(
        TypeError, match="k must be a jagged nested tensor if q, k or v is one, got torch"
    ):
        fastattn.attention(q, dense, dense)
    with pytest.raises(ValueError, match="mask must be None for nested q, k and v"):
        fastattn.attention(q, q, q, mask=torch.ones(6, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"q must be \[B, H, j, D\]"):
        untransposed = q.transpose(1, 2)
        fastattn.attention(untransposed, untransposed, untransposed)
    with pytest.raises(TypeError, match="k must be a dense tensor, got a nested tensor"):
        fastattn.attention(dense, q, q)
    with pytest.raises(TypeError, match="q must be a dense tensor, got a nested tensor"):
        fastattn.attention_weights(q, q)
    _, same = jagged(2, 8)
    assert fastattn.attention(q, q, same).shape == q.shape
    _, others = jagged(2, 8, lengths=(3, 5, 1, 4))
    with pytest.raises(ValueError, match="v must have the sequence lengths of k, got others"):
        fastattn.attention(q, q, others)
    _, fewer = jagged(2, 8, lengths=(3, 10))
    with pytest.raises(ValueError, match="k must have q's 4 sequences, got 2"):
        fastattn.attention(q, fewer, fewer)
    narrow = torch.nested.narrow(
        torch.randn(2, 6, 2, 8), 1, torch.tensor([1, 0]), torch.tensor([3, 4]), layout=torch.jagged
    ).transpose(1, 2)
    with pytest.raises(ValueError, match="q must have no gaps between its sequences"):
        fastattn.attention(narrow, narrow, narrow)


# -- deterministic algorithms ----------------------------------------------------------------------
def test_deterministic_mode_has_no_effect() -> None:
    module = layer()
    expected = gradients(module, module)
    torch.use_deterministic_algorithms(True)
    try:
        got = gradients(module, module)
    finally:
        torch.use_deterministic_algorithms(False)
    for actual, usual in zip(got, expected, strict=True):
        assert torch.equal(actual, usual)


# -- ahead of time ---------------------------------------------------------------------------------
class Everything(nn.Module):
    """A module that calls each op once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = fnn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.norm = fnn.RMSNorm(16)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        heads = self.norm(self.layer(x)).unflatten(-1, (2, 8)).transpose(1, 2)
        out = fastattn.attention(heads, heads, heads, key_lengths=lengths, causal="top_left")
        return fastattn.add_layer_norm(out.transpose(1, 2).flatten(-2), x)


@pytest.mark.slow
def test_aot_inductor_in_a_python_process(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Everything().eval()
    x, lengths = torch.randn(3, 7, 16), torch.tensor([7, 2, 0])
    dynamic = {"x": {1: torch.export.Dim("S", min=2, max=64)}, "lengths": None}
    with torch.no_grad():
        exported = torch.export.export(model, (x, lengths), dynamic_shapes=dynamic)
        package = torch._inductor.aoti_compile_and_package(
            exported, package_path=str(tmp_path / "model.pt2"), inductor_configs=_COMPILES_QUICKLY
        )
        loaded = torch._inductor.aoti_load_package(package)
        for S in (7, 12):
            x = torch.randn(3, S, 16)
            torch.testing.assert_close(loaded(x, lengths), model(x, lengths))
    torch.export.save(exported, tmp_path / "exported.pt2")
    with_ops, without = (_loads(tmp_path, first) for first in ("import fastattn", "pass"))
    assert with_ops == ["True", "True"]
    assert without[0].startswith("We ran into an error when deserializing the saved file")
    assert "Could not find schema for fastattn::attention_fwd" in without[1]


# Headers that one model includes are not worth precompiling.
_COMPILES_QUICKLY = {
    "aot_inductor.precompile_headers": False,
    "aot_inductor.compile_wrapper_opt_level": "O0",
}
_LOAD = """
{first}
import torch
arguments = torch.ones(3, 7, 16), torch.tensor([7, 2, 0])
for load in (
    lambda: torch.export.load("exported.pt2").module(),
    lambda: torch._inductor.aoti_load_package("model.pt2"),
):
    try:
        with torch.no_grad():
            print(bool(load()(*arguments).isfinite().all()))
    except RuntimeError as error:
        print(str(error).splitlines()[0])
"""


def _loads(folder: Path, first: str) -> list[str]:
    """Output of a process that loads and runs both files after the statement `first`."""
    done = subprocess.run(
        [sys.executable, "-c", _LOAD.format(first=first)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(fastattn.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()
