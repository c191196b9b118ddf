"""Continuous batching: a sentence that has ended gives its place in the batch to the next one.

The places of the batch are the slots of a paged cache. Waiting sentences are encoded together as
soon as enough places are free; those that run continue meanwhile where they are. If the pages do
not suffice for all running sentences, the one that began last returns its pages and waits to begin
again, with the same result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastattn.nn.paged_decoding import PagedDecoderCache

from .continuations import CachedContinuations
from .data import pad
from .model import Seq2SeqTransformer
from .sampling import SamplingSearch
from .search import Hypothesis, Request, SingleSearch

# New sentences start when this share of the places is free: encoding several together is faster.
SHARE_OF_PLACES = 1 / 8


@dataclass(frozen=True)
class Sentence:
    """A source and what `generate` takes for it; number: its stream of random numbers."""

    source: Sequence[int]
    max_length: int
    prefix: Sequence[int]
    number: int


@dataclass
class ContinuousBatch:
    """A search over a paged cache without sequences, and what advances it by one step."""

    model: Seq2SeqTransformer
    continuations: CachedContinuations
    search: SingleSearch
    advance: Callable[[], None]
    unscored: int
    steps: int  # from one check for sentences that have ended to the next

    def run(self, sentences: Sequence[Sentence], notify: Callable[[int], None]) -> list[Hypothesis]:
        """The hypothesis of each sentence; they start in this order. `notify` receives the number
        of those that have ended.
        """
        cache, search = self._cache, self.search
        places = range(len(search.ended))
        results: dict[int, Hypothesis] = {}
        waiting = deque(range(len(sentences)))
        running: dict[int, int] = {}  # the sentence in each place, in the order of their start
        lengths: dict[int, int] = {}  # and its tokens after the next steps
        while waiting or running:
            free = [place for place in places if place not in running]
            if waiting and (not running or len(free) >= SHARE_OF_PLACES * len(places)):
                for place, i in zip(free, self._start(sentences, waiting, free), strict=False):
                    running[place], lengths[place] = i, 0
            for place, i in running.items():
                lengths[place] = min(lengths[place] + self.steps, sentences[i].max_length)
            while cache.missing_pages(lengths) > cache.free_pages:
                place, i = running.popitem()
                del lengths[place]
                waiting.appendleft(i)
                cache.release([place])
            cache.reserve(lengths)
            for _ in range(self.steps):
                self.advance()
            ended = search.ended.tolist()
            done = [place for place in running if ended[place]]
            if done:
                for place, found in zip(done, search.results(done), strict=True):
                    results[running.pop(place)] = found
                    del lengths[place]
                cache.release(done)
                notify(len(results))
        return [results[i] for i in range(len(sentences))]

    @property
    def _cache(self) -> PagedDecoderCache:
        cache = self.continuations.cache
        assert isinstance(cache, PagedDecoderCache)
        return cache

    def _start(
        self, sentences: Sequence[Sentence], waiting: deque[int], free: Sequence[int]
    ) -> list[int]:
        """Starts the next sentences in free places as far as there are pages; returns which."""
        cache, special = self._cache, self.model.config.special
        # One page more for each sentence: for its first tokens, or for the next ones.
        pages = cache.free_pages - (len(self.search.ended) - len(free))
        started: list[int] = []
        while waiting and len(started) < len(free):
            pages -= cache.missing_pages({}, [len(sentences[waiting[0]].source)]) + 1
            if pages < 0:
                break
            started.append(waiting.popleft())
        if not started:
            return started
        places, chosen = free[: len(started)], [sentences[i] for i in started]
        source = pad([s.source for s in chosen], special.pad).to(self.continuations.device)
        self.continuations.restart(self.model.encode(source, source == special.pad), places)
        prefixes = [s.prefix for s in chosen]
        self.search.replace(
            places, Request([s.max_length for s in chosen], prefixes, self.unscored)
        )
        if isinstance(self.search, SamplingSearch):
            self.search.draw_numbers([s.number for s in chosen], places)
        return started
