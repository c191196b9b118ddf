"""The decoder cache in pages: sequences start and end at different times, unused pages unread."""

import pytest
import torch
from torch import nn

import fastattn.nn as fnn
from fastattn.nn.paged_decoding import PagedDecoderCache
from fastattn.nn.step_graph import Tape

E, H, N, T, PAGE = 16, 2, 20, 40, 16


def decoder(**changes) -> fnn.TransformerDecoder:
    torch.manual_seed(0)
    options = {"dim_feedforward": 32, "batch_first": True} | changes
    layer = fnn.TransformerDecoderLayer(E, H, **options)
    return fnn.TransformerDecoder(layer, 2, norm=nn.LayerNorm(E)).eval()


def poison(cache: PagedDecoderCache) -> None:
    """NaN wherever no running sequence has a position."""
    for layer in cache.layers:
        kept = torch.zeros(layer.target.shape[:2], dtype=torch.bool)
        for kind, lengths in enumerate((cache.lengths, dict(enumerate(cache.memory_lengths)))):
            for slot in cache.lengths:
                for at in range(int(lengths[slot])):
                    kept[cache._pages[kind][slot][at // PAGE], at % PAGE] = True
        layer.target[~kept] = float("nan")


# Before which step the sequences of which slots end, and new ones start.
ENDS = {9: [1], 15: [2, 0], 33: [2], 40: [1], 41: [0]}
STARTS = {9: [1], 17: [2], 25: [0], 33: [2], 41: [0]}
CASES = [
    pytest.param({}, id="plain"),
    pytest.param({"batch_first": False, "norm_first": True}, id="sequence-first"),
    pytest.param({"positions": "alibi"}, id="alibi"),
    pytest.param({"positions": "t5"}, id="t5"),
    pytest.param({"positions": "rotary"}, id="rotary"),
]


@pytest.mark.parametrize("options", CASES)
@torch.no_grad()
def test_sequences_start_and_end_at_different_times(options):
    fast, draw = decoder(**options), torch.Generator().manual_seed(1)

    def laid_out(x):
        return x if options.get("batch_first", True) else x.transpose(0, 1)

    def alone(memory, length):
        return fast.init_cache(laid_out(memory[:, :length]), max_length=T)

    memory, lengths = torch.randn(3, N, E, generator=draw), [0, 3, 16]
    cache = fast.init_cache(
        laid_out(memory), memory_lengths=lengths, max_length=T, page_size=PAGE, pages=15
    )
    addresses = [layer.target.data_ptr() for layer in cache.layers]
    single = {slot: alone(memory[slot : slot + 1], n) for slot, n in enumerate(lengths)}
    for t in range(46):
        cache.release(ENDS.get(t, []))
        for slot in ENDS.get(t, []):
            del single[slot]
        if t in STARTS:
            memory = torch.randn(1, N - 2, E, generator=draw)
            (slot,), length = STARTS[t], (3 * t + 5) % (N - 1)
            fast.restart(cache, laid_out(memory), [length], slots=[slot])
            single[slot] = alone(memory, length)
        poison(cache)
        count = 3 if t in (8, 16, 34) else 1
        x = torch.randn(3, count, E, generator=draw)
        got = laid_out(fast.step(laid_out(x), cache))
        for slot, expected in single.items():
            row = laid_out(fast.step(laid_out(x[slot : slot + 1]), expected))[0]
            torch.testing.assert_close(got[slot], row, rtol=1e-5, atol=1e-6)
            assert cache.lengths[slot] == cache.position[slot] == expected.length
    assert sorted(single) == [0, 2]
    assert addresses == [layer.target.data_ptr() for layer in cache.layers]


def test_pages_are_held_for_the_positions_there_are():
    fast, x = decoder(), torch.randn(2, 1, E)
    options = {"memory_lengths": [N, 3], "max_length": T, "page_size": PAGE}
    cache = fast.init_cache(torch.randn(2, N, E), **options)
    assert cache.free_pages == 2 * (3 + 2) - 3  # the memories' alone
    held = []
    for _ in range(T):
        fast.step(x, cache)
        held.append(7 - cache.free_pages)
    assert held == [2 * -(-t // PAGE) for t in range(1, T + 1)]
    with pytest.raises(ValueError, match="max_length=40 positions, got position 40"):
        fast.step(x, cache)
    cache.release([1])
    assert cache.free_pages == 5 and list(cache.lengths) == [0]
    fast.restart(cache, torch.randn(1, 5, E), [5], slots=[0])
    assert cache.free_pages == 9 and cache.position.tolist() == [[0], [0]]
    # The same sequences in the same pages.
    first = fast.step(x, cache)
    cache.rewind()
    assert cache.lengths == {0: 0} and cache.free_pages == 8
    torch.testing.assert_close(fast.step(x, cache)[0], first[0])


@torch.no_grad()
def test_pages_that_do_not_suffice_are_an_error_and_change_nothing():
    fast, x = decoder(), torch.randn(2, 1, E)
    options = {"max_length": T, "page_size": PAGE, "pages": 5}
    with pytest.raises(ValueError, match="got 3, of which 3 are free where 4 more are needed"):
        fast.init_cache(torch.randn(2, N, E), **options | {"pages": 3})
    cache = fast.init_cache(torch.randn(2, 5, E), **options, memory_size=64)
    for _ in range(PAGE):
        fast.step(x, cache)
    wanted = "pages must be enough for all sequences, got 5, of which 1 are free where"
    for more, refused in (
        (2, lambda: fast.step(x, cache)),
        (3, lambda: cache.reserve({0: PAGE + 1, 1: T})),
        (2, lambda: fast.restart(cache, torch.randn(1, 64, E), [64], slots=[0])),
    ):
        with pytest.raises(ValueError, match=f"{wanted} {more} more are needed"):
            refused()
    assert cache.free_pages == 1 and cache.lengths == {0: PAGE, 1: PAGE}
    assert cache.position.tolist() == [[PAGE], [PAGE]]
    cache.release([0])
    fast.step(x, cache)
    assert cache.lengths == {1: PAGE + 1} and cache.free_pages == 2


def test_no_sequences():
    """An empty batch, as without pages."""
    fast = decoder()
    cache = fast.init_cache(torch.randn(0, N, E), max_length=T, page_size=PAGE)
    assert fast.step(torch.randn(0, 1, E), cache).shape == (0, 1, E) and cache.free_pages == 0


@torch.no_grad()
def test_recorded_steps_follow_the_host():
    """Replays write to pages taken after the recording, and for sequences started after it."""
    fast, draw = decoder(), torch.Generator().manual_seed(2)
    memory, x = torch.randn(3, N, E, generator=draw), torch.randn(60, 2, 1, E, generator=draw)
    options = {"memory_lengths": [N, 4], "max_length": T, "memory_size": N, "page_size": PAGE}
    caches = [fast.init_cache(memory[:2], **options) for _ in range(2)]
    now, out = torch.empty(2, 1, E), torch.empty(2, 1, E)

    def step() -> None:
        out.copy_(fast.step(now, caches[0]))

    advance = Tape(step)
    lengths = {0: 0, 1: 0}
    for t in range(60):
        if t in (20, 25):
            slot = t % 2
            for cache in caches:
                fast.restart(cache, memory[2:], [9 + slot], slots=[slot])
            lengths[slot] = 0
        if t == 40:
            lengths.pop(1)
            for cache in caches:
                cache.release([1])
        lengths = {slot: length + 1 for slot, length in lengths.items()}
        caches[0].reserve(lengths)
        now.copy_(x[t])
        advance()
        assert advance.is_replayed
        expected = fast.step(x[t], caches[1])
        for slot in lengths:
            torch.testing.assert_close(out[slot], expected[slot])
    assert caches[0].position.tolist() == caches[1].position.tolist()


@torch.no_grad()
def test_slots_without_a_sequence_at_the_last_position():
    """They advance with the others, but never beyond the end of their block table."""
    fast, x = decoder(), torch.randn(2, 4, E)
    cache = fast.init_cache(torch.randn(2, 5, E), max_length=2 * PAGE, page_size=PAGE)
    cache.release([1])
    for _ in range(2 * PAGE):
        fast.step(x[:, :1], cache)
    memory = torch.randn(1, 5, E)
    fast.restart(cache, memory, [5], slots=[0])
    expected = fast.step(x[:1], fast.init_cache(memory, max_length=T))
    torch.testing.assert_close(fast.step(x, cache)[:1], expected)


@pytest.mark.parametrize("options", [{}, {"page_size": PAGE}], ids=["contiguous", "paged"])
@torch.no_grad()
def test_lengths_beyond_a_memory_end_with_it(options):
    fast, x = decoder(), torch.randn(1, 1, E)
    options = {"max_length": T, "memory_size": 2 * N, **options}
    for memory in (torch.randn(1, N, E), torch.randn(1, 5, E)):
        expected = fast.step(x, fast.init_cache(memory, max_length=T))
        cache = fast.init_cache(memory, memory_lengths=[N + 3], **options)
        torch.testing.assert_close(fast.step(x, cache), expected)
        fast.restart(cache, memory, [N + 3])
        torch.testing.assert_close(fast.step(x, cache), expected)


def test_paged_cache_errors():
    fast, memory = decoder(), torch.randn(2, 5, E)
    for options, wanted in (
        ({"page_size": 8}, r"page_size must be one of \(16, 32, 64, 128, 256\), got 8"),
        ({"page_size": PAGE, "beams": 2}, "page_size must be None with beams or .* got 16"),
        ({"page_size": PAGE, "memory_key_padding_mask": torch.zeros(2, 5).bool()}, "page_size"),
        ({"page_size": PAGE, "pages": 0}, "pages must be at least 1, got 0"),
        ({"pages": 9}, "pages must be None without page_size, got 9"),
        ({"page_size": PAGE, "memory_size": 4}, "memory_size must be at least the memory's 5"),
    ):
        with pytest.raises(ValueError, match=wanted):
            fast.init_cache(memory, max_length=T, **options)
    for name, value in (("page_size", 16.0), ("pages", 8.5), ("pages", "8")):
        with pytest.raises(TypeError, match=f"{name} must be an integer, got {value!r}"):
            fast.init_cache(memory, max_length=T, **{"page_size": PAGE, name: value})
    cache = fast.init_cache(memory, max_length=T, page_size=PAGE)
    for slots in ([0, 0], [2, 1], [-1, 0]):
        with pytest.raises(ValueError, match="slots must be different numbers below 2, got"):
            fast.restart(cache, memory, [5, 5], slots=slots)
        with pytest.raises(ValueError, match="slots must be different numbers below 2, got"):
            cache.release(slots)
    with pytest.raises(ValueError, match="memory must have 1 sequences of at most 5 rows, got 2"):
        fast.restart(cache, memory, [5, 5], slots=[0])
    whole = fast.init_cache(memory, memory_lengths=[5, 5], max_length=T)
    with pytest.raises(ValueError, match=r"slots must be None for a cache without pages.*\[0\]"):
        fast.restart(whole, memory[:1], [5], slots=[0])
    for call in (lambda: cache.reorder(torch.tensor([1, 0])), lambda: cache.seek(torch.zeros(1))):
        with pytest.raises(NotImplementedError, match="a paged cache"):
            call()
