"""Common code of the Triton attention kernels, forward and backward.

Restrictions come in two kinds. Arithmetic ones (lengths, causal alignment, window) bound the loops:
`tile_range` splits a loop into edge and full tiles, `key_bounds` gives every row its keys. A dense
mask is classified before: mask_lists.py lists its full, partial and edge tiles. What acts on a tile
takes indices i (query) and j (key) already expanded to two dimensions: one function serves
[BLOCK_M, BLOCK_N] scores and their transpose. Scores are in natural units: scaled, bias added.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fastattn.ops._dropout import keep_scale, threshold
from fastattn.ops._triton_dropout import column_keys_kernel
from fastattn.ops._triton_launch import BoundLaunch
from fastattn.ops.attention.calls import CausalKind

LOG2E = tl.constexpr(1.4426950408889634)
NEG_INF = tl.constexpr(float("-inf"))
# Smallest normal fp32 number.
SMALLEST_NORMAL = tl.constexpr(2.0**-126)

# Kinds of tiles (mask_lists.py).
FULL = tl.constexpr(0)
PARTIAL = tl.constexpr(1)
EDGE = tl.constexpr(2)

# Broadcast dimension of a mask: one row for all queries, or one column for all keys.
ONE_ROW = tl.constexpr(1)
ONE_COLUMN = tl.constexpr(2)


# -- geometry, on the host ------------------------------------------------------------------------


class DiagonalBounds(NamedTuple):
    """Causal or window bounds: query i may attend keys i + low to i + high. A side that restricts
    nothing is off, number 0.

    For the queries of a key j swap the roles: j - high to j - low.
    """

    low: int
    high: int
    has_low: bool
    has_high: bool


def diagonal_bounds(
    causal: int, window_left: int, window_right: int, M: int, N: int
) -> DiagonalBounds:
    """Bounds by causal alignment, of the tensors, and window (-1 unlimited)."""
    shift = N - M if causal == CausalKind.BOTTOM_RIGHT else 0
    if causal:
        window_right = 0  # no window widens what causal allows
    low, high = shift - window_left, shift + window_right
    has_low = window_left >= 0 and M - 1 + low > 0  # else even the last row starts at key 0
    has_high = window_right >= 0 and high < N - 1  # else even the first row reaches the last key
    return DiagonalBounds(low if has_low else 0, high if has_high else 0, has_low, has_high)


def own_diagonal_bounds(causal: int, window_left: int, window_right: int) -> DiagonalBounds:
    """The bounds of sequences whose sizes or lengths differ: their diagonals' shift is added on the
    device.
    """
    right = 0 if causal else window_right
    low = -window_left if window_left >= 0 else 0
    return DiagonalBounds(low, max(right, 0), window_left >= 0, right >= 0)


def split_width(width: int) -> tuple[int, int]:
    """A head dim as one power-of-two tile and 0, or as two tiles if they pad less: 80 -> 64, 16."""
    whole = max(16, triton.next_power_of_2(width))
    first = whole // 2
    second = max(16, triton.next_power_of_2(width - first)) if width > first else whole
    return (first, second) if first >= 16 and first + second < whole else (whole, 0)


def dropout_numbers(p: float) -> tuple[int, float]:
    """(t, factor of what is kept): kept if the byte is >= t. p = 1 has factor 0, whatever stays."""
    return min(threshold(p), 255), keep_scale(p)


# No tile has more columns.
_WIDEST_TILE = 256


def column_keys_workspace(N: int) -> tuple[tuple[int, ...], torch.dtype, bool]:
    """Workspace for the keys of N columns and of those that the last tile has beyond them."""
    return (triton.cdiv(max(N, 1), _WIDEST_TILE) * _WIDEST_TILE // 2,), torch.int32, False


def column_hasher(N: int) -> Callable[..., None]:
    """Called with (seed, keys of column_keys_workspace(N), stream): for `load_keys`."""
    [units], _, _ = column_keys_workspace(N)
    launch = BoundLaunch(column_keys_kernel, (units,), {"BLOCK": 256}, num_warps=4)
    return launch.over(triton.cdiv(units, 256))


# -- what a kernel is given ------------------------------------------------------------------------

# Not specialised: what changes from batch to batch and buys no wider load.
NOT_SPECIALIZED = (
    "stream", "base_tiles_m", "base_tiles_n", "stride_base_b", "stride_base_h", "alive_heads",
    "stride_list_b", "stride_list_h", "stride_list_tile", "inner",
    "rows", "batch_heads", "swizzle_group", "low", "high", "threshold",
)  # fmt: skip


class KernelConstants(NamedTuple):
    """Compile-time constants of the forward and the backward."""

    HAS_LOW: Any  # row i attends no key before i + low
    HAS_HIGH: Any  # row i attends no key after i + high
    KEY_LENGTHS: Any  # 0 none, 1 per sequence, 2 per query
    QUERY_LENGTHS: Any
    # A head's rows are those of all sequences; lengths are their offsets, M and N of the longest.
    PACKED: Any
    FROM_END: Any  # low and high count from the bottom right of each sequence
    ARITHMETIC: Any  # lengths, causality or a window restrict rows
    DENSE: Any  # there is a mask
    BIAS: Any  # the mask is added
    SOFTCAP: Any  # scores are capped
    SINKS: Any  # rows have a logit without a value
    DISTANCE: Any  # what depends on the distance is added
    SHARED: Any  # which line of the mask serves all: ONE_ROW, ONE_COLUMN or 0
    MASK_UNIT: Any  # divisor of N and of the mask's strides but the last: shows the alignment
    DROPOUT: Any  # 0 none, 1 on any GPU, 2 with an instruction of NVIDIA's
    NATURAL: Any  # scores are in natural units, else times log2(e)
    D: Any  # columns of q and k, on chip as tiles of D0 and D1 (or 0)
    D0: Any
    D1: Any
    E: Any  # columns of v, on chip as tiles of E0 and E1 (or 0)
    E0: Any
    E1: Any
    BLOCK_M: Any
    BLOCK_N: Any
    UNIT: Any = 1  # divisor of the tensors' strides: shows the alignment
    PRECISION: Any = "ieee"  # of fp32 products
    STAGES: Any = 1
    EDGE_STAGES: Any = 1
    RAGGED: Any = True  # the last tile of the loop is not whole
    DEAD: Any = True  # rows of what the loop reads may attend no pair
    TMA: Any = False  # the loop reads through descriptors
    PAGE: Any = 0  # keys of a page, to which a block table points; 0: k and v have no pages
    # Constants of the backward only.
    LISTS: Any = False  # tiles are listed in memory, from base tiles of BASE_M by BASE_N
    BASE_M: Any = 1
    BASE_N: Any = 1
    BY_VALUE: Any = False  # blocked pairs of a partial tile get weight 0 by the mask's value
    KEEP_LOG2: Any = 0  # log2 of dropout's factor, rounded up: 0 without dropout, else 1 to 8
    HAS_DOUT: Any = True
    NEED_DK: Any = True
    NEED_DV: Any = True
    LATE: Any = False  # dkdv computes dp before p


class RowStrides(NamedTuple):
    """Strides of q, k, v and tensors of their layout, without the last dimension."""

    b: Any
    h: Any
    row: Any


class MaskStrides(NamedTuple):
    b: Any
    h: Any
    m: Any
    n: Any


class LengthTensors(NamedTuple):
    """Lengths of keys [B] or [B, M] and of queries [B], None without; offsets of packed sequences.
    Tensors on the host, pointers in kernels.
    """

    key: Any
    query: Any


class LengthStrides(NamedTuple):
    """Strides of key lengths by batch and query, and of query lengths by batch."""

    key_b: Any
    key_m: Any
    query_b: Any


class Lengths(NamedTuple):
    ptr: LengthTensors
    stride: LengthStrides


class TableStrides(NamedTuple):
    """Strides of a block table, by batch and page."""

    b: Any
    page: Any


class ScoreTensors(NamedTuple):
    """Tensors of score modifications, None without. Tensors on the host, pointers in kernels."""

    sinks: Any  # [H], fp32
    distance_bias: Any  # [B or 1, H, M + N - 1], fp32


class ScoreNumbers(NamedTuple):
    """Numbers of score modifications, None without."""

    softcap: Any
    sink_stride: Any
    distance_b: Any  # strides of distance_bias
    distance_h: Any
    distance_entries: Any
    distance_first: Any  # the entry of key i for query i, if that is on the diagonal


class ScoreModifications(NamedTuple):
    """Score modifications of a program. cap_scale: with a soft cap, times products: the tanh is the
    capped score divided by the cap. distance_ptr: the entry of distance_bias for key i of query i;
    the head has those from distance_begin to distance_end, counted from it.
    """

    cap_scale: Any
    distance_ptr: Any
    distance_begin: Any
    distance_end: Any


class KeyBounds(NamedTuple):
    """Keys by arithmetic: [row_begin, row_end) [BLOCK_M] of each row, none outside [begin, end)."""

    row_begin: Any
    row_end: Any
    begin: Any
    end: Any


class Dropout(NamedTuple):
    """Keys of the program's rows and of columns; of those that the loop goes over, a pointer."""

    row_keys: Any
    column_keys: Any
    threshold: Any


