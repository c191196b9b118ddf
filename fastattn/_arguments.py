"""Checks of the public functions' arguments. Errors name the argument, what is required and what
was passed; valid arguments are returned in the form that ops take.

Shapes as in `functional.py`. Valid calls take the fast path: messages are built only on failure.
"""

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from fastattn.ops._dropout import SECOND_STREAM, draw_seed
from fastattn.ops.attention.op import CAUSAL, MASK_TILE, PreparedMask
from fastattn.ops.ffn.op import GATED_ACTIVATIONS

Causal = Literal["top_left", "bottom_right", "bottom_right_lengths"] | bool
Lengths: TypeAlias = Tensor | Sequence[int]
FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))
_INTEGERS = (torch.int32, torch.int64)
_DENSE = torch.strided
_autocasts, _is_tracing = torch._C._is_any_autocast_enabled, torch._C._is_tracing
_is_compiling = torch.compiler.is_compiling
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, numbers.Real)  # NumPy scalars are Real
_POSITIONS = 2**31  # offsets are int32
_DEFAULT_FUNCTIONS: tuple[Any, ...] = (
    Tensor.__torch_function__.__func__,  # type: ignore[attr-defined]
    torch._C._disabled_torch_function_impl,
)


def sizes(x: Tensor) -> list[int]:
    return list(x.shape)


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """The tensors, floating ones in autocast's dtype if autocast is on; fp64 is not cast, as in
    PyTorch.
    """
    if not torch._C._is_any_autocast_enabled() and not torch.compiler.is_compiling():
        return tensors
    if not isinstance(tensors[0], Tensor):
        return tensors  # the checks raise for it
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if _casts(t) else t for t in tensors)


def _casts(x: Any) -> bool:
    if not isinstance(x, Tensor) or x.layout is not _DENSE:
        return False
    return x.is_floating_point() and x.dtype != torch.float64


def check_tensor(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.layout is not _DENSE or x.is_nested:
        got = "a nested tensor" if x.is_nested else f"layout {x.layout}"
        raise TypeError(f"{name} must be a dense tensor, got {got}")


def overrides_functions(x: Tensor) -> bool:
    """Whether x's class has its own `__torch_function__`, so that x may mean more than its data."""
    kind = type(x)
    if kind is Tensor or kind is torch.nn.Parameter:
        return False
    function = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    return all(function is not default for default in _DEFAULT_FUNCTIONS)


def check_float(name: str, x: Any) -> None:
    if not isinstance(x, Tensor) or x.layout is not _DENSE or x.is_nested:
        check_tensor(name, x)
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} must be fp16, bf16, fp32 or fp64, got {x.dtype}")


