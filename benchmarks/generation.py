"""Greedy and beam search decoding of a fixed number of tokens: workloads, check and calls.

The oracle is torch.nn.Transformer in fp64 with the same weights, run on whole prefixes: each token
that a greedy candidate chose must have the largest logit there, within the error budget of a logit,
and the log-probability that beam search returns must be that of its hypothesis. For a model with
other weights only the number of tokens is checked. END is unlikely: all decode equally long.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fastattn
from benchmarks.implementations import Implementation, Task
from benchmarks.model import requested_backends, requesting
from benchmarks.op_benchmark import Benchmark, Verdict
from fastattn.testing.compare import compare
from fastattn.testing.spec import Inputs, Workload
from fastattn.testing.timing import Call, peak_memory

GENERATION = "generation"
_CHECKED_SENTENCES = 2


@dataclass(frozen=True)
class DecodeSize:
    """d_model, heads, feed-forward width, layers of each stack, vocabulary; batch, source tokens,
    new tokens, beams.
    """

    d: int
    heads: int
    ff: int
    layers: int
    vocabulary: int
    B: int
    S: int
    new: int
    beams: int = 1


@dataclass(frozen=True)
class DecodeWorkload(Workload):
    size: DecodeSize = DecodeSize(0, 0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Decoded:
    """tokens [B, new] of the best hypotheses; log_probabilities [B] if the candidate returns them.

    own_weights: the model does not have the oracle's weights.
    """

    tokens: Tensor
    log_probabilities: Tensor | None = None
    own_weights: bool = False


def _workload(size: DecodeSize, devices: tuple[str, ...]) -> DecodeWorkload:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        from fastattn.seq2seq.data import END

        source = torch.randint(END + 1, size.vocabulary, (size.B, size.S), generator=generator,
                               device=generator.device)  # fmt: skip
        return {"source": source.to(device)}

    name = f"d{size.d}_h{size.heads}_b{size.B}_s{size.S}_new{size.new}"
    name += f"_beams{size.beams}" if size.beams > 1 else ""
    features = ("beams",) if size.beams > 1 else ()
    return DecodeWorkload(name, make, (), 0.0, 0.0, 0.0, 0.0, features, devices, size)


DECODE_WORKLOADS = (
    *[_workload(DecodeSize(512, 8, 2048, 6, 32000, B, 64, 128), ("cuda",)) for B in (1, 32, 256)],
    _workload(DecodeSize(512, 8, 2048, 6, 32000, 32, 64, 128, beams=4), ("cuda",)),
    *[_workload(DecodeSize(256, 4, 1024, 3, 8000, B, 24, 24), ("cpu",)) for B in (1, 8, 64)],
    *[_workload(DecodeSize(256, 4, 1024, 3, 8000, B, 24, 24, beams=4), ("cpu",)) for B in (2, 16)],
    *[_workload(DecodeSize(512, 8, 2048, 6, 32000, B, 32, 32), ("cpu",)) for B in (1, 8)],
    *[_workload(DecodeSize(512, 8, 2048, 6, 32000, B, 32, 32, beams=4), ("cpu",)) for B in (2, 16)],
)


# -- implementations -------------------------------------------------------------------------------
def build_model(
    size: DecodeSize,
    kind: type[nn.Transformer],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype,
) -> Any:
    """The token model of a size, in eval mode; all `kind`s have the same weights."""
    from fastattn.seq2seq.data import BEGIN, END, PAD
    from fastattn.seq2seq.model import ModelConfig, Seq2SeqTransformer

    torch.manual_seed(0)
    config = ModelConfig(
        size.vocabulary,
        size.d,
        size.heads,
        size.layers,
        size.layers,
        size.ff,
        tied=False,  # with random tied weights every next token is the last one
        max_length=max(size.S, size.new + 1),
    )
    model = Seq2SeqTransformer(config, kind)
    with torch.no_grad():
        # Their logits are 0, the largest ones are above 2: no search chooses these tokens.
        model.head.weight[[PAD, BEGIN, END]] = 0
    return model.to(device, dtype).eval()


def model_of(task: Task, kind: type[nn.Transformer]) -> Any:
    assert isinstance(task.workload, DecodeWorkload)
    return build_model(task.workload.size, kind, device=task.device, dtype=task.dtype)


def decode(model: Any, task: Task, *, keep_programs: bool) -> Any:
    """inputs -> Decoded, by fastattn's search with `model`."""
    from fastattn.seq2seq.beam_search import BeamSearch
    from fastattn.seq2seq.generation import GREEDY, Programs, generate

    assert isinstance(task.workload, DecodeWorkload)
    size = task.workload.size
    strategy = BeamSearch(size.beams, length_penalty=0.0) if size.beams > 1 else GREEDY
    programs = Programs() if keep_programs else None

    def forward(inputs: Inputs) -> Decoded:
        source = inputs["source"]
        found = generate(
            model,
            source,
            torch.zeros_like(source, dtype=torch.bool),
            max_lengths=[size.new] * len(source),
            strategy=strategy,
            programs=programs,
        )
        best = [hypotheses[0] for hypotheses in found]
        return Decoded(
            torch.tensor([h.tokens for h in best], device=source.device),
            torch.tensor([h.log_probability for h in best], dtype=torch.float64),
        )

    return forward


