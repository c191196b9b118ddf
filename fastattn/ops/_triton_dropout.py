"""The dropout bits of fastattn/ops/_dropout.py in Triton, for the kernels of every op."""

# Kernels are in Triton's language: no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fastattn.ops import _dropout

ROW_TAG = tl.constexpr(_dropout.ROW_TAG)
COLUMN_TAG = tl.constexpr(_dropout.COLUMN_TAG)
GOLDEN = tl.constexpr(_dropout.GOLDEN)
SECOND_STREAM = tl.constexpr(_dropout.SECOND_STREAM)


# -- the hash -------------------------------------------------------------------------------------


@triton.jit
def begin(x):
    """The first step of finalise. It is linear: begin(a) ^ begin(b) == begin(a ^ b)."""
    return x ^ (x >> 16)


@triton.jit
def finalise(x):
    """`finalise` of _dropout.py."""
    return finish(begin(x))


@triton.jit
def finish(x):
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def absorb(state, value):
    return finalise((state ^ value) + GOLDEN)


@triton.jit
def stream_key(TAG: tl.constexpr, seed_ptr, stream, SECOND: tl.constexpr):
    """SECOND: for the second dropout of a call."""
    seed = tl.load(seed_ptr)
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    stream = stream.to(tl.uint32)
    if SECOND:
        stream = stream ^ SECOND_STREAM
    return absorb(absorb(absorb(tl.full([], TAG, tl.uint32), low), high), stream)


# -- row-wise ops: one word for four columns of a row ---------------------------------------------


@triton.jit
def row_keys(seed_ptr, stream, rows, SECOND: tl.constexpr = False):
    """rows: indices in the whole tensor; int64 of any shape."""
    key = absorb(stream_key(ROW_TAG, seed_ptr, stream, SECOND), (rows >> 32).to(tl.uint32))
    key = absorb(key, tl.zeros_like(key))
    return absorb(key, (rows & 0xFFFFFFFF).to(tl.uint32))


