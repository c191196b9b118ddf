"""A decoder cache in pages: sequences that start and end at different times share one pool.

A layer's pool `[P, page size, 2, H, D]` holds the keys and values of all sequences, those of their
memories too. Pages are taken when a sequence reaches them and returned when it ends, so that memory
is held for the positions there are. `attention(block_table=)` reads them in place.

The sequence in slot b of the batch has a position of its own. The pool, the block tables and the
positions are tensors of fixed size and address, so that a step can be recorded; which page is free
is known to the host alone, which writes the block tables between two steps.

Shapes: B slots, S positions of a step, H heads, D head dim.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn.nn.decoding import DecoderCache, LayerCache, Step

PAGE_SIZES = (16, 32, 64, 128, 256)  # those that the kernels of every backend read in place
# Belongs to no sequence: where slots without a sequence, and positions beyond an end, are written.
UNUSED_PAGE = 0


class PagedDecoderCache(DecoderCache):
    """A `DecoderCache` in pages. `TransformerDecoder.init_cache(page_size=)` makes it,
    `TransformerDecoder.restart(slots=)` starts new sequences in some of its slots, `release` ends
    sequences.

    lengths: of the sequence in each slot that has one, on the host, in place of `length`, which
    stays 0; replayed steps do not advance it. On the device: `position` `[B, 1]`, `memory_lengths`
    `[B]`.
    """

    def __init__(
        self,
        projected: Sequence[Tensor],
        max_length: int,
        memory_size: int,
        page_size: int,
        pages: int | None,
    ) -> None:
        """Without sequences, for memories whose keys and values are like `projected`."""
        if page_size not in PAGE_SIZES:
            raise ValueError(f"page_size must be one of {PAGE_SIZES}, got {page_size}")
        B, device = projected[0].shape[0], projected[0].device
        self.page_size, self._memory_size = page_size, memory_size
        widths = [max(self._count(size), 1) for size in (max_length, memory_size)]
        pages = B * sum(widths) if pages is None else pages
        self.lengths: dict[int, int] = {}
        self._free = list(range(pages, UNUSED_PAGE, -1))
        # For the targets and the memories: pages of each slot, and block tables on host and device.
        self._pages: tuple[list[list[int]], ...] = tuple([[] for _ in range(B)] for _ in widths)
        self._host = [torch.full((B, width), UNUSED_PAGE, dtype=torch.int32) for width in widths]
        self._tables = [table.to(device, copy=True) for table in self._host]
        pools = [kv.new_zeros(1 + pages, page_size, *kv.shape[2:]) for kv in projected]
        lengths = torch.zeros(B, dtype=torch.long, device=device)
        layers = [LayerCache(pool, pool) for pool in pools]
        super().__init__(layers, max_length, memory_lengths=lengths)

    def _allocate(self) -> None:
        assert self.memory_lengths is not None
        self.position = torch.zeros_like(self.memory_lengths)[:, None]

    @property
    def batch_size(self) -> int:
        return len(self.position)

    @property
    def memory_size(self) -> int:
        return self._memory_size

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def missing_pages(self, lengths: Mapping[int, int], memory_lengths: Iterable[int] = ()) -> int:
        """How many more pages are needed for the first `lengths[b]` positions of the sequence in
        each slot b, and for new sequences with these memories.
        """
        held = self._pages[0]
        more = sum(max(self._count(n) - len(held[slot]), 0) for slot, n in lengths.items())
        return more + sum(map(self._count, memory_lengths))

    def reserve(self, lengths: Mapping[int, int]) -> None:
        """Takes pages for the first `lengths[b]` positions of the sequence in each slot b.

        `step` does so itself; the replay of a recorded step does not.
        """
        missing = self.missing_pages(lengths)
        if missing:
            self._check_free(missing)
            for slot, length in lengths.items():
                self._take(0, slot, length)
            self._tables[0].copy_(self._host[0])

    def release(self, slots: Sequence[int]) -> None:
        """Ends the sequences in these slots and frees their pages."""
        self._check_slots(slots)
        for slot in slots:
            for pages, table in zip(self._pages, self._host, strict=True):
                self._free += reversed(pages[slot])
                pages[slot].clear()
                table[slot].fill_(UNUSED_PAGE)
            self.lengths.pop(slot, None)
        rows = torch.tensor(slots, dtype=torch.long, device=self.position.device)
        assert self.memory_lengths is not None
        for counter in (self.position, self.memory_lengths):
            counter.index_fill_(0, rows, 0)
        for table, host in zip(self._tables, self._host, strict=True):
            table.copy_(host)

    def restart(
        self, projected: Iterable[Tensor], lengths: Any, slots: Sequence[int] | None = None
    ) -> None:
        """Starts sequences in these slots, default all, in place of those that they hold.

        projected: keys and values of the memory `[len(slots), N, 2, H, D]` for each layer, of which
        `lengths` rows are read.
        """
        slots = range(self.batch_size) if slots is None else slots
        self._check_slots(slots)
        lengths = [max(0, min(n, self._memory_size)) for n in torch.as_tensor(lengths).tolist()]
        held = sum(len(pages[slot]) for pages in self._pages for slot in slots)
        self._check_free(self.missing_pages({}, lengths) - held)
        self.release(slots)
        for slot, length in zip(slots, lengths, strict=True):
            self._take(1, slot, length)
            self.lengths[slot] = 0
        self._tables[1].copy_(self._host[1])
        device = self.position.device
        chosen = torch.tensor(list(slots), dtype=torch.long, device=device)
        assert self.memory_lengths is not None
        self.memory_lengths.index_copy_(0, chosen, torch.tensor(lengths, device=device).long())

        at = torch.arange(max(lengths, default=0))
        tables = self._host[1][list(slots)].long()  # [slots, pages]
        rows = tables[:, at // self.page_size] * self.page_size + at % self.page_size
        real = at < torch.tensor(lengths)[:, None]
        rows, (b, n) = rows[real].to(device), (i.to(device) for i in real.nonzero(as_tuple=True))
        for layer, kv in zip(self.layers, projected, strict=True):
            layer.memory.flatten(0, 1).index_copy_(0, rows, kv[b, n].to(layer.memory.dtype))

    def step(self, positions: int) -> Step:
        ends = {slot: length + positions for slot, length in self.lengths.items()}
        self._check_end(max(ends.values(), default=0))
        self.reserve(ends)
        at = self.position
        if positions > 1:
            at = at + torch.arange(positions, device=at.device)  # [B, S]
            # Slots without a sequence may be at any position: the block table ends at max_length.
            at = at.clamp(max=self.max_length - 1)
        pages = self._tables[0].gather(1, at // self.page_size)
        rows = (pages * self.page_size).long() + at % self.page_size
        key_lengths = at + 1
        return Step(self, at, rows.flatten(), key_lengths[:, 0] if positions == 1 else key_lengths)

    def write(self, target: Tensor, step: Step, kv: Tensor) -> None:
        target.flatten(0, 1).index_copy_(0, step.rows, kv.flatten(0, 1))

    def target_options(self) -> dict[str, Any]:
        return {"block_table": self._tables[0]}

    def memory_options(self) -> dict[str, Any]:
        return {"key_lengths": self.memory_lengths, "block_table": self._tables[1]}

    def advance(self, positions: int) -> None:
        # Positions of slots without a sequence, or past a sequence's end in replays, stay bounded.
        self.position.add_(positions).clamp_(max=self.max_length - 1)
        for slot in self.lengths:
            self.lengths[slot] += positions

    def rewind(self) -> None:
        """Resets all sequences to position 0; they keep their pages."""
        self.position.zero_()
        self.lengths = dict.fromkeys(self.lengths, 0)

    def seek(self, position: Tensor) -> None:
        raise NotImplementedError("a paged cache has a position for each sequence: use restart")

    def reorder(self, rows: Tensor) -> None:
        raise NotImplementedError("a paged cache keeps its batch: use release and restart")

    def _count(self, length: int) -> int:
        return -(-length // self.page_size)

    def _check_slots(self, slots: Sequence[int]) -> None:
        if len(set(slots)) != len(slots) or not set(slots) <= set(range(self.batch_size)):
            raise ValueError(
                f"slots must be different numbers below {self.batch_size}, got {list(slots)}"
            )

    def _check_free(self, missing: int) -> None:
        if missing > len(self._free):
            total = len(self.layers[0].target) - 1
            raise ValueError(
                f"pages must be enough for all sequences, got {total}, of which {len(self._free)} "
                f"are free where {missing} more are needed"
            )

    def _take(self, kind: int, slot: int, length: int) -> None:
        pages = self._pages[kind][slot]
        while len(pages) < self._count(length):
            self._host[kind][slot, len(pages)] = page = self._free.pop()
            pages.append(page)
