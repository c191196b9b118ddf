"""Training: AdamW, accumulation, clipping, warm-up then cosine, checkpoints, metrics.

`train` runs a fixed number of updates, or fewer with `patience`, and returns the loss of each. An
update minimises `batch_loss`: cross-entropy under teacher forcing, replaced or extended by the
options. With a run folder it writes `metrics.jsonl` and checkpoints and can resume: the data order
is a function of seed and epoch, and a checkpoint holds the generators' state, so on a CPU a run, or
a resumed run, is reproducible bit for bit. That includes a run that was extended: the configuration
records each extension.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
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
    prepare_folder,
    prune_checkpoints,
    read_checkpoint,
    reading,
    save_checkpoint,
    write_atomically,
)
from .data import PAD, Batch, Example, collate, plan_batches, training_batches
from .losses import guided_attention_loss, label_smoothed_cross_entropy
from .model import Seq2SeqTransformer, record_attention
from .non_autoregressive import NonAutoregressiveTransformer, non_autoregressive_loss
from .progress import Progress
from .scheduled_sampling import parallel_inputs, sequential_inputs
from .schedules import DECAYS, truth_share, warmup_cosine
from .sequence_training import self_critical_loss

PRECISIONS = ("fp32", "bf16")
SCHEDULED_SAMPLING = ("none", "sequential", "parallel")


class TrainingDiverged(ArithmeticError):
    """The loss is not finite."""


class TrainingInterrupted(Exception):
    """`should_stop` has ended a training that others were to follow."""


@dataclass(frozen=True)
class TrainingConfig:
    """How to train.

    Attributes:
        batch_tokens: padded source and target tokens per batch.
        accumulate: batches per update; the gradient is that of one batch of all of them.
        patience: stop after this many validations without a lower loss; 0: never.
        scheduled_sampling: "sequential" or "parallel": some decoder inputs are the model's own
            tokens, see `scheduled_sampling`.
        sampling_decay, truth_floor: decay of the share of true inputs from 1, and its lowest value.
        guided_attention: weight of the loss that keeps cross-attention near the diagonal.
        guided_width: its `width`, see `guided_attention_loss`.
        sequence_steps: number of last updates that reward sampled translations by their BLEU.
        sequence_weight: weight of that loss in these updates; the rest is cross-entropy.
        packed: run layers and head only on real tokens: the same losses, faster.
        extensions: for each time that `steps` was raised, the updates done until then and the
            `steps` that they were planned for. All schedules of these updates go by the latter,
            of later ones by `steps`.
    """

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
    accumulate: int = 1
    patience: int = 0
    scheduled_sampling: str = "none"
    sampling_decay: str = "linear"
    truth_floor: float = 0.5
    guided_attention: float = 0.0
    guided_width: float = 0.2
    sequence_steps: int = 0
    sequence_weight: float = 0.9
    packed: bool = False
    extensions: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        at_least_one = "steps", "batch_tokens", "log_every", "valid_every", "checkpoint_every"
        for name in (*at_least_one, "accumulate", "keep"):
            value = getattr(self, name)
            if value != int(value) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value}")
        not_negative = "warmup_steps", "patience", "sequence_steps", "guided_attention"
        for name in (*not_negative, "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), got {self.betas}")
        if not math.isfinite(self.cycles):
            raise ValueError(f"cycles must be finite, got {self.cycles}")
        for name, known in (
            ("scheduled_sampling", SCHEDULED_SAMPLING),
            ("sampling_decay", DECAYS),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {known}, got {getattr(self, name)!r}")
        for name in ("truth_floor", "sequence_weight"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must lie in [0, 1], got {getattr(self, name)}")
        if self.packed and self.guided_attention > 0.0:
            raise ValueError("packed must be False with guided_attention, which needs weights")
        for name in ("guided_width", "learning_rate"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if not self.clip > 0.0:  # inf: no clipping
            raise ValueError(f"clip must be above 0, got {self.clip}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {PRECISIONS}, got {self.precision!r}")
        if not 0.0 <= self.smoothing < 1.0:
            raise ValueError(f"smoothing must lie in [0, 1), got {self.smoothing}")
        last = (0, 0)
        for done, planned in self.extensions:
            if not (last[0] < done <= planned and last[1] < planned < self.steps):
                raise ValueError(
                    "extensions must be ascending pairs of updates done and steps planned, below "
                    f"steps {self.steps}, got {self.extensions}"
                )
            last = (done, planned)

    def extended(self, done: int, steps: int) -> TrainingConfig:
        """Return the configuration for `steps` updates of a run that has done `done`. An earlier
        extension counts up to there: the run may have been interrupted before its next checkpoint.
        """
        extensions = tuple(earlier for earlier in self.extensions if earlier[0] < done)
        if done:
            extensions += ((done, self.planned_steps(done)),)
        return replace(self, steps=steps, extensions=extensions)

    def planned_steps(self, step: int) -> int:
        """Return the total number of updates that the schedules of update `step` go by."""
        return next((planned for done, planned in self.extensions if step <= done), self.steps)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> TrainingConfig:
        values: dict[str, Any] = json.loads(text)
        known = {field.name for field in fields(cls)}
        if unknown := sorted(values.keys() - known):
            raise ValueError(
                f"training configuration keys must be in {sorted(known)}, got {unknown}"
            )
        values["betas"] = tuple(values["betas"])
        values["extensions"] = tuple(map(tuple, values.get("extensions", ())))
        return cls(**values)


@dataclass(frozen=True)
class TrainingResult:
    """The curve of one call: updates `first_step` .. `first_step + len(losses) - 1`, from 1."""

    first_step: int
    losses: list[float]
    validations: list[tuple[int, float]]  # (step, loss)
    tokens: int  # real source and target tokens of these updates
    seconds: float  # of updates, without validation and checkpoints
    tokens_per_second: float  # without the first `log_every` updates, which may compile kernels
    stopped_early: bool = False  # due to `patience`
    bleus: tuple[tuple[int, float], ...] = ()  # (step, what `score` returned)
    learning_rates: tuple[float, ...] = ()  # of the same updates as `losses`
    interrupted: bool = False  # due to `should_stop`


def train(
    model: Seq2SeqTransformer,
    train_examples: Sequence[Example],
    valid_examples: Sequence[Example],
    config: TrainingConfig,
    *,
    device: torch.device | str,
    run: Path | None = None,
    resume: bool = False,
    stop_after: int | None = None,
    score: Callable[[Seq2SeqTransformer], float] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    description: str = "training",
    show: bool = True,
) -> TrainingResult:
    """Train `model` for `config.steps` updates and leave it on `device` with its last parameters.

    With `run`, write metrics and checkpoints there; `resume` continues from the newest one, if
    any. `stop_after` ends the call after that many updates in total, with an unchanged schedule;
    the run can be resumed. `score` is called at every validation, for example for a BLEU curve,
    and must draw no random numbers. `should_stop` is called after every update; once it returns
    True, the call saves a checkpoint and ends, with `interrupted` in its result.
    """
    require_trainable(model, config)
    if stop_after is not None and stop_after < 0:
        raise ValueError(f"stop_after must be at least 0, got {stop_after}")
    device = torch.device(device)
    state, saved = TrainingState(), None
    if run is not None and resume and (steps := checkpoint_steps(run)):
        saved = read_checkpoint(checkpoint_folder(run, steps[-1]), model)
        state = saved.state
    model.to(device).train()
    optimizer = make_optimizer(model, config, device)
    if saved is None:
        torch.manual_seed(config.seed)
    else:
        saved.restore(model, optimizer, device)
    metrics = None
    if run is not None:
        prepare_folder(run, state)
        metrics = MetricsFile(run / "metrics.jsonl", keep_until=state.step)
    last_step = config.steps if stop_after is None else min(config.steps, stop_after)
    stream = training_batches(
        train_examples,
        token_budget=config.batch_tokens,
        seed=config.seed,
        start=state.position,
    )
    curve = _Curve(first_step=state.step + 1, metrics=metrics)
    interrupted = False
    with Progress(description, last_step, show=show, unit="steps") as progress:
        progress.update(state.step)
        for step in range(state.step + 1, last_step + 1):
            if out_of_patience(state, config):
                break
            batches = [next(stream) for _ in range(config.accumulate)]
            position = batches[-1][1]
            learning_rate = config.learning_rate * warmup_cosine(
                step - 1,
                warmup_steps=config.warmup_steps,
                total_steps=config.planned_steps(step),
                cycles=config.cycles,
            )
            moved = [batch.to(device) for batch, _ in batches]
            loss, norm = update(model, optimizer, moved, learning_rate, config, step)
            tokens = sum(batch.tokens for batch in moved)
            state = replace(state, step=step, position=position, tokens=state.tokens + tokens)
            curve.add(step, loss, norm, learning_rate, tokens)
            validate = bool(valid_examples) and (
                step % config.valid_every == 0 or step == config.planned_steps(step)
            )
            save = run is not None and (step % config.checkpoint_every == 0 or step == last_step)
            read = step % config.log_every == 0 or step == last_step
            interrupted = should_stop()
            if not (validate or save or read or interrupted):
                continue

            curve.read()
            if validate:
                valid_loss = validation_loss(model, valid_examples, config, device=device)
                require_finite("validation loss", valid_loss, step)
                bleu = None if score is None else score(model)
                curve.add_validation(step, valid_loss, bleu)
                if state.best is None or valid_loss < state.best.valid_loss:
                    state = replace(state, best=Best(step, valid_loss), stale=0)
                else:
                    state = replace(state, stale=state.stale + 1)
                if state.stale == 0 or out_of_patience(state, config):
                    save = run is not None
                interrupted = interrupted or should_stop()
            progress.update(step, curve.note())
            if run is not None and (save or interrupted):
                save_checkpoint(run, state, model, optimizer, device)
                prune_checkpoints(run, keep=config.keep)
            curve.restart_clock()
            if interrupted:
                break
    early = out_of_patience(state, config)
    return replace(curve.result(), stopped_early=early, interrupted=interrupted)


def out_of_patience(state: TrainingState, config: TrainingConfig) -> bool:
    return 0 < config.patience <= state.stale


def require_trainable(model: Seq2SeqTransformer, config: TrainingConfig) -> None:
    """Raise for options that the model does not support."""
    if not isinstance(model, NonAutoregressiveTransformer):
        if config.packed and (why := model.cannot_pack()):
            raise ValueError(f"packed must be False for a model that {why}")
        return
    for name, usual in (
        ("scheduled_sampling", "none"),
        ("guided_attention", 0.0),
        ("sequence_steps", 0),
        ("packed", False),
    ):
        if getattr(config, name) != usual:
            raise ValueError(
                f"{name} must be {usual!r} for a non-autoregressive decoder, which reads no target "
                f"tokens, got {getattr(config, name)!r}"
            )


def require_finite(name: str, value: float, step: int) -> None:
    if not math.isfinite(value):
        raise TrainingDiverged(
            f"the {name} must stay finite, got {value} at update {step}: lower the learning rate "
            "or lengthen the warm-up"
        )


class _Curve:
    """The losses and the time of one call of `train`.

    Losses stay on the device until `read`, which synchronises and then reads the clock;
    `restart_clock` starts it again, so that validation and checkpoints do not count.
    """

    def __init__(self, first_step: int, metrics: MetricsFile | None) -> None:
        self._first_step = first_step
        self._metrics = metrics
        self._pending: list[dict[str, Any]] = []
        self._losses: list[float] = []
        self._learning_rates: list[float] = []
        self._validations: list[tuple[int, float]] = []
        self._bleus: list[tuple[int, float]] = []
        self._tokens = 0
        self._seconds = 0.0
        self._start_up: tuple[int, float] | None = None
        self.restart_clock()

    def restart_clock(self) -> None:
        self._clock = time.perf_counter()

    def add(self, step: int, loss: Tensor, norm: Tensor, learning_rate: float, tokens: int) -> None:
        row = {"step": step, "loss": loss, "gradient_norm": norm, "lr": learning_rate}
        self._pending.append({**row, "tokens": tokens})
        self._tokens += tokens

    def read(self) -> None:
        for row in self._pending:
            row["loss"], row["gradient_norm"] = float(row["loss"]), float(row["gradient_norm"])
            self._losses.append(row["loss"])
            self._learning_rates.append(row["lr"])
        self._seconds += time.perf_counter() - self._clock
        if self._start_up is None:
            self._start_up = (self._tokens, self._seconds)
        names = {"loss": "loss", "gradient_norm": "gradient's norm"}
        finite = [row for row in self._pending if all(math.isfinite(row[name]) for name in names)]
        if self._metrics is not None:
            self._metrics.write(finite)
        for row in self._pending:
            for name, words in names.items():
                require_finite(words, row[name], row["step"])
        self._pending = []

    def add_validation(self, step: int, loss: float, bleu: float | None) -> None:
        self._validations.append((step, loss))
        row: dict[str, Any] = {"step": step, "valid_loss": loss}
        if bleu is not None:
            self._bleus.append((step, bleu))
            row["valid_bleu"] = bleu
        if self._metrics is not None:
            self._metrics.write([{**row, "tokens_per_second": round(self.rate())}])

    def note(self) -> str:
        valid = f"  valid {self._validations[-1][1]:.3f}" if self._validations else ""
        valid += f"  BLEU {self._bleus[-1][1]:.1f}" if self._bleus else ""
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
            bleus=tuple(self._bleus),
            learning_rates=tuple(self._learning_rates),
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
    batches: Sequence[Batch],
    learning_rate: float,
    config: TrainingConfig,
    step: int = 1,
) -> tuple[Tensor, Tensor]:
    """Do one optimizer step; return the loss before it and the gradient's norm.

    Batches are weighted by their target tokens, so that the loss is that of one large batch.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.zero_grad(set_to_none=True)
    counts = torch.stack([(batch.target_out != PAD).sum() for batch in batches])
    all_count = counts.sum()
    total = torch.zeros((), device=all_count.device)
    for batch, count in zip(batches, counts, strict=True):
        loss = batch_loss(model, batch, config, step)
        if len(batches) > 1:
            loss = loss * (count / all_count)
        loss.backward()
        total += loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    optimizer.step()
    return total, norm.detach()


