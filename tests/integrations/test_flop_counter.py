"""FlopCounterMode counts the package's ops as it counts torch's."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from attention_options import packing
from subprocesses import python_output
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import fastattn
from fastattn import nn as fnn
from fastattn.integrations import flop_counter
from fastattn.ops.attention.calls import ForwardCall


def count(function: Callable[[], Tensor], backward: bool = True) -> int:
    with FlopCounterMode(display=False) as counter:
        y = function()
        if backward:
            y.sum().backward()
    return counter.get_total_flops()


def data(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_as_torch(causal: bool) -> None:
    q, k, v = data(2, 4, 9, 8), data(2, 4, 9, 8), data(2, 4, 9, 8)

    def attend() -> Tensor:
        return fastattn.attention(q, k, v, causal=causal)  # type: ignore[return-value]

    with sdpa_kernel(SDPBackend.MATH):
        expected = count(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal), False)
    assert count(attend, backward=False) == expected == 2 * 2 * 4 * 9 * 9 * 16
    # The backward computes Q Kᵀ once more.
    assert count(attend) == expected + 2 * 2 * 4 * 9 * 9 * 5 * 8


def test_attention_with_other_sizes() -> None:
    q, k, v = data(2, 4, 5, 8), data(2, 2, 9, 8), data(2, 2, 9, 6)
    assert count(lambda: fastattn.attention(q, k, v)) == 2 * 2 * 4 * 5 * 9 * (14 + 36)  # type: ignore[arg-type, return-value]


def test_varlen_counts_pairs_inside_sequences() -> None:
    q, k, v = data(9, 4, 8), data(9, 2, 8), data(9, 2, 6)
    offsets = torch.tensor([0, 3, 9], dtype=torch.int32)
    actual = count(lambda: fastattn.attention_varlen(q, k, v, offsets, offsets, 6, 6))  # type: ignore[arg-type, return-value]
    assert actual == 2 * 4 * (3 * 3 + 6 * 6) * (14 + 36)


@pytest.mark.parametrize(
    "names, columns",
    [("v", 8 + 6), ("q", 2 * 8 + 6), ("kv", 2 * 8 + 2 * 6), ("qkv", 3 * 8 + 2 * 6)],
)
def test_tangents(names: str, columns: int) -> None:
    """The forward, and the operators that compute the tangents from the scores again."""
    tensors = {"q": data(2, 4, 5, 8), "k": data(2, 2, 9, 8), "v": data(2, 2, 9, 6)}
    with torch.no_grad(), forward_ad.dual_level():
        duals = [
            forward_ad.make_dual(x, torch.ones_like(x)) if n in names else x
            for n, x in tensors.items()
        ]
        found = count(lambda: fastattn.attention(*duals), backward=False)  # type: ignore[arg-type, return-value]
    assert found == 2 * 2 * 4 * 5 * 9 * (14 + columns)


def test_varlen_without_data_counts_the_longest_sequences() -> None:
    with torch.device("meta"):
        q, offsets = data(9, 4, 8), torch.zeros(3, dtype=torch.int32)
    actual = count(lambda: fastattn.attention_varlen(q, q, q, offsets, offsets, 6, 5))  # type: ignore[arg-type, return-value]
    assert actual == 2 * 4 * (2 * 6 * 5) * (2 + 5) * 8


def test_varlen_counts_pairs_beyond_32_bits() -> None:
    length = 2**16
    q, offsets = torch.empty(length, 1, 8), torch.tensor([0, length], dtype=torch.int32)
    call = ForwardCall(q, q, q, **packing(offsets, offsets, length, length))
    found = flop_counter.attention_flops(*call)
    assert found == 2 * length**2 * (8 + 8)


@pytest.mark.parametrize("frozen", [(), ("weight",), ("x", "bias")])
def test_linear_as_torch(frozen: tuple[str, ...]) -> None:
    tensors = {"x": data(3, 5, 8), "weight": data(12, 8), "bias": data(12)}
    for name in frozen:
        tensors[name].requires_grad_(False)
    x, weight, bias = tensors.values()
    actual = count(lambda: fastattn.linear(x, weight, bias))
    assert actual == count(lambda: F.linear(x, weight, bias)) > 0


@pytest.mark.parametrize("frozen", [(), ("w1", "b1"), ("x", "w1"), ("x", "w1", "b1"), ("w2",)])
def test_ffn_as_torch(frozen: tuple[str, ...]) -> None:
    tensors = {"x": data(3, 5, 8), "w1": data(12, 8), "b1": data(12), "w2": data(8, 12)}
    tensors["b2"] = data(8)
    for name in frozen:
        tensors[name].requires_grad_(False)
    x, w1, b1, w2, b2 = tensors.values()
    actual = count(lambda: fastattn.ffn(x, w1, b1, w2, b2))
    expected = count(lambda: F.linear(F.relu(F.linear(x, w1, b1)), w2, b2))
    assert actual == expected


def test_layer_as_torch() -> None:
    kinds = nn.TransformerEncoderLayer, fnn.TransformerEncoderLayer
    x = data(2, 7, 16)
    with sdpa_kernel(SDPBackend.MATH):
        expected, actual = (
            count(lambda k=k: k(16, 2, 32, 0.0, batch_first=True)(x), backward=False)  # type: ignore[misc]
            for k in kinds
        )
    assert actual == expected


@pytest.mark.slow
def test_import_order_does_not_matter() -> None:
    """Each order in a copy of a process that has imported torch."""
    fast, counter = "import fastattn", "from torch.utils.flop_counter import FlopCounterMode"
    late = f"{fast}\nassert 'triton' not in sys.modules\n{counter}"
    look = "import importlib.util; importlib.util.find_spec('torch.utils.flop_counter')"
    orders = (late, f"{counter}\n{fast}", f"{fast}\n{look}\n{counter}")
    shown = python_output("-c", _IN_ORDER, *orders)
    assert shown.split() == [str(2 * 4 * 4 * 16)] * len(orders)


_IN_ORDER = """
import os, sys, torch
assert not {"fastattn", "torch.utils.flop_counter"} & set(sys.modules)
for imports in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        exec(imports)
        q = torch.randn(1, 1, 4, 8)
        with FlopCounterMode(display=False) as counter:
            fastattn.attention(q, q, q)
        print(counter.get_total_flops(), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, imports
"""
