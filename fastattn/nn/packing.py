"""Packed execution: a stack of layers runs only on the real tokens of a padded batch.

The stacks' `src_lengths=` and `tgt_lengths=` request it. A `Packing` holds which rows of the batch
are real; rows are gathered once at the entry, `[B, S, E]` to `[T, E]`, and scattered once at the
exit, where padding is 0. Everything in between is row-wise, except attention, which is
`attention_varlen`. Lengths are on the CPU, so nothing synchronises with the device.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn.functional import Lengths
from fastattn.nn.attention import project_each, projects_alike
from fastattn.nn.feed_forward import GatedActivation
from fastattn.nn.fusion import DropoutStreams, inherits, is_unmodified
from fastattn.nn.norm import LayerNorm, RMSNorm
from fastattn.nn.positional_attention import attention_classes, positions_of
from fastattn.nn.sharding import SINGLE, Sharding, sharding_of

# Element-wise modules.
_ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Softplus,
    nn.Tanh, nn.Sigmoid, GatedActivation,
)  # fmt: skip


@dataclass(frozen=True)
class Packing:
    """The positions of the real rows of a padded batch.

    rows: int64 [T], the index of each packed row in the batch with its two leading dimensions
    flattened; positions: [T], its position in its sequence; cu_seqlens: int32 [B + 1]. All on the
    data's device.
    """

    batch: int
    length: int
    batch_first: bool
    lengths: Tensor  # int32 [B], on the data's device
    longest: int
    cu_seqlens: Tensor
    rows: Tensor
    positions: Tensor

    @classmethod
    def of(
        cls, x: Tensor, lengths: Lengths | None, batch_first: bool, x_name: str, name: str
    ) -> "Packing":
        """The packing of `x`, `[B, S, E]` or `[S, B, E]`, by `lengths` (None: every row is real).

        Raises ValueError or TypeError that name `x_name` and `name`.
        """
        if x.dim() != 3:
            wanted = "[B, S, E]" if batch_first else "[S, B, E]"
            raise ValueError(f"{x_name} must be {wanted} with {name}, got {list(x.shape)}")
        B, S = (x.shape[0], x.shape[1]) if batch_first else (x.shape[1], x.shape[0])
        numbers = [S] * B if lengths is None else _numbers(lengths, B, S, name)
        offsets = [0]
        for number in numbers:
            offsets.append(offsets[-1] + number)
        total = offsets[-1]
        on_device = _to_device([*numbers, *offsets], x.device)
        lengths_, cu_seqlens = on_device[:B], on_device[B:]
        # Packed row t of sequence b is its position t - cu_seqlens[b].
        sequence = torch.repeat_interleave(
            torch.arange(B, device=x.device), lengths_, output_size=total
        )
        position = torch.arange(total, device=x.device) - cu_seqlens[sequence]
        rows = sequence * S + position if batch_first else position * B + sequence
        longest = max([0, *numbers])
        return cls(B, S, batch_first, lengths_, longest, cu_seqlens, rows, position)

    def pack(self, x: Tensor) -> Tensor:
        """The padded `x` -> its real rows `[T, E]`, one sequence after the other."""
        return x.flatten(0, 1).index_select(0, self.rows)

    def unpack(self, rows: Tensor) -> Tensor:
        """`[T, E]` -> the padded layout, with zeros where there is no token."""
        padded = rows.new_zeros(self.batch * self.length, rows.shape[-1])
        padded = padded.index_copy(0, self.rows, rows)
        return padded.unflatten(0, self._leading)

    def extended(self, rows: Tensor, multiple: int) -> tuple["Packing", Tensor]:
        """The packing, of which only offsets, positions and `longest` count then, and its rows with
        one more sequence, which makes the number of rows a multiple; unchanged if that is 1.

        It has copies of the last row, whose norms are finite wherever those of the batch are; and
        always a row, so that compiled code does not depend on whether there is one.
        """
        if multiple == 1:
            return self, rows
        extra = multiple - len(rows) % multiple
        added = rows[-1:].detach() if len(rows) else rows.new_zeros(1, rows.shape[1])
        end, longest = self.cu_seqlens[-1:] + extra, max(self.longest, extra)
        packing = replace(
            self,
            longest=-(-longest // multiple) * multiple,  # an upper bound
            cu_seqlens=torch.cat([self.cu_seqlens, end]),
            positions=F.pad(self.positions, (0, extra)),
        )
        return packing, torch.cat([rows, added.expand(extra, -1)])

    def padding(self) -> Tensor:
        """Bool `[B, S]`, True where there is no token: torch's key padding mask."""
        return torch.arange(self.length, device=self.lengths.device) >= self.lengths[:, None]

    def zero_padding(self, x: Tensor) -> Tensor:
        """The padded `x` with zeros where there is no token."""
        padding = self.padding() if self.batch_first else self.padding().t()
        return x.masked_fill(padding[..., None], 0.0)

    @property
    def _leading(self) -> tuple[int, int]:
        return (self.batch, self.length) if self.batch_first else (self.length, self.batch)


