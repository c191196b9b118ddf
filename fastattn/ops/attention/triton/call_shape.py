"""The shape of a call for attention's kernels in Triton, forward and backward, dense and packed:
`CallShape`, from which both directions take their kernels' numbers and constants.

Arguments of launches that come from tensors: strides, tensor descriptors, L2 swizzle groups; and
the calls that no kernel supports.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from fastattn.ops import _env
from fastattn.ops._triton_dropout import AttentionSeed
from fastattn.ops._triton_launch import DTYPES, DescriptorTemplate, descriptor_template, too_old
from fastattn.ops.attention.calls import AnyCall, CausalKind, why_call_unsupported
from fastattn.ops.attention.triton.tiles import (
    DiagonalBounds,
    KernelConstants,
    LengthStrides,
    LengthTensors,
    MaskShape,
    MaskStrides,
    RowStrides,
    ScoreNumbers,
    ScoreTensors,
    diagonal_bounds,
    dropout_numbers,
    mask_shape,
    own_diagonal_bounds,
    shared_lines,
)

# Offsets inside a tile are 32-bit: 256 rows of this stride stay below 2^31.
_LARGEST_ROW_STRIDE = 1 << 22
# Operands that concurrently running heads read repeatedly should stay in the L2 cache.
_SWIZZLE_GROUP_BYTES = 32 << 20

Workspace = list[tuple[tuple[int, ...], torch.dtype, bool]]


# -- what a call is -------------------------------------------------------------------------------


class Packed(NamedTuple):
    """Sequences one behind the other: how many, and the longest."""

    sequences: int
    M: int
    N: int


class CallShape(NamedTuple):
    """Sizes and constants that all kernels derive from a call's shapes, strides and options."""

    arch: str
    dtype: torch.dtype
    B: int  # of packed sequences: how many
    H: int
    K: int
    M: int  # of packed sequences: the longest
    N: int
    D: int
    E: int
    rows: int  # of a head, in all sequences
    limits: DiagonalBounds
    from_end: bool  # limits count from each sequence's own end
    key_lengths: int  # their dimensions, 0 without
    query_lengths: bool
    length_strides: LengthStrides
    packed: Packed | None
    mask: MaskShape | None
    mask_dtype: torch.dtype | None
    mask_unit: int  # what kernels get mask_strides and N divided by (mask_strides_in_units)
    mask_strides: MaskStrides
    scale: float
    dropout_p: float
    score_numbers: ScoreNumbers
    page: int  # keys of a page, 0 without a block table

    @property
    def group(self) -> int:
        return self.H // self.K

    @property
    def shorter_keys(self) -> bool:
        """Whether the keys of a sequence may end before N."""
        return self.key_lengths > 0 or self.packed is not None

    @property
    def shorter_queries(self) -> bool:
        return self.query_lengths or self.packed is not None

    @property
    def needs_lists(self) -> bool:
        """Whether arithmetic alone cannot say which tiles the backward visits."""
        return self.mask is not None or self.key_lengths == 2

    @property
    def arithmetic(self) -> bool:
        shorter = self.shorter_keys or self.shorter_queries
        return shorter or self.limits.has_low or self.limits.has_high

    @property
    def bias(self) -> bool:
        return self.mask_dtype not in (None, torch.bool)

    @property
    def natural(self) -> bool:
        distances = self.score_numbers.distance_first is not None
        return self.dtype == torch.float32 or self.bias or distances

    @property
    def dead_rows(self) -> bool:
        """Rows without a key lie beyond their length, or where the bounds hold none."""
        limits = self.limits
        if self.needs_lists or self.from_end or self.shorter_queries:
            return True
        dead = limits.has_high and limits.high < 0
        return dead or (limits.has_low and (self.shorter_keys or limits.low > self.N - self.M))

    @property
    def dead_keys(self) -> bool:
        """Keys without a row lie beyond their length, or where the bounds hold none."""
        limits = self.limits
        if self.needs_lists or self.from_end or self.shorter_keys:
            return True
        dead = limits.has_low and limits.low > 0
        return dead or (limits.has_high and (self.shorter_queries or limits.high < self.N - self.M))

    @property
    def numbers(self) -> tuple[Any, ...]:
        """Last arguments of the kernels: low, high, scale, dropout's threshold and keep_factor, and
        the numbers of score modifications.
        """
        dropout = dropout_numbers(self.dropout_p)
        return self.limits.low, self.limits.high, self.scale, *dropout, self.score_numbers

    def constants(
        self,
        block_m: int,
        block_n: int,
        d: tuple[int, int] = (0, 0),
        e: tuple[int, int] = (0, 0),
        **others: Any,
    ) -> KernelConstants:
        """d, e: the tiles of both head dims. others: fields that follow from tiling and tensors, in
        the place of defaults.
        """
        dropout = 0
        if self.dropout_p > 0.0:
            dropout = 2 if self.arch.startswith("sm_") else 1
        fields: dict[str, Any] = {
            "HAS_LOW": self.limits.has_low,
            "HAS_HIGH": self.limits.has_high,
            "KEY_LENGTHS": self.key_lengths,
            "QUERY_LENGTHS": self.query_lengths,
            "PACKED": self.packed is not None,
            "FROM_END": self.from_end,
            "ARITHMETIC": self.arithmetic,
            "DENSE": self.mask is not None,
            "BIAS": self.bias,
            "SOFTCAP": self.score_numbers.softcap is not None,
            "SINKS": self.score_numbers.sink_stride is not None,
            "DISTANCE": self.score_numbers.distance_first is not None,
            "SHARED": 0 if self.mask is None else shared_lines(self.mask),
            "MASK_UNIT": self.mask_unit,
            "DROPOUT": dropout,
            "NATURAL": self.natural,
            "D": self.D, "D0": d[0], "D1": d[1], "E": self.E, "E0": e[0], "E1": e[1],
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "PAGE": self.page,
        }  # fmt: skip
        # Each on its own: of a tuple that is a constant the compiler gets plain Python numbers.
        return KernelConstants(*map(tl.constexpr, KernelConstants(**fields | others)))


