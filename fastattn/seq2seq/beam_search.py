"""Beam search: keeps the best K unfinished hypotheses of every sentence.

Each step considers the 2K best continuations. Those that end and are among the first K join the
finished hypotheses, of which the best K are kept; the best K others continue. A finished hypothesis
Y is ranked by log P(Y) / lp(|Y|), END counted, where lp(n) = ((5 + n) / 6)^length_penalty (Wu et
al. 2016, equation 14) or n^length_penalty. A sentence is done when K hypotheses have ended and,
unless `early_stopping`, no unfinished one can still overtake the last of them.

Every step stores its choices, token and parent; at the end hypotheses are read backwards from
them. Until then, reordering changes only the ancestry mask of the cache.

Shapes: B sentences, K beams, T steps, V vocabulary, C candidates of a beam.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .continuations import Continuations
from .data import BEGIN, END, NEVER_CHOSEN
from .search import FREE, Hypothesis, Request, largest_logits

NEG_INF = float("-inf")


@dataclass(frozen=True)
class BeamSearch:
    """Options of beam search; `length_penalty` 0 ranks by probability, larger favours length."""

    beams: int = 4
    length_penalty: float = 0.6
    early_stopping: bool = False

    def __post_init__(self) -> None:
        if self.beams < 1:
            raise ValueError(f"beams must be at least 1, got {self.beams}")
        if not 0.0 <= self.length_penalty < float("inf"):
            raise ValueError(f"length_penalty must be at least 0, got {self.length_penalty}")


def length_factor(length: int | Tensor, options: BeamSearch) -> float | Tensor:
    """The divisor of the log-probability of a hypothesis of `length` tokens."""
    return ((5 + length) / 6) ** options.length_penalty


class BeamState:
    """A search in progress; see `search.Search`."""

    def __init__(
        self, continuations: Continuations, options: BeamSearch, request: Request, *, steps: int
    ) -> None:
        self._continuations = continuations
        self._options = options
        B, K, device = len(request.max_lengths), options.beams, continuations.device

        def integers(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.long, device=device)

        self._forces = request.prefixes is not None
        self._forced = integers(steps, B)
        self._limits = integers(B)
        self._factors = length_factor(torch.arange(steps + 1), options).to(device)  # type: ignore[union-attr]
        self._largest = torch.empty(B, device=device)  # factor at each sentence's limit
        self._neg_inf = torch.full((), NEG_INF, device=device)
        self._step = integers(1)
        self._beam = torch.arange(K, device=device)
        self._last = integers(B, K)
        self._scores = torch.empty(B, K, device=device)  # log-probabilities of the unfinished
        self._tokens, self._parents = integers(steps, B, K), integers(steps, B, K)
        # Finished hypotheses, best first: their scores, and where each ends, as one number from
        # the number of tokens, the beam of the last one and whether END followed it.
        self._pool = torch.empty(B, K, device=device)
        self._pool_place = integers(B, K)
        self._cut_place = (self._beam * 2 + 2 * K).expand(B, K)  # at step 0
        self.ended = torch.empty(B, dtype=torch.bool, device=device)
        self.start(request)

    def start(self, request: Request) -> None:
        if self._forces:
            self._forced.copy_(request.forced(len(self._forced)))
        self._limits.copy_(torch.tensor(request.max_lengths))
        self._largest.copy_(self._factors[self._limits.clamp(min=0)])
        self.rewind()

    def rewind(self) -> None:
        self._continuations.rewind()
        self._step.zero_()
        self._last.fill_(BEGIN)
        # All beams are at BEGIN, so only the first one counts.
        self._scores.fill_(NEG_INF)
        self._scores[:, 0].fill_(0.0)
        self._pool.fill_(NEG_INF)
        torch.le(self._limits, 0, out=self.ended)

    def step(self) -> None:
        K = self._options.beams
        scores, parents, tokens = self._candidates()  # [B, 2K], best first
        ends = tokens == END
        length = self._step + 1  # of a hypothesis that ends with this step's token, [1]
        factor = self._factors.index_select(0, length)

        finished = torch.where(ends, scores / factor, self._neg_inf)[:, :K]
        alive, order = scores.masked_fill(ends, NEG_INF).topk(K, dim=1)
        parent, token = parents.gather(1, order), tokens.gather(1, order)
        self._tokens.index_copy_(0, self._step, token[None])
        self._parents.index_copy_(0, self._step, parent[None])
        self._continuations.follow(parent)
        self._last.copy_(token)
        self._scores.copy_(alive)

        at_limit = (self._limits <= length)[:, None]
        cut = torch.where(at_limit, alive / factor, self._neg_inf)
        self._collect(finished, parents[:, :K], cut)
        self._step.add_(1)

        # The highest score that an unfinished hypothesis can still reach: tokens of probability 1
        # up to the limit. Log-probabilities are negative, so the largest divisor is the best.
        possible = alive[:, 0] / self._largest
        worst = self._pool[:, -1]
        settled = worst > NEG_INF
        if not self._options.early_stopping:
            settled = settled & (possible <= worst)
        self.ended.logical_or_(settled | at_limit[:, 0])

    def _candidates(self) -> tuple[Tensor, Tensor, Tensor]:
        """The 2K best continuations of each sentence: log-probability, parent, token."""
        K = self._options.beams
        logits = self._continuations.logits(self._last)  # [B, K, V]
        C = min(2 * K, logits.shape[-1] - NEVER_CHOSEN.stop)
        # [B, K], [B, K, C] twice
        logsumexp, best, tokens = largest_logits(logits, C)
        if self._forces:
            forced = self._forced.index_select(0, self._step)[0][:, None, None]  # [B, 1, 1]
            free = forced == FREE
            only = torch.full_like(best, NEG_INF)
            index = forced.clamp(min=0).expand(-1, K, 1)
            only[..., :1] = logits.gather(-1, index)
            best, tokens = torch.where(free, best, only), torch.where(free, tokens, forced)
        if C == 1:  # only END: add a second candidate of probability 0
            best = torch.cat([best, torch.full_like(best, NEG_INF)], -1)
            tokens, C = tokens.expand(-1, -1, 2), 2
        scores = self._scores[:, :, None] + (best - logsumexp[..., None])
        scores, order = scores.flatten(1).topk(2 * K, dim=1)
        parents = torch.div(order, C, rounding_mode="floor")
        return scores, parents, tokens.flatten(1).gather(1, order)

    def _collect(self, finished: Tensor, parents: Tensor, cut: Tensor) -> None:
        """Merge this step's hypotheses into the finished ones of sentences that have not ended."""
        K = self._options.beams
        new = torch.cat([finished, cut], dim=1).masked_fill(self.ended[:, None], NEG_INF)
        # A hypothesis that ends at this step holds the tokens of its parent, without END.
        steps = self._step * (2 * K)
        places = torch.cat(
            [self._pool_place, parents * 2 + (steps + 1), self._cut_place + steps], 1
        )
        pool, order = torch.cat([self._pool, new], dim=1).topk(K, dim=1)
        self._pool.copy_(pool)
        self._pool_place.copy_(places.gather(1, order))

    def hypotheses(self) -> list[list[Hypothesis]]:
        K = self._options.beams
        tokens, parents = self._tokens.tolist(), self._parents.tolist()
        results = []
        for b, (scores, places) in enumerate(
            zip(self._pool.tolist(), self._pool_place.tolist(), strict=True)
        ):
            found = []
            for score, place in zip(scores, places, strict=True):
                if score == NEG_INF:
                    continue
                ended = place % 2 == 1
                length, beam = divmod(place // 2, K)
                row = []
                for step in range(length - 1, -1, -1):
                    row.append(tokens[step][b][beam])
                    beam = parents[step][b][beam]
                factor = length_factor(length + ended, self._options)
                found.append(Hypothesis(row[::-1], score * float(factor), score, ended))
            results.append(found or [Hypothesis([], 0.0, 0.0, False)])
        return results
