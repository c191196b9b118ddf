"""Training on meshes of four gloo processes: losses, checkpoints and texts are those of one."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from seq2seq_samples import random_examples, small_model, toy_training
from support import in_processes, needs_distributed
from torch.distributed.device_mesh import init_device_mesh

from fastattn.seq2seq import checkpoint, runs, training
from fastattn.seq2seq.data import SubwordTokenizer
from fastattn.seq2seq.ranks import ONE_PROCESS, Ranks
from fastattn.seq2seq.training import TrainingResult, train

pytestmark = needs_distributed
# The last batches of an epoch have fewer sentences than there are ranks.
SENTENCES = 31


@functools.cache
def ranks_of(**sizes: int) -> Ranks:
    if not sizes:
        return ONE_PROCESS
    return Ranks(init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)))


def trained(
    ranks: Ranks, model: dict[str, Any] | None = None, *, changes: Any = (), **options: Any
) -> TrainingResult:
    return train(
        small_model(**{"vocabulary": 32, **(model or {})}),
        random_examples(SENTENCES),
        random_examples(7, seed=1),
        toy_training(**dict(changes)),
        device="cpu",
        ranks=ranks,
        show=False,
        **options,
    )


def assert_trained_alike(
    sizes: dict[str, int], model: dict[str, Any], changes: dict[str, Any]
) -> None:
    found = trained(ranks_of(**sizes), model, changes=changes)
    if dist.get_rank() == 0:
        expected = trained(ONE_PROCESS, model, changes=changes)
        torch.testing.assert_close(found.losses, expected.losses, atol=1e-5, rtol=0.0)
        torch.testing.assert_close(found.validations, expected.validations, atol=1e-5, rtol=0.0)
        assert (found.first_step, found.tokens) == (expected.first_step, expected.tokens)


# -- losses ---------------------------------------------------------------------------------------
def losses_are_those_of_one_process() -> None:
    data, both = {"data": 4}, {"data": 2, "tensor": 2}
    few: dict[str, Any] = {"steps": 4, "valid_every": 4}
    assert_trained_alike(both, {}, {"steps": 10, "valid_every": 5})
    assert_trained_alike(both, {}, {**few, "packed": True, "smoothing": 0.2})
    # Shards without a sentence.
    assert_trained_alike(data, {}, {**few, "accumulate": 3, "batch_tokens": 30})
    assert_trained_alike(data, {"memory_layers": "same"}, {**few, "guided_attention": 1.0})
    assert_trained_alike({"context": 2, "data": 2}, {"positions": "rotary"}, few)
    # Every rank has a whole vocabulary.
    assert_trained_alike(both, {"copy": True}, few)
    assert_trained_alike(both, {"vocabulary": 31}, few)


def scores_come_from_whole_models() -> None:
    """Every rank scores a whole copy of the trained model, and each translates a share."""
    tokenizer = SubwordTokenizer.train(["ka lo mi"], vocabulary=300)
    texts = ["ka lo", "mi", "lo lo ka", "ka", "mi mi"]
    weights: list[dict[str, torch.Tensor]] = []

    def score(ranks: Ranks) -> Callable[[Any], float]:
        def translate(model: Any) -> float:
            translator = runs.Translator(model, tokenizer)
            shared = ranks.join(translator.translate(ranks.share(texts)))
            assert shared == translator.translate(texts)
            weights.append({name: x.clone() for name, x in model.state_dict().items()})
            return float(len(weights))

        return translate

    few = {"steps": 4, "valid_every": 2}
    for ranks in (ONE_PROCESS, ranks_of(data=2, tensor=2)):
        result = trained(ranks, {"vocabulary": 300, "bias": False}, changes=few, score=score(ranks))
        assert len(result.bleus) == 2
    torch.testing.assert_close(weights[2:], weights[:2], atol=1e-5, rtol=0.0)


def scoring_draws_no_random_numbers() -> None:
    ranks = ranks_of(data=2, tensor=2)
    options: dict[str, Any] = {"changes": {"steps": 4, "valid_every": 2}}
    plain, scored = (
        trained(ranks, {"dropout": 0.3}, score=score, **options) for score in (None, lambda _: 0.0)
    )
    assert scored.losses == plain.losses


def options_are_refused_by_name() -> None:
    for sizes, model, changes, message in (
        ({"data": 4}, {}, {"scheduled_sampling": "parallel"}, "scheduled_sampling must be"),
        ({"data": 4}, {}, {"sequence_steps": 2}, "must be 0 on a mesh of data, got 2"),
        (
            {"data": 2, "tensor": 2}, {}, {"guided_attention": 1.0},
            r"guided_attention must be 0\.0 on a mesh of data, tensor",
        ),
        ({"context": 2, "data": 2}, {}, {"packed": True}, "packed must be False on a mesh of"),
        ({"data": 4}, {"decoder": "non-autoregressive"}, {}, "predicts tokens in parallel"),
        ({"data": 4}, {"norm": "power"}, {}, "must not normalise over tokens, got PowerNorm"),
        ({"data": 2, "tensor": 2}, {"heads": 1}, {}, "must have heads that"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            trained(ranks_of(**sizes), model, changes=changes)


# -- checkpoints ----------------------------------------------------------------------------------
def runs_continue_on_other_meshes(run: Path) -> None:
    """On every mesh, and in one process, with the losses of a run that was not interrupted."""
    model = {"positions": "t5"}  # whose tables several layers share
    changes = {"steps": 8}
    whole = trained(ONE_PROCESS, model, changes=changes)
    losses = []
    for sizes, stop_after in (
        ({"data": 2, "tensor": 2}, 2), ({}, 3), ({"data": 4}, 5), ({"tensor": 2, "data": 2}, 8),
    ):  # fmt: skip
        if sizes or dist.get_rank() == 0:
            part = trained(
                ranks_of(**sizes), model, changes=changes, run=run, resume=bool(losses),
                stop_after=stop_after,
            )  # fmt: skip
            assert part.first_step == len(losses) + 1
            losses += part.losses
        gathered: list[Any] = [losses]
        dist.broadcast_object_list(gathered)
        losses = gathered[0]
        if stop_after == 5:  # continue from the checkpoint of update 4, while 5 was being computed
            if dist.get_rank() == 0:
                shutil.rmtree(checkpoint.checkpoint_folder(run, 5))
            dist.barrier()
            losses = losses[:4]
    torch.testing.assert_close(losses, whole.losses, atol=1e-5, rtol=0.0)
    rows = training.read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 9))
    names = sorted(path.name for path in (run / checkpoint.CHECKPOINTS).iterdir())
    assert names[-1] == "step-00000008" and all(name.startswith("step-") for name in names)


def random_numbers_continue(run: Path) -> None:
    model, changes = {"dropout": 0.3}, {"steps": 4, "packed": True}
    ranks = ranks_of(data=2, tensor=2)
    whole = trained(ranks, model, changes=changes)
    first = trained(ranks, model, changes=changes, run=run, stop_after=2)
    rest = trained(ranks, model, changes=changes, run=run, resume=True)
    assert first.losses + rest.losses == whole.losses


def a_failed_save_is_raised_in_all_ranks(run: Path) -> None:
    def full_disk(*_: Any) -> None:
        raise OSError("no space left on device")

    real, checkpoint.write_checkpoint = checkpoint.write_checkpoint, full_disk  # type: ignore[assignment]
    try:
        with pytest.raises(OSError, match="rank 0 cannot write a checkpoint: no space left"):
            trained(ranks_of(data=4), run=run)
    finally:
        checkpoint.write_checkpoint = real
    assert checkpoint.checkpoint_steps(run) == []
    # Unfinished checkpoints are deleted when training starts again.
    assert any((run / checkpoint.CHECKPOINTS).iterdir())
    trained(ranks_of(data=4), run=run, resume=True, stop_after=0)
    assert not any((run / checkpoint.CHECKPOINTS).iterdir())


@pytest.mark.slow
def test_training(tmp_path: Path) -> None:
    in_processes(
        losses_are_those_of_one_process,
        scores_come_from_whole_models,
        scoring_draws_no_random_numbers,
        options_are_refused_by_name,
        functools.partial(runs_continue_on_other_meshes, tmp_path / "run"),
        functools.partial(random_numbers_continue, tmp_path / "dropout"),
        functools.partial(a_failed_save_is_raised_in_all_ranks, tmp_path / "failed"),
    )
