"""Linear and softmax attention: time against length, and the loss of a language model.

Linear attention (Katharopoulos et al. 2020, equations 8 to 12) replaces exp(q k) by phi(q) phi(k),
phi = elu + 1, so that keys and values can be summed independently of the query: work grows linearly
with the length instead of quadratically. `python -m examples.ablations recurrence` decodes with it.

Data of the language model: the source text of Python's standard library, as characters. The
baseline is the entropy of single characters.

    python -m examples.linear_attention
"""

import math
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import fastattn
from examples import common
from fastattn.seq2seq.progress import Progress

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
WINDOW = 128
# Positions whose pairs are computed as a matrix product; the sums are carried from one chunk to the
# next.
CHUNK = 64


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return fastattn.attention(q, k, v, causal=True)


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The causal context `[B, H, S, D]` of q, k and v `[B, H, S, D]`, all positions in parallel."""
    return _divided(_causal_sums(phi(q), phi(k), _with_ones(v)))


def linear_step(q: Tensor, k: Tensor, v: Tensor, sums: Tensor) -> Tensor:
    """The context of the next positions, after a prefix whose sums of phi(k) [v, 1] are `sums`
    `[B, H, D, D + 1]`, to which those of the positions are added.
    """
    q, k, v = phi(q), phi(k), _with_ones(v)
    if q.shape[2] == 1:
        return _divided(q @ sums.add_(k.mT * v))
    found = _divided(_causal_sums(q, k, v) + q @ sums)
    sums.add_(k.mT @ v)
    return found


def phi(x: Tensor) -> Tensor:
    """elu(x) + 1; exp(x) for negative x, where adding 1 to elu would round."""
    return torch.where(x > 0.0, x + 1.0, x.clamp(max=0.0).exp())


def _with_ones(v: Tensor) -> Tensor:
    """v with a last column of ones, whose sum is that of the weights."""
    return F.pad(v, (0, 1), value=1.0)


def _divided(sums: Tensor) -> Tensor:
    return sums[..., :-1] / sums[..., -1:]


def _causal_sums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """sum_{j <= i} (q_i k_j) v_j of q, k `[B, H, S, D]` and v `[B, H, S, D + 1]`.

    Within a chunk it is a masked product of CHUNK² pairs; what comes before a chunk is one sum.
    """
    S = q.shape[2]
    chunks = -(-S // CHUNK)
    q, k, v = (
        F.pad(x, (0, 0, 0, chunks * CHUNK - S)).unflatten(2, (chunks, CHUNK)) for x in (q, k, v)
    )  # [B, H, chunks, CHUNK, D]
    sums = k.mT @ v  # [B, H, chunks, D, D + 1]
    # Not `sums.cumsum(2) - sums`, whose rounding errors grow with the keys of the chunk itself.
    before = F.pad(sums[:, :, :-1].cumsum(dim=2), (0, 0, 0, 0, 1, 0))
    out = q @ before + (q @ k.mT).tril() @ v
    return out.flatten(2, 3)[:, :, :S]


FORMS = {"softmax": softmax_attention, "linear": linear_attention}


def time_against_length(longest: int) -> dict[str, list[float]]:
    """Milliseconds of one forward, the minimum of five, for each length up to `longest`."""
    lengths = [length for length in LENGTHS if length <= longest]
    times: dict[str, list[float]] = {name: [] for name in FORMS}
    with Progress("timing", len(lengths)) as bar, torch.no_grad():
        for count, S in enumerate(lengths, start=1):
            q, k, v = torch.randn(3, 1, 4, S, 32).unbind()
            for name, attend in FORMS.items():
                best = math.inf
                for _ in range(5):
                    begin = time.perf_counter()
                    attend(q, k, v)
                    best = min(best, time.perf_counter() - begin)
                times[name].append(1e3 * best)
            bar.update(count, f"length {S}")
    return times


class LanguageModel(nn.Module):
    """Characters `[B, S]` -> logits `[B, S, characters]`, with either attention."""

    def __init__(self, characters: int, form: str, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.attend = FORMS[form]
        self.embedding = nn.Embedding(characters, width)
        self.positions = fastattn.nn.LearnedPositionalEncoding(width, WINDOW)
        self.projections = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.outputs = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.networks = nn.ModuleList(
            fastattn.nn.PositionWiseFFN(width, 2 * width, activation="gelu") for _ in range(layers)
        )
        self.norms = nn.ModuleList(fastattn.nn.AddNorm(width) for _ in range(2 * layers))
        self.logits = nn.Linear(width, characters)

    def forward(self, x: Tensor) -> Tensor:
        x = self.positions(self.embedding(x))
        for i, (project, output) in enumerate(zip(self.projections, self.outputs, strict=True)):
            heads = project(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
            attended = self.attend(*heads).transpose(1, 2).flatten(-2)
            x = self.norms[2 * i](x, output(attended))
            x = self.norms[2 * i + 1](x, self.networks[i](x))
        return self.logits(x)


def text() -> tuple[Tensor, int]:
    """The first half megabyte of source, as character codes."""
    folder = Path(sysconfig.get_path("stdlib"))
    source = "".join(p.read_text(encoding="utf-8") for p in sorted(folder.glob("[a-d]*.py")))
    codes = torch.tensor([min(ord(c), 127) for c in source[: 1 << 19]])
    return codes, 128


def entropy(codes: Tensor) -> float:
    """Nats per character, from the frequencies of single characters."""
    shares = codes.bincount().double() / len(codes)
    return -(shares[shares > 0] * shares[shares > 0].log()).sum().item()


def draw(times: dict[str, list[float]], losses: dict[str, list[float]], baseline: float) -> Figure:
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, colour in zip(FORMS, common.COLOURS, strict=False):
        left.loglog(LENGTHS[: len(times[name])], times[name], "o-", color=colour, label=name)
        right.plot(losses[name], color=colour, label=name, linewidth=0.8)
    left.set(xlabel="length", ylabel="ms per forward")
    right.axhline(baseline, color="0.6", linestyle=":", label="entropy of characters")
    right.set(xlabel="update", ylabel="loss (nats per character)")
    for axes in (left, right):
        axes.legend(frameon=False)
    return figure


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = common.options(__doc__, steps=300)
    parser.add_argument("--longest", type=int, default=LENGTHS[-1])
    settings = parser.parse_args(arguments)
    times = time_against_length(settings.longest)
    codes, characters = text()
    held_out = codes[-(1 << 15) :].view(-1, WINDOW)
    train = codes[: -(1 << 15)]
    losses, results = {}, {"baseline": entropy(codes)}
    for form in FORMS:
        torch.manual_seed(settings.seed)
        model = LanguageModel(characters, form)

        def loss(model: nn.Module = model) -> Tensor:
            begin = torch.randint(len(train) - WINDOW - 1, (24,))
            window = train[begin[:, None] + torch.arange(WINDOW + 1)]
            return F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())

        losses[form] = common.train(model, loss, settings.steps, title=form)
        with torch.no_grad():
            logits = model(held_out)[:, :-1]
            results[form] = F.cross_entropy(logits.flatten(0, 1), held_out[:, 1:].flatten()).item()
    print("held-out loss in nats per character (baseline: entropy of characters):")
    print(", ".join(f"{name} {value:.3f}" for name, value in results.items()))
    for i, S in enumerate(LENGTHS[: len(times["softmax"])]):
        print(f"length {S:5d}: " + ", ".join(f"{n} {t[i]:8.3f} ms" for n, t in times.items()))
    common.save(draw(times, losses, results["baseline"]), settings.out, "linear_attention.png")
    return results


if __name__ == "__main__":
    main()
