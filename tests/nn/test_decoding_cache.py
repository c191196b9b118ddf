"""The decoder cache: shared by beams, with several memories, and reused."""

import pytest
import torch
from torch import nn

import fastattn.nn as fnn

B, K, S, T, E = 2, 3, 5, 6, 16


def decoder(**changes) -> fnn.TransformerDecoder:
    torch.manual_seed(0)
    arguments = {"batch_first": True, "dim_feedforward": 32} | changes
    layer = fnn.TransformerDecoderLayer(E, 2, **arguments)
    made = fnn.TransformerDecoder(layer, 2, norm=nn.LayerNorm(E)).eval()
    for parameter in made.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    return made


def last_row(module: fnn.TransformerDecoder, x: torch.Tensor, memory, **masks) -> torch.Tensor:
    causal = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
    return module(x, memory, tgt_mask=causal, **masks)[:, -1]


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_beams_follow_their_parents_and_nothing_is_copied(norm_first, batch_first):
    fast = decoder(norm_first=norm_first, batch_first=batch_first)
    whole = decoder(norm_first=norm_first)
    memory = torch.randn(B, S, E)
    lengths = torch.tensor([S, 2])
    given = memory if batch_first else memory.transpose(0, 1)
    cache = fast.init_cache(given, memory_lengths=lengths, max_length=T, beams=K)
    padding = torch.arange(S) >= lengths[:, None]
    histories = [[[] for _ in range(K)] for _ in range(B)]
    draw = torch.Generator().manual_seed(1)
    addresses = [(layer.target.data_ptr(), layer.memory.data_ptr()) for layer in cache.layers]
    for step in range(T):
        x = torch.randn(B, K, E, generator=draw)
        for b in range(B):
            for k in range(K):
                histories[b][k].append(x[b, k])
        before = [layer.target.clone() for layer in cache.layers]
        got = fast.step(x if batch_first else x.transpose(0, 1), cache)
        got = got if batch_first else got.transpose(0, 1)
        for b in range(B):
            for k in range(K):
                row = last_row(
                    whole, torch.stack(histories[b][k])[None], memory[b : b + 1],
                    memory_key_padding_mask=padding[b : b + 1],
                )  # fmt: skip
                torch.testing.assert_close(got[b, k], row[0], rtol=1e-4, atol=1e-5)
        parents = torch.randint(K, (B, K), generator=draw)
        after = [layer.target.clone() for layer in cache.layers]
        cache.follow(parents)
        histories = [[list(histories[b][p]) for p in parents[b].tolist()] for b in range(B)]
        for layer, was, filled in zip(cache.layers, before, after, strict=True):
            written = (was != filled).flatten(2).any(-1).any(0).nonzero()[:, 0].tolist()
            assert written == list(range(step * K, step * K + K))
            assert torch.equal(layer.target, filled)
    assert addresses == [
        (layer.target.data_ptr(), layer.memory.data_ptr()) for layer in cache.layers
    ]
    assert cache.length == T and cache.position.item() == T


def test_a_cache_restarts_with_another_memory():
    fast = decoder()
    x = torch.randn(B, T, E)
    first, second = torch.randn(B, S, E), torch.randn(B, S - 2, E)
    lengths = [torch.tensor(values) for values in ([S, 1], [1, S - 2])]
    kept = fast.init_cache(first, memory_lengths=lengths[0], max_length=T, memory_size=S + 3)
    for memory, length in ((first, lengths[0]), (second, lengths[1])):
        if memory is second:
            fast.restart(kept, memory, length)
        fresh = fast.init_cache(memory, memory_lengths=length, max_length=T)
        for t in range(T):
            row = x[:, t : t + 1]
            torch.testing.assert_close(fast.step(row, kept), fast.step(row, fresh))
    assert lengths[0].tolist() == [S, 1]  # the caller's tensor is unchanged
    assert not any(layer.memory.requires_grad for layer in kept.layers)
    kept.rewind()
    again = fast.init_cache(second, memory_lengths=lengths[1], max_length=T)
    torch.testing.assert_close(fast.step(x[:, :3], kept), fast.step(x[:, :3], again))


def test_restarted_beams_have_their_own_rows():
    fast = decoder()
    memory, x = torch.randn(B, S, E), torch.randn(B, K, E)
    cache = fast.init_cache(memory, max_length=T, beams=K)
    first = [fast.step(x, cache) for _ in range(3)]
    cache.follow(torch.zeros(B, K, dtype=torch.long))
    fast.step(x, cache)
    cache.rewind()
    for expected in first:
        torch.testing.assert_close(fast.step(x, cache), expected)