@triton.jit
def rows_of(ptr, strides, b, h, row, UNIT: tl.constexpr):
    """ptr from that row of that head on; 64-bit indices."""
    return ptr + (b * strides.b + h * strides.h + row * strides.row) * UNIT


# -- geometry, in kernels -------------------------------------------------------------------------


@triton.jit
def program_tile(lines, batch_heads, swizzle_group, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr):
    """(tile, batch and head) of this program, which owns BLOCK of a head's lines.

    L2 swizzle: programs run in groups of heads that share the L2 cache, in each the tiles in one
    order for all heads: LAST_FIRST where causality makes the last the longest, so that short ones
    fill up.
    """
    pid = tl.program_id(0)
    tiles = (lines + BLOCK - 1) // BLOCK
    group_index = pid // (swizzle_group * tiles)
    heads_in_group = tl.minimum(swizzle_group, batch_heads - group_index * swizzle_group)
    in_group = pid - group_index * swizzle_group * tiles
    tile = in_group // heads_in_group
    if LAST_FIRST:
        tile = tiles - 1 - tile
    return tile, group_index * swizzle_group + in_group % heads_in_group


@triton.jit
def clamped_length(length, limit):
    """A length of any integer type, clamped to [0, limit], as int32."""
    return tl.minimum(tl.maximum(length, 0), limit).to(tl.int32)


