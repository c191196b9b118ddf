"""Quality and speed of trained runs, for `fastattn evaluate`."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .beam_search import BeamSearch
from .data import Pair
from .generation import GREEDY, Strategy, bleu
from .progress import Progress
from .runs import load_translator, open_run, prepare_text


@dataclass(frozen=True)
class Evaluation:
    """A run's results on its test part; `bleu_of_source` is the BLEU of the untranslated source."""

    run: str
    decoder: str
    search: str
    bleu: float
    bleu_of_source: float
    bleu_signature: str
    sentences: int
    seconds: float
    test_part: str  # a digest of the sentences

    @property
    def sentences_per_second(self) -> float:
        return self.sentences / self.seconds


def evaluate_run(
    run: Path,
    pairs: Sequence[Pair],
    *,
    strategy: Strategy = GREEDY,
    device: torch.device | str = "cpu",
    show: bool = True,
) -> Evaluation:
    """Translate the test part of the text that `run` was trained on and score it.

    A decoder that predicts all tokens in parallel ignores `strategy`. Set-up is not timed: a few
    sentences are translated before the clock starts.
    """
    files = open_run(run)
    prepared = prepare_text(
        pairs,
        held_out=files.held_out,
        seed=files.training.seed,
        max_length=files.model.max_length,
        vocabulary=files.tokenizer,
        show=show,
    )
    if prepared.digest != files.data_digest:
        raise ValueError(f"pairs must be the text that {run} was trained on, got another text")
    parallel = files.model.decoder == "non-autoregressive"
    strategy = GREEDY if parallel else strategy
    translator = load_translator(run, device=device)
    sources, references = zip(*prepared.test, strict=True)
    translator.translate(sources[:64], strategy=strategy)
    started = time.perf_counter()
    with Progress(f"translating with {run}", len(sources), show=show) as progress:
        translations = translator.translate(sources, strategy=strategy, notify=progress.update)
    seconds = time.perf_counter() - started
    score = bleu(translations, references)
    beams = f"{strategy.beams} beams" if isinstance(strategy, BeamSearch) else ""
    return Evaluation(
        run=str(run),
        decoder=f"{files.model.decoder} ({files.model.length})"
        if parallel
        else files.model.decoder,
        search="parallel" if parallel else beams or type(strategy).__name__.lower(),
        bleu=score.score,
        bleu_of_source=bleu(sources, references).score,
        bleu_signature=score.signature,
        sentences=len(sources),
        seconds=seconds,
        test_part=hashlib.sha256(repr(prepared.test).encode()).hexdigest()[:12],
    )