def check_device(name: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        raise ValueError(f"{name} must be on {device} like the first input, got {x.device}")


_LAYOUTS = {"q": "[B, H, M, D]", "k": "[B, K, N, D]", "v": "[B, K, N, E]"}


def check_qkv(q: Tensor, k: Tensor, v: Tensor, layouts: dict[str, str]) -> None:
    """Type, dtype, dimensions and device; the layouts are for messages."""
    if not (
        isinstance(q, Tensor)
        and isinstance(k, Tensor)
        and isinstance(v, Tensor)
        and q.layout is k.layout is v.layout is _DENSE
        and k.dtype is q.dtype is v.dtype
        and q.dtype in FLOATS
        and q.dim() == k.dim() == v.dim() == 4
        and not (q.is_nested or k.is_nested or v.is_nested)
        # is_cpu is faster than comparing devices.
        and ((q.is_cpu and k.is_cpu and v.is_cpu) or k.device == q.device == v.device)
    ):
        _refuse_qkv(q, k, v, layouts)


def are_plain(x: Tensor, *others: Tensor | None) -> bool:
    """Whether all are dense CPU tensors of one dtype, x and its views computed by an op: one test
    in place of the checks of a public function, which remain for everything else.
    """
    if type(x) is not Tensor or x.is_nested or not x.is_cpu or (dtype := x.dtype) not in FLOATS:
        return False
    for other in others:
        if (
            other is not None
            and other is not x
            and not (
                (type(other) is Tensor or type(other) is torch.nn.Parameter)
                and not other.is_nested
                and other.dtype is dtype
                and other.is_cpu
                and other.layout is _DENSE
            )
        ):
            return False
    return x.layout is _DENSE


def runs_eagerly() -> bool:
    """Whether calls are neither compiled, traced nor cast by autocast."""
    return not (_is_compiling() or _is_tracing() or _autocasts())


def fits_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `linear` surely takes these as they are, by one test, in eager code."""
    return (
        runs_eagerly()
        and are_plain(x, weight, bias)
        and weight is not None
        and x.dim() > 0
        and len(rows := weight.shape) == 2
        and x.shape[-1] == rows[1]
        and (bias is None or bias.shape == rows[:1])
    )


def plain_sizes(q: Any, k: Any, v: Any) -> tuple[int, ...] | None:
    """q's sizes [B, H, M, D] if attention surely takes q, k and v as they are, by one test: dense
    CPU tensors of one dtype in eager code without autocast, with sizes that fit and equal numbers
    of heads.
    """
    if (
        not _is_compiling()  # first: comparisons of sizes would become conditions of the graph
        and type(q) is type(k) is type(v) is Tensor
        and not (q.is_nested or k.is_nested or v.is_nested)
        and q.layout is k.layout is v.layout is _DENSE
        and q.is_cpu
        and k.is_cpu
        and v.is_cpu
        and k.dtype is q.dtype is v.dtype
        and q.dtype in FLOATS
        and len(of_q := q.shape) == 4
        and (
            (of_k := k.shape) == of_q or (len(of_k) == 4 and of_k == (*of_q[:2], of_k[2], of_q[3]))
        )
        and ((of_v := v.shape) == of_k or of_v[:-1] == of_k[:-1])
        and not _autocasts()
    ):
        return of_q
    return None


def check_attention_inputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int, int, int]:
    """The sizes B, H, M, D, N."""
    check_qkv(q, k, v, _LAYOUTS)
    (B, H, M, D), (key_B, K, N, key_D) = q.shape, k.shape
    if not is_size(key_B, B):
        raise ValueError(f"k must have q's batch size {B}, got {key_B}")
    if key_D != D or (H != K and (K == 0 or H % K != 0)):
        check_heads(H, K, D, key_D, _layout_hint(q, k))
    if not is_shape(v.shape[:3], (B, K, N)):
        raise ValueError(f"v must be [{B}, {K}, {N}, E] like k, got {sizes(v)}")
    return B, H, M, D, N


def _refuse_qkv(q: Tensor, k: Tensor, v: Tensor, layouts: dict[str, str]) -> None:
    """Raises for the first argument that is wrong, if there is one."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_float(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions {layouts[name]}, got {sizes(x)}")
    for name, x in (("k", k), ("v", v)):
        check_device(name, x, q.device)
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")


