"""Patches Triton's interpreter: arithmetic as on GPUs, and half the run time.

The interpreter stores bfloat16 as 16-bit integers and computes with these integers; only loads,
stores and conversions to fp32 are correct. After `install`, arithmetic and products are computed in
fp32, and conversions to bfloat16 round to nearest even, as on GPUs. tl.minimum and tl.maximum
return the operand that is not NaN unless they are asked to propagate NaN.

Half of the run time went into patching triton.language at every function call inside a kernel and
into overflow checks of integers whose results are not used.
"""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

_BINARY = (
    "create_fadd", "create_fsub", "create_fmul", "create_fdiv", "create_minimumf", "create_minnumf",
    "create_maximumf", "create_maxnumf",
)  # fmt: skip


def _is_bf16(x: Any) -> bool:
    return isinstance(x, TensorHandle) and x.dtype.scalar == tl.bfloat16


def _to_fp32(x: Any) -> Any:
    if not _is_bf16(x):
        return x
    return TensorHandle(
        (x.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32), tl.float32
    )


def _to_bf16(x: TensorHandle) -> TensorHandle:
    value = np.ascontiguousarray(x.data, dtype=np.float32)
    bits = value.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return TensorHandle(np.where(np.isnan(value), np.uint16(0x7FC0), rounded), tl.bfloat16)


@functools.cache
def install() -> None:
    """Patches the interpreter, before the first kernel runs; further calls do nothing."""

    def through_fp32(original: Any) -> Any:
        def compute(self: Any, a: Any, b: Any, *rest: Any) -> Any:
            if not _is_bf16(a):
                return original(self, a, b, *rest)
            return _to_bf16(original(self, _to_fp32(a), _to_fp32(b), *rest))

        return compute

    for name, function in (("create_minnumf", np.fmin), ("create_maxnumf", np.fmax)):
        setattr(
            InterpreterBuilder,
            name,
            lambda self, a, b, function=function: self.binary_op(a, b, function),
        )
    for name in _BINARY:
        if hasattr(InterpreterBuilder, name):
            setattr(InterpreterBuilder, name, through_fp32(getattr(InterpreterBuilder, name)))
    dot, truncate = InterpreterBuilder.create_dot, InterpreterBuilder.create_fp_trunc

    def create_dot(self: Any, a: Any, b: Any, accumulator: Any, *rest: Any) -> Any:
        return dot(self, _to_fp32(a), _to_fp32(b), accumulator, *rest)

    def create_fp_trunc(self: Any, x: Any, to: Any) -> Any:
        if to.scalar != tl.bfloat16:
            return truncate(self, x, to)
        return _to_bf16(x if x.dtype.scalar == tl.float32 else truncate(self, x, tl.float32))

    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.create_fp_trunc = create_fp_trunc
    _save_time()


def _save_time() -> None:
    builder = interpreter.interpreter_builder
    assert not builder.options.debug  # only debug runs use the results of overflow checks
    builder.options = replace(builder.options, sanitize_overflow=False)
    patched: set[int] = set()

    def call_inside(self: Any, *args: Any, **kwargs: Any) -> Any:
        """A launch patches triton.language for the kernel's module and restores it. For other
        modules it stays patched after the first call of one of their functions.
        """
        module = id(self.fn.__globals__)
        if module not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(module)
        return self.rewrite()(*args, **kwargs)

    InterpretedFunction.__call__ = call_inside
