"""fastattn as a flash attention of `torch.nn.functional.scaled_dot_product_attention`.

`register()` adds the name "fastattn" to torch's list of implementations (torch 2.11 and newer);
`torch.nn.attention.activate_flash_attention_impl("fastattn")` replaces SDPA's flash backend by it,
for CUDA tensors, and `restore_flash_attention_impl()` undoes that. SDPA still decides when its
flash backend may run: without a mask, in half precision.
"""

from typing import Any

import torch
from torch import Tensor

from fastattn import functional

NAME = "fastattn"
_TOP_LEFT = 1  # the op's code; SDPA's is_causal means this


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
    out, lse = torch.ops.fastattn.attention_fwd(
        query, key, value, None, None, None, None, _TOP_LEFT if is_causal else 0, -1, -1,
        query.shape[-1] ** -0.5 if scale is None else scale, dropout_p, seed, 0,
    )  # fmt: skip
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
    grads = torch.ops.fastattn.attention_bwd(
        grad_out.contiguous(), None, query, key, value, None, None, None, None, out, logsumexp,
        _TOP_LEFT if is_causal else 0, -1, -1,
        query.shape[-1] ** -0.5 if scale is None else scale, dropout_p,
        philox_seed.view(torch.int64)[:1] if dropout_p > 0.0 else None, 0,
        [True, True, True, False],
    )  # fmt: skip
    return grads[0], grads[1], grads[2]