def fastattn_decoders(device_type: str) -> list[Implementation]:
    backends = requested_backends(device_type)

    def build(task: Task) -> Any:
        from fastattn import nn as fast_nn

        forward = decode(model_of(task, fast_nn.Transformer), task, keep_programs=True)

        def forward_with_backends(inputs: Inputs) -> Decoded:
            with requesting(backends):
                return forward(inputs)

        return forward_with_backends

    return [
        Implementation(
            "fastattn",
            (GENERATION,),
            build,
            version=lambda: fastattn.__version__,
            backend=backends or "automatic",
            is_fastattn=True,
        )
    ]


# -- the benchmark ---------------------------------------------------------------------------------
class GenerationBenchmark(Benchmark):
    def __init__(self, workload: DecodeWorkload, device: torch.device, dtype: torch.dtype):
        super().__init__(GENERATION, workload, device, dtype)
        size = workload.size
        self.shape = {"source": [size.B, size.S], "new": size.new}
        self.shape |= {"d": size.d, "heads": size.heads, "ff": size.ff, "layers": 2 * size.layers}
        self.shape |= {"vocabulary": size.vocabulary, "beams": size.beams}
        self.oracles: tuple[Any, Any] | None = None
        self.tokens: Tensor | None = None  # fastattn's, if it is a candidate

    def prepare_oracle(self, candidate: Implementation) -> None:
        if self.oracles is None:
            same = model_of(self.task, nn.Transformer)
            self.oracles = model_of(self.task, nn.Transformer).double(), same

    def check(self, candidate: Implementation, direction: str) -> Verdict:
        with torch.no_grad():
            decoded = self.forwards[candidate.name](self.inputs)
        verdict = Verdict()
        size, tokens = self.workload.size, decoded.tokens
        if tokens.shape != (size.B, size.new):
            verdict.fail(f"tokens: shape {list(tokens.shape)}, wanted {[size.B, size.new]}")
        elif decoded.own_weights:
            verdict.message = "own weights: checked by the number of tokens"
        else:
            self._check_tokens(decoded, verdict)
            if candidate.is_fastattn:
                self.tokens = tokens.cpu()
            elif verdict.ok and self.tokens is not None:
                same = int((self.tokens == tokens.cpu()).all(1).sum())
                verdict.message = f"{same} of {size.B} sentences have fastattn's tokens"
        return verdict

    @torch.no_grad()
    def _check_tokens(self, decoded: Decoded, verdict: Verdict) -> None:
        assert self.oracles is not None
        from fastattn.seq2seq.data import BEGIN, PAD

        tokens = decoded.tokens[:_CHECKED_SENTENCES]
        source = self.inputs["source"][:_CHECKED_SENTENCES]
        begin = torch.full_like(tokens[:, :1], BEGIN)
        prefixes = torch.cat([begin, tokens[:, :-1]], 1)
        padding = torch.zeros_like(source, dtype=torch.bool)
        exact, same = (oracle(source, prefixes, padding).cpu() for oracle in self.oracles)
        budget = compare(same, exact, same, exact.abs(), 0)
        chosen = tokens.cpu()[..., None]
        if self.workload.size.beams == 1:
            # Both logits may have the allowed error.
            allowed_logits = exact.clone()
            allowed_logits[..., [PAD, BEGIN]] = -torch.inf  # never chosen
            gap = float(
                (allowed_logits.amax(-1) - allowed_logits.gather(-1, chosen)[..., 0]).amax()
            )
            _limit(verdict, "tokens: a more likely one by", gap, 2 * budget.allowed)
        if decoded.log_probabilities is not None and verdict.ok:
            wanted = exact.log_softmax(-1).gather(-1, chosen)[..., 0].sum(-1)
            error = float((decoded.log_probabilities[:_CHECKED_SENTENCES] - wanted).abs().amax())
            allowed = 2 * budget.allowed * self.workload.size.new
            _limit(verdict, "log-probability: error", error, allowed)

    def calls(self, candidate: Implementation, direction: str) -> list[Call]:
        forward = self.forwards[candidate.name]

        def call() -> None:
            with torch.no_grad():
                forward(self.inputs)

        if hasattr(forward, "pid"):  # computed in another process, see `timing.cpu_clock`
            call.pid = forward.pid  # type: ignore[attr-defined]
            return [call]
        self.peaks[candidate.name, direction] = peak_memory(call, self.device)
        return [call]

    def work(self, direction: str) -> tuple[float, float]:
        return 0.0, 0.0

    def details(self, candidate: Implementation, direction: str) -> dict[str, Any]:
        positions = self.workload.size.B * self.workload.size.new
        work = {"positions": positions, "real_tokens": positions}
        return super().details(candidate, direction) | work


def _limit(verdict: Verdict, what: str, error: float, allowed: float) -> None:
    verdict.error, verdict.allowed = error, allowed
    if not error <= allowed:
        verdict.ok, verdict.message = False, f"{what} {error:.3g}, allowed {allowed:.3g}"
