"""Common code of the examples: options, a training loop with a progress bar, saving figures."""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from fastattn.seq2seq.progress import Progress
from fastattn.seq2seq.schedules import warmup_cosine

COLOURS = ("#0b6e99", "#d9730d", "#2e7d32", "#7b1fa2", "#616161", "#c2185b")


def options(description: str | None, steps: int | None = None) -> argparse.ArgumentParser:
    """The options that examples share; `--steps` if they have one number of updates."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n\n")[0])
    if steps is not None:
        help = "updates (default: %(default)s)"
        parser.add_argument("--steps", type=int, default=steps, help=help)
    parser.add_argument("--out", type=Path, default=Path("runs/examples"), help="folder of figures")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def train(
    model: nn.Module,
    loss_of_batch: Callable[[], Tensor],
    steps: int,
    *,
    title: str,
    learning_rate: float = 2e-3,
) -> list[float]:
    """`steps` AdamW updates with 10 % warm-up, then cosine; returns the losses."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    warmup = max(1, steps // 10)
    losses = []
    with Progress(title, steps) as bar:
        for step in range(steps):
            factor = warmup_cosine(step + 1, warmup_steps=warmup, total_steps=steps + 1)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * factor
            loss = loss_of_batch()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            bar.update(step + 1, f"loss {losses[-1]:.3f}")
    model.eval()
    return losses


def batches(count: int, size: int, seed: int) -> Iterable[Tensor]:
    """Endless shuffled batches of indices below `count`."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator).split(size)


def majority(labels: Tensor) -> float:
    """The accuracy of always predicting the commonest label, a baseline."""
    return labels.flatten().bincount().max().item() / labels.numel()


def save(figure: Figure, folder: Path, name: str, *, show: bool = True) -> Path:
    """Saves a figure atomically; `show` prints where."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    partial = path.with_suffix(".partial.png")
    figure.savefig(partial, dpi=120)
    partial.replace(path)
    if show:
        print(f"figure: {path}")
    return path
