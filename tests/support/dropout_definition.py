"""The definition of the dropout bits, on Python's integers."""

WORD = 2**32
ROW_TAG, COLUMN_TAG = 0x243F6A88, 0x85A308D3


def finalise(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D % WORD
    x = (x ^ x >> 15) * 0x846CA68B % WORD
    return x ^ x >> 16


def absorb(state: int, value: int) -> int:
    return finalise(((state ^ value) + 0x9E3779B9) % WORD)


def key(tag: int, seed: int, stream: int, *values: int) -> int:
    """The key of a row (ROW_TAG) or a column (COLUMN_TAG)."""
    state = tag
    for value in (seed % WORD, (seed >> 32) % WORD, stream, *values):
        state = absorb(state, value)
    return state


def attention_byte(seed: int, stream: int, b: int, h: int, i: int, j: int) -> int:
    """Rows i and i + 8 of a block of 16, and columns j and j + 8, share a word."""
    row = key(ROW_TAG, seed, stream, b, h, i // 16 * 8 + i % 8)
    column = key(COLUMN_TAG, seed, stream, j // 16 * 8 + j % 8)
    index = 2 * (i // 8 % 2) + j // 8 % 2
    return finalise(row ^ column) >> 8 * index & 255


def row_byte(seed: int, stream: int, row: int, column: int) -> int:
    """Four consecutive columns of a row share a word."""
    row_key = key(ROW_TAG, seed, stream, row >> 32, 0, row % WORD)
    word = finalise(row_key ^ key(COLUMN_TAG, seed, stream, column // 4))
    return word >> 8 * (column % 4) & 255
