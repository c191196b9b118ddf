"""Two functions of CUDA's driver API that PyTorch does not expose; no-ops without that driver.

Triton uses the driver API, which needs a current context in the calling thread and cannot load
kernels during a graph capture. PyTorch takes care of both only in its own calls.
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
    """Makes the device's context current in a thread that has none, such as one whose allocations
    all came from PyTorch's memory cache: encoding a tensor descriptor would fail there.
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
    """Inside, this thread may load kernels while its stream is captured into a graph. Loading
    enqueues nothing on a stream, but the stricter capture modes forbid it and end the capture.
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
