"""Inputs for samples of attention: layouts, masks, lengths and dead positions."""

from typing import Any

import torch
from torch import Tensor

from fastattn import functional
from fastattn._options import PaddedOptions
from fastattn.ops.attention import reference
from fastattn.ops.attention.calls import ForwardCall
from fastattn.testing.properties import fill_positions
from fastattn.testing.spec import Entry, Inputs

RELATIVE = ("relative_bias", "relative_buckets", "relative_max_distance")
_ARGUMENTS = {"q", "k", "v"} | PaddedOptions.__optional_keys__ - {"block_table", "backend"}
_SEED = -0x1234_5678_9ABC


def _tensor(
    generator: torch.Generator, dtype: torch.dtype, layout: str, B: int, H: int, S: int, D: int
) -> Tensor:
    """[B, H, S, D] with one of the memory layouts that models use."""
    if layout == "bhsd":
        return torch.randn(B, H, S, D, generator=generator).to(dtype)
    if layout == "bshd":
        return torch.randn(B, S, H, D, generator=generator).to(dtype).transpose(1, 2)
    if layout == "packed":  # a slice of one projection of q, k and v
        return torch.randn(B, S, H, 3 * D, generator=generator).to(dtype)[..., :D].transpose(1, 2)
    if layout == "shared":  # stride 0 over the batch
        return torch.randn(1, H, S, D, generator=generator).to(dtype).expand(B, H, S, D)
    if layout == "columns":  # the last dimension is not contiguous
        return torch.randn(B, H, D, S, generator=generator).to(dtype).mT
    raise ValueError(f"unknown layout {layout!r}")


def _mask(
    generator: torch.Generator, dtype: torch.dtype, kind: str, B: int, H: int, M: int, N: int
) -> Tensor:
    """kind: the values and the dimensions that are not broadcast, such as "bool BHMN"."""
    what, letters = kind.split()
    sizes = {"B": B, "H": H, "M": M, "N": N}
    shape = [sizes[d] if d in letters else 1 for d in "BHMN"]
    if "expanded" in what:
        return torch.rand(1, 1, *shape[2:], generator=generator).gt(0.3).expand(shape)
    if what == "bool":
        return torch.rand(shape, generator=generator) > 0.3
    if what == "none":
        return torch.zeros(shape, dtype=torch.bool)
    if what == "blocks":  # empty, full and partial tiles; dead rows and keys
        mask = torch.rand(shape, generator=generator) > 0.2
        mask[..., :40, :40] = True
        mask[..., 40:, 40:72] = False
        mask[..., 7] = False
        mask[..., 50, :] = False
        return mask
    if what == "rows":  # whole rows and whole keys blocked
        mask = torch.rand(shape, generator=generator) > 0.2
        mask[..., ::3, :] = False
        mask[..., 1::4] = False
        return mask
    bias = torch.randn(shape, generator=generator).to(torch.promote_types(dtype, torch.float32))
    smallest = torch.finfo(dtype).min
    if what == "min":
        bias = torch.where(torch.rand(shape, generator=generator) < 0.3, smallest, bias)
    elif what == "min_rows":  # whole rows and whole keys
        bias[..., ::3, :] = smallest
        bias[..., 1::4] = smallest
    elif what == "min_causal":
        bias = torch.full_like(bias, smallest).triu(1)
    elif what == "near_min":
        bias = torch.where(torch.rand(shape, generator=generator) < 0.3, smallest / 2, bias)
    elif what.startswith("padding"):  # the first keys and all later than the query; whole rows
        outside = torch.ones(shape, dtype=torch.bool).triu(1)
        outside[..., :9] = True
        number = -float(what.removeprefix("padding"))
        bias = torch.where(outside, max(number, smallest / 2), 0.0)
    elif what.startswith("add"):  # a number to all keys of every third row, or of all queries
        number = max(min(float(what.removeprefix("add")), -smallest / 2), smallest / 2)
        bias[..., :: 3 if "M" in letters else 1, :] += number
    elif what == "low":
        bias = bias - 100
    elif what == "inf":
        bias = torch.where(torch.rand(shape, generator=generator) < 0.3, -torch.inf, bias)
    return bias.to(torch.float32 if what == "fp32" else dtype)


