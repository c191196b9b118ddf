"""From BEGIN to END: greedy search, sampling, beam search; translation of text, and BLEU.

`generate` decodes a batch of token ids, `Translator` texts. If the decoder has a key/value cache,
each step feeds one token per beam through it, on a GPU as one CUDA graph; any other decoder
recomputes the whole prefix, which gives the same tokens more slowly. A sentence's result does not
depend on the other sentences of its batch or on padding.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fastattn.functional import batch_invariant
from fastattn.nn.fusion import inherits, modules_of
from fastattn.nn.sharding import SINGLE, sharding_of
from fastattn.nn.step_graph import recorded
from fastattn.nn.transformer import TransformerEncoder

from .beam_search import BeamSearch, BeamState
from .continuations import CachedContinuations, Continuations, make_continuations
from .data import BEGIN, END, PAD, SubwordTokenizer, pad, tidy
from .model import Seq2SeqTransformer, record_attention
from .non_autoregressive import NonAutoregressiveTransformer, parallel_decode
from .sampling import Sampling, SamplingSearch
from .search import Hypothesis, Request, Search, SingleSearch, most_likely, run


@dataclass(frozen=True)
class Greedy:
    """The most likely token at every step."""


Strategy: TypeAlias = Greedy | Sampling | BeamSearch
GREEDY = Greedy()

# Sizes are rounded up to multiples of these, so that similar batches share one recorded step.
MEMORY_SIZES = 16
STEPS = 32
# Largest number of source tokens of a batch whose encoding is recorded, too, on a CPU: the
# encoder's Python would take as long as its products (d256 3+3, one sentence of 24 tokens, 24 new
# ones, one Zen 5 thread, fp32 and bf16: 10.3 and 6.0 ms instead of 11.3 and 6.8; 8 sentences in
# bf16: 13.0 instead of 14.2). While it is recorded, all its tensors are kept: 36 MB with 256 of
# d512 6+6.
RECORDED_TOKENS = 256
_ENCODINGS = 4  # of different lengths that a program keeps


@dataclass
class _Program:
    """A search with its tensors, and the function that advances it by one step."""

    continuations: CachedContinuations
    search: Search
    advance: Callable[[], None]
    _encodings: dict[int, _Encoding] = field(default_factory=dict)  # by length, the newest last

    def restart(self, model: Seq2SeqTransformer, source: Tensor, padding: Tensor) -> None:
        """Replace the sentences by others."""
        size = source.shape[1]
        if (
            source.device.type != "cpu"
            or source.numel() > RECORDED_TOKENS
            or type(model.transformer.encoder) is not TransformerEncoder
            or not inherits(model, Seq2SeqTransformer, "encode")
        ):
            self.continuations.restart(model.encode(source, padding))
            return
        if size not in self._encodings:
            if len(self._encodings) == _ENCODINGS:
                del self._encodings[next(iter(self._encodings))]
            self._encodings[size] = _Encoding(model, self.continuations, source, padding)
        self._encodings[size](source, padding)


class _Encoding:
    """Encodes sources of one size and restarts from them; recorded at the first call."""

    def __init__(
        self,
        model: Seq2SeqTransformer,
        continuations: CachedContinuations,
        source: Tensor,
        padding: Tensor,
    ) -> None:
        self._source, self._padding = torch.empty_like(source), torch.empty_like(padding)

        def restart() -> None:
            continuations.restart(model.encode(self._source, self._padding))

        self._restart = recorded(restart, lambda: None, source.device, results=lambda: ())

    def __call__(self, source: Tensor, padding: Tensor) -> None:
        self._source.copy_(source)
        self._padding.copy_(padding)
        self._restart()


@dataclass
class Programs:
    """Decoding programs kept for later batches of the same sizes: a step is recorded once, on a CPU
    also the encoding of a small batch.

    For one model; the newest `keep` stay in memory. Values of parameters may change in place; after
    other changes, such as of a module's attributes, use new `Programs`.
    """

    keep: int = 4
    _kept: OrderedDict[Hashable, _Program] = field(default_factory=OrderedDict)

    def take(self, key: Hashable) -> _Program | None:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def put(self, key: Hashable, program: _Program) -> None:
        self._kept[key] = program
        while len(self._kept) > self.keep:
            self._kept.popitem(last=False)


@torch.no_grad()
@batch_invariant()
def generate(
    model: Seq2SeqTransformer,
    source: Tensor,
    source_padding: Tensor,
    *,
    max_lengths: Sequence[int],
    strategy: Strategy = GREEDY,
    prefixes: Sequence[Sequence[int]] | None = None,
    numbers: Sequence[int] | None = None,
    return_attention: bool = False,
    use_cache: bool | None = None,
    programs: Programs | None = None,
) -> list[list[Hypothesis]]:
    """Return the hypotheses of each source of a batch, best first; only beam search has several.

    Args:
        source, source_padding: [B, S]; padding must be on the right.
        max_lengths: for each source the maximum tokens of its result, END and prefix included.
        strategy: `Greedy()`, `Sampling(...)` or `BeamSearch(...)`.
        prefixes: for each source the tokens that its result begins with; they count in scores.
        numbers: the stream of random numbers for each source in `Sampling`, default 0, 1, 2, ...
        return_attention: return the decoder's attention over the source for the best hypothesis,
            from one more run of the model.
        use_cache: None means if the decoder has one.
        programs: reuses recorded steps and encodings for batches of the same sizes, see
            `Programs`.

    The model must be in eval mode.
    """
    request = Request(max_lengths, prefixes)
    if not len(source) and not max_lengths:
        return []
    _check(model, source, source_padding, request)
    if isinstance(model, NonAutoregressiveTransformer):
        if strategy != GREEDY or prefixes is not None or return_attention:
            raise ValueError(
                "strategy must be Greedy(), without prefixes or attention, for a model that "
                f"predicts all tokens in parallel, got {strategy}"
            )
        return parallel_decode(model, source, source_padding, max_lengths)
    search, advance = _search(model, source, source_padding, strategy, request, use_cache, programs)
    if isinstance(search, SamplingSearch):
        search.draw_numbers(range(len(source)) if numbers is None else numbers)
    run(search, advance, request.limit)
    results = search.hypotheses()
    return _with_attention(model, source, source_padding, results) if return_attention else results


def greedy_decode(
    model: Seq2SeqTransformer,
    source: Tensor,
    source_padding: Tensor,
    *,
    max_lengths: Sequence[int],
    use_cache: bool | None = None,
) -> list[list[int]]:
    """Return only the tokens of greedy search, without END; see `generate`."""
    results = generate(model, source, source_padding, max_lengths=max_lengths, use_cache=use_cache)
    return [hypotheses[0].tokens for hypotheses in results]


def _check(
    model: Seq2SeqTransformer, source: Tensor, source_padding: Tensor, request: Request
) -> None:
    if model.training:
        raise ValueError("model must be in eval mode, got one in training mode")
    if len(request.max_lengths) != len(source):
        raise ValueError(
            f"max_lengths must hold one length for each of {len(source)} sources, "
            f"got {len(request.max_lengths)}"
        )
    if bool((source_padding[:, :-1] & ~source_padding[:, 1:]).any()):
        raise ValueError("source_padding must be on the right, got a token after padding")
    if sharding_of(model) is not SINGLE:
        raise ValueError(
            "model must be whole, got one that parallelize has divided: load "
            "full_state_dict(model) into one that was not"
        )
    B, limits = len(request.max_lengths), request.max_lengths
    if request.limit > model.config.max_length:
        raise ValueError(
            f"max_lengths must not exceed the model's max_length {model.config.max_length}, "
            f"got {request.limit}"
        )
    if request.prefixes is None:
        return
    if len(request.prefixes) != B:
        raise ValueError(
            f"prefixes must hold one prefix for each of {B} sources, got {len(request.prefixes)}"
        )
    for prefix, limit in zip(request.prefixes, limits, strict=True):
        if len(prefix) > limit:
            raise ValueError(
                f"prefixes must not be longer than their max_lengths, got {len(prefix)} tokens "
                f"for {limit}"
            )
        if not all(END < t < model.config.vocabulary for t in prefix):
            raise ValueError(f"prefixes must hold ordinary tokens, got {list(prefix)}")


def _search(
    model: Seq2SeqTransformer,
    source: Tensor,
    source_padding: Tensor,
    strategy: Strategy,
    request: Request,
    use_cache: bool | None,
    programs: Programs | None,
) -> tuple[Search, Callable[[], None]]:
    """A search for this request, new or kept, and the function that advances it."""
    modules = modules_of(model)
    hooked = _has_hooks(modules)
    parameters = [p for m in modules for p in m._parameters.values() if p is not None]
    programs = None if hooked or use_cache is False else programs
    B, S = source.shape
    size, steps = _round_up(S, MEMORY_SIZES), _round_up(request.limit, STEPS)
    # The random numbers of a sampling strategy are inputs of the program, not part of it.
    fixed = replace(strategy, seed=0) if isinstance(strategy, Sampling) else strategy
    key = (fixed, B, size, steps, request.prefixes is not None, *_fingerprint(model, parameters))
    program = None if programs is None else programs.take(key)
    if program is not None:
        program.restart(model, source, source_padding)
        if isinstance(program.search, SamplingSearch):
            program.search.seed = strategy.seed  # type: ignore[union-attr]
        program.search.start(request)
        return program.search, program.advance
    continuations = make_continuations(
        model,
        model.encode(source, source_padding),
        beams=strategy.beams if isinstance(strategy, BeamSearch) else 1,
        max_length=steps,
        memory_size=size,
        use_cache=use_cache,
    )
    search = _make_search(continuations, strategy, request, steps)
    if not isinstance(continuations, CachedContinuations) or hooked:
        return search, search.step
    device = source.device
    if programs is None and device.type != "cpu":
        # Recording a graph takes longer than a few dozen steps: only worth it if it is kept.
        return search, search.step
    advance = recorded(search.step, search.rewind, device, weights=parameters)
    if programs is not None:
        programs.put(key, _Program(continuations, search, advance))
    return search, advance


def _has_hooks(modules: Sequence[nn.Module]) -> bool:
    """Whether modules have hooks, which a replay of a recorded step does not run."""
    return _has_any_global_hook() or any(m._forward_hooks or m._forward_pre_hooks for m in modules)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _fingerprint(model: Seq2SeqTransformer, parameters: Sequence[Tensor]) -> tuple[Hashable, ...]:
    """The state that a recorded step depends on: modes, and the addresses of the parameters."""
    device = model.embedding.weight.device.type
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    mode = torch.is_inference_mode_enabled()  # whose tensors cannot be written outside of it
    return (autocast, mode, *(p.data_ptr() for p in parameters))


def _make_search(
    continuations: Continuations, strategy: Strategy, request: Request, steps: int
) -> Search:
    if isinstance(strategy, BeamSearch):
        return BeamState(continuations, strategy, request, steps=steps)
    if isinstance(strategy, Sampling):
        return SamplingSearch(continuations, strategy, request, steps=steps)
    return SingleSearch(continuations, most_likely, request, steps=steps)


def _with_attention(
    model: Seq2SeqTransformer,
    source: Tensor,
    source_padding: Tensor,
    results: list[list[Hypothesis]],
) -> list[list[Hypothesis]]:
    """The best hypotheses with the attention of each layer over the source."""
    targets = [best.tokens + [END] * best.ended for best, *_ in results]
    shifted = [[BEGIN, *tokens[:-1]] for tokens in targets]
    with record_attention(model) as weights:
        model(source, pad(shifted).to(source.device), source_padding)
    layers = [
        weights[f"decoder.layers.{i}.multihead_attn"] for i in range(model.config.decoder_layers)
    ]
    stacked = torch.stack(layers, dim=1).float()  # [B, layers, H, T, S]
    sizes = (~source_padding).sum(dim=1).tolist()
    return [
        [replace(found[0], attention=stacked[b, :, :, : len(targets[b]), :size]), *found[1:]]
        for b, (found, size) in enumerate(zip(results, sizes, strict=True))
    ]


@dataclass(frozen=True)
class Translation:
    """A text's translation; `hypothesis` is None if the text is empty."""

    text: str
    hypothesis: Hypothesis | None


