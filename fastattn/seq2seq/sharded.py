"""Checkpoints and whole copies of a model whose parameters are sharded over a mesh.

Checkpoints are written by torch.distributed.checkpoint: every rank copies its shards to memory and
continues; in the background it writes them, and rank 0 then joins all to whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor

from fastattn.distributed import full_state_dict, join_parts, split_parts, weight_blocks

from .model import Seq2SeqTransformer
from .non_autoregressive import make_model
from .ranks import Ranks


class _ShardWriter(HuggingFaceStorageWriter):
    """Writes shards into a folder; once all ranks have, rank 0 calls `finished` with the whole
    tensors.
    """

    def __init__(
        self, folder: Path, finished: Callable[[dict[str, Tensor]], None], ranks: Ranks
    ) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._folder, self._finished, self._ranks = folder, finished, ranks

    def finish(self, metadata: Metadata, results: Any) -> None:
        tensors: dict[str, Tensor] = {}
        for name, about in metadata.state_dict_metadata.items():
            assert isinstance(about, TensorStorageMetadata)
            tensors[name] = torch.empty(about.size, dtype=about.properties.dtype)
        reader = HuggingFaceStorageReader(str(self._folder))
        dcp.load(cast(Any, tensors), storage_reader=reader, process_group=self._ranks.alone)
        self._finished(_join(tensors))


class SavedShards:
    """Tensors that are copied, and written in the background: each rank's shards into `folder`, and
    then the whole tensors by `finished`, which rank 0 calls.
    """

    def __init__(
        self,
        tensors: dict[str, Tensor],
        folder: Path,
        finished: Callable[[dict[str, Tensor]], None],
        ranks: Ranks,
    ) -> None:
        writer = _ShardWriter(folder, finished, ranks)
        self._saved: Any = dcp.async_save(
            cast(Any, tensors), storage_writer=writer, process_group=ranks.files
        )

    def wait(self) -> None:
        """Wait until all is written; raises in every rank what failed in any."""
        try:
            self._saved.result()
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            if isinstance(cause, OSError):
                raise OSError(f"rank {rank} cannot write a checkpoint: {cause}") from error
            raise


def shard_moments(
    moments: dict[str, dict[str, Tensor]], model: nn.Module
) -> dict[str, dict[str, Tensor]]:
    """Return this rank's shards of whole moments, named and placed as their parameters are."""
    blocks = weight_blocks(model)
    return {
        kind: {
            name: _shard_like(parameter, parts[name])
            for name, parameter in model.named_parameters()
            if name in parts
        }
        for kind, values in moments.items()
        for parts in [_split(values, blocks)]
    }


def _split(values: dict[str, Tensor], blocks: dict[str, int]) -> dict[str, Tensor]:
    """`split_parts`; each part of a scalar, such as a number of updates, is a copy of it."""
    spread = {name: v.repeat(blocks.get(name, 1)) for name, v in values.items() if not v.ndim}
    scalars = {name: part[0] for name, part in split_parts(spread, blocks).items()}
    return split_parts(values | spread, blocks) | scalars


def _join(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`join_parts`, the inverse of `_split`."""
    scalars = {name: value.view(1) for name, value in tensors.items() if not value.ndim}
    joined = {name: value[0] for name, value in join_parts(scalars).items()}
    return join_parts(tensors | scalars) | joined


def _shard_like(parameter: Tensor, whole: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor) or not whole.ndim:
        return whole
    whole = whole.to(parameter.device)
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


@torch.no_grad()
def copy_whole(model: Seq2SeqTransformer) -> Seq2SeqTransformer:
    """Return an ordinary copy of a model, in each rank."""
    state = full_state_dict(model)
    with torch.random.fork_rng(devices=[]):  # training draws the same numbers with and without
        copy = make_model(model.config)
    copy.load_state_dict(state)
    return copy.to(next(iter(state.values())).device).train(model.training)
