"""What the launches of the Triton attention kernels take from their operands: strides, tensor
descriptors, L2 swizzle groups; and what no kernel can read.
"""

from collections.abc import Sequence

from torch import Tensor

from fastattn.ops import _env
from fastattn.ops._triton_launch import DTYPES, DescriptorTemplate, descriptor_template, too_old
from fastattn.ops.attention.triton.tiles import DiagonalBounds

# Offsets inside a tile are 32-bit: 256 rows of this stride stay below 2^31.
_LARGEST_ROW_STRIDE = 1 << 22
# What the heads that run at the same time read again and again should stay in the L2 cache.
_SWIZZLE_GROUP_BYTES = 32 << 20


def architecture(x: Tensor) -> str:
    return _env.architecture(x.device.type, x.device.index or 0)


def row_strides(x: Tensor | None) -> tuple[int, ...]:
    """Strides of all but the last dimension, 0 where there is nothing to step over."""
    if x is None:
        return (0, 0, 0)
    sizes, strides = x.shape, x.stride()
    return tuple(0 if sizes[d] <= 1 else strides[d] for d in range(x.dim() - 1))


def stride_unit(strides: Sequence[int]) -> int:
    """What strides are divided by for the kernels, whose compiler then sees alignment."""
    return 8 if all(stride % 8 == 0 for stride in strides) else 1


def mask_steps(strides: Sequence[int], N: int) -> tuple[int, tuple[int, ...]]:
    """(unit, strides as the kernels get them) of a mask over N keys: what all of its strides but
    the last, and N, are divided by for the kernels. Where one of them is odd, tiles of the mask are
    read element by element, in every loop alike (else ptxas serialises products: C7515).
    """
    unit = stride_unit((*strides[:3], N))
    return unit, (*(stride // unit for stride in strides[:3]), strides[3])


def describable(x: Tensor | None) -> bool:
    """Whether tensor descriptors can cover an aligned x: nothing expanded, steps of 16 bytes."""
    if x is None:
        return True
    pairs = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    steps = [stride * x.element_size() for size, stride in pairs if size > 1]
    return x.numel() > 0 and all(step > 0 and step % 16 == 0 for step in steps)


def descriptor_templates(
    x: Tensor | None, rows: int, widths: tuple[int, int]
) -> tuple[DescriptorTemplate | None, DescriptorTemplate | None]:
    """Descriptors of tensors like x, [B, K, N, D] or packed [S, K, D]: blocks of so many rows of
    one head, of its first columns and of those that follow; 0 in columns beyond D.
    """
    if x is None:
        return None, None
    # Torch leaves strides of size-1 dimensions undefined, the hardware wants multiples of 16 bytes.
    pairs = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    strides = [*(16 if size == 1 else stride for size, stride in pairs), 1]
    found: list[DescriptorTemplate | None] = []
    for width in widths:
        block = [1, 1, rows, width] if x.dim() == 4 else [rows, 1, width]
        found.append(descriptor_template(x, list(x.shape), strides, block) if width else None)
    return found[0], found[1]


def swizzle_group_size(limits: DiagonalBounds, head_bytes: int, group: int, heads: int) -> int:
    """How many of the heads form an L2 swizzle group, whose tiles run in one long-to-short order.
    head_bytes: what each of them reads again and again, shared by `group` of them.
    """
    if not limits.has_high:
        return 1
    return min(heads, group * max(1, _SWIZZLE_GROUP_BYTES // max(1, head_bytes)))


def dropout_kind(q: Tensor, dropout_p: float) -> int:
    """DROPOUT of the kernels: 0 none, 1 on any GPU, 2 with an instruction of NVIDIA's."""
    return 0 if dropout_p == 0.0 else 2 if architecture(q).startswith("sm_") else 1


def unsupported(
    mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor, **others: Tensor | None
) -> str | None:
    """What none of the kernels can do. others: further tensors whose rows they read, by name."""
    if q.dtype not in DTYPES:
        return f"has kernels for float16, bfloat16 and float32, got {q.dtype}"
    D, E = q.shape[3], v.shape[3]
    if not (1 <= D <= 256 and 1 <= E <= 256):
        return f"handles head dims up to 256, got {D} and {E}"
    for name, x in (("q", q), ("k", k), ("v", v), *others.items()):
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