@dataclass(frozen=True)
class Translator:
    """A model with its tokenizer: text in, text out."""

    model: Seq2SeqTransformer
    tokenizer: SubwordTokenizer
    programs: Programs = field(default_factory=Programs, repr=False, compare=False)

    def translate(
        self,
        texts: Sequence[str],
        *,
        max_length: int | None = None,
        batch_size: int = 64,
        strategy: Strategy = GREEDY,
        use_cache: bool | None = None,
        notify: Callable[[int], None] = lambda _: None,
    ) -> list[str]:
        """Translate sentences, in batches of similar length; `notify` receives the count so far.

        A translation has at most `max_length` tokens, by default twice those of its source plus
        ten. A source longer than the model allows raises ValueError; an empty one stays empty.
        """
        results = self.search(
            texts,
            max_length=max_length,
            batch_size=batch_size,
            strategy=strategy,
            use_cache=use_cache,
            notify=notify,
        )
        return [result.text for result in results]

    def search(
        self,
        texts: Sequence[str],
        *,
        prefixes: Sequence[str] | None = None,
        max_length: int | None = None,
        batch_size: int = 64,
        strategy: Strategy = GREEDY,
        return_attention: bool = False,
        use_cache: bool | None = None,
        notify: Callable[[int], None] = lambda _: None,
    ) -> list[Translation]:
        """Translate as `translate` does and return tokens, scores and, on request, attention.

        prefixes: for each text the words that its translation begins with, or "".
        """
        if isinstance(texts, str):
            raise TypeError(f"texts must be a sequence of sentences, got one: {texts[:60]!r}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length}")
        if prefixes is not None and len(prefixes) != len(texts):
            raise ValueError(
                f"prefixes must hold one for each of {len(texts)} texts, got {len(prefixes)}"
            )
        allowed = self.model.config.max_length
        sources = self.tokenizer.encode_sentences(texts)
        begins = None if prefixes is None else self.tokenizer.encode_all(prefixes)
        for number, ids in enumerate(sources, start=1):
            if len(ids) > allowed:
                raise ValueError(
                    f"text {number} must have at most {allowed - 1} tokens, got {len(ids) - 1}: "
                    f"{texts[number - 1][:60]!r}"
                )
        limits = [
            min(allowed, 2 * len(ids) + 8 if max_length is None else max_length) for ids in sources
        ]
        device = self.model.embedding.weight.device
        results = [Translation("", None)] * len(texts)
        filled = (i for i, text in enumerate(texts) if tidy(text))
        order = sorted(filled, key=lambda i: len(sources[i]))
        was_training = self.model.training
        self.model.eval()
        try:
            for start in range(0, len(order), batch_size):
                chosen = order[start : start + batch_size]
                source = pad([sources[i] for i in chosen]).to(device)
                found = generate(
                    self.model,
                    source,
                    source == PAD,
                    max_lengths=[limits[i] for i in chosen],
                    strategy=strategy,
                    prefixes=None if begins is None else [begins[i] for i in chosen],
                    numbers=chosen,
                    return_attention=return_attention,
                    use_cache=use_cache,
                    programs=self.programs,
                )
                for i, (best, *_) in zip(chosen, found, strict=True):
                    results[i] = Translation(self.tokenizer.decode(best.tokens), best)
                notify(start + len(chosen))
        finally:
            self.model.train(was_training)
        return results


@dataclass(frozen=True)
class Bleu:
    """Corpus BLEU, 0 to 100; `signature` names sacrebleu's settings."""

    score: float
    details: str
    signature: str


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> Bleu:
    """Return sacrebleu's corpus BLEU (13a tokens, letter case kept) with one reference each."""
    from sacrebleu.metrics.bleu import BLEU

    if not hypotheses:
        raise ValueError("hypotheses must hold at least one sentence, got none")
    if len(hypotheses) != len(references):
        raise ValueError(
            f"references must be as many as the {len(hypotheses)} hypotheses, got {len(references)}"
        )
    metric = BLEU()
    score = metric.corpus_score(list(hypotheses), [list(references)])
    return Bleu(score.score, str(score), str(metric.get_signature()))


def chrf(hypothesis: str, reference: str) -> float:
    """Return sacrebleu's chrF of one sentence, 0 to 100."""
    from sacrebleu.metrics.chrf import CHRF

    return float(CHRF().sentence_score(hypothesis, [reference]).score)