def batch_loss(
    model: Seq2SeqTransformer, batch: Batch, config: TrainingConfig, step: int
) -> Tensor:
    """Return the loss of update `step`, counted from 1."""
    rewarded_from = config.planned_steps(step) - config.sequence_steps
    weight = config.sequence_weight if step > rewarded_from else 0.0
    inputs = decoder_inputs(model, batch, config, step)
    loss = cross_entropy(model, replace(batch, target_in=inputs), config)
    if weight == 0.0:
        return loss
    with torch.autocast(
        batch.source.device.type, torch.bfloat16, enabled=config.precision == "bf16"
    ):
        rewarded = self_critical_loss(model, batch)
    return torch.lerp(loss, rewarded, weight)


def decoder_inputs(
    model: Seq2SeqTransformer, batch: Batch, config: TrainingConfig, step: int
) -> Tensor:
    """The decoder's inputs at update `step`: the truth, or partly its own tokens."""
    if config.scheduled_sampling == "none":
        return batch.target_in
    share = truth_share(
        step - 1,
        total_steps=config.planned_steps(step),
        decay=config.sampling_decay,
        floor=config.truth_floor,
    )
    mix = sequential_inputs if config.scheduled_sampling == "sequential" else parallel_inputs
    device_type = batch.source.device.type
    with torch.autocast(device_type, torch.bfloat16, enabled=config.precision == "bf16"):
        return mix(model, batch, share)


