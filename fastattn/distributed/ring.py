"""Ring attention (Liu, Zaharia, Abbeel 2023): chunks of keys and values are passed from process to
process; each process attends its queries to the chunks it holds, and merges the results by their
lse. In the backward, the gradients of keys and values follow them.

While a chunk is computed, the next one is transferred. A chunk is passed on only as far as a
process needs it, that is, as causal and window restrictions allow pairs with its queries. Its
gradient starts at the first other process that needs it, and is sent home by the last one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fastattn.distributed.blocks import Block, Call, Inputs, merge, merge_sinks, sink_gradients
from fastattn.distributed.derivatives import first_only
from fastattn.distributed.sequence import chunk_count, chunks_of, owner_of

# Chunks by number: their keys and values, or the gradients of these that are required.
_Chunks = dict[int, tuple[Tensor, ...]]
_Transfer = tuple[int, tuple[Tensor, ...]]  # the other rank, modulo P, and a chunk


class Route(NamedTuple):
    """How far a chunk of keys is passed: over `last` steps. Other processes that need it are from
    `first` to `last` steps from its owner; both are 0 if there are none.
    """

    first: int
    last: int


@lru_cache(maxsize=64)
def routes(
    P: int, M: int, N: int, bounds: tuple[int, int], balanced: bool, key_balanced: bool
) -> tuple[Route, ...]:
    """Those of all chunks of keys. bounds: as of `Call`. M, N: the sizes of whole sequences."""
    m, n = M // chunk_count(P, balanced), N // chunk_count(P, key_balanced)
    low, high = bounds

    def needs(rank: int, chunk: int) -> bool:
        distances = (chunk * n - c * m for c in chunks_of(P, rank, balanced))
        return any(d - m < high and d + n > low for d in distances)

    def route(chunk: int) -> Route:
        owner = owner_of(P, chunk)
        forwards, backwards = range(1, P), range(P - 1, 0, -1)
        first, last = (
            next((step for step in steps if needs((owner + step) % P, chunk)), 0)
            for steps in (forwards, backwards)
        )
        return Route(first, last)

    return tuple(route(chunk) for chunk in range(chunk_count(P, key_balanced)))


@dataclass(frozen=True)
class Ring:
    """A process's place. At each step it sends to the next process and receives from the one
    before; at step s it holds chunks of the process s places before it.
    """

    group: dist.ProcessGroup | None
    size: int
    rank: int
    balanced: bool
    key_balanced: bool

    def blocks(self, call: Call, chunk: int) -> Iterator[Block]:
        """Those of this process's queries and a chunk of keys."""
        m = call.M // chunk_count(self.size, self.balanced)
        n = call.N // chunk_count(self.size, self.key_balanced)
        for i, c in enumerate(chunks_of(self.size, self.rank, self.balanced)):
            for rectangle in call.rectangles(c * m, m, chunk * n, n):
                yield Block(call, rectangle, i * m, c * m, chunk * n)

    def positions(self, call: Call, device: torch.device) -> Tensor:
        """The positions of this process's queries in the whole sequence."""
        m = call.M // chunk_count(self.size, self.balanced)
        chunks = chunks_of(self.size, self.rank, self.balanced)
        return torch.cat([torch.arange(c * m, (c + 1) * m, device=device) for c in chunks])

    def own_chunks(self, *shards: Tensor) -> _Chunks:
        """Views of this process's chunks of keys."""
        numbers = self.chunks_at(0)
        parts = [x.chunk(len(numbers), 2) for x in shards]
        return {c: tuple(x[i] for x in parts) for i, c in enumerate(numbers)}

    def chunks_at(self, step: int) -> tuple[int, ...]:
        """The chunks of keys that are here at a step, as far as they are passed."""
        return chunks_of(self.size, (self.rank - step) % self.size, self.key_balanced)

    def global_rank(self, rank: int) -> int:
        """The global rank of a rank in the group, modulo its size."""
        rank = rank % self.size
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


class Transfers:
    """Transfers that are under way. Keeps what is sent."""

    def __init__(self, ring: Ring, sent: list[_Transfer], received: list[_Transfer]):
        self._operations = [
            dist.P2POp(operation, x, ring.global_rank(rank), ring.group)
            for operation, chunks in ((dist.isend, sent), (dist.irecv, received))
            for rank, chunk in chunks
            for x in chunk
        ]
        self._started = dist.batch_isend_irecv(self._operations) if self._operations else []

    def wait(self) -> None:
        for transfer in self._started:
            transfer.wait()


class Passing:
    """The transfers of one direction of one call. like: tensors of the shapes of a chunk."""

    def __init__(self, ring: Ring, call: Call, like: tuple[Tensor, ...]):
        self.ring, self.like = ring, like
        layout = (ring.balanced, ring.key_balanced)
        self.routes = routes(ring.size, call.M, call.N, call.bounds, *layout)

    def pass_on(self, held: _Chunks, step: int) -> tuple[_Chunks, Transfers]:
        """Starts sending on what is held at this step and needed after it. Returns what arrives for
        the next step.
        """
        ring, last = self.ring, [route.last for route in self.routes]
        sent = [(ring.rank + 1, chunk) for c, chunk in held.items() if last[c] > step]
        arriving = self._empty([c for c in ring.chunks_at(step + 1) if last[c] > step])
        received = [(ring.rank - 1, chunk) for chunk in arriving.values()]
        return arriving, Transfers(ring, sent, received)

    def new_totals(self, step: int) -> _Chunks:
        """Zeros for the gradients of the chunks at this step which this process, or one before it,
        has needed.
        """
        routes = self.routes
        needed = [c for c in self.ring.chunks_at(step) if routes[c].first <= step <= routes[c].last]
        return {c: tuple(torch.zeros_like(x) for x in self.like) for c in needed}

    def pass_gradients(self, totals: _Chunks, step: int) -> tuple[_Chunks, Transfers]:
        """Starts sending the gradients of this step's chunks, to which those of this process have
        been added: on, or home after the last process that needs the chunk. Returns what arrives:
        for the next step's chunks, and for own ones.
        """
        ring, routes = self.ring, self.routes
        sent = [
            (ring.rank + 1 if routes[c].last > step else owner_of(ring.size, c), chunk)
            for c, chunk in totals.items()
        ]
        passed = [c for c in ring.chunks_at(step + 1) if routes[c].first <= step < routes[c].last]
        home = [c for c in ring.chunks_at(0) if routes[c].last == step]
        arriving = self._empty([*passed, *home])
        sources = [ring.rank - 1] * len(passed) + [ring.rank + step] * len(home)
        received = list(zip(sources, arriving.values(), strict=True))
        return arriving, Transfers(ring, sent, received)

    def _empty(self, chunks: list[int]) -> _Chunks:
        return {c: tuple(torch.empty_like(x) for x in self.like) for c in chunks}


