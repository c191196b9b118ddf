"""Ring attention (Liu, Zaharia, Abbeel 2023): chunks of keys and values are passed from process to
process; each process attends its queries to the chunks it holds, and merges the results by their
lse. In the backward, the gradients of keys and values follow them.

While a chunk is computed, the next one is transferred. A chunk is passed on only as far as a
process needs it, that is, as causal and window restrictions allow pairs with its queries. Its
gradient starts at the first other process that needs it, and is sent home by the last one.
"""

from collections.abc import Iterator
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

    def routes(self, call: Call) -> tuple[Route, ...]:
        layout = (self.balanced, self.key_balanced)
        return routes(self.size, call.M, call.N, call.bounds, *layout)

    def own_chunks(self, shards: tuple[Tensor, ...]) -> _Chunks:
        """Views of this process's chunks."""
        numbers = chunks_of(self.size, self.rank, self.key_balanced)
        parts = [x.chunk(len(numbers), 2) for x in shards]
        return {c: tuple(x[i] for x in parts) for i, c in enumerate(numbers)}

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

    def chunks_at(self, step: int) -> tuple[int, ...]:
        """Those that reach this process at a step, if they are passed so far."""
        return chunks_of(self.size, (self.rank - step) % self.size, self.key_balanced)

    # -- transfers --------------------------------------------------------------------------------
    def pass_on(
        self, held: _Chunks, step: int, found: tuple[Route, ...], like: tuple[Tensor, ...]
    ) -> tuple[_Chunks, list[Any]]:
        """Starts sending on what is held at this step and needed after it. Returns what arrives for
        the next step, and the transfers. like: tensors of a chunk's shapes.
        """
        sent = [(self.rank + 1, held[c]) for c in held if found[c].last > step]
        arriving = _empty(like, [c for c in self.chunks_at(step + 1) if found[c].last > step])
        received = [(self.rank - 1, x) for x in arriving.values()]
        return arriving, self._start(sent, received)

    def pass_gradients(
        self, totals: _Chunks, step: int, found: tuple[Route, ...], like: tuple[Tensor, ...]
    ) -> tuple[_Chunks, list[Any]]:
        """Starts sending the gradients of other processes' chunks after a step: on, or home after
        the last one. Returns what arrives: for the next step's chunks, and for own chunks.
        """
        sent = [
            (self.rank + 1 if found[c].last > step else owner_of(self.size, c), chunk)
            for c, chunk in totals.items()
        ]
        passed = [c for c in self.chunks_at(step + 1) if found[c].first <= step < found[c].last]
        home = [c for c in self.chunks_at(0) if found[c].last == step]
        arriving = _empty(like, [*passed, *home])
        sources = [self.rank - 1] * len(passed) + [self.rank + step] * len(home)
        return arriving, self._start(sent, [*zip(sources, arriving.values(), strict=True)])

    def _start(
        self,
        sent: list[tuple[int, tuple[Tensor, ...]]],
        received: list[tuple[int, tuple[Tensor, ...]]],
    ) -> list[Any]:
        """Starts transfers to and from processes, whose ranks are meant modulo P."""
        transfers = [
            dist.P2POp(operation, x, self._global(rank % self.size), self.group)
            for operation, chunks in ((dist.isend, sent), (dist.irecv, received))
            for rank, chunk in chunks
            for x in chunk
        ]
        return dist.batch_isend_irecv(transfers) if transfers else []

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


def _empty(like: tuple[Tensor, ...], chunks: list[int]) -> _Chunks:
    return {c: tuple(x.new_empty(x.shape) for x in like) for c in chunks}


def _contiguous(chunks: _Chunks) -> _Chunks:
    return {c: tuple(x.contiguous() for x in chunk) for c, chunk in chunks.items()}


def _wait(transfers: list[Any]) -> None:
    for transfer in transfers:
        transfer.wait()


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
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=wide)
        found, held = ring.routes(call), _contiguous(ring.own_chunks((k, v)))
        like = next(iter(held.values()))
        for step in range(ring.size):
            arriving, transfers = ring.pass_on(held, step, found, like)
            for c, (chunk_k, chunk_v) in held.items():
                inputs = Inputs(q, chunk_k, chunk_v, mask, distance_bias)
                for block in ring.blocks(call, c):
                    merge(block.of_rows(out), block.of_rows(lse), *block.forward(inputs))
            _wait(transfers)
            held = arriving
        if sinks is not None:
            merge_sinks(out, lse, sinks, call.query_lengths, ring.positions(call, q.device))
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, mask, distance_bias, sinks, result, lse)
        ctx.ring, ctx.call = ring, call
        ctx.set_materialize_grads(False)
        return result, lse

    @staticmethod
    @first_only
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, mask, bias, sinks, out, lse = ctx.saved_tensors
        ring, call, needs, wide = ctx.ring, ctx.call, ctx.needs_input_grad, lse.dtype
        inputs = Inputs(q, k, v, mask, bias)
        totals = [
            None if x is None or not need else torch.zeros(x.shape, dtype=wide, device=x.device)
            for x, need in zip(inputs, needs, strict=False)
        ]
        dq, dk, dv, dmask, dbias = totals
        found, held = ring.routes(call), _contiguous(ring.own_chunks((k, v)))
        like = next(iter(held.values()))
        own = ring.own_chunks(tuple(x for x in (dk, dv) if x is not None))
        gradient_like = next(iter(own.values()))

        arrived, gradient_transfers = _Chunks(), list[Any]()
        for step in range(ring.size):
            arriving, transfers = ring.pass_on(held, step, found, like)
            of_chunks = own
            if step > 0:
                needed = [c for c in held if found[c].first <= step]
                of_chunks = {c: tuple(x.new_zeros(x.shape) for x in gradient_like) for c in needed}
            for c, (chunk_k, chunk_v) in held.items():
                for block in ring.blocks(call, c):
                    chunk = iter(of_chunks[c])
                    chunk_totals = [next(chunk) if need else None for need in needs[1:3]]
                    parts = block.backward(
                        inputs._replace(k=chunk_k, v=chunk_v), out, lse, dout, dlse, needs[:5]
                    )
                    block.add_to((dq, *chunk_totals, dmask, dbias), parts)
            _wait(gradient_transfers)
            _add(arrived, own | of_chunks)
            if step > 0:
                arrived, gradient_transfers = ring.pass_gradients(
                    of_chunks, step, found, gradient_like
                )
            _wait(transfers)
            held = arriving
        _wait(gradient_transfers)
        _add(arrived, own)

        dsinks = sink_gradients(sinks, out, lse, dout, dlse) if needs[5] else None
        gradients = (
            None if x is None or total is None else total.to(x.dtype)
            for total, x in zip(totals, inputs, strict=True)
        )
        return *gradients, dsinks, None, None


def _add(arrived: _Chunks, totals: _Chunks) -> None:
    for c, chunk in arrived.items():
        for total, x in zip(totals[c], chunk, strict=True):
            total.add_(x)