@triton.jit
def sequence_limits(lengths, b, M, N, low, high, CASE: tl.constexpr):
    """(query limit, key limit, low, high) of sequence b: no query from the one limit on attends
    anything, none attends a key from the other on, as far as lengths of sequences say; with
    FROM_END low and high counted from the limits. b: 64-bit.
    """
    q_limit = M
    if CASE.QUERY_LENGTHS:
        q_limit = clamped_length(tl.load(lengths.ptr.query + b * lengths.stride.query_b), M)
    limit = N
    if CASE.KEY_LENGTHS == 1:
        limit = clamped_length(tl.load(lengths.ptr.key + b * lengths.stride.key_b), N)
    if CASE.FROM_END:
        low += limit - q_limit
        high += limit - q_limit
    return q_limit, limit, low, high


@triton.jit
def row_limits(lengths, b, i, inside, limit, N, CASE: tl.constexpr):
    """The key limit of each query i, shaped like i if it has its own length, else `limit`."""
    if CASE.KEY_LENGTHS == 2:
        ptrs = lengths.ptr.key + b * lengths.stride.key_b + i.to(tl.int64) * lengths.stride.key_m
        limit = clamped_length(tl.load(ptrs, mask=inside, other=0), N)
    return limit


@triton.jit
def packed_sequence(lengths, b):
    """(first query, queries, first key, keys) of sequence b, whose offsets the lengths are."""
    query0 = tl.load(lengths.ptr.query + b)
    key0 = tl.load(lengths.ptr.key + b)
    M = tl.load(lengths.ptr.query + b + 1) - query0
    N = tl.load(lengths.ptr.key + b + 1) - key0
    return query0, M, key0, N


