"""Patches Triton's interpreter: arithmetic as on GPUs, and a quarter of the run time.

The interpreter stores bfloat16 as 16-bit integers and computes with these integers; only loads,
stores and conversions to fp32 are correct. After `install`, arithmetic and products are computed in
fp32, and conversions to bfloat16 round to nearest even, as on GPUs. tl.minimum and tl.maximum
return the operand that is not NaN unless they are asked to propagate NaN.

Half of the run time went into patching triton.language at every function call inside a kernel and
into overflow checks of integers whose results are not used, half of the rest into making the same
types and shapes for every result of an operation.
"""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
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
    _make_types_once()


def _make_types_once() -> None:
    np_dtype, unwrap = interpreter._get_np_dtype, core._unwrap_if_constexpr

    @functools.cache
    def sizes_of(*sizes: int) -> tuple[tl.tuple, int, str, tl.tuple, tl.constexpr]:
        made = tl.tuple(sizes)
        numel = core.validate_block_shape(made)
        constants = tl.tuple([tl.constexpr(size) for size in sizes])
        return made, numel, str(made), constants, tl.constexpr(numel)

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [x.value if isinstance(x, tl.constexpr) else x for x in shape]
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        self.element_ty = element_ty
        self.shape, self.numel, text, *_ = sizes_of(*sizes)
        self.name = f"<{text}, {element_ty}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = type.shape.values if type.is_block() else ()
        *_, self.shape, self.numel = sizes_of(*sizes)

    def init_tuple(self: Any, args: Any, type: Any = None) -> None:
        self.values, self.given = list(args), type

    def type_of_tuple(self: Any) -> Any:
        if self.given is None:
            self.given = core._type_for_tuple_values(self.values)
        elif not isinstance(self.given, tl.tuple_type):
            self.given = tl.tuple_type(self.given)
        return self.given

    def unwrap_constexpr(x: Any) -> Any:
        if isinstance(x, tl.constexpr):
            return x.value
        return unwrap(x) if isinstance(x, (list, tuple, tl.tuple)) else x

    np_dtype_of_scalar = functools.cache(np_dtype)

    def get_np_dtype(type: Any) -> Any:
        scalar = type.element_ty if isinstance(type, tl.block_type) else type
        return (np_dtype if isinstance(scalar, tl.pointer_type) else np_dtype_of_scalar)(scalar)

    tl.tuple.__init__ = init_tuple
    tl.tuple.type = property(type_of_tuple, lambda self, type: setattr(self, "given", type))
    tl.block_type.__init__ = init_block_type
    tl.tensor.__init__ = init_tensor
    core._unwrap_if_constexpr = unwrap_constexpr
    interpreter._get_np_dtype = get_np_dtype
