"""Two calls of CUDA's driver API that torch does not offer; nothing where there is no such driver.

Triton's launches go through that API, and it assumes what torch only sees to when it must: that a
thread has a context, and that nobody captures a graph while kernels are loaded.
"""

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator

import torch

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_thread = threading.local()


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def ensure_context() -> None:
    """Makes the context of torch's current device current in a thread that has none, as threads are
    that were served from torch's memory cache so far: encoding a tensor descriptor fails there.
    """
    if getattr(_thread, "has_context", False) or not torch.cuda.is_initialized():
        return
    if (cuda := _library()) is not None:
        context, device = ctypes.c_void_p(), ctypes.c_int()
        if cuda.cuCtxGetCurrent(ctypes.byref(context)) == 0 and not context:
            cuda.cuDeviceGet(ctypes.byref(device), torch.cuda.current_device())
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
            cuda.cuCtxSetCurrent(context)
    _thread.has_context = True


@contextlib.contextmanager
def loading_allowed() -> Iterator[None]:
    """Inside, this thread may load kernels although its stream is captured into a graph. Loading
    puts nothing on a stream, but the stricter modes of capture forbid it and break off.
    """
    cuda = _library() if torch.cuda.is_initialized() else None
    if cuda is None or not torch.cuda.is_current_stream_capturing():
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
