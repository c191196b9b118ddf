"""Common code of all searches for a translation: the request, the result, the loop.

A search keeps its state in tensors of fixed address. `step` advances every sentence of the batch by
one token on the device, without effect on ended ones, so that it can be recorded as a CUDA graph;
the host checks every few steps whether all have ended. A sentence's result does not depend on the
others. `SingleSearch` keeps one continuation (greedy, sampling), `beam_search` several.

Shapes: B sentences, K beams, T steps, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fastattn.functional import topk_logsumexp

from .continuations import Continuations
from .data import BEGIN, END, NEVER_CHOSEN, PAD

# Checking whether all sentences have ended synchronises with the GPU.
STEPS_BETWEEN_END_CHECKS = {"cpu": 1, "cuda": 8}
FREE = -1  # marks a position where no token is forced


@dataclass(frozen=True)
class Hypothesis:
    """A translation, without END; `log_probability` includes END if the hypothesis reached it.

    score: the value that ranked it, the log-probability under the length penalty, if any. ended:
    False if it was cut at its maximum length. attention: of each decoder layer over the source,
    [layers, H, tokens (and END), S], if requested.
    """

    tokens: list[int]
    log_probability: float
    score: float
    ended: bool
    attention: Tensor | None = None


@dataclass(frozen=True)
class Request:
    """The fixed values of each sentence: its maximum length and the tokens that it begins with."""

    max_lengths: Sequence[int]
    prefixes: Sequence[Sequence[int]] | None = None

    @property
    def limit(self) -> int:
        return max(self.max_lengths)

    def forced(self, steps: int) -> Tensor:
        """Token ids [T, B], FREE where the search chooses."""
        prefixes = self.prefixes or [()] * len(self.max_lengths)
        rows = [[*prefix, *[FREE] * (steps - len(prefix))] for prefix in prefixes]
        return torch.tensor(rows, dtype=torch.long).T.contiguous()


class Search(Protocol):
    ended: Tensor  # bool [B]

    def start(self, request: Request) -> None:
        """Rewind with a request of the same batch size and no more steps."""

    def rewind(self) -> None:
        """Return to BEGIN."""

    def step(self) -> None:
        """One more token for every sentence."""

    def hypotheses(self) -> list[list[Hypothesis]]:
        """For each sentence its results, best first."""


def run(search: Search, advance: Callable[[], None], limit: int) -> None:
    """Advance until all sentences have ended, at most `limit` times."""
    between = STEPS_BETWEEN_END_CHECKS.get(search.ended.device.type, 8)
    for step in range(1, limit + 1):
        advance()
        if step % between == 0 and bool(search.ended.all()):
            return


# The logits [B, V] of one step and its number [1] -> the chosen token and the logsumexp of the
# logits, [B] each. PAD and BEGIN are not chosen.
Choose = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class SingleSearch:
    """One token after the other by the rule `choose`; PAD and BEGIN are never chosen."""

    def __init__(
        self, continuations: Continuations, choose: Choose, request: Request, *, steps: int
    ) -> None:
        self._continuations = continuations
        self._choose = choose
        B, device = len(request.max_lengths), continuations.device
        self._forces = request.prefixes is not None
        self._forced = torch.empty(steps, B, dtype=torch.long, device=device)
        self._limits = torch.empty(B, dtype=torch.long, device=device)
        self._step = torch.zeros(1, dtype=torch.long, device=device)
        self._last = torch.empty(B, 1, dtype=torch.long, device=device)
        self._tokens = torch.empty(steps, B, dtype=torch.long, device=device)
        self._log_p = torch.empty(B, device=device)
        self.ended = torch.empty(B, dtype=torch.bool, device=device)
        self.start(request)

    def start(self, request: Request) -> None:
        if self._forces:
            self._forced.copy_(request.forced(len(self._forced)))
        self._limits.copy_(torch.tensor(request.max_lengths))
        self.rewind()

    def rewind(self) -> None:
        self._continuations.rewind()
        self._step.zero_()
        self._last.fill_(BEGIN)
        self._tokens.fill_(PAD)
        self._log_p.zero_()
        torch.le(self._limits, 0, out=self.ended)

    def step(self) -> None:
        logits = self._continuations.logits(self._last)[:, 0]  # [B, V]
        token, logsumexp = self._choose(logits, self._step)
        if self._forces:
            forced = self._forced.index_select(0, self._step)[0]
            token = torch.where(forced == FREE, token, forced)
        log_p = logits.gather(1, token[:, None])[:, 0] - logsumexp
        self._log_p.add_(log_p.masked_fill(self.ended, 0.0))
        token = token.masked_fill(self.ended, PAD)
        self._tokens.index_copy_(0, self._step, token[None])
        self._last.copy_(token[:, None])
        self._step.add_(1)
        self.ended.logical_or_((token == END) | (self._limits <= self._step))

    def hypotheses(self) -> list[list[Hypothesis]]:
        results = []
        for row, log_p in zip(self._tokens.T.tolist(), self._log_p.tolist(), strict=True):
            stop = next((i for i, token in enumerate(row) if token in (END, PAD)), len(row))
            ended = stop < len(row) and row[stop] == END
            results.append([Hypothesis(row[:stop], log_p, log_p, ended)])
        return results


def most_likely(logits: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """The rule of greedy search."""
    logsumexp, _, tokens = largest_logits(logits, 1)
    return tokens[..., 0], logsumexp


def largest_logits(logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The logsumexp of each row of logits [..., V], and the `count` largest logits of tokens that
    may be chosen, in descending order, with these tokens: [..., count].
    """
    return topk_logsumexp(logits, NEVER_CHOSEN.stop, count)