def cross_entropy(model: Seq2SeqTransformer, batch: Batch, config: TrainingConfig) -> Tensor:
    """Return the loss of the batch's targets, with the guided attention loss if configured."""
    guided = config.guided_attention > 0.0 and model.training
    device_type = batch.source.device.type
    with ExitStack() as stack:
        stack.enter_context(
            torch.autocast(device_type, torch.bfloat16, enabled=config.precision == "bf16")
        )
        if isinstance(model, NonAutoregressiveTransformer):
            return non_autoregressive_loss(model, batch, smoothing=config.smoothing)
        if guided:
            weights = stack.enter_context(
                record_attention(model, only="multihead_attn", differentiable=True)
            )
        inputs, targets = (batch.source, batch.target_in, batch.source_padding), batch.target_out
        fused = model.has_head_loss(targets.numel())
        if config.packed:
            run = model.hidden_packed if fused else model.forward_packed
            outputs, targets = run(batch)
        else:
            outputs = model.hidden(*inputs)[0] if fused else model(*inputs)
    if fused:
        loss = model.head_loss(outputs, targets, config.smoothing)
    else:
        loss = label_smoothed_cross_entropy(
            outputs, targets, smoothing=config.smoothing, ignore_index=PAD
        )
    if not guided:
        return loss
    lengths = (batch.target_out != PAD).sum(dim=1), (~batch.source_padding).sum(dim=1)
    guided_losses = [
        guided_attention_loss(layer, *lengths, width=config.guided_width)
        for layer in weights.values()
    ]
    return loss + config.guided_attention * torch.stack(guided_losses).mean()