def _mask_in(layout: str, mask: Tensor) -> Tensor:
    """The same values with a memory layout that callers use."""
    if layout == "transposed":
        return mask.mT.contiguous().mT
    if layout == "slice":  # of a mask for longer sequences
        larger = mask.new_zeros(*mask.shape[:-2], mask.shape[-2] + 3, mask.shape[-1] + 5)
        larger[..., 1:-2, 2:-3] = mask
        return larger[..., 1:-2, 2:-3]
    if layout == "few dimensions":  # without leading ones
        return mask.reshape(mask.shape[[*(n != 1 for n in mask.shape), True].index(True) :])
    return mask


def make_scores(
    generator: torch.Generator,
    dtype: torch.dtype,
    B: int,
    H: int,
    alibi: str | None,
    sinks: float | None,
    relative: tuple[str, int, int] | None,
) -> Inputs:
    """alibi: the dimensions of the slopes, "H" or "BH". sinks: their mean. relative: the kind of
    the buckets, their number and the largest distance.
    """
    inputs: Inputs = {}
    if alibi is not None:
        slopes = torch.rand({"H": (H,), "BH": (B, H)}[alibi], generator=generator)
        inputs["alibi_slopes"] = (0.02 + 0.3 * slopes).to(dtype)
    if sinks is not None:
        inputs["sinks"] = (sinks + torch.randn(H, generator=generator)).to(dtype)
    if relative is not None:
        kind, buckets, distance = relative
        inputs["relative_bias"] = torch.randn(H, buckets, generator=generator).to(dtype)
        inputs |= {"relative_buckets": kind, "relative_max_distance": distance}
    return inputs


def make_inputs(
    generator: torch.Generator,
    dtype: torch.dtype,
    *,
    B: int = 2,
    H: int = 2,
    K: int | None = None,
    M: int = 65,
    N: int | None = None,
    D: int = 32,
    E: int | None = None,
    layout: str = "bhsd",
    mask: str | None = None,
    mask_layout: str = "",
    key_lengths: Any = None,
    query_lengths: list[int] | None = None,
    alibi: str | None = None,
    sinks: float | None = None,
    relative: tuple[str, int, int] | None = None,
    dropout_p: float = 0.0,
    origin: tuple[int, ...] = (),
    amplitude: float = 1.0,
    key_amplitude: float = 1.0,
    whole: bool = False,
    cancelling: bool = False,
    poison: bool = True,
    prepared: bool = False,
    **options: Any,
) -> Inputs:
    """alibi, sinks, relative: as in `make_scores`. origin: of the dropout bits. whole: whether q
    and k are whole numbers, before they are multiplied by their amplitudes. cancelling: see
    `cancelling_terms`. options: arguments of `attention` as they are.
    """
    N = M if N is None else N
    K = H if K is None else K
    q = _tensor(generator, dtype, layout, B, H, M, D)
    k = _tensor(generator, dtype, layout, B, K, N, D)
    if cancelling:
        q, k = cancelling_terms(q, k, torch.arange(1 - N, 1))
    q = q.round() if whole else q
    q = q if amplitude == 1.0 else q * amplitude
    k = k.round() if whole else k
    k = k if key_amplitude == 1.0 else k * key_amplitude
    v = _tensor(generator, dtype, layout, B, K, N, D if E is None else E)
    inputs: Inputs = {"q": q, "k": k, "v": v}
    if mask is not None:
        inputs["mask"] = _mask_in(mask_layout, _mask(generator, dtype, mask, B, H, M, N))
    if key_lengths is not None:
        inputs["key_lengths"] = (
            torch.randint(0, N + 1, (B, M), generator=generator, dtype=torch.int32)
            if key_lengths == "per query"
            else torch.tensor(key_lengths, dtype=torch.int64)
        )
    if query_lengths is not None:
        inputs["query_lengths"] = torch.tensor(query_lengths, dtype=torch.int32)
    inputs |= {"causal": False, "window": None, "scale": None, "return_lse": True} | options
    inputs |= make_scores(generator, dtype, B, H, alibi, sinks, relative)
    if dropout_p > 0:
        inputs |= {
            "dropout_p": dropout_p,
            "dropout_seed": torch.tensor([_SEED, *origin]),
            "dropout_stream": 7,
        }
    if prepared:
        inputs["prepared"] = True
    if poison:
        write_poison(inputs)
    return inputs