def check_varlen_inputs(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> None:
    layouts = {"q": "[T, H, D]", "k": "[S, K, D]", "v": "[S, K, E]"}
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_float(name, x)
        if x.dim() != 3:
            raise ValueError(f"{name} must have 3 dimensions {layouts[name]}, got {sizes(x)}")
        check_device(name, x, q.device)
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")
    check_heads(q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(f"v must be [{k.shape[0]}, {k.shape[1]}, E] like k, got {sizes(v)}")
    for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_tensor(name, offsets)
        if offsets.dtype != torch.int32 or offsets.dim() != 1 or offsets.shape[0] < 1:
            raise ValueError(f"{name} must be int32 [B + 1], got {offsets.dtype} {sizes(offsets)}")
        check_device(name, offsets, q.device)
    if not is_shape(cu_seqlens_k.shape, cu_seqlens_q.shape):
        raise ValueError(
            f"cu_seqlens_k must have cu_seqlens_q's shape {sizes(cu_seqlens_q)}, "
            f"got {sizes(cu_seqlens_k)}"
        )


def check_heads(H: int, K: int, D: int, key_D: int, hint: str = "") -> None:
    if key_D != D:
        raise ValueError(f"k must have q's head dim {D}, got {key_D}")
    if (K == 0 and H != 0) or (K != 0 and H % K != 0):
        raise ValueError(f"q must have a multiple of k's {K} heads, got {H}{hint}")


def _layout_hint(q: Tensor, k: Tensor) -> str:
    """For heads that do not fit but would if dimensions 1 and 2 of q and k were swapped."""
    H, K = q.shape[2], k.shape[2]
    if K == 0 or H % K != 0:
        return ""
    return "; if q, k and v are [B, S, H, D], pass q.transpose(1, 2), k.transpose(1, 2), ..."


def check_length(name: str, length: Any) -> int:
    length = _integer(name, length)
    if torch.compiler.is_compiling():
        # A data-dependent length is checked in the graph. torch 2.11 traces no message with a name.
        torch._check(length >= 0)
        torch._check(length < _POSITIONS)
        return length
    if not 0 <= length < _POSITIONS:
        raise ValueError(f"{name} must be >= 0 and < 2 ** 31, got {length}")
    return length


def check_index(name: str, index: Tensor | slice | None, size: int, device: torch.device) -> Tensor:
    """The positions as an int64 index; negative ones count from the end, as in Python."""
    if index is None:
        return torch.arange(size, device=device)
    if isinstance(index, slice):
        try:
            return torch.arange(size, device=device)[index]
        except (TypeError, ValueError) as error:
            wanted = "a slice of integers with a step >= 1"
            raise type(error)(f"{name} must be {wanted}, got {index!r}") from None
    if not isinstance(index, Tensor) or index.dtype not in _INTEGERS or index.dim() != 1:
        raise TypeError(f"{name} must be a slice or an int32 or int64 index [n], got {index!r}")
    check_tensor(name, index)
    if is_on_host(index) and not bool(((index >= -size) & (index < size)).all()):
        raise IndexError(f"{name} must hold positions from {-size} to {size - 1}, got {index!r}")
    index = index.to(device=device, dtype=torch.int64)
    return torch.where(index < 0, index + size, index)


def is_on_host(x: Tensor) -> bool:
    """Whether the values can be read without waiting for a device, and are not being traced."""
    if torch.compiler.is_compiling() or torch._C._is_tracing() or not x.is_cpu:
        return False
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x)
    return type(x) is Tensor and not wrapped and torch._C._len_torch_dispatch_stack() == 0


def check_restrictions(
    mask: Tensor | PreparedMask | None,
    key_lengths: Lengths | None,
    query_lengths: Lengths | None,
    B: int,
    H: int,
    M: int,
    N: int,
    device: torch.device,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The mask in 4 dimensions, its tiles if it is a prepared one, and the lengths as tensors."""
    tiles = None
    if mask is not None:
        mask, tiles = check_mask(mask, B, H, M, N, device)
    if key_lengths is not None:
        key_lengths = check_lengths("key_lengths", key_lengths, ((B,), (B, M)), device)
    if query_lengths is not None:
        query_lengths = check_lengths("query_lengths", query_lengths, ((B,),), device)
    return mask, tiles, key_lengths, query_lengths


def check_mask(
    mask: Tensor | PreparedMask, B: int, H: int, M: int, N: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """The mask as a 4-dimensional view (not expanded) and, for a prepared one, its tiles."""
    tiles = None
    if isinstance(mask, PreparedMask):
        mask, tiles = mask
    check_mask_dtype(mask)
    check_device("mask", mask, device)
    fits = mask.dim() <= 4
    for size, wanted in zip(reversed(mask.shape), (N, M, H, B), strict=False):
        fits = fits and is_size(size, wanted, 1)
    if not fits:
        raise ValueError(f"mask must be broadcastable to {[B, H, M, N]}, got {sizes(mask)}")
    mask = in_four_dimensions(mask)
    if tiles is not None:
        check_mask_tiles(tiles, mask)
    return mask, tiles


def is_size(size: int, wanted: int, *others: int) -> bool:
    """Whether a size is one of those given. In compiled code, a size that depends on data must be
    `wanted` if it is not known to be another, which is checked when the graph runs.
    """
    if not torch.compiler.is_compiling():
        return size == wanted or size in others
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

    if any(guard_or_false(size == other) for other in others):
        return True
    if not guard_or_true(size == wanted):
        return False
    torch._check(size == wanted)
    return True


def is_shape(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether all sizes are those wanted, as `is_size` compares them."""
    if not torch.compiler.is_compiling():
        return shape == wanted
    return len(shape) == len(wanted) and all(map(is_size, shape, wanted))


def check_mask_dtype(mask: Any) -> None:
    check_tensor("mask", mask)
    check_holds_values("mask", mask)
    if overrides_functions(mask):
        raise TypeError(
            f"mask must hold its values itself, got {type(mask).__name__}, which overrides "
            "PyTorch's functions: if its data are the mask, pass mask.as_subclass(torch.Tensor)"
        )
    if mask.dtype != torch.bool and mask.dtype not in FLOATS:
        raise TypeError(f"mask must be bool or floating, got {mask.dtype}")


def check_holds_values(name: str, mask: Any) -> None:
    """Raises for a mask that is no tensor, and for torch's CausalBias, whose data are undefined."""
    if type(mask) is Tensor:
        return
    if not isinstance(mask, Tensor):
        check_tensor(name, mask)
    if _is_causal_bias(mask):
        raise TypeError(
            f"{name} must hold its values, got CausalBias, which fastattn.attention and "
            "attention_weights accept as their mask"
        )


def _is_causal_bias(mask: Any) -> bool:
    if type(mask) is Tensor or not isinstance(mask, Tensor) or not overrides_functions(mask):
        return False
    from torch.nn.attention.bias import CausalBias  # here, because it imports torch._dynamo

    return isinstance(mask, CausalBias)


def aligned_mask(mask: Any, causal: Causal, M: int, N: int) -> tuple[Any, Causal]:
    """The mask and `causal`. A `CausalBias` of torch.nn.attention, which holds no values, becomes
    the `causal` that it stands for.
    """
    if not _is_causal_bias(mask) or not hasattr(mask, "variant"):
        return mask, causal  # a view of a CausalBias has no attributes
    kind: Causal = "top_left" if mask.variant.name == "UPPER_LEFT" else "bottom_right"
    if mask.seq_len_q != M or mask.seq_len_kv != N:
        raise ValueError(f"mask must be for {M} queries and {N} keys, got {_described(mask)}")
    same = (kind, True, "top_left", "bottom_right") if M == N else (kind,)
    if causal is not False and causal not in same:
        wanted = f'False or "{kind}" with mask={_described(mask)}'
        raise ValueError(f"causal must be {wanted}, got {causal!r}")
    return None, kind


def _described(bias: Any) -> str:
    return f"causal_{bias.variant.name.lower()}({bias.seq_len_q}, {bias.seq_len_kv})"


def in_four_dimensions(mask: Tensor) -> Tensor:
    return mask[(None,) * (4 - mask.dim())] if mask.dim() < 4 else mask


def check_mask_tiles(tiles: Tensor, mask: Tensor) -> None:
    """Kernels do not check the tiles: shape and device must be right here."""
    check_tensor("mask.tiles", tiles)
    B, H, M, N = mask.shape
    wanted = (B, H, -(-M // MASK_TILE), -(-N // MASK_TILE))
    fits = tiles.dtype == torch.int64 and tiles.dim() == 4
    for size, most in zip(tiles.shape, wanted, strict=fits):
        fits = fits and (size == 1 or size == most)
    if not fits:
        raise ValueError(
            f"mask.tiles must be int64, broadcastable to {list(wanted)}, "
            f"got {tiles.dtype} {sizes(tiles)}"
        )
    check_device("mask.tiles", tiles, mask.device)


def check_lengths(
    name: str, lengths: Lengths, shapes: tuple[tuple[int, ...], ...], device: torch.device
) -> Tensor:
    if not isinstance(lengths, Tensor):
        lengths = lengths_tensor(name, lengths, device)
    if lengths.layout is not _DENSE or lengths.is_nested:
        check_tensor(name, lengths)
    if lengths.dtype not in _INTEGERS:
        raise TypeError(f"{name} must be int32 or int64, got {lengths.dtype}")
    if not any(is_shape(lengths.shape, shape) for shape in shapes):
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name} must be {wanted}, got {sizes(lengths)}")
    check_device(name, lengths, device)
    return lengths


def lengths_tensor(name: str, lengths: Any, device: torch.device) -> Tensor:
    """The lengths as a tensor, on `device` if they are a list; tensors are not checked."""
    if isinstance(lengths, Tensor):
        return lengths
    if not isinstance(lengths, Sequence):
        wanted = "a tensor or a list of integers"
        raise TypeError(f"{name} must be {wanted}, got {type(lengths).__name__}")
    try:
        numbers = [_integer(name, number) for number in lengths]
    except TypeError:
        raise TypeError(f"{name} must hold integers, got {lengths!r}") from None
    if any(type(number) is int and not -(2**63) <= number < 2**63 for number in numbers):
        raise ValueError(f"{name} must fit int64, got {lengths!r}")
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def check_number(name: str, value: Any) -> float:
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, _NUMBERS):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must fit a float, got a larger integer") from None


def check_eps(eps: Any) -> float:
    eps = check_number("eps", eps)
    if not 0.0 <= eps < math.inf:
        raise ValueError(f"eps must be a finite number >= 0, got {eps}")
    return eps


def _integer(name: str, value: Any) -> int:
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return value  # type: ignore[return-value]
    try:
        if not isinstance(value, (bool, Tensor)):  # reading a tensor could wait for its device
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name} must be an integer, got {value!r}")


def check_window(window: tuple[int, int] | None) -> tuple[int, int]:
    if window is None:
        return -1, -1
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"window must be (left, right), got {window!r}")
    try:
        left, right = (_integer("window", side) for side in window)
    except TypeError:
        wanted = "two integers (left, right), -1 for unlimited"
        raise TypeError(f"window must be {wanted}, got {window!r}") from None
    if left < -1 or right < -1:
        raise ValueError(f"window must hold numbers >= 0, or -1 for unlimited, got {window!r}")
    return -1 if left >= _POSITIONS else left, -1 if right >= _POSITIONS else right


