"""fastattn as a flash attention of `torch.nn.functional.scaled_dot_product_attention`.

`register()` adds the name "fastattn" to torch's list of implementations (torch 2.11 and newer);
`torch.nn.attention.activate_flash_attention_impl("fastattn")` replaces SDPA's flash backend by it,
for CUDA tensors, and `restore_flash_attention_impl()` undoes that. SDPA still decides when its
flash backend may run: without a mask, in half precision.

In functions made by `answering`, and within an `AttentionMode`, `attention` answers the calls
of scaled_dot_product_attention itself, on every device, masks included.
"""

import ast
import math
import types
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastattn import functional
from fastattn.nn.conversion import names
from fastattn.nn.fusion import is_plain_tensor

NAME = "fastattn"
_SDPA = "scaled_dot_product_attention"
# What stands for it in code made by `answering`: in torch.nn.functional, and in the globals of code
# that has imported the function itself.
_ANSWERED = "_fastattn_scaled_dot_product_attention"
_sdpa = torch._C._nn.scaled_dot_product_attention  # also where another package has replaced it


def register() -> None:
    """Registers the name with torch; may be called again.

    Raises ImportError if torch has no list of implementations.
    """
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError:
        raise ImportError(
            "register needs torch.nn.attention.register_flash_attention_impl, "
            "which this torch does not have"
        ) from None
    register_flash_attention_impl(NAME, register_fn=override)


class Handle:
    """An active registration; `remove` ends it."""

    def __init__(self, library: "torch.library.Library | None") -> None:
        self._library = library

    def remove(self) -> None:
        if self._library is not None:
            self._library._destroy()
        self._library = None


def override(key: str = "CUDA") -> Handle:
    """Overrides SDPA's flash ops with `attention` for the dispatch key."""
    library = torch.library.Library("aten", "IMPL", key)
    library.impl("_scaled_dot_product_flash_attention", _forward, key)
    library.impl("_scaled_dot_product_flash_attention_backward", _backward, key)
    return Handle(library)


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    seed: Tensor | None,
) -> functional.ForwardCall:
    """is_causal is bottom-right: SDPA passes it with M == N alone, torch's causal_lower_right with
    every M and N.
    """
    return functional.ForwardCall(
        query,
        key,
        value,
        causal=functional.CAUSAL["bottom_right" if is_causal else False],
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        dropout_p=dropout_p,
        dropout_seed=seed,
    )


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    if return_debug_mask:
        raise NotImplementedError("return_debug_mask=True is not supported by fastattn")
    seed = functional.new_dropout_seed(query.device) if dropout_p > 0.0 else None
    call = _call(query, key, value, is_causal, scale, dropout_p, seed)
    out, lse = torch.ops.fastattn.attention_fwd(*call)
    # The seed is returned as torch's generator state, in the state's shape.
    state = (
        torch.zeros(2, dtype=torch.int64, device=query.device) if seed is None else seed.repeat(2)
    )
    unused = torch.empty((), dtype=torch.uint64, device=query.device)
    state, debug_mask = state.view(torch.uint64), query.new_empty(0)
    return out, lse, None, None, query.shape[2], key.shape[2], state, unused, debug_mask


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    seed = philox_seed.view(torch.int64)[:1] if dropout_p > 0.0 else None
    call = _call(query, key, value, is_causal, scale, dropout_p, seed)
    needs = [True, True, True, False, False, False]
    grads = torch.ops.fastattn.attention_bwd(
        grad_out.contiguous(), None, out, logsumexp, *call, needs
    )
    return grads[0], grads[1], grads[2]


