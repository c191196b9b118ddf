"""The dropout bits of fastattn/ops/_dropout.py in Triton's language, for every op's kernels."""

# Kernels are in Triton's language: no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs

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
    """The first step of finalise, linear: begin(a) ^ begin(b) is begin(a ^ b)."""
    return x ^ (x >> 16)


@triton.jit
def finalise(x):
    """A bijection of uint32 with good avalanche."""
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
    """SECOND: of the second dropout of a call."""
    seed = tl.load(seed_ptr)
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    stream = stream.to(tl.uint32)
    if SECOND:
        stream = stream ^ SECOND_STREAM
    return absorb(absorb(absorb(tl.full([], TAG, tl.uint32), low), high), stream)


# -- row-wise ops: a word for every four columns of a row -----------------------------------------


@triton.jit
def row_keys(seed_ptr, stream, rows, SECOND: tl.constexpr = False):
    """rows: int64 of any shape, counted over the whole tensor."""
    key = absorb(stream_key(ROW_TAG, seed_ptr, stream, SECOND), (rows >> 32).to(tl.uint32))
    key = absorb(key, tl.zeros_like(key))
    return absorb(key, (rows & 0xFFFFFFFF).to(tl.uint32))


@triton.jit
def column_keys(seed_ptr, stream, start, local, SECOND: tl.constexpr = False):
    """Of the columns start + local: start a multiple of 4, local from arange."""
    unit = (start // 4 + (local >> 2)).to(tl.uint32)
    return absorb(stream_key(COLUMN_TAG, seed_ptr, stream, SECOND), unit)


@triton.jit
def row_kept(row_keys, column_keys, local, threshold):
    """Which elements are kept. Four columns share a word, which the compiler sees: what tells them
    apart are constant bits of `local`. All three have as many dimensions as the tile.
    """
    word = finalise(row_keys ^ column_keys)
    byte = (word >> (8 * (local & 3)).to(tl.uint32)) & 0xFF
    return byte >= threshold.to(tl.uint32)


@triton.jit
def drop(x, keep, keep_factor):
    """x with dropped elements 0 and kept ones scaled."""
    return tl.where(keep, x * keep_factor, 0.0)


# -- attention: a word for rows {r, r + 8} x columns {c, c + 8} in blocks of 16 -------------------


@triton.jit
def dropout_row_base(seed_ptr, stream, b, h):
    """What `unit_keys` turns into keys of rows."""
    rows = stream_key(ROW_TAG, seed_ptr, stream, False)
    return absorb(absorb(rows, b.to(tl.uint32)), h.to(tl.uint32))


@triton.jit
def dropout_bases(seed_ptr, stream, b, h):
    """(row base, column base): what `unit_keys` turns into keys of rows and columns."""
    rows = dropout_row_base(seed_ptr, stream, b, h)
    return rows, stream_key(COLUMN_TAG, seed_ptr, stream, False)


@triton.jit
def unit_keys(base, start, UNITS: tl.constexpr):
    """Keys of the lattice units of 2 UNITS lines from start, a multiple of 16, on: already begun,
    so that a word takes one step less.
    """
    return begin(absorb(base, (start // 2 + tl.arange(0, UNITS)).to(tl.uint32)))


@triton.jit
def unit_rows(start, UNITS: tl.constexpr):
    """The first row of each unit of unit_keys."""
    unit = tl.arange(0, UNITS)
    return start + unit // 8 * 16 + unit % 8


@triton.jit(do_not_specialize=["stream", "units"])
def column_keys_kernel(seed_ptr, keys_ptr, stream, units, BLOCK: tl.constexpr):
    """Keys of all column units, which batches, heads and rows share: every thread of a kernel would
    hash those of its columns for every tile, as much work as the words.
    """
    start = tl.program_id(0) * BLOCK
    keys = unit_keys(stream_key(COLUMN_TAG, seed_ptr, stream, False), 2 * start, BLOCK)
    unit = start + tl.arange(0, BLOCK)
    tl.store(keys_ptr + unit, keys.to(tl.int32, bitcast=True), mask=unit < units)


@triton.jit
def load_keys(keys_ptr, start, UNITS: tl.constexpr):
    """unit_keys of columns, from what column_keys_kernel has left."""
    keys = tl.load(keys_ptr + start // 2 + tl.arange(0, UNITS))
    return keys.to(tl.uint32, bitcast=True)


@triton.jit
def spread(word, SIZE0: tl.constexpr, SIZE1: tl.constexpr):
    """Every word to its four places: [SIZE0 / 2, SIZE1 / 2] -> [SIZE0, SIZE1]."""
    word = word.reshape([SIZE0 // 16, 1, 8, SIZE1 // 16, 1, 8])
    return tl.broadcast_to(word, [SIZE0 // 16, 2, 8, SIZE1 // 16, 2, 8]).reshape([SIZE0, SIZE1])


@triton.jit
def byte_index(rows, columns):
    """Which byte decides: of local indices, expanded to two dimensions."""
    return ((rows >> 3) & 1) * 2 + ((columns >> 3) & 1)


@triton.jit
def dropout_kept(keys0, keys1, rows, columns, threshold, SIZE0: tl.constexpr, SIZE1: tl.constexpr):
    """Which weights of a tile [SIZE0, SIZE1] are kept, from the keys of the units of both sides;
    rows and columns as for byte_index.
    """
    word = spread(finish(keys0[:, None] ^ keys1[None, :]), SIZE0, SIZE1)
    # The byte moves to the top; what lies below it cannot change the comparison.
    return (word << (24 - 8 * byte_index(rows, columns)).to(tl.uint32)) >= (
        threshold.to(tl.uint32) << 24
    )


@triton.jit
def kept_bits(keys0, keys1, threshold, SIZE0: tl.constexpr, SIZE1: tl.constexpr):
    """The decisions of all four bytes of a word at once, each in its byte's top bit; the other bits
    mean nothing. They need no predicates, of which a thread has seven. threshold: 1 to 255.
    """
    word = finish(keys0[:, None] ^ keys1[None, :])
    # Differences of the lower seven bits, which borrow from nobody; the top bits decide the rest.
    low = (threshold & 0x7F).to(tl.uint32) * 0x01010101
    above = (word | 0x80808080) - low
    either = ((threshold >> 7) - 1).to(tl.uint32)  # all ones for thresholds below 128
    return spread((word & above) | ((word | above) & either), SIZE0, SIZE1)


@triton.jit
def negate_dropped(p, bits, rows, columns):
    """p, not negative, with a minus where it is dropped. bits: kept_bits."""
    top = bits << (24 - 8 * byte_index(rows, columns)).to(tl.uint32)
    minus = (top & 0x80000000) ^ 0x80000000
    return (p.to(tl.uint32, bitcast=True) ^ minus).to(tl.float32, bitcast=True)


@triton.jit
def zero_dropped(x, bits, rows, columns):
    """x with 0 where it is dropped: `prmt` of NVIDIA spreads the top bit of a byte over others, for
    two neighbours of 16 bits at a time. bits: kept_bits.
    """
    # The byte's number with the bit that asks for its sign; once for each byte of the mask.
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
        # The upper half's bytes are those of the second word, 4 to 7. ptxas knows the numbers.
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