def check_scale(scale: float | None, D: int) -> float:
    if scale is None:
        return D**-0.5 if D else 1.0
    scale = check_number("scale", scale)
    if not -math.inf < scale < math.inf:  # math.isfinite does not trace
        raise ValueError(f"scale must be finite, got {scale}")
    return scale


def causal_code(
    causal: Causal,
    M: int,
    N: int,
    key_lengths: Tensor | None = None,
    query_lengths: Tensor | None = None,
) -> int:
    if causal is True:
        if not is_size(M, N):
            raise ValueError(
                f"causal=True is ambiguous for {M} queries and {N} keys: "
                'pass "top_left" or "bottom_right"'
            )
        return CAUSAL["top_left"]
    if causal is False:
        return CAUSAL[False]
    if not isinstance(causal, str) or causal not in CAUSAL:
        raise ValueError(
            'causal must be False, True, "top_left", "bottom_right" or "bottom_right_lengths", '
            f"got {causal!r}"
        )
    if causal == "bottom_right_lengths":
        if key_lengths is None and query_lengths is None:
            return CAUSAL["bottom_right"]
        if key_lengths is not None and key_lengths.dim() > 1:
            raise ValueError(
                'key_lengths must be [B] with causal="bottom_right_lengths", which aligns the last '
                f"query with the last key of a sequence, got {sizes(key_lengths)}"
            )
    return CAUSAL[causal]