@triton.jit
def tile_range(
    begin, end, limit, limit_all, low, high,
    HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The key tiles that the query rows [begin, end) may touch.

    limit: no row reaches keys from there on; limit_all: lengths keep no row from keys below it.
    Returns tiles first <= full_first <= full_last <= last: [full_first, full_last) need no
    arithmetic test, the rest of [first, last) does; and touched_begin, touched_end: outside them no
    row has a key. For the query tiles of a key tile pass -high, -low, HAS_HIGH, HAS_LOW.
    """
    touched_begin = 0
    touched_end = limit
    full_begin = 0
    full_end = limit_all
    if HAS_LOW:
        touched_begin = tl.maximum(begin + low, 0)
        full_begin = tl.maximum(end - 1 + low, 0)
    if HAS_HIGH:
        touched_end = tl.minimum(touched_end, end + high)
        full_end = tl.minimum(full_end, begin + high + 1)
    touched_end = tl.maximum(touched_end, touched_begin)
    first = touched_begin // BLOCK
    last = tl.where(touched_end > touched_begin, (touched_end + BLOCK - 1) // BLOCK, first)
    full_first = tl.minimum((full_begin + BLOCK - 1) // BLOCK, last)
    full_last = tl.maximum(tl.minimum(full_end // BLOCK, last), full_first)
    return first, full_first, full_last, last, touched_begin, touched_end


@triton.jit
def key_bounds(i, row_limit, q_limit, low, high, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr):
    """Row i may attend keys [begin, end), by arithmetic; rows from q_limit on have none.

    row_limit: the row's key length, a scalar or shaped like i.
    """
    begin = tl.zeros_like(i)
    end = tl.zeros_like(i) + row_limit
    if HAS_LOW:
        begin = i + low
    if HAS_HIGH:
        end = tl.minimum(end, i + high + 1)
    return begin, tl.where(i < q_limit, end, 0)


# -- score modifications --------------------------------------------------------------------------


@triton.jit
def tanh(x):
    """With a relative error below 5e-7, near 0 too: there by the polynomial of least relative error
    (4.4e-9), as 1 minus almost 1 loses digits. 15 instructions (sm_90), 18 with a division for the
    square of a reciprocal root.
    """
    z = x * x
    near = -5.70498713e-3 * z + 2.06390874e-2
    near = near * z - 5.37397151e-2
    near = near * z + 1.33314422e-1
    near = near * z - 3.33332819e-1
    near = near * z * x + x
    size = tl.abs(x)
    root = tl.rsqrt(0.5 + 0.5 * tl.exp2(size * (2.0 * LOG2E)))
    far = 1.0 - root * root
    far = tl.where(x < 0.0, -far, far)
    return tl.where(size < 0.625, near, far)


@triton.jit
def score_factor(scale, numbers, CASE: tl.constexpr):
    """Times what `capped` returns: scores before biases are added, in base 2 unless NATURAL."""
    if CASE.SOFTCAP:
        scale = numbers.softcap
    if not CASE.NATURAL:
        scale = scale * LOG2E
    return scale


@triton.jit
def score_changes(tensors, numbers, scale, b, h, q_limit, k_limit, CASE: tl.constexpr):
    """The ScoreModifications of head h in batch b (64-bit); limits: of its sequence."""
    if CASE.SOFTCAP:
        scale = scale / numbers.softcap
    ptr = scale
    begin = 0
    end = 0
    if CASE.DISTANCE:
        begin -= numbers.distance_first
        if CASE.FROM_END:
            begin += k_limit - q_limit
        end = begin + numbers.distance_entries
        ptr = tensors.distance_bias + b * numbers.distance_b + h * numbers.distance_h - begin
    return ScoreModifications(scale, ptr, begin, end)


@triton.jit
def capped(s, changes, CASE: tl.constexpr):
    """Products as they are, or a soft cap's tanh of them."""
    if CASE.SOFTCAP:
        s = tanh(s * changes.cap_scale)
    return s


@triton.jit
def distance_bias(changes, m_start, n_start, i, j, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The bias of the scores of pairs m_start + i, n_start + j; any number for pairs that are not
    allowed.

    The tile's distances are loaded once and exchanged through shared memory: 1.7 instructions a
    pair (sm_90). A load for each pair would be kept in shared memory by the load pipeline, another
    64 KB.
    """
    d = n_start - m_start - (BLOCK_M - 1) + tl.arange(0, 2 * max(BLOCK_M, BLOCK_N))
    inside = (d >= changes.distance_begin) & (d < changes.distance_end)
    values = tl.load(changes.distance_ptr + d, mask=inside, other=0.0)
    index = j - i + (BLOCK_M - 1)
    return tl.gather(values, index.reshape([BLOCK_M * BLOCK_N]), 0).reshape(index.shape)


@triton.jit
def sink_of(tensors, numbers, h):
    """The sink of head h (64-bit)."""
    return tl.load(tensors.sinks + h * numbers.sink_stride)


# -- dense masks ----------------------------------------------------------------------------------


@triton.jit
def blocked_value(DTYPE: tl.constexpr):
    """finfo(DTYPE).min: an additive mask at or below it blocks."""
    if DTYPE == tl.float16:
        return -65504.0
    elif DTYPE == tl.bfloat16:
        return -3.3895313892515355e38
    elif DTYPE == tl.float64:
        return -1.7976931348623157e308
    else:
        return -3.4028234663852886e38


@triton.jit
def allowed_and_bias(value, DTYPE: tl.constexpr):
    """(allowed, bias) of loaded values of a mask; bias is 0.0 for a boolean one."""
    if DTYPE == tl.int1:
        return value != 0, 0.0
    elif DTYPE == tl.float64:
        # Values that are not blocked in fp64 must not become blocked in fp32.
        bias = tl.maximum(value, blocked_value(tl.float32)).to(tl.float32)
        return ~(value <= blocked_value(tl.float64)), bias
    else:
        bias = value.to(tl.float32)
        return ~(bias <= blocked_value(DTYPE)), bias


@triton.jit
def mask_pointers(tile_ptr, i, j, stride_mm, stride_mn, SHARED: tl.constexpr):
    """Pointers to the mask's values of pairs i, j. SHARED: the dimension that is broadcast."""
    if SHARED == ONE_ROW:
        return tile_ptr + j * stride_mn
    elif SHARED == ONE_COLUMN:
        return tile_ptr + i * stride_mm
    else:
        return tile_ptr + i * stride_mm + j * stride_mn


@triton.jit
def load_mask(tile_ptr, i, j, stride_mm, stride_mn, rows, columns, SHARED: tl.constexpr):
    """(allowed, bias) of the pairs i, j counted from the tile's corner, where tile_ptr points.

    Pairs outside [rows, columns], which is what the mask has left from the corner on, are not
    allowed. Where one row serves all queries, i and rows do not matter and the results have one
    row; where one column serves all keys, the bias has one column.
    """
    DTYPE: tl.constexpr = tile_ptr.dtype.element_ty
    if SHARED == ONE_ROW:
        inside = j < columns
    elif SHARED == ONE_COLUMN:
        inside = i < rows
    else:
        inside = (i < rows) & (j < columns)
    ptrs = mask_pointers(tile_ptr, i, j, stride_mm, stride_mn, SHARED)
    allowed, bias = allowed_and_bias(tl.load(ptrs, mask=inside, other=0), DTYPE)
    if DTYPE != tl.int1:
        allowed = inside & allowed
    if SHARED == ONE_COLUMN:
        allowed = allowed & (j < columns)
    return allowed, bias


@triton.jit
def load_partial(tile_ptr, i, j, inside, stride_mm, stride_mn, SHARED: tl.constexpr):
    """(allowed, bias) as load_mask, of a partial tile, all of whose lines that are summed over lie
    in the mask. inside: which of the other lines do; None where one line serves all of these, and
    the results have one.
    """
    ptrs = mask_pointers(tile_ptr, i, j, stride_mm, stride_mn, SHARED)
    if inside is None:
        value = tl.load(ptrs)
    else:
        value = tl.load(ptrs, mask=inside, other=0)
    return allowed_and_bias(value, tile_ptr.dtype.element_ty)


class MaskShape(NamedTuple):
    """A 4-dimensional mask's real sizes (1 where broadcast) and strides (0 where broadcast)."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def mask_shape(mask: torch.Tensor) -> MaskShape:
    pairs = list(zip(mask.shape, mask.stride(), strict=True))
    sizes = tuple(1 if stride == 0 else size for size, stride in pairs)
    return MaskShape(sizes, tuple(0 if size == 1 else stride for size, stride in pairs))


def shared_lines(mask: MaskShape) -> int:
    """SHARED of the kernels: ONE_ROW, ONE_COLUMN or 0."""
    if mask.sizes[2] == 1:
        return ONE_ROW.value
    return ONE_COLUMN.value if mask.sizes[3] == 1 else 0