@torch.no_grad()
def validation_loss(
    model: Seq2SeqTransformer,
    examples: Sequence[Example],
    config: TrainingConfig,
    *,
    device: torch.device,
) -> float:
    """Return the mean loss per target token in eval mode, with the smoothing of training.

    Always under teacher forcing, so that it is comparable across training options.
    """
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    for indices in plan_batches(examples, token_budget=config.batch_tokens):
        batch = collate([examples[i] for i in indices])
        loss = cross_entropy(model, batch.to(device), config)
        tokens = sum(len(examples[i].target) for i in indices)
        total += float(loss) * tokens
        count += tokens
    model.train(was_training)
    return total / count


class MetricsFile:
    """A JSON Lines file, one object for each update and each validation.

    On resuming, rows after the checkpoint's step are dropped, because training repeats them.
    """

    def __init__(self, path: Path, *, keep_until: int) -> None:
        kept = [row for row in read_metrics(path) if row["step"] <= keep_until]
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._path = path

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics file, without a last line truncated by a crash."""
    if not path.exists():
        return []
    with reading(path):
        *lines, _ = path.read_bytes().split(b"\n")
        return [_row(number, line) for number, line in enumerate(lines, start=1)]


def _row(number: int, line: bytes) -> dict[str, Any]:
    try:
        row: dict[str, Any] = json.loads(line)
    except ValueError:
        raise ValueError(f"line {number} is not JSON: {line[:40]!r}") from None
    return row
