"""Plans of the bindings of the Hopper kernels before they launch (split-KV, tile counters, copies
of masks, splits of a mask's gradient, the order of sums), and how they divide the workspace.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_options import packing
from sm90_on_host import bindings
from sm90_on_host.bindings import Plan
from sm90_on_host.build import missing
from torch import Tensor

import fastattn
from fastattn.ops._op import OPS
from fastattn.ops.attention import sm90
from fastattn.ops.attention.calls import BackwardCall, ForwardCall
from fastattn.ops.attention.sm90_bias import as_readable, is_readable
from fastattn.testing.properties import deterministic_algorithms

MULTIPROCESSORS = 132  # of an H200, for which other devices stand in


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Plans of the forward's launches, which compute nothing."""
    if reason := missing():
        pytest.skip(reason)
    made: list[Plan] = []
    bindings.use(monkeypatch, lambda op, problem, _: made.append(bindings.plan_of(problem)))
    return made


def _plan(plans, q, k, v, *, mask=None, causal=0, window=(-1, -1), key_lengths=None, dropout_p=0.0):
    seed = torch.zeros(1, dtype=torch.int64) if dropout_p else None
    left, right = window
    call = ForwardCall(
        q, k, v, mask, key_lengths=key_lengths, causal=causal, window_left=left,
        window_right=right, scale=0.1, dropout_p=dropout_p, dropout_seed=seed,
    )  # fmt: skip
    out = torch.empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3], dtype=q.dtype)
    sm90.attention_fwd(call, out.transpose(1, 2), q.new_empty(q.shape[:3], dtype=torch.float32))
    return plans[-1] if plans else None


def _decoding(B: int, H: int, K: int, M: int, N: int, D: int = 128) -> tuple[Tensor, ...]:
    q = torch.empty(B, M, H, D, dtype=torch.bfloat16).transpose(1, 2)
    return q, *(torch.empty(B, K, N, D, dtype=torch.bfloat16) for _ in range(2))