class AttentionMode(TorchFunctionMode):
    """Within it, `attention` runs the calls of scaled_dot_product_attention that it covers: those
    with queries, keys and values in four dimensions and of one dtype. Results are PyTorch's up to
    rounding, but a query whose keys are all masked gets a zero context.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            out = _attention_of_sdpa(*args, **kwargs)
            if out is not None:
                return out
        return func(*args, **kwargs)


ATTENTION_MODE = AttentionMode()


class Answering(NamedTuple):
    """A function in which `attention` answers the calls of scaled_dot_product_attention without a
    mode, which adds 5 us (AMD EPYC, one thread) to every call of torch. It may run in place of
    `original` while `is_valid`: all names in `found`, (namespace, name, value), have these values.
    """

    function: Any
    original: Any
    code: types.CodeType
    found: list[tuple[dict[str, Any], str, Any]]

    def is_valid(self, current: Any) -> bool:
        """current: the method that would run."""
        if torch.compiler.is_compiling():  # there the mode takes no time
            return False
        for namespace, name, value in self.found:
            if namespace.get(name) is not value:
                return False
        made, original = self.function, self.original
        return (
            current is original
            and original.__code__ is self.code
            and original.__defaults__ is made.__defaults__
            and original.__kwdefaults__ is made.__kwdefaults__
        )


# Within these, names or modes may change before the call.
_CHANGES = (ast.With, ast.AsyncWith, ast.Global, ast.Nonlocal, ast.Yield, ast.YieldFrom, ast.Await)


def answering(function: types.FunctionType, tree: ast.stmt) -> Answering | None:
    """The function with another name for scaled_dot_product_attention in its code.

    tree: its source. None if this does anything but call it, or finds it elsewhere than in its
    globals or in torch.nn.functional, by the names of modules, or is not that of the code.
    """
    code, namespace = function.__code__, function.__globals__
    compiled = compile(ast.Module([tree], []), code.co_filename, "exec").co_consts
    if not any(
        isinstance(const, types.CodeType)
        and (const.co_names, const.co_varnames) == (code.co_names, code.co_varnames)
        for const in compiled
    ):
        return None
    nodes = list(ast.walk(tree))
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    nested = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    found: list[tuple[dict[str, Any], str, Any]] = [(vars(F), _SDPA, _sdpa)]
    for node in nodes:
        if isinstance(node, _CHANGES):
            return None
        if _SDPA not in (getattr(node, each, None) for each in ("attr", "id", "name", "asname")):
            continue
        root, *path = ast.unparse(node).split(".")
        if id(node) not in called or root in (*code.co_varnames, *code.co_cellvars):
            return None
        place: Any = namespace
        for name in (root, *path):
            value = place.get(name) if type(place) is dict else None
            found.append((place, name, value))
            place = vars(value) if type(value) is types.ModuleType else value
        if place is not _sdpa or (path and found[-1][0] is not vars(F)):
            return None
    if len(found) == 1 or any(_SDPA in names(const) for const in nested):
        return None
    for place in [place for place, name, _ in found if name == _SDPA]:
        place[_ANSWERED] = _answered
        found.append((place, _ANSWERED, _answered))
    renamed = tuple(_ANSWERED if name == _SDPA else name for name in code.co_names)
    made = types.FunctionType(
        code.replace(co_names=renamed),
        namespace,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return Answering(made, function, code, found)


def _answered(*args: Any, **kwargs: Any) -> Any:
    out = _attention_of_sdpa(*args, **kwargs)
    return _sdpa(*args, **kwargs) if out is None else out


def _attention_of_sdpa(
    query: Any = None,
    key: Any = None,
    value: Any = None,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    *surplus: Any,
    scale: Any = None,
    enable_gqa: Any = False,
    **unknown: Any,
) -> Any:
    """None for a call that `attention` does not cover, which may also be an invalid one."""
    if surplus or unknown or type(is_causal) is not bool or type(enable_gqa) is not bool:
        return None
    if (
        attn_mask is scale is None
        and type(dropout_p) in (float, int)
        and dropout_p == 0
        and (sizes := functional.plain_sizes(query, key, value)) is not None
    ):
        code = functional.CAUSAL["top_left"] if is_causal else 0
        scale = sizes[3] ** -0.5 if sizes[3] else 1.0
        return functional.plain_attention(query, key, value, code, scale)
    inputs = (query, key, value)
    if not all(_is_supported(x) and x.dim() == 4 and x.dtype in functional.FLOATS for x in inputs):
        return None
    B, H, M, D = query.shape
    K, N = key.shape[1:3]
    if (
        not (query.dtype is key.dtype is value.dtype)
        or not (query.device == key.device == value.device)
        or key.shape != (B, K, N, D)
        or value.shape[:3] != (B, K, N)
        or (H != K != 1 and not (enable_gqa and K > 0 and H % K == 0))
        or not (isinstance(dropout_p, (int, float)) and 0.0 <= dropout_p <= 1.0)
        or not (scale is None or (isinstance(scale, (int, float)) and -math.inf < scale < math.inf))
    ):
        return None
    if attn_mask is not None and (
        is_causal
        or not _is_supported(attn_mask)
        or attn_mask.dtype not in (torch.bool, query.dtype)
        or attn_mask.device != query.device
        or not 2 <= attn_mask.dim() <= 4
        or not all(
            functional.is_size(size, wanted, 1)
            for size, wanted in zip(reversed(attn_mask.shape), (N, M, H, B), strict=False)
        )
    ):
        return None
    causal: Any = "top_left" if is_causal else False
    return functional.attention(
        query, key, value, mask=attn_mask, causal=causal, scale=scale, dropout_p=dropout_p
    )


def _is_supported(x: Any) -> bool:
    return isinstance(x, Tensor) and is_plain_tensor(x) and x.layout is torch.strided