# Rows of packed batches on a GPU, where calls of a layout that was seen before are launched without
# Python (csrc/autograd/launch_cache.h): so few numbers of rows occur.
_ROW_MULTIPLES = {"cuda": 64}


def row_multiple(sharding: Sharding, device: torch.device) -> int:
    """The number that has to divide the number of rows in a stack."""
    if sharding is not SINGLE:
        return sharding.row_multiple
    return _ROW_MULTIPLES.get(device.type, 1)


def refuse_padding_masks(lengths: str, **masks: Tensor | None) -> None:
    """Raises if a key padding mask is given together with lengths of the same sequences."""
    for name, mask in masks.items():
        if mask is not None:
            raise ValueError(f"{name} must be None with {lengths}, which replaces it")


def can_pack_norm(norm: nn.Module | None) -> bool:
    """Whether a stack's norm, if there is one, computes the same on packed rows."""
    return norm is None or is_unmodified(norm, nn.LayerNorm, LayerNorm, nn.RMSNorm, RMSNorm)


def can_pack(layer: nn.Module, classes: tuple[type[nn.Module], ...]) -> bool:
    """Whether `layer` computes the same on packed rows: unmodified modules of torch or fastattn.

    The linear layers may have other weights (parametrizations) but must be linear layers: another
    module in their place might read neighbouring rows.
    """
    if (sharding := sharding_of(layer)) is not SINGLE:
        return sharding.can_pack
    if not is_unmodified(layer, *classes) or "_sa_block" in layer.__dict__:
        return False
    if "_ff_block" in layer.__dict__ or "_mha_block" in layer.__dict__:
        return False
    for name, child in layer.named_children():
        if name in ("self_attn", "multihead_attn"):
            if not (is_unmodified(child, *attention_classes(name)) and projects_alike(child)):
                return False
        elif name.startswith("norm"):
            if not can_pack_norm(child):
                return False
        elif name.startswith("dropout"):
            if not is_unmodified(child, nn.Dropout):
                return False
        elif name.startswith("linear"):
            if not isinstance(child, nn.Linear) or not inherits(child, nn.Linear, "forward"):
                return False
        elif name == "activation" and not is_unmodified(child, *_ACTIVATIONS):
            return False
    return True


def packed_context(
    attention: nn.MultiheadAttention,
    y: Tensor,
    memory: Tensor,
    queries: Packing,
    keys: Packing,
    causal: bool,
    streams: DropoutStreams,
) -> Tensor:
    """The context of `attention`, before its output projection: y `[T, E]`, memory `[S, E]`."""
    q, k, v = project_each(attention, y, memory, memory)  # [T, H, D]
    scores: dict[str, Any] = {}
    if (positions := positions_of(attention)) is not None:
        q, k = positions.rotated(q, k, queries.positions)
        scores = positions.score_options(q.device)
    p = float(attention.dropout) if attention.training else 0.0
    heads = sharding_of(attention).attention_varlen(
        q,
        k,
        v,
        queries.cu_seqlens,
        keys.cu_seqlens,
        queries.longest,
        keys.longest,
        causal="top_left" if causal else False,
        dropout_p=p,
        **streams.take(p, of="heads"),
        **scores,
    )
    return heads.flatten(-2)


def _numbers(lengths: Lengths, B: int, S: int, name: str) -> list[int]:
    if isinstance(lengths, Tensor):
        if lengths.device.type != "cpu":
            raise ValueError(
                f"{name} must be on the CPU, where reading it needs no synchronisation, "
                f"got {lengths.device}"
            )
        if lengths.dtype not in (torch.int32, torch.int64) or lengths.dim() != 1:
            raise ValueError(
                f"{name} must be int32 or int64 [{B}], got {lengths.dtype} {list(lengths.shape)}"
            )
        numbers = lengths.tolist()
    elif not isinstance(lengths, Sequence):
        raise TypeError(f"{name} must be a list or a CPU tensor, got {type(lengths).__name__}")
    else:
        numbers = list(lengths)
        for i, number in enumerate(numbers):
            if isinstance(number, int) and not isinstance(number, bool):
                continue
            if isinstance(number, (bool, Tensor)) or not hasattr(number, "__index__"):
                raise TypeError(f"{name} must hold integers, got {number!r}")
            numbers[i] = operator.index(number)
    if len(numbers) != B:
        raise ValueError(
            f"{name} must have one length for each of the {B} sequences, got {len(numbers)}"
        )
    for number in numbers:
        if not 0 <= number <= S:
            raise ValueError(f"{name} must be between 0 and {S}, got {number}")
    return numbers


def _to_device(numbers: list[int], device: torch.device) -> Tensor:
    values = torch.tensor(numbers, dtype=torch.int32, device="cpu")
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)