def cancelling_terms(q: Tensor, k: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """q and k whose products cancel up to a 1/100 of their size, in their layouts. Scores of a row
    differ by as much as a product for each step of `order`, a number <= 0 for each key.
    """
    D = q.shape[-1]
    pattern = torch.zeros(len(order), D)
    pattern[:, 0] = order
    pattern[:, 1 : D - 1 : 2], pattern[:, 2:D:2] = 1.0, -1.0
    return 1 + q / 100, (k * 0 + pattern).to(k.dtype)


def call_of(inputs: Inputs) -> ForwardCall:
    """The arguments of the op."""
    given = {name: x for name, x in inputs.items() if name in _ARGUMENTS}
    return functional.attention_call(**given)


def distances_of(inputs: Inputs) -> Tensor:
    """The distance of each pair, [B, 1, M, N]."""
    (B, _, M, _), N = inputs["q"].shape, inputs["k"].shape[2]
    causal, device = inputs.get("causal", False), inputs["q"].device
    offset = torch.zeros(B, dtype=torch.int64, device=device)
    if causal == "bottom_right":
        offset += N - M
    elif causal == "bottom_right_lengths":
        n, m = inputs.get("key_lengths"), inputs.get("query_lengths")
        offset += N if n is None else n.clamp(0, N)
        offset -= M if m is None else m.clamp(0, M)
    i, j = torch.arange(M, device=device), torch.arange(N, device=device)
    return j - i[:, None] - offset.view(B, 1, 1, 1)


def allowed_of(inputs: Inputs) -> Tensor:
    """Which pairs are allowed, [B, H, M, N]."""
    allowed = reference.allowed_pairs(call_of(inputs))
    return allowed.expand(*inputs["q"].shape[:3], inputs["k"].shape[2])


def dead(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Dead rows [B, H, M] and dead keys [B, K, N]: those without an allowed pair."""
    allowed, (H, K) = allowed_of(inputs), (inputs["q"].shape[1], inputs["k"].shape[1])
    rows, keys = reference.live(allowed, H, K)
    return ~rows[..., 0], ~keys[..., 0]


def dead_positions(inputs: Inputs) -> dict[str, Tensor]:
    """The dead positions of all tensors. A position of a floating mask is dead if the other
    restrictions block all its pairs.
    """
    rows, keys = (x[..., None] for x in dead(inputs))
    positions = {"q": rows, "k": keys, "v": keys, "out": rows, "lse": rows[..., 0]}
    if inputs.get("sinks") is not None:  # the lse of a row without a key is the sink
        M, lengths = rows.shape[2], inputs.get("query_lengths")
        i = torch.arange(M, device=rows.device)
        beyond = i >= (M if lengths is None else lengths[:, None, None])
        positions["lse"] = beyond.expand(rows.shape[:3])
    mask = inputs.get("mask")
    if mask is not None and mask.is_floating_point():
        live = allowed_of(inputs | {"mask": None})
        shape = (1,) * (4 - mask.dim()) + mask.shape
        for dim in range(4):
            if shape[dim] == 1:
                live = live.any(dim, keepdim=True)
        positions["mask"] = ~live.reshape(mask.shape)
    return positions


def write_poison(inputs: Inputs) -> None:
    """Writes NaN and inf to dead positions."""
    values = {"q": float("nan"), "k": float("inf"), "v": float("nan"), "mask": float("nan")}
    for name, positions in dead_positions(inputs).items():
        if name in inputs:
            fill_positions(inputs[name], positions, values[name])


def entries(inputs: Inputs) -> tuple[Entry, ...]:
    """Each batch entry; with dropout only the first, as the bits depend on the entry's index."""
    B = inputs["q"].shape[0]
    mask = inputs.get("mask")
    batched = mask is not None and mask.dim() == 4 and mask.shape[0] == B
    names = ["q", "k", "v", "key_lengths", "query_lengths", *(["mask"] if batched else [])]
    results = ["out", "lse", "dq", "dk", "dv", *(["dmask"] if batched else [])]
    if "alibi_slopes" in inputs and inputs["alibi_slopes"].dim() == 2:
        names, results = [*names, "alibi_slopes"], [*results, "dalibi_slopes"]
    found = []
    for b in range(0 if B < 2 else 1 if inputs.get("dropout_p") else B):
        alone = {name: inputs[name][b : b + 1] for name in names if name in inputs}
        where = dict.fromkeys(results, (slice(b, b + 1),))
        found.append(Entry(f"batch entry {b}", inputs | alone, where))
    return tuple(found)