@pytest.mark.parametrize("tiles", [1, 3, 8, 16, 40, 57, 90])
@pytest.mark.parametrize("blocks", [8, 64, 1000])
@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize("multiprocessors", [78, 114, 132])
def test_splits_fill_the_multiprocessors(
    tiles: int, blocks: int, rows: int, multiprocessors: int
) -> None:
    splits = bindings.HOST.native.on_host_num_splits(tiles, rows, blocks, 128, multiprocessors)
    assert 1 <= splits <= 128
    if splits > 1:
        assert blocks // splits >= 2
        assert blocks * 128 // splits >= 8 * rows

    def share(count: int) -> float:
        """The share of busy multiprocessors in all waves."""
        return tiles * count / (multiprocessors * -(-tiles * count // multiprocessors))

    assert share(splits) >= share(1)
    most = min(128, blocks // max(2, 8 * rows // 128))
    if most >= 2 and tiles < 0.8 * multiprocessors:
        assert share(splits) >= 0.85 * max(map(share, range(1, most + 1)))


@pytest.mark.parametrize(
    ("shape", "options", "cut"),
    [
        ((1, 16, 16, 1, 16384), {}, True),
        ((1, 32, 8, 1, 16384), {"causal": 2}, True),
        ((1, 32, 8, 1, 16384), {"causal": 1}, False),  # one key
        ((1, 32, 8, 1, 16384), {"causal": 2, "window": (500, 0)}, False),
        ((1, 32, 8, 1, 16384), {"causal": 3, "key_lengths": torch.zeros(1).long()}, True),
        ((64, 32, 8, 1, 8192), {}, False),  # tiles enough
        ((4, 32, 8, 1, 8192), {}, True),
        ((4, 32, 8, 1, 512), {}, False),  # too short
        ((1, 8, 8, 1024, 1024), {}, False),
        ((1, 8, 8, 128, 16384), {}, True),
        ((1, 16, 16, 1, 16384), {"dropout_p": 0.1}, False),
    ],
)
def test_what_is_cut(
    plans: list[Plan], shape: tuple[int, ...], options: dict[str, object], cut: bool
) -> None:
    plan = _plan(plans, *_decoding(*shape), **options)
    assert (plan.splits > 1) == cut
    assert not plan.ordered


def test_merged_heads_count_once(plans: list[Plan]) -> None:
    """Query heads that share keys form one tile: 8 of them, not 32, fill the multiprocessors."""
    merged = _plan(plans, *_decoding(1, 32, 8, 1, 1 << 17))
    assert 0.8 * MULTIPROCESSORS < 8 * merged.splits <= MULTIPROCESSORS
    assert not merged.counted


def test_no_wave_is_left_half_empty(plans: list[Plan]) -> None:
    """32 tiles in 4 splits are one wave of an H200; in 7 they would be two."""
    assert _plan(plans, *_decoding(4, 32, 8, 1, 8192)).splits == 4


@pytest.mark.parametrize("shape", [(0, 4, 4, 1, 9000), (2, 0, 0, 1, 9000), (2, 4, 4, 0, 9000)])
def test_nothing_to_compute(plans: list[Plan], shape: tuple[int, ...]) -> None:
    assert _plan(plans, *_decoding(*shape)) is None


@pytest.mark.parametrize(
    ("shape", "options", "counted"),
    [
        ((1, 16, 16, 1024, 1024), {"causal": 1}, False),  # every tile starts at once
        ((1, 17, 17, 1024, 1024), {"causal": 1}, True),
        ((1, 17, 17, 1024, 1024), {}, False),  # equal tiles
        ((1, 17, 17, 1024, 1024), {"key_lengths": torch.ones(1, dtype=torch.int32)}, True),
        ((4, 23, 23, 1024, 1024, 64), {}, True),
        ((1, 23, 23, 1024, 1024, 64), {}, False),  # 8 blocks of keys for an SM
        ((64, 16, 16, 1, 512, 64), {}, False),
        ((64, 16, 16, 1, 1024, 64), {}, True),
        ((1, 1, 1, 128, 128), {"dropout_p": 0.1}, True),
    ],
)
def test_what_is_counted(
    plans: list[Plan], shape: tuple[int, ...], options: dict[str, object], counted: bool
) -> None:
    assert _plan(plans, *_decoding(*shape), **options).counted == counted


@pytest.mark.parametrize(
    ("longest", "sequences", "keys", "cut", "ordered"),
    [
        (1, 4, 4096, True, False),
        (1, 500, 4096, False, True),
        (500, 16, 500, False, False),  # no tile is long
        (2048, 1, 2048, False, False),
        (2048, 2, 2048, False, True),
    ],
)
def test_packed(
    plans: list[Plan], longest: int, sequences: int, keys: int, cut: bool, ordered: bool
) -> None:
    q = torch.empty(longest * sequences, 8, 64, dtype=torch.bfloat16)
    k = torch.empty(sequences * keys, 8, 64, dtype=torch.bfloat16)
    offsets = torch.empty(sequences + 1, dtype=torch.int32)
    call = ForwardCall(q, k, k, **packing(offsets, offsets, longest, keys))
    sm90.attention_fwd(call, torch.empty_like(q), torch.empty(8, q.shape[0]))
    assert (plans[-1].splits > 1) == cut
    assert plans[-1].ordered == ordered
    assert plans[-1].counted


def _shifted(mask: Tensor, columns: int, start: int = 0) -> Tensor:
    """The same values in rows of `columns` columns, from column `start` on."""
    storage = mask.new_zeros(*mask.shape[:3], columns)
    storage[..., start : start + mask.shape[3]] = mask
    return storage[..., start : start + mask.shape[3]]


@pytest.mark.parametrize(
    ("mask", "copied"),
    [
        (torch.zeros(2, 1, 30, 40, dtype=torch.bfloat16), 0),
        (torch.zeros(1, 1, 1, 43, dtype=torch.bfloat16), 0),  # no stride counts
        (torch.zeros(2, 1, 30, 43, dtype=torch.bfloat16), 2),
        (_shifted(torch.zeros(2, 1, 30, 43, dtype=torch.bfloat16), 48), 0),
        (_shifted(torch.zeros(2, 1, 30, 40, dtype=torch.bfloat16), 48, 1), 2),
        (torch.zeros(2, 1, 30, 44), 0),
        (torch.zeros(2, 1, 30, 43), 4),
        (torch.zeros(2, 1, 40, 30).mT, 4),
        (torch.zeros(2, 1, 30, 40).expand(2, 3, 30, 40), 0),
        (torch.zeros(2, 1, 30, 40, dtype=torch.float16), 4),
        (torch.zeros(2, 1, 30, 43, dtype=torch.bool), 0),
    ],
)
def test_copied_masks(plans: list[Plan], mask: Tensor, copied: int) -> None:
    """An additive mask for bf16 is copied only where TMA cannot read it."""
    M, N = (max(n, 30) for n in mask.shape[2:])
    assert _plan(plans, *_decoding(2, 3, 3, M, N), mask=mask).copied == copied


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_readable_masks(dtype: torch.dtype, step: int) -> None:
    """The backward's copy has the same values in rows that TMA reads, each line once."""
    mask = torch.randn(1, 2, 30, 86).to(dtype)[..., ::step].expand(3, 2, 30, 86 // step)
    assert not is_readable(mask)
    copy = as_readable(mask)
    assert is_readable(copy)
    assert copy.stride(0) == 0
    assert torch.equal(copy, mask)
    assert as_readable(copy) is copy


@pytest.mark.parametrize(
    ("shape", "count"), [((2, 3, 65, 270), 1), ((1, 3, 65, 270), 2), ((1, 1, 1, 270), 6)]
)
def test_splits_of_a_mask_gradient(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], count: int
) -> None:
    """Where tiles are few, what they are broadcast over is shared out; never more than there is."""
    if reason := missing():
        pytest.skip(reason)
    splits: list[int] = []
    of = bindings.HOST.native.on_host_dmask_splits
    of.argtypes = [bindings.ctypes.c_void_p]
    bindings.use(monkeypatch, lambda op, problem, _: splits.append(of(problem)))
    q, k, v = (torch.empty(2, 3, n, 64, dtype=torch.bfloat16) for n in (65, 270, 270))
    lse, mask = torch.empty(2, 3, 65), torch.empty(shape)
    for needed in (False, True):
        call = BackwardCall(None, None, q, lse, q, k, v, mask)
        dmask, none = torch.empty_like(mask) if needed else mask.new_empty(0), mask.new_empty(0)
        sm90.attention_bwd(call, *map(torch.empty_like, (q, k, v)), dmask, none, none)
    assert splits == [1, count]


# -- layout ---------------------------------------------------------------------------------------
def _forward(B: int, M: int, N: int, **options: object) -> None:
    _plan([None], *_decoding(B, 3, 3, M, N), **options)


def _packed_forward(rows: int, sequences: int) -> None:
    q = torch.empty(rows * sequences, 8, 64, dtype=torch.bfloat16)
    offsets = torch.empty(sequences + 1, dtype=torch.int32)
    call = ForwardCall(q, q, q, **packing(offsets, offsets, rows, rows))
    sm90.attention_fwd(call, torch.empty_like(q), torch.empty(8, q.shape[0]))


def _backward(
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    sinks: Tensor | None = None,
    distance_bias: Tensor | None = None,
) -> None:
    q, k, v = (torch.empty(2, 3, n, 64, dtype=torch.bfloat16) for n in (65, 270, 270))
    seed = torch.zeros(1, dtype=torch.int64) if dropout_p else None
    call = BackwardCall(
        None, None, q, torch.empty(2, 3, 65), q, k, v, mask, distance_bias=distance_bias,
        sinks=sinks, dropout_p=dropout_p, dropout_seed=seed,
    )  # fmt: skip
    changes = (
        torch.empty(0) if x is None else torch.empty_like(x) for x in (mask, distance_bias, sinks)
    )
    sm90.attention_bwd(call, *map(torch.empty_like, (q, k, v)), *changes)


@pytest.mark.parametrize(
    ("call", "count"),
    [
        # out and max_sum of the splits
        (partial(_forward, 1, 1, 9001), 2),
        # the counter, dropout's column keys
        (partial(_forward, 2, 70, 130, dropout_p=0.1), 2),
        # the counter; bits, plain and classes of a mask; its copy
        (partial(_forward, 2, 30, 43, mask=torch.zeros(2, 1, 30, 43)), 5),
        # the counter, the order of sequences
        (partial(_packed_forward, 2049, 3), 2),
        # lse2, delta, dq_sum, its semaphores, the counter
        (_backward, 5),
        # dropout's row keys
        (partial(_backward, dropout_p=0.1), 6),
        # what each row adds to dsinks
        (partial(_backward, sinks=torch.zeros(3)), 6),
        # the bands of the gradient of distance_bias
        (partial(_backward, distance_bias=torch.zeros(1, 3, 334)), 6),
        # bits, plain and classes of a mask; the splits of its gradient
        (partial(_backward, torch.zeros(1, 1, 1, 270)), 9),
    ],
)
def test_sections_of_the_workspace(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[], None], count: int
) -> None:
    """In the library's own layout they begin at multiples of 128 bytes, do not overlap, and are
    together as large as the workspace that the binding asks for.
    """
    if reason := missing():
        pytest.skip(reason)
    launched: list[str] = []
    bindings.use(monkeypatch, lambda op, problem, _: launched.append(op))
    with bindings.own_layout():
        call()
        found, size = bindings.sections()
    assert len(launched) == 1 and len(found) == count
    end = 0
    for offset, length in found:
        assert length > 0
        assert offset == -(-end // 128) * 128
        end = offset + length
    assert size == -(-end // 128) * 128


def test_order_of_the_sums_of_dq(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the keys under deterministic algorithms, read when a backward runs. PyTorch does
    not run a compiled one whose forward ran without them.
    """
    if reason := missing():
        pytest.skip(reason)
    ordered: list[int] = []
    of = bindings.HOST.native.on_host_adds_in_order
    of.argtypes = [bindings.ctypes.c_void_p]
    bindings.use(monkeypatch, lambda op, problem, _: ordered.append(of(problem)))
    backward = OPS["attention_bwd"]

    def launch(args: tuple[object, ...]) -> list[Tensor]:
        results = list(backward.allocate(args))
        (call,) = backward.backend_args(args)
        sm90.attention_bwd(call, *results)
        return results

    monkeypatch.setitem(backward._launchers, "reference", launch)
    attention = partial(fastattn.attention, backend="reference")
    torch._dynamo.reset()
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    q = torch.randn(1, 1, 130, 64, dtype=torch.bfloat16, requires_grad=True)
    out = attention(q, q, q).sum()
    for deterministic in (False, True, False):
        with deterministic_algorithms(deterministic):
            torch.autograd.grad(out, q, retain_graph=True)
            torch.autograd.grad(compiled(q, q, q).sum(), q)
    assert ordered == [False, False, True, True, False, False]


@pytest.mark.parametrize("packed", [False, True])
def test_order_of_the_dimensions_of_a_distance_gradient(
    monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    """Slopes [H, B] that are given transposed make a bias, and a gradient, whose heads come first.
    The kernels write a contiguous one.
    """
    q, offsets = torch.empty(2, 3, 9, 64), torch.zeros(3, dtype=torch.int32)
    ddistance_bias = torch.empty(3, 2, 17).transpose(0, 1)
    values = torch.arange(102.0).view(2, 3, 17)

    def write(*arguments: Any) -> int:
        *_, gradient, _, _, _ = arguments  # dsinks, multiprocessors, workspace
        assert gradient.is_contiguous()
        gradient.copy_(values)
        return 0

    library = SimpleNamespace(attention_bwd=SimpleNamespace(default=write))
    monkeypatch.setattr(sm90, "_library", library)
    bias, none = torch.empty_like(ddistance_bias), q.new_empty(0)
    x = q[0].transpose(0, 1) if packed else q
    given = packing(offsets, offsets, 9, 9) if packed else {}
    lse = torch.empty(3, 9) if packed else torch.empty(2, 3, 9)
    call = BackwardCall(None, None, x, lse, x, x, x, distance_bias=bias, **given)
    sm90.attention_bwd(call, x, x, x, none, ddistance_bias, none)
    assert torch.equal(ddistance_bias, values)
