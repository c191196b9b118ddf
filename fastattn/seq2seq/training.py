"""Training with teacher forcing: AdamW, clipping, warm-up then cosine, checkpoints, metrics.

`train` runs a fixed number of updates and returns the loss of each. With a run folder it writes
`metrics.jsonl` and checkpoints and can resume: the data order is a function of seed and epoch,
and a checkpoint holds the generators' state, so on a CPU a resumed run repeats the losses of an
uninterrupted one bit for bit.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoint import (
    Best,
    TrainingState,
    checkpoint_folder,
    checkpoint_steps,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
    write_atomically,
    write_best,
)
from .data import PAD, Batch, Example, collate, plan_batches, training_batches
from .losses import label_smoothed_cross_entropy
from .model import Seq2SeqTransformer
from .progress import Progress
from .schedules import warmup_cosine

PRECISIONS = ("fp32", "bf16")


class TrainingDiverged(ArithmeticError):
    """The loss is no longer a number."""


@dataclass(frozen=True)
class TrainingConfig:
    """How to train; `batch_tokens` counts padded source and target tokens of a batch."""

    steps: int = 10_000
    batch_tokens: int = 8192
    learning_rate: float = 1e-3
    warmup_steps: int = 400
    cycles: float = 0.5
    smoothing: float = 0.1
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.98)
    clip: float = 1.0
    precision: str = "fp32"
    seed: int = 0
    log_every: int = 10
    valid_every: int = 500
    checkpoint_every: int = 500
    keep: int = 2

    def __post_init__(self) -> None:
        for name in ("steps", "batch_tokens", "log_every", "valid_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must be at least 0, got {self.warmup_steps}")
        if not self.learning_rate > 0.0:
            raise ValueError(f"learning_rate must be above 0, got {self.learning_rate}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {PRECISIONS}, got {self.precision!r}")
        if not 0.0 <= self.smoothing < 1.0:
            raise ValueError(f"smoothing must lie in [0, 1), got {self.smoothing}")

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> TrainingConfig:
        values: dict[str, Any] = json.loads(text)
        known = {field.name for field in fields(cls)}
        if unknown := sorted(values.keys() - known):
            raise ValueError(
                f"a training configuration has the keys {sorted(known)}, got {unknown}"
            )
        return cls(**{**values, "betas": tuple(values["betas"])})


@dataclass(frozen=True)
class TrainingResult:
    """The curve of this call: updates `first_step` .. `first_step + len(losses) - 1`, from 1."""

    first_step: int
    losses: list[float]
    validations: list[tuple[int, float]]  # (step, loss)
    tokens: int  # real source and target tokens of these updates
    seconds: float  # spent in updates: no validation, no checkpoint
    tokens_per_second: float  # without the first `log_every` updates, which may compile kernels


def train(
    model: Seq2SeqTransformer,
    train_examples: Sequence[Example],
    valid_examples: Sequence[Example],
    config: TrainingConfig,
    *,
    device: torch.device,
    run: Path | None = None,
    resume: bool = False,
    stop_after: int | None = None,
    description: str = "training",
    show: bool = True,
) -> TrainingResult:
    """Train `model` for `config.steps` updates and leave it on `device` with its last parameters.

    With `run`, write metrics and checkpoints there; `resume` continues from the newest one, if
    any. `stop_after` ends the call early, after that many updates in all, without changing the
    schedule; the run can be resumed to the rest.
    """
    model.to(device).train()
    optimizer = make_optimizer(model, config, device)
    state = TrainingState()
    if run is not None and resume and (steps := checkpoint_steps(run)):
        state = load_checkpoint(checkpoint_folder(run, steps[-1]), model, optimizer, device)
        if state.best is not None:
            write_best(run, state.best)
    else:
        torch.manual_seed(config.seed)
    metrics = None
    if run is not None:
        run.mkdir(parents=True, exist_ok=True)
        metrics = MetricsFile(run / "metrics.jsonl", keep_until=state.step)
    last_step = min(config.steps, stop_after or config.steps)
    stream = training_batches(
        train_examples, token_budget=config.batch_tokens, seed=config.seed, start=state.position
    )
    curve = _Curve(first_step=state.step + 1, metrics=metrics)
    with Progress(description, last_step, show=show, unit="steps") as progress:
        progress.update(state.step)
        for step in range(state.step + 1, last_step + 1):
            batch, position = next(stream)
            learning_rate = config.learning_rate * warmup_cosine(
                step - 1,
                warmup_steps=config.warmup_steps,
                total_steps=config.steps,
                cycles=config.cycles,
            )
            loss, norm = update(model, optimizer, batch.to(device), learning_rate, config)
            state = replace(state, step=step, position=position, tokens=state.tokens + batch.tokens)
            curve.add(step, loss, norm, learning_rate, batch.tokens)
            validate = bool(valid_examples) and (
                step % config.valid_every == 0 or step == config.steps
            )
            save = run is not None and (step % config.checkpoint_every == 0 or step == last_step)
            if not (validate or save or step % config.log_every == 0 or step == last_step):
                continue

            curve.read()
            if validate:
                valid_loss = validation_loss(model, valid_examples, config, device=device)
                curve.add_validation(step, valid_loss)
                if state.best is None or valid_loss < state.best.valid_loss:
                    state = replace(state, best=Best(step, valid_loss))
                    save = run is not None
            progress.update(step, curve.note())
            if save and run is not None:
                save_checkpoint(run, state, model, optimizer, device)
                if state.best is not None:
                    write_best(run, state.best)
                prune_checkpoints(run, keep=config.keep)
            curve.restart_clock()
    return curve.result()


class _Curve:
    """The losses and the time of one call of `train`.

    Losses stay on the device until `read`, which waits for it: the clock is read after that, and
    runs again from `restart_clock`, so that validation and checkpoints do not count.
    """

    def __init__(self, first_step: int, metrics: MetricsFile | None) -> None:
        self._first_step = first_step
        self._metrics = metrics
        self._waiting: list[dict[str, Any]] = []
        self._losses: list[float] = []
        self._validations: list[tuple[int, float]] = []
        self._tokens = 0
        self._seconds = 0.0
        self._start_up: tuple[int, float] | None = None
        self.restart_clock()

    def restart_clock(self) -> None:
        self._clock = time.perf_counter()

    def add(self, step: int, loss: Tensor, norm: Tensor, learning_rate: float, tokens: int) -> None:
        row = {"step": step, "loss": loss, "gradient_norm": norm, "lr": learning_rate}
        self._waiting.append({**row, "tokens": tokens})
        self._tokens += tokens

    def read(self) -> None:
        for row in self._waiting:
            row["loss"], row["gradient_norm"] = float(row["loss"]), float(row["gradient_norm"])
            self._losses.append(row["loss"])
        self._seconds += time.perf_counter() - self._clock
        if self._start_up is None:
            self._start_up = (self._tokens, self._seconds)
        if self._metrics is not None:
            self._metrics.write(self._waiting)
        for row in self._waiting:
            if not math.isfinite(row["loss"]):
                raise TrainingDiverged(
                    f"the loss must stay finite, got {row['loss']} at update {row['step']}: lower "
                    "the learning rate or lengthen the warm-up"
                )
        self._waiting = []

    def add_validation(self, step: int, loss: float) -> None:
        self._validations.append((step, loss))
        if self._metrics is not None:
            self._metrics.write(
                [{"step": step, "valid_loss": loss, "tokens_per_second": round(self.rate())}]
            )

    def note(self) -> str:
        valid = f"  valid {self._validations[-1][1]:.3f}" if self._validations else ""
        return f"loss {self._losses[-1]:.3f}{valid}  {self.rate():,.0f} tokens/s"

    def rate(self) -> float:
        tokens, seconds = self._start_up or (0, 0.0)
        if seconds == self._seconds:
            tokens, seconds = 0, 0.0
        return (self._tokens - tokens) / max(self._seconds - seconds, 1e-9)

    def result(self) -> TrainingResult:
        return TrainingResult(
            first_step=self._first_step,
            losses=self._losses,
            validations=self._validations,
            tokens=self._tokens,
            seconds=self._seconds,
            tokens_per_second=self.rate(),
        )


def make_optimizer(
    model: nn.Module, config: TrainingConfig, device: torch.device
) -> torch.optim.AdamW:
    """Return AdamW that decays matrices only, not biases and the weights of norms."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=config.betas,
        fused=device.type in ("cpu", "cuda"),
    )