def packed_of(call: AnyCall) -> Packed | None:
    if call.cu_seqlens_q is None:
        return None
    return Packed(call.cu_seqlens_q.numel() - 1, max(1, call.max_seqlen_q), call.max_seqlen_k)


def call_shape_of(call: AnyCall) -> CallShape:
    """Packed tensors are as in the op or heads first."""
    q, k, v, mask, table = call.q, call.k, call.v, call.mask, call.block_table
    packed, keys, queries = packed_of(call), call.key_lengths, call.query_lengths
    if q.dim() == 3:
        q, k, v = map(heads_first, (q, k, v))
    (B, H, rows, D), (K, N), E = q.shape, k.shape[1:3], v.shape[3]
    M, causal, window = rows, call.causal, (call.window_left, call.window_right)
    page = 0
    if table is not None:
        page, N = N, table.shape[1] * N
    one_query = M == 1 and call.window_left < 0 and call.distance_bias is None
    if causal == CausalKind.BOTTOM_RIGHT_LENGTHS and one_query:
        causal = CausalKind.BOTTOM_RIGHT  # which then restricts nothing, and takes no edge tile
    own = CausalKind.BOTTOM_RIGHT_LENGTHS if packed is None else CausalKind.BOTTOM_RIGHT
    from_end = causal >= own
    if packed is not None:
        B, M, N = packed
        keys = queries = None
    if packed is not None or from_end:
        limits = own_diagonal_bounds(causal, *window)
    else:
        limits = diagonal_bounds(causal, *window, M, N)
    length_strides = LengthStrides(
        0 if keys is None else keys.stride(0),
        keys.stride(1) if keys is not None and keys.dim() == 2 else 0,
        0 if queries is None else queries.stride(0),
    )
    shape = None if mask is None else mask_shape(mask)
    unit, strides = (1, (0, 0, 0, 0)) if shape is None else mask_strides_in_units(shape.strides, N)
    return CallShape(
        architecture(q), q.dtype, B, H, K, M, N, D, E, rows, limits, from_end,
        0 if keys is None else keys.dim(), queries is not None, length_strides, packed, shape,
        None if mask is None else mask.dtype, unit, MaskStrides(*strides), call.scale,
        call.dropout_p, _score_numbers(call, M, N, from_end), page,
    )  # fmt: skip


def _score_numbers(call: AnyCall, M: int, N: int, from_end: bool) -> ScoreNumbers:
    """M and N: of packed sequences those of the longest."""
    sinks, bias = call.sinks, call.distance_bias
    sink_stride = None if sinks is None else sinks.stride(0)
    if bias is None:
        return ScoreNumbers(call.softcap or None, sink_stride, None, None, None, None)
    stride_b = 0 if bias.shape[0] == 1 else bias.stride(0)
    # The diagonal of all sequences ends in the same corner, or each has its own: subtracted later.
    first = (N if from_end else M) - 1
    strides = stride_b, bias.stride(1)
    return ScoreNumbers(call.softcap or None, sink_stride, *strides, bias.shape[2], first)


def length_tensors(call: AnyCall) -> LengthTensors:
    """Packed sequences have offsets in their place."""
    if call.cu_seqlens_q is not None:
        return LengthTensors(call.cu_seqlens_k, call.cu_seqlens_q)
    return LengthTensors(call.key_lengths, call.query_lengths)


def score_tensors(call: AnyCall) -> ScoreTensors:
    return ScoreTensors(call.sinks, call.distance_bias)


def attention_seed(seed: Tensor | None) -> AttentionSeed | None:
    return None if seed is None else AttentionSeed(seed, seed if seed.shape[0] > 1 else None)


def has_origin(seed: AttentionSeed | None) -> bool:
    return seed is not None and seed.origin is not None