def test_each_layer_may_attend_its_own_memory():
    fast = decoder()
    memories = [torch.randn(B, S, E) for _ in range(2)]
    x = torch.randn(B, T, E)
    cache = fast.init_cache(memories, max_length=T)
    got = torch.cat([fast.step(x[:, t : t + 1], cache) for t in range(T)], 1)
    causal = torch.ones(T, T).triu(1).bool()
    y = x
    for layer, memory in zip(fast.layers, memories, strict=True):
        y = layer(y, memory, tgt_mask=causal)
    torch.testing.assert_close(got, fast.norm(y), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("beams", [1, K])
def test_reordering_sequences_keeps_their_beams(beams):
    fast = decoder()
    memory, x = torch.randn(B, S, E), torch.randn(B, beams, E)
    rows, parents = torch.tensor([1, 0, 1]), torch.tensor([[0] * beams, [beams - 1] * beams])
    cache = fast.init_cache(memory, memory_lengths=torch.tensor([2, S]), max_length=T, beams=beams)
    other = fast.init_cache(
        memory[rows], memory_lengths=torch.tensor([S, 2, S]), max_length=T, beams=beams
    )
    for _ in range(2):
        fast.step(x, cache), fast.step(x[rows], other)
        cache.follow(parents), other.follow(parents[rows])
    cache.reorder(rows)
    assert cache.batch_size == 3 and cache.length == 2
    torch.testing.assert_close(fast.step(x[rows], cache), fast.step(x[rows], other))


def test_cache_errors():
    fast, memory = decoder(), torch.randn(B, S, E)
    lengths = torch.tensor([S, 2])
    for arguments, message in (
        ({"beams": 0}, "beams must be at least 1, got 0"),
        ({"memory_size": S}, f"memory_size must be at least the memory's {S} and needs memory_len"),
        ({"memory_size": 2, "memory_lengths": lengths}, "memory_size must be at least .* got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            fast.init_cache(memory, **{"max_length": T, **arguments})
    with pytest.raises(ValueError, match="one tensor or one for each of 2 layers, got 3"):
        fast.init_cache([memory] * 3, max_length=T)
    with pytest.raises(ValueError, match=r"one shape for all layers, \[2, 5, 16\], got"):
        fast.init_cache([memory, memory[:, :4]], max_length=T)
    cache = fast.init_cache(memory, memory_lengths=lengths, max_length=2, beams=K)
    with pytest.raises(ValueError, match=r"x must be \[B, 3, E\] with B=2, E=16, got \[2, 1, 16\]"):
        fast.step(torch.zeros(B, 1, E), cache)
    with pytest.raises(ValueError, match=r"parents must be int64 \[2, 3\], got torch.int64 \[3\]"):
        cache.follow(torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="must have 2 sequences of at most 5 rows, got 2 of 6"):
        fast.restart(cache, torch.randn(B, S + 1, E), lengths)
    with pytest.raises(ValueError, match="cache must have memory_lengths"):
        fast.restart(fast.init_cache(memory, max_length=2), memory, lengths)
    masked = fast.init_cache(
        memory, memory_lengths=lengths, max_length=2,
        memory_key_padding_mask=torch.zeros(B, S, dtype=torch.bool),
    )  # fmt: skip
    with pytest.raises(ValueError, match="memory_lengths and no memory_key_padding_mask"):
        fast.restart(masked, memory, lengths)
    for _ in range(2):
        fast.step(torch.zeros(B, K, E), cache)
    with pytest.raises(ValueError, match="max_length=2 positions, got position 2"):
        fast.step(torch.zeros(B, K, E), cache)


def test_offsets_may_be_tensors():
    for encoding in (fnn.SinusoidalPositionalEncoding(E, 9), fnn.LearnedPositionalEncoding(E, 9)):
        for length in (1, 4):
            x = torch.randn(B, length, E)
            for y in (x, x.bfloat16()):
                added = encoding(y, offset=torch.tensor([3]))
                assert added.dtype == y.dtype
                assert torch.equal(added, encoding(y, offset=3))


@torch.no_grad()
def test_lengths_beyond_a_memory_end_with_it():
    fast, x, N = decoder(), torch.randn(1, 1, E), 20
    for memory in (torch.randn(1, N, E), torch.randn(1, 5, E)):
        expected = fast.step(x, fast.init_cache(memory, max_length=T))
        cache = fast.init_cache(memory, memory_lengths=[N + 3], max_length=T, memory_size=2 * N)
        torch.testing.assert_close(fast.step(x, cache), expected)
        fast.restart(cache, memory, [N + 3])
        torch.testing.assert_close(fast.step(x, cache), expected)
