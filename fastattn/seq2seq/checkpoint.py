"""Checkpoints of a training run: safetensors and JSON, written atomically.

A run folder holds `model.json`, `training.json`, `tokenizer.json`, `metrics.jsonl`, `best.json`
and folders `checkpoints/step-00000400/` with

    model.safetensors   the parameters, named as in `state_dict`; those of several names once
    state.safetensors   AdamW's moments, named by parameter, and the random number generators
    state.json          the update count, the position in the data, the best validation

A checkpoint is written under a temporary name and renamed when complete; nothing is pickled.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from .data import Position

CHECKPOINTS = "checkpoints"
BEST = "best.json"
_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class Best:
    """The checkpoint with the lowest validation loss so far."""

    step: int
    valid_loss: float


@dataclass(frozen=True)
class TrainingState:
    """State that training needs to continue, besides the model and the optimizer."""

    step: int = 0  # updates done
    position: Position = field(default_factory=Position)  # the next batch
    tokens: int = 0  # real tokens seen
    best: Best | None = None
    stale: int = 0  # validations since the best


class DamagedFile(ValueError):
    """A file of a run whose content is not what training writes."""


@contextmanager
def reading(path: Path) -> Iterator[Path]:
    """Convert errors about the content of a file into a DamagedFile that names the file."""
    try:
        yield path
    except (OSError, ImportError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # tokenizers raises Exception itself
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise DamagedFile(f"{path} must be as training wrote it, got {why}") from error


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that after a crash it holds either the old or the new text."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp creates a private file; run folders have the permissions of other files.
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def prepare_folder(run: Path, state: TrainingState) -> None:
    """Create the run's folder, or clean up after a run that was killed."""
    run.mkdir(parents=True, exist_ok=True)
    if state.best is not None:
        write_best(run, state.best)
    delete_unfinished(run)


def save_checkpoint(
    run: Path,
    state: TrainingState,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> Path:
    """Write the checkpoint of `state.step` and return its folder."""
    from safetensors.torch import save_file

    files: dict[str, dict[str, Tensor]] = {"model": {}, "state": {}}
    for name, tensor in (training_tensors(model, optimizer) | generator_states(device)).items():
        kind, _, rest = name.partition(".")
        file, kept = ("model", rest) if kind == "model" else ("state", name)
        files[file][kept] = tensor.cpu().contiguous()
    folder = checkpoint_folder(run, state.step)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        # mkdtemp creates a private folder, and renaming keeps its mode.
        temporary.chmod(0o777 & ~_umask())
        for file, contents in files.items():
            with _writing(temporary / f"{file}.safetensors") as path:
                save_file(contents, path)
        (temporary / "state.json").write_text(json.dumps(asdict(state)))
        if folder.exists():
            shutil.rmtree(folder)
        temporary.replace(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if state.best is not None:
        write_best(run, state.best)
    return folder


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return parameters and buffers as `model.NAME` and moments as `optimizer.KIND.NAME`; a
    parameter of several names has the first of them.
    """
    named: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        named.setdefault(id(tensor), (f"model.{name}", tensor.detach()))
    tensors = dict(named.values())
    for name, parameter in model.named_parameters():
        for kind, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{kind}.{name}"] = value
    return tensors


def generator_states(device: torch.device) -> dict[str, Tensor]:
    states = {"rng.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["rng.cuda"] = torch.cuda.get_rng_state(device)
    return states


@contextmanager
def _writing(path: Path) -> Iterator[Path]:
    from safetensors import SafetensorError

    try:
        yield path
    except SafetensorError as error:  # also for a full disk
        raise OSError(f"cannot write {path}: {error}") from error
    path.chmod(0o666 & ~_umask())  # safetensors creates private files


@dataclass(frozen=True)
class SavedTraining:
    """A checkpoint that was read, without its parameters.

    moments: by kind and name of the parameter, such as `moments["exp_avg"]["embedding.weight"]`.
    """

    state: TrainingState
    moments: dict[str, dict[str, Tensor]]
    generators: dict[str, Tensor]

    def restore(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
    ) -> None:
        """Restore the optimizer and the random number generators."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        state = {
            index: {kind: values[name] for kind, values in self.moments.items() if name in values}
            for index, name in enumerate(names[id(parameter)] for parameter in parameters)
        }
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        torch.set_rng_state(self.generators["rng.cpu"])
        if device.type == "cuda" and "rng.cuda" in self.generators:
            torch.cuda.set_rng_state(self.generators["rng.cuda"], device)


def read_checkpoint(folder: Path, model: nn.Module) -> SavedTraining:
    """Load the parameters into `model` and read the rest."""
    from safetensors.torch import load_file

    load_parameters(folder, model)
    named = dict(model.named_parameters())
    moments: dict[str, dict[str, Tensor]] = {}
    generators = {}
    with reading(folder / "state.safetensors") as path:
        for name, tensor in load_file(path).items():
            if not name.startswith("optimizer."):
                generators[name] = tensor
                continue
            kind, _, parameter = name.removeprefix("optimizer.").partition(".")
            if kind != "step" and tensor.shape != named[parameter].shape:
                raise ValueError(f"{name} must have the shape of {parameter}, got {tensor.shape}")
            moments.setdefault(kind, {})[parameter] = tensor
    return SavedTraining(read_state(folder), moments, generators)


def read_state(folder: Path) -> TrainingState:
    with reading(folder / "state.json") as path:
        values = json.loads(path.read_text())
        return TrainingState(
            step=values["step"],
            position=Position(*values["position"]),
            tokens=values["tokens"],
            best=None if values["best"] is None else Best(**values["best"]),
            stale=values.get("stale", 0),
        )


def load_parameters(folder: Path, model: nn.Module) -> None:
    """Load the parameters of a checkpoint into `model`."""
    from safetensors.torch import load_model

    with reading(folder / "model.safetensors") as path:
        load_model(model, path)


# Listing checkpoints


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / CHECKPOINTS / f"step-{step:08d}"


def checkpoint_steps(run: Path) -> list[int]:
    """Return the steps of the complete checkpoints of a run, in order."""
    folder = run / CHECKPOINTS
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def prune_checkpoints(run: Path, *, keep: int) -> None:
    """Delete unfinished checkpoints, and all but the newest `keep` and the best one."""
    delete_unfinished(run)
    best = read_best(run)
    for step in checkpoint_steps(run)[:-keep]:
        if best is None or step != best.step:
            shutil.rmtree(checkpoint_folder(run, step))


def delete_unfinished(run: Path) -> None:
    for unfinished in (run / CHECKPOINTS).glob(".step-*"):
        shutil.rmtree(unfinished)


def read_best(run: Path) -> Best | None:
    path = run / BEST
    if not path.exists():
        return None
    with reading(path):
        return Best(**json.loads(path.read_text()))


def write_best(run: Path, best: Best) -> None:
    write_atomically(run / BEST, json.dumps(asdict(best)))
