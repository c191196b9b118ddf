"""Tensors between inaccessible pages: accesses out of bounds fault."""

import ctypes
import mmap

import torch
from torch import Tensor

_NO_ACCESS = 0
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded(x: Tensor) -> Tensor:
    """A copy with the same strides, aligned to 16 bytes: up to 15 bytes may lie behind it."""
    if x.numel() == 0:
        return x
    once = x.detach()[tuple(slice(0, 1) if step == 0 else slice(None) for step in x.stride())]
    steps = zip(once.shape, once.stride(), strict=True)
    size = (1 + sum((n - 1) * step for n, step in steps)) * x.element_size()
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = torch.frombuffer(mmap.mmap(-1, pages + 2 * mmap.PAGESIZE), dtype=torch.uint8)
    for guard in (0, mmap.PAGESIZE + pages):
        if _libc.mprotect(memory.data_ptr() + guard, mmap.PAGESIZE, _NO_ACCESS):
            raise OSError(ctypes.get_errno(), "mprotect")
    first = mmap.PAGESIZE + (pages - size) // 16 * 16
    storage = memory[first : first + size].view(x.dtype)
    copy = storage.as_strided(once.shape, once.stride(), storage.storage_offset()).copy_(once)
    return copy.expand(x.shape)