def check_probability(name: str, p: float) -> float:
    p = check_number(name, p)
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{name} must be between 0 and 1, got {p}")
    return p


def check_dropout(
    p: float,
    seed: Tensor | None,
    stream: int,
    x: Tensor,
    second_p: float = 0.0,
    *,
    takes_origin: bool = False,
) -> Tensor | None:
    """The seed to use on x's device, None where nothing is dropped. takes_origin: as attention's
    may have one.
    """
    if type(p) is float and p == 0.0 == second_p and seed is None and type(stream) is int:
        if 0 <= stream < SECOND_STREAM:  # without dropout: 0.4 us less than the checks below
            return None
    p = check_probability("dropout_p", p)
    stream = _integer("dropout_stream", stream)
    if not 0 <= stream < SECOND_STREAM:
        raise ValueError(f"dropout_stream must be >= 0 and < 2 ** 31, got {stream}")
    if seed is not None:
        check_tensor("dropout_seed", seed)
        has_origin = takes_origin and seed.shape == (5,)
        if seed.dtype != torch.int64 or not (has_origin or seed.shape == (1,)):
            wanted = "int64 [1]"
            if takes_origin:
                wanted += ", or [5] with the index of the first sequence, head, query and key"
            raise ValueError(f"dropout_seed must be {wanted}, got {seed.dtype} {sizes(seed)}")
        check_device("dropout_seed", seed, x.device)
        if has_origin:
            seed = seed.contiguous()
            _check_dropout_origin(seed)
    if p == 0.0 and second_p == 0.0:
        return None
    if seed is not None:
        return seed
    return draw_seed(x.device)