@triton.jit
def column_keys(seed_ptr, stream, start, local, SECOND: tl.constexpr = False):
    """Keys of the columns start + local. start: a multiple of 4; local: from arange."""
    unit = (start // 4 + (local >> 2)).to(tl.uint32)
    return absorb(stream_key(COLUMN_TAG, seed_ptr, stream, SECOND), unit)


@triton.jit
def row_kept(row_keys, column_keys, local, threshold):
    """Which elements are kept. row_keys, column_keys and local have as many dimensions as the tile.
    The compiler hashes once for four columns, since only constant bits of `local` differ.
    """
    word = finalise(row_keys ^ column_keys)
    byte = (word >> (8 * (local & 3)).to(tl.uint32)) & 0xFF
    return byte >= threshold.to(tl.uint32)


@triton.jit
def drop(x, keep, keep_factor):
    """x with dropped elements 0 and kept ones scaled."""
    return tl.where(keep, x * keep_factor, 0.0)


# -- attention: one word for a unit of rows {r, r + 8} and one of columns {c, c + 8} --------------


class AttentionSeed(NamedTuple):
    """Attention's dropout seed: a tensor on the host, a pointer in kernels. origin: the same if the
    seed has an origin, else None, so that kernels for seeds without one have no instruction for it.
    """

    ptr: Any
    origin: Any


class Base(NamedTuple):
    """The base of the keys of rows or columns: their hash up to the units, the first unit."""

    key: Any
    first_unit: Any


@triton.jit
def units_before(position):
    """The units of the multiple of 16 at or below an int64 position."""
    return ((position >> 4) * 8).to(tl.uint32)


@triton.jit
def dropout_row_base(seed, stream, b, h):
    """For `unit_keys` of rows. seed: AttentionSeed."""
    b = b.to(tl.uint32)
    h = h.to(tl.uint32)
    first_unit = tl.full([], 0, tl.uint32)
    if seed.origin is not None:
        b += tl.load(seed.origin + 1).to(tl.uint32)
        h += tl.load(seed.origin + 2).to(tl.uint32)
        first_unit = units_before(tl.load(seed.origin + 3))
    rows = stream_key(ROW_TAG, seed.ptr, stream, False)
    return Base(absorb(absorb(rows, b), h), first_unit)


@triton.jit
def dropout_column_base(seed, stream):
    """For `unit_keys` of columns."""
    first_unit = tl.full([], 0, tl.uint32)
    if seed.origin is not None:
        first_unit = units_before(tl.load(seed.origin + 4))
    return Base(stream_key(COLUMN_TAG, seed.ptr, stream, False), first_unit)


@triton.jit
def dropout_bases(seed, stream, b, h):
    """(row base, column base) for `unit_keys`."""
    return dropout_row_base(seed, stream, b, h), dropout_column_base(seed, stream)


@triton.jit
def unit_keys(base, start, UNITS: tl.constexpr):
    """Keys of the UNITS units of the 2 * UNITS rows or columns from start (a multiple of 16) on.
    `begin` is applied to them here, which saves a step for each word.
    """
    units = (start // 2 + tl.arange(0, UNITS)).to(tl.uint32) + base.first_unit
    return begin(absorb(base.key, units))


@triton.jit
def unit_rows(start, UNITS: tl.constexpr):
    """The first row of each unit of `unit_keys`."""
    unit = tl.arange(0, UNITS)
    return start + unit // 8 * 16 + unit % 8


@triton.jit(do_not_specialize=["stream", "units"])
def column_keys_kernel(seed, keys_ptr, stream, units, BLOCK: tl.constexpr):
    """Keys of all column units. Batches, heads and rows share them; without this kernel every
    thread would hash its columns' keys for every tile, as much work as the words themselves.
    """
    start = tl.program_id(0) * BLOCK
    keys = unit_keys(dropout_column_base(seed, stream), 2 * start, BLOCK)
    unit = start + tl.arange(0, BLOCK)
    tl.store(keys_ptr + unit, keys.to(tl.int32, bitcast=True), mask=unit < units)


@triton.jit
def load_keys(keys_ptr, start, UNITS: tl.constexpr):
    """`unit_keys` of columns, as stored by column_keys_kernel."""
    keys = tl.load(keys_ptr + start // 2 + tl.arange(0, UNITS))
    return keys.to(tl.uint32, bitcast=True)


@triton.jit
def spread(word, SIZE0: tl.constexpr, SIZE1: tl.constexpr):
    """Copies each word to its four positions: [SIZE0 / 2, SIZE1 / 2] -> [SIZE0, SIZE1]."""
    word = word.reshape([SIZE0 // 16, 1, 8, SIZE1 // 16, 1, 8])
    return tl.broadcast_to(word, [SIZE0 // 16, 2, 8, SIZE1 // 16, 2, 8]).reshape([SIZE0, SIZE1])


@triton.jit
def byte_index(rows, columns):
    """Which byte of a word decides. rows: [SIZE0, 1], columns: [1, SIZE1], indices in the tile."""
    return ((rows >> 3) & 1) * 2 + ((columns >> 3) & 1)


@triton.jit
def dropout_kept(keys0, keys1, rows, columns, threshold, SIZE0: tl.constexpr, SIZE1: tl.constexpr):
    """Which weights of a tile [SIZE0, SIZE1] are kept. keys0, keys1: of the units of both
    dimensions; rows, columns: as for byte_index.
    """
    word = spread(finish(keys0[:, None] ^ keys1[None, :]), SIZE0, SIZE1)
    return kept_by_word(word, rows, columns, threshold)


@triton.jit
def kept_by_word(word, rows, columns, threshold):
    # The byte is shifted to the top; the bits below it cannot change the comparison.
    return (word << (24 - 8 * byte_index(rows, columns)).to(tl.uint32)) >= (
        threshold.to(tl.uint32) << 24
    )


@triton.jit
def line_keys(base, lines):
    """As unit_keys, for each of any rows or columns; those of a unit have the same key."""
    units = (lines // 16 * 8 + lines % 8).to(tl.uint32) + base.first_unit
    return begin(absorb(base.key, units))


@triton.jit
def kept_pairs(keys0, keys1, rows, columns, threshold):
    """Which weights are kept, anywhere: from `line_keys`, already expanded to two dimensions. Each
    weight is hashed, where dropout_kept hashes once for four.
    """
    return kept_by_word(finish(keys0 ^ keys1), rows, columns, threshold)


@triton.jit
def kept_bits(keys0, keys1, threshold, SIZE0: tl.constexpr, SIZE1: tl.constexpr):
    """Which of the four weights of each word are kept: the top bit of each byte, computed for all
    bytes at once; the other bits are undefined. This needs no predicate registers, of which a
    thread has seven. threshold: 1 to 255.
    """
    word = finish(keys0[:, None] ^ keys1[None, :])
    # With the top bit set, subtracting the lower seven bits never borrows from the next byte.
    low = (threshold & 0x7F).to(tl.uint32) * 0x01010101
    above = (word | 0x80808080) - low
    either = ((threshold >> 7) - 1).to(tl.uint32)  # all ones for thresholds below 128
    return spread((word & above) | ((word | above) & either), SIZE0, SIZE1)


@triton.jit
def negate_dropped(p, bits, rows, columns):
    """p, or -p where it is dropped. p: not negative; bits: from kept_bits."""
    top = bits << (24 - 8 * byte_index(rows, columns)).to(tl.uint32)
    minus = (top & 0x80000000) ^ 0x80000000
    return (p.to(tl.uint32, bitcast=True) ^ minus).to(tl.float32, bitcast=True)


@triton.jit
def zero_dropped(x, bits, rows, columns):
    """x with 0 where it is dropped. The PTX instruction `prmt` copies the top bit of a byte to all
    bits of a mask, for two neighbouring 16-bit elements at a time. bits: from kept_bits.
    """
    # A selector of `prmt`: the byte's index, and the bit (8) that replicates the byte's sign.
    byte = tl.broadcast_to((byte_index(rows, columns) | 8).to(tl.uint32), x.shape)
    if x.dtype == tl.float32:
        return tl.inline_asm_elementwise(
            """
            {
                .reg .b32 bytes, mask;
                mul.lo.u32 bytes, $3, 0x1111;
                prmt.b32 mask, $2, 0, bytes;
                and.b32 $0, $1, mask;
            }
            """,
            "=r,r,r,r", [x, bits, byte], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        # The upper element's byte is in the second word, bytes 4 to 7. ptxas folds the constants.
        return tl.inline_asm_elementwise(
            """
            {
                .reg .b32 lower, upper, bytes, mask;
                mul.lo.u32 lower, $4, 0x0011;
                mul.lo.u32 upper, $5, 0x1100;
                or.b32 bytes, lower, upper;
                or.b32 bytes, bytes, 0x4400;
                prmt.b32 mask, $2, $3, bytes;
                and.b32 $0, $1, mask;
            }
            """,
            "=r,r,r,r,r,r", [x, bits, byte], dtype=x.dtype, is_pure=True, pack=2,
        )  # fmt: skip