class RingAttention(torch.autograd.Function):
    """The inputs and results are this process's; see `Inputs` for mask and distance_bias. lse is in
    fp32 (fp64 for fp64 inputs), as are all sums of partial results and gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        distance_bias: Tensor | None,
        sinks: Tensor | None,
        ring: Ring,
        call: Call,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=wide)
        m = q.new_full(q.shape[:3], -torch.inf, dtype=wide)
        log_sum = torch.zeros_like(m)
        held = _contiguous(ring.own_chunks(k, v))
        passing = Passing(ring, call, next(iter(held.values())))
        for step in range(ring.size):
            arriving, transfers = passing.pass_on(held, step)
            for c, (chunk_k, chunk_v) in held.items():
                inputs = Inputs(q, chunk_k, chunk_v, mask, distance_bias)
                for block in ring.blocks(call, c):
                    rows = block.of_rows
                    merge(rows(out), rows(m), rows(log_sum), *block.forward(inputs))
            transfers.wait()
            held = arriving
        if sinks is None:
            lse = m + log_sum
        else:
            positions = ring.positions(call, q.device)
            lse = merge_sinks(out, m, log_sum, sinks, call.options.query_lengths, positions)
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, mask, distance_bias, sinks, result, lse, m, log_sum)
        ctx.ring, ctx.call = ring, call
        ctx.set_materialize_grads(False)
        return result, lse

    @staticmethod
    @first_only
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, mask, bias, sinks, out, lse, m, log_sum = ctx.saved_tensors
        ring, call, needs = ctx.ring, ctx.call, ctx.needs_input_grad
        inputs = Inputs(q, k, v, mask, bias)
        # As in calls without sinks, which blocks are: rows without a key have lse -inf.
        m_of_keys = m if sinks is None else m.masked_fill(lse == sinks[:, None], -torch.inf)
        totals = _zeros(inputs, needs[:5], lse.dtype)
        dq, dk, dv, dmask, dbias = totals
        held = _contiguous(ring.own_chunks(k, v))
        own = ring.own_chunks(*(x for x in (dk, dv) if x is not None))
        passing = Passing(ring, call, next(iter(held.values())))
        passing_gradients = Passing(ring, call, next(iter(_contiguous(own).values())))

        totals_of_chunks, arrived, gradient_transfers = own, _Chunks(), Transfers(ring, [], [])
        for step in range(ring.size if any(needs[:5]) else 0):
            arriving, transfers = passing.pass_on(held, step)
            if step > 0:
                totals_of_chunks = passing_gradients.new_totals(step)
            for c, (chunk_k, chunk_v) in held.items():
                chunk = inputs._replace(k=chunk_k, v=chunk_v)
                for block in ring.blocks(call, c):
                    found = iter(totals_of_chunks[c])
                    of_chunk = [next(found) if need else None for need in needs[1:3]]
                    merged = (out, m_of_keys, log_sum)
                    parts = block.backward(chunk, *merged, dout, dlse, needs[:5])
                    block.add_to((dq, *of_chunk, dmask, dbias), parts)
            gradient_transfers.wait()
            _add(arrived, own | totals_of_chunks)
            if step > 0:
                arrived, gradient_transfers = passing_gradients.pass_gradients(
                    totals_of_chunks, step
                )
            transfers.wait()
            held = arriving
        gradient_transfers.wait()
        _add(arrived, own)

        dsinks = sink_gradients(sinks, out, lse, m, log_sum, dout, dlse) if needs[5] else None
        gradients = (
            None if x is None or total is None else total.to(x.dtype)
            for total, x in zip(totals, inputs, strict=True)
        )
        return *gradients, dsinks, None, None


def _contiguous(chunks: _Chunks) -> _Chunks:
    return {c: tuple(x.contiguous() for x in chunk) for c, chunk in chunks.items()}


def _zeros(inputs: Inputs, needs: Sequence[bool], wide: torch.dtype) -> list[Tensor | None]:
    """For sums of gradients of blocks, in `wide` unless each element is in one block."""
    *_, mask, _ = inputs
    dtypes = [wide] * len(inputs)
    if mask is not None:
        has_pairs = mask.shape[2] > 1 and mask.shape[3] > 1
        dtypes[3] = mask.dtype if has_pairs else torch.promote_types(mask.dtype, wide)
    return [
        torch.zeros(x.shape, dtype=dtype, device=x.device) if need and x is not None else None
        for x, need, dtype in zip(inputs, needs, dtypes, strict=True)
    ]


def _add(arrived: _Chunks, totals: _Chunks) -> None:
    for c, chunk in arrived.items():
        for total, x in zip(totals[c], chunk, strict=True):
            total.add_(x)