def _check_dropout_origin(seed: Tensor) -> None:
    """Kernels round the index of the first query and key down to a multiple of 16."""
    if is_on_host(seed):
        query, key = seed[3:].tolist()
        if query % 16 or key % 16:
            raise ValueError(
                "dropout_seed must have multiples of 16 as the index of the first query and key, "
                f"got {query} and {key}"
            )


def check_rows(name: str, x: Tensor) -> None:
    check_float(name, x)
    if x.dim() == 0:
        raise ValueError(f"{name} must have at least one dimension, got a scalar")


def check_parameter(name: str, parameter: Tensor | None, x: Tensor) -> None:
    if parameter is None:
        return
    N = x.shape[-1]
    check_float(name, parameter)
    if parameter.shape != (N,):
        raise ValueError(f"{name} must be [{N}] like the last dimension, got {sizes(parameter)}")
    if parameter.device != x.device:
        check_device(name, parameter, x.device)


def check_linear_weights(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    _check_same_kind(x, ("weight", weight), ("bias", bias))
    if weight.dim() != 2 or not is_size(weight.shape[1], x.shape[-1]):
        raise ValueError(f"weight must be [E, {x.shape[-1]}] to fit x, got {sizes(weight)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [{weight.shape[0]}], got {sizes(bias)}")


def _check_same_kind(x: Tensor, *named: tuple[str, Tensor | None]) -> None:
    """Checks that tensors have x's device and dtype. Biases (names with b) may be None."""
    for name, tensor in named:
        if tensor is None and name[0] == "b":
            continue
        if type(tensor) is Tensor or type(tensor) is torch.nn.Parameter:
            if tensor.dtype is x.dtype and tensor.layout is _DENSE and not tensor.is_nested:
                if tensor.is_cpu and x.is_cpu:
                    continue  # the usual case, in a third of the time of the checks below
        check_float(name, tensor)
        assert tensor is not None
        if tensor.device != x.device:
            check_device(name, tensor, x.device)
        if tensor.dtype != x.dtype:
            raise TypeError(f"{name} must have x's dtype {x.dtype}, got {tensor.dtype}")


def check_ffn_weights(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str
) -> None:
    _check_same_kind(x, ("w1", w1), ("b1", b1), ("w2", w2), ("b2", b2))
    if w1.dim() != 2 or w1.shape[1] != x.shape[-1]:
        raise ValueError(f"w1 must be [F, {x.shape[-1]}] to fit x, got {sizes(w1)}")
    F = w1.shape[0]
    if activation in GATED_ACTIVATIONS:
        if F % 2:
            raise ValueError(f"w1 must have an even number of rows for {activation}, got {F}")
        F //= 2
    if w2.dim() != 2 or w2.shape[1] != F:
        raise ValueError(f"w2 must be [D, {F}] to fit w1 and {activation}, got {sizes(w2)}")
    for name, bias, weight in (("b1", b1, w1), ("b2", b2, w2)):
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"{name} must be [{weight.shape[0]}], got {sizes(bias)}")
