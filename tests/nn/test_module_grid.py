"""The drop-in modules against torch's over a grid: every pair of values of every two factors.

Each case compares results, gradients of inputs and of parameters, copies the parameters back
and forth through `state_dict`, and requires the same bits without autograd.
"""

import itertools
from typing import Any

import pytest
import torch
from module_equivalence import assert_equivalent, label, pairwise, random_mask
from torch import Tensor, nn
from transformer_twins import CLASSES, B, E, H, S, T, build

import fastattn.nn as fnn

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*mask:UserWarning"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning"),
]


# -- the cases ------------------------------------------------------------------------------------
ATTENTION = {
    "inputs": ("self", "cross", "query is key", "all different", "kdim and vdim", "kdim alone"),
    "attn_mask": (
        "none", "bool 2-D", "float 2-D", "bool 3-D", "float 3-D", "float 2-D with gradient",
        "causal", "causal hint",
    ),
    "padding": ("none", "bool", "float"),
    "weights": ("none", "average", "heads"),
    "extra": ("none", "bias_kv", "zero_attn", "both"),
    "layout": ("batch first", "sequence first", "unbatched"),
    "bias": (True, False),
    "training": (True, False),
    "dtype": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "strides": ("contiguous", "transposed", "sliced"),
}  # fmt: skip
LAYERS = {
    "batch_first": (True, False), "norm_first": (True, False), "bias": (True, False),
    "activation": ("relu", "gelu", "module", "function"),
    "mask": ("none", "bool", "float", "bool 3-D", "float 3-D", "causal", "causal hint"),
    "padding": ("none", "bool", "float"), "training": (True, False), "batched": (True, False),
    "dtype": (torch.float32, torch.bfloat16, torch.float64),
    "strides": ("contiguous", "transposed", "sliced"),
}  # fmt: skip
ATTENTION_CASES = pairwise(**ATTENTION)
# A case of three factors: padding makes torch read the mask, which allows the added keys.
HINT_BESIDE_PADDING = [
    ATTENTION_CASES[0] | {"attn_mask": "causal hint", "padding": "bool", "weights": "none"} | more
    for more in ({"extra": "bias_kv"}, {"extra": "zero_attn"}, {"extra": "both"})
]
LAYER_CASES = [(name, case) for name in CLASSES for case in pairwise(**LAYERS, seed=(name,))]
ACTIVATIONS: dict[str, Any] = {
    "relu": "relu", "gelu": "gelu", "module": nn.GELU(approximate="tanh"), "function": torch.tanh,
}  # fmt: skip


@pytest.mark.parametrize("name", ["MultiheadAttention", *CLASSES])
def test_every_pair_occurs(name: str) -> None:
    factors = ATTENTION if name == "MultiheadAttention" else LAYERS
    cases = ATTENTION_CASES if name == "MultiheadAttention" else _cases_of(name)
    for (a, values), (b, others) in itertools.combinations(factors.items(), 2):
        found = {(case[a], case[b]) for case in cases}
        assert found == set(itertools.product(values, others)), (a, b)
    again = pairwise(**factors, seed=() if name == "MultiheadAttention" else (name,))
    assert cases == again  # the same in every process


def _cases_of(name: str) -> list[dict[str, Any]]:
    return [case for other, case in LAYER_CASES if other == name]


class _WrongByAFactor(nn.Linear):
    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


@pytest.mark.parametrize(
    "dtype, factor", [(torch.float64, 1e-14), (torch.float32, 1e-5), (torch.bfloat16, 0.06)]
)
def test_the_comparison_detects_a_small_difference(dtype: torch.dtype, factor: float) -> None:
    reference, fast = nn.Linear(E, E, dtype=dtype), _WrongByAFactor(E, E, dtype=dtype)
    fast.load_state_dict(reference.state_dict())
    x = torch.randn(B, E, dtype=dtype)
    assert_equivalent(reference, fast, x)
    fast.factor = 1 + factor
    with pytest.raises(AssertionError, match=r"error .*, allowed"):
        assert_equivalent(reference, fast, x)


# -- values ---------------------------------------------------------------------------------------
def sequence(case: dict[str, Any], length: int, size: int, layout: str) -> Tensor:
    """A random input in the case's dtype and storage. layout: as in ATTENTION."""
    shape = {"batch first": (B, length, size), "sequence first": (length, B, size)}.get(
        layout, (length, size)
    )
    if case["strides"] == "transposed":
        return torch.randn(*shape[:-2], shape[-1], shape[-2], dtype=case["dtype"]).mT
    if case["strides"] == "sliced":
        return torch.randn(*shape[:-1], 2 * size, dtype=case["dtype"])[..., 1::2]
    return torch.randn(shape, dtype=case["dtype"])


def prepare(reference: nn.Module, fast: nn.Module, case: dict[str, Any]) -> None:
    """Equal parameters in the case's dtype and mode, copied back and forth through `state_dict`."""
    for module in (reference, fast):
        module.to(case["dtype"]).train(case["training"])
    for parameter in reference.parameters():
        if parameter.dim() == 1:  # away from 0 and 1
            nn.init.normal_(parameter, mean=0.5, std=0.3)
    state = reference.state_dict()
    assert list(fast.state_dict()) == list(state)
    fast.load_state_dict(state)
    reference.load_state_dict(fast.state_dict())
    for name, value in fast.state_dict().items():
        assert torch.equal(value, state[name]), name