def update(
    model: Seq2SeqTransformer,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    learning_rate: float,
    config: TrainingConfig,
) -> tuple[Tensor, Tensor]:
    """Do one optimizer step and return the loss before it and the gradient's norm."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    loss = batch_loss(model, batch, config)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    optimizer.step()
    return loss.detach(), norm.detach()


def batch_loss(model: Seq2SeqTransformer, batch: Batch, config: TrainingConfig) -> Tensor:
    device_type = batch.source.device.type
    with torch.autocast(device_type, torch.bfloat16, enabled=config.precision == "bf16"):
        logits = model(batch.source, batch.target_in, batch.source_padding)
    return label_smoothed_cross_entropy(
        logits, batch.target_out, smoothing=config.smoothing, ignore_index=PAD
    )


@torch.no_grad()
def validation_loss(
    model: Seq2SeqTransformer,
    examples: Sequence[Example],
    config: TrainingConfig,
    *,
    device: torch.device,
) -> float:
    """Return the mean loss per target token in eval mode, with the smoothing of training."""
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    for indices in plan_batches(examples, token_budget=config.batch_tokens):
        batch = collate([examples[i] for i in indices])
        tokens = int((batch.target_out != PAD).sum())
        total += float(batch_loss(model, batch.to(device), config)) * tokens
        count += tokens
    model.train(was_training)
    return total / count


class MetricsFile:
    """A JSON Lines file, one object for each update and each validation.

    On resuming, rows after the checkpoint's step are dropped: training is about to repeat them.
    """

    def __init__(self, path: Path, *, keep_until: int) -> None:
        kept = [row for row in read_metrics(path) if row["step"] <= keep_until]
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._path = path

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics file; a last line cut short by a crash is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            rows.append(json.loads(line))
    return rows
