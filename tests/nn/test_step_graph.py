"""A recorded step on a CPU: replays do the same as the step, in the same memory."""

import contextlib

import pytest
import torch
from torch import nn

import fastattn
from fastattn.nn.step_graph import Tape, recorded
from fastattn.ops import _native


class Counter:
    """A step of many kinds of operations; its state is what it keeps between calls."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weight = torch.randn(8, 8)
        self.state = torch.randn(3, 8)
        self.position = torch.zeros(1, dtype=torch.long)
        self.history = torch.zeros(9, 3, dtype=torch.long)
        self.norm = nn.LayerNorm(8)
        self.calls = 0

    @torch.no_grad()
    def step(self) -> None:
        self.calls += 1
        x = self.norm(self.state @ self.weight).view(3, 2, 4).transpose(0, 1)  # views of results
        q = x[None]  # [1, H, M, D]
        attended = fastattn.attention(q, q, q, key_lengths=(self.position + 1).clamp(max=3))
        rows = fastattn.layer_norm(attended[0].transpose(0, 1).flatten(1))
        best, index = rows.topk(2, dim=-1)  # two results
        low, high = rows.split(4, dim=-1)
        mixed = torch.cat([high, low], dim=-1) * best.sum(dim=-1, keepdim=True)
        buffer = torch.empty(3, 8)
        torch.sub(mixed, mixed.mean(), out=buffer)
        buffer[:, :2].fill_(0.5)
        kept = torch.where(buffer > 0, buffer, torch.zeros_like(buffer))
        self.state.copy_(torch.nn.functional.pad(kept[:, 1:], (1, 0), value=0.25))
        self.history.index_copy_(0, self.position, index[None, :, 0])
        self.position.add_(1)


@pytest.mark.parametrize("extended", [True, False])
@pytest.mark.parametrize("shared", [False, True])
def test_a_tape_replays_what_was_recorded(shared, extended, monkeypatch):
    """Also without the extension, which makes the calls in C++."""
    if not extended:
        monkeypatch.setattr(_native, "extension", lambda: None)
    direct, taped = Counter(), Counter()
    results = (lambda: []) if shared else None
    advance = recorded(taped.step, lambda: None, torch.device("cpu"), results)
    assert isinstance(advance, Tape)
    for step in range(1, 8):
        direct.step()
        advance()
        assert taped.calls == 1
        if step == 3:  # a pause without the memory of what the step computes
            advance.release()
            advance.allocate()
        torch.testing.assert_close(taped.state, direct.state, rtol=0, atol=0)
        assert torch.equal(taped.history, direct.history)
        assert taped.position.item() == direct.position.item() == step
    assert len({tuple(row) for row in direct.history[:7].tolist()}) > 1
    # Changed in place, parameters and state are what the next step reads.
    for counter in (direct, taped):
        counter.weight.mul_(-2.0)
        counter.position.zero_()
    direct.step()
    advance()
    torch.testing.assert_close(taped.state, direct.state, rtol=0, atol=0)


@pytest.mark.parametrize("extended", [True, False])
def test_operations_without_an_out_form_are_copied(extended, monkeypatch):
    if not extended:
        monkeypatch.setattr(_native, "extension", lambda: None)
    x, seen, total = torch.arange(4.0), torch.zeros(4), torch.zeros(())

    def step() -> None:
        # A view of the result of a conversion, and a result whose dtype is an argument.
        seen.copy_(torch.ops.aten._to_copy(x.double(), dtype=torch.float32).view(2, 2).flatten())
        total.copy_(x.sum(dtype=torch.float64))
        x.add_(1)

    advance = Tape(step)
    for expected in (0.0, 1.0, 2.0):
        advance()
        assert seen.tolist() == [expected + i for i in range(4)]
        assert total.item() == 4 * expected + 6


def test_a_tape_replays_the_reference_too(monkeypatch):
    monkeypatch.setenv("FASTATTN_BACKEND", "reference")
    direct, taped = Counter(), Counter()
    advance = Tape(taped.step)
    for _ in range(4):
        direct.step()
        advance()
    torch.testing.assert_close(taped.state, direct.state, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_tape_replays_ops_in_every_dtype(dtype):
    q, out = torch.randn(1, 2, 3, 8, dtype=dtype), torch.zeros(1, 2, 3, 8, dtype=dtype)
    weight = torch.randn(8, 8, dtype=dtype)

    def step() -> None:
        x = fastattn.linear(fastattn.layer_norm(q), weight)
        out.copy_(fastattn.ffn(fastattn.attention(x, x, x), weight, None, weight, None))

    advance = Tape(step)
    with torch.no_grad():
        step()
        expected = out.clone()
        for _ in range(3):
            out.zero_()
            advance()
            assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("read", "expected"),
    [(lambda x: float(x[0]), [-1.0, -2.0, -3.0]), (lambda x: len(x.nonzero()), [2, 3, 2])],
    ids=["values are read", "results have no fixed size"],
)
def test_steps_that_are_not_replayed(read, expected):
    x, seen = torch.tensor([-1.0, 0.0, 2.0]), []

    def step() -> None:
        seen.append(read(x))
        x.sub_(1.0)

    advance = Tape(step)
    for _ in range(3):
        advance()
    assert seen == expected


def test_on_other_devices_the_step_is_called(monkeypatch):
    def step() -> None:
        pass

    assert recorded(step, step, torch.device("meta")) is step
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert recorded(step, step, torch.device("cpu")) is step


def test_shared_memory():
    x, results, others = torch.arange(1.0, 5.0), [], []

    def step() -> None:
        a = x * 2
        b = a + 1
        results[:] = [b * a, (difference := b - a).sum()]
        results.append((tripled := results[0] * 3) + 1)
        others[:] = [a, b, difference, tripled]

    alone, shared = Tape(step), Tape(step, lambda: [results[0], results[2]])
    # With shared memory, `difference` overwrites b, a result overwrites `tripled`, and all others
    # lie in memory that is allocated for a replay alone.
    for advance, buffers in ((alone, 7), (shared, 2)):
        for _ in range(3):
            advance()
            assert results[0].tolist() == [(2 * n + 1) * 2 * n for n in x.tolist()]
            assert results[2].tolist() == [(2 * n + 1) * 6 * n + 1 for n in x.tolist()]
            x.add_(1)
        assert len(advance._made) == buffers
        between_replays = [made.untyped_storage().nbytes() for made in others[:3]]
        assert between_replays == ([0] * 3 if advance is shared else [16, 16, 16])
        b, difference = others[1:3]
        assert (b.data_ptr() == difference.data_ptr()) == (advance is shared)
        assert (others[3].data_ptr() == results[2].data_ptr()) == (advance is shared)
        advance.release()
        assert all(made.untyped_storage().nbytes() == 0 for made in results + others)
        advance.allocate()
        advance()
        assert results[0].tolist() == [(2 * n + 1) * 2 * n for n in x.tolist()]


def test_a_replay_that_fails_frees_its_memory():
    index, results = torch.tensor([1]), []

    def step() -> None:
        a = torch.arange(4.0) + index
        results[:] = [a.sum()[None]]
        a.index_copy_(0, index, results[0])

    advance = Tape(step, lambda: results)
    for place in (1, 9, 2):
        index.fill_(place)
        with pytest.raises(IndexError) if place == 9 else contextlib.nullcontext():
            advance()
        assert advance._workspace_size > 0 and advance._workspace.nbytes() == 0
    assert results[0].item() == 6 + 4 * 2


def test_early_tensors_lie_in_the_memory_of_the_result():
    x, kept, early = torch.arange(1.0, 5.0), [], []

    def step() -> None:
        a = x.double()
        b = a.sum(0, keepdim=True)
        early[:] = [a, b]
        kept[:] = [b.float() * torch.ones(64)]

    advance = Tape(step, lambda: kept)
    for _ in range(3):
        advance()
        assert torch.equal(kept[0], x.sum().expand(64))
        x.add_(1)
    start, size = kept[0].data_ptr(), 64 * 4
    assert all(start <= tensor.data_ptr() < start + size for tensor in early)
    assert len({tensor.data_ptr() for tensor in early}) == 2
    assert all(tensor.data_ptr() % 64 == 0 for tensor in early)


def test_an_operand_that_is_read_elsewhere_is_not_overwritten():
    """Not if results of other elements need it too, nor by a result of another layout or dtype."""
    x, results = torch.arange(1.0, 5.0).view(2, 2), []

    def step() -> None:
        a, b, c, d = x + 1, x + 2, x + 3, (x + 4).double()
        results[:] = [a + a[:1], b + b.T, c.T + torch.ones(2, 1), x + d]
        results.append(torch.add(x, results[0], alpha=2))

    advance = Tape(step, lambda: results)
    for _ in range(3):
        advance()
        wanted = [(x + 1) + (x + 1)[:1], x + 2 + (x + 2).T, (x + 3).T + 1, 2 * x.double() + 4]
        for result, value in zip(results, [*wanted, x + 2 * wanted[0]], strict=True):
            assert torch.equal(result, value)
        x.mul_(2)