def assert_same_without_autograd(fast: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Evaluation takes the same path, so it has the same results."""
    expected = fast(*args, **kwargs)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = fast(*args, **kwargs)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("case", [*ATTENTION_CASES, *HINT_BESIDE_PADDING], ids=label)
def test_multihead_attention(case: dict[str, Any]) -> None:
    torch.manual_seed(0)
    kind, layout, dtype = case["inputs"], case["layout"], case["dtype"]
    sizes = {"kdim and vdim": {"kdim": 6, "vdim": 10}, "kdim alone": {"kdim": 6}}.get(kind, {})
    reference, fast = (
        package.MultiheadAttention(
            E, H, bias=case["bias"], add_bias_kv=case["extra"] in ("bias_kv", "both"),
            add_zero_attn=case["extra"] in ("zero_attn", "both"),
            batch_first=layout == "batch first", **sizes,
        )
        for package in (nn, fnn)
    )  # fmt: skip
    prepare(reference, fast, case)
    batch = 1 if layout == "unbatched" else B
    keys = T if kind in ("self", "query is key") else S
    query = sequence(case, T, E, layout)
    key = query if kind in ("self", "query is key") else None
    key = sequence(case, keys, sizes.get("kdim", E), layout) if key is None else key
    value = key if kind in ("self", "cross") else sequence(case, keys, sizes.get("vdim", E), layout)

    kwargs: dict[str, Any] = {
        "need_weights": case["weights"] != "none",
        "average_attn_weights": case["weights"] == "average",
    }
    mask, padding = case["attn_mask"], case["padding"]
    if "causal" in mask:
        blocked = torch.ones(T, keys, dtype=torch.bool).triu(1)
        kwargs |= {"attn_mask": blocked, "is_causal": "hint" in mask}
    elif mask != "none":
        shape = (T, keys) if "2-D" in mask else (batch * H, T, keys)
        kwargs["attn_mask"] = random_mask(*shape, dtype=torch.bool if "bool" in mask else dtype)
        kwargs["attn_mask"].requires_grad_("gradient" in mask)
    if padding != "none":
        shape = (keys,) if layout == "unbatched" else (B, keys)
        kwargs["key_padding_mask"] = random_mask(
            *shape, dtype=torch.bool if padding == "bool" else dtype
        )
    assert_equivalent(reference, fast, query, key, value, **kwargs)
    assert_same_without_autograd(fast, query, key, value, **kwargs)


def masks(name: str, case: dict[str, Any]) -> dict[str, Any]:
    """Every mask that the class takes, of the case's kind. Causal ones: of its self-attention."""
    rows = {"src": (S, S), "tgt": (T, T), "memory": (T, S)}
    if name == "Transformer":
        own, names = "tgt", {key: f"{key}_mask" for key in rows}
    elif "Decoder" in name:
        own, names = "tgt", {"tgt": "tgt_mask", "memory": "memory_mask"}
    else:
        own, names = "src", {"src": "src_mask" if name.endswith("Layer") else "mask"}
    kind, padding, dtype = case["mask"], case["padding"], case["dtype"]
    found: dict[str, Any] = {}
    if "causal" in kind:
        size = rows[own][0]
        found[names[own]] = nn.Transformer.generate_square_subsequent_mask(size, dtype=dtype)
        if "hint" in kind:
            found["is_causal" if own == "src" else "tgt_is_causal"] = True
    elif kind != "none":
        heads = ((B if case["batched"] else 1) * H,) if "3-D" in kind else ()
        of = torch.bool if "bool" in kind else dtype
        found |= {names[key]: random_mask(*heads, *rows[key], dtype=of) for key in names}
    if padding != "none":
        batch = (B,) if case["batched"] else ()
        of = torch.bool if padding == "bool" else dtype
        for key in names:
            found[f"{key}_key_padding_mask"] = random_mask(*batch, rows[key][1], dtype=of)
    return found


@pytest.mark.parametrize("name, case", LAYER_CASES, ids=label)
def test_layers_and_stacks(name: str, case: dict[str, Any]) -> None:
    torch.manual_seed(0)
    options = {key: case[key] for key in ("batch_first", "norm_first", "bias")}
    options["activation"] = ACTIVATIONS[case["activation"]]
    reference, fast = build(nn, name, **options), build(fnn, name, **options)
    prepare(reference, fast, case)
    layout = "batch first" if case["batch_first"] else "sequence first"
    layout = layout if case["batched"] else "unbatched"
    lengths = {"Transformer": (S, T)}.get(name, (T, S) if "Decoder" in name else (S,))
    args = [sequence(case, length, E, layout) for length in lengths]
    kwargs = masks(name, case)
    assert_equivalent(reference, fast, *args, **kwargs)
    assert_same_without_autograd(fast, *args, **kwargs)
