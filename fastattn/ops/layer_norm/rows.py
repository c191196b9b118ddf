"""Rows of a tensor as the GPU kernels read them: contiguous, with one stride from row to row."""

from itertools import pairwise

from torch import Tensor


def with_one_stride(x: Tensor) -> tuple[Tensor, int]:
    """(x, or a contiguous copy if its rows do not have a single stride; the stride of rows)."""
    N = x.shape[-1]
    if x.is_contiguous():
        return x, N
    if x.stride(-1) == 1 or N == 1:
        pairs = zip(x.shape[:-1], x.stride()[:-1], strict=True)
        leading = [(size, stride) for size, stride in pairs if size != 1]
        if all(outer[1] == inner[0] * inner[1] for outer, inner in pairwise(leading)):
            return x, leading[-1][1] if leading else N
    return x.contiguous(), N