def heads_first(x: Any) -> Any:
    """[T, H, D] as [1, H, T, D]; None, and a result that is not needed, stay as they are."""
    return x if x is None or x.dim() == 1 else x.transpose(0, 1)[None]


def architecture(x: Tensor) -> str:
    return _env.architecture(x.device.type, x.device.index or 0)


# -- what launches take from tensors --------------------------------------------------------------


def row_strides(x: Tensor | None) -> RowStrides:
    """0 where there is nothing to step over."""
    if x is None:
        return RowStrides(0, 0, 0)
    sizes, strides = x.shape, x.stride()
    return RowStrides(*(0 if sizes[d] <= 1 else strides[d] for d in range(3)))


def row_strides_in_units(*tensors: Tensor | None) -> tuple[int, list[RowStrides]]:
    """(unit, the tensors' strides divided by it), so that the compiler sees alignment."""
    strides = [row_strides(x) for x in tensors]
    unit = stride_unit([stride for each in strides for stride in each])
    return unit, [RowStrides(*(stride // unit for stride in each)) for each in strides]


def stride_unit(strides: Sequence[int]) -> int:
    """Divisor of the strides in the kernels' arguments: the compiler can infer alignment."""
    return 8 if all(stride % 8 == 0 for stride in strides) else 1


def mask_strides_in_units(strides: Sequence[int], N: int) -> tuple[int, tuple[int, ...]]:
    """(unit, strides as the kernels get them) of a mask over N keys: what all of its strides but
    the last, and N, are divided by for the kernels. Where one of them is odd, tiles of the mask are
    read element by element, in every loop alike (else ptxas serialises products: C7515).
    """
    unit = stride_unit((*strides[:3], N))
    return unit, (*(stride // unit for stride in strides[:3]), strides[3])


def fits_descriptor(x: Tensor | None) -> bool:
    """Whether tensor descriptors can cover an aligned x: nothing expanded, steps of 16 bytes."""
    if x is None:
        return True
    pairs = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    steps = [stride * x.element_size() for size, stride in pairs if size > 1]
    return x.numel() > 0 and all(step > 0 and step % 16 == 0 for step in steps)


def descriptor_templates(
    x: Tensor | None, rows: int, widths: tuple[int, int]
) -> tuple[DescriptorTemplate | None, DescriptorTemplate | None]:
    """Descriptors of tensors like x, [B, K, N, D] or, packed, [K, N, D]: blocks of `rows` rows of
    one head, of its first columns and of those that follow; 0 in columns beyond D.
    """
    if x is None:
        return None, None
    # Strides of size-1 dimensions are undefined in PyTorch; TMA needs multiples of 16 bytes.
    pairs = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    strides = [*(16 if size == 1 else stride for size, stride in pairs), 1]
    found: list[DescriptorTemplate | None] = []
    for width in widths:
        block = [*[1] * (x.dim() - 2), rows, width]
        found.append(descriptor_template(x, list(x.shape), strides, block) if width else None)
    return found[0], found[1]


def swizzle_group_size(limits: DiagonalBounds, head_bytes: int, group: int, heads: int) -> int:
    """How many of the heads form an L2 swizzle group, whose tiles run in one long-to-short order.
    head_bytes: what each of them reads again and again, shared by `group` of them.
    """
    if not limits.has_high:
        return 1
    return min(heads, group * max(1, _SWIZZLE_GROUP_BYTES // max(1, head_bytes)))


def unsupported(call: AnyCall, **others: Tensor | None) -> str | None:
    """Why no kernel supports the call. others: further tensors whose rows they read, by name."""
    if why := why_call_unsupported(call):
        return why
    mask, tensors = call.mask, {"q": call.q, "k": call.k, "v": call.v} | others
    if call.cu_seqlens_q is not None:
        tensors = {name: heads_first(x) for name, x in tensors.items()}
    q, v = tensors["q"], tensors["v"]
    assert q is not None and v is not None
    if q.dtype not in DTYPES:
        return f"has kernels for float16, bfloat16 and float32, got {q.dtype}"
    D, E = q.shape[3], v.shape[3]
    if not (1 <= D <= 256 and 1 <= E <= 256):
        return f"handles head dims up to 256, got {D} and {E}"
    for name, x in tensors.items():
        if x is None:
            continue
        _, _, step, last = x.stride()
        if last != 1 and x.shape[3] > 1:
            return f"needs a contiguous last dimension, got {name} with strides {x.stride()}"
        if step > _LARGEST_ROW_STRIDE and x.shape[2] > 1:
            return f"handles row strides up to {_LARGEST_ROW_STRIDE}, got {step} in {name}"
    if mask is not None and max(mask.stride()[2:]) > _LARGEST_ROW_STRIDE:
        return f"handles mask strides up to {_LARGEST_ROW_STRIDE}, got {mask.stride()}"
    return too_old(architecture(q))
