"""The feed-forward network in Triton, the portable GPU path: the launchers.

PyTorch computes the matrix products, and the kernels of triton_elementwise.py what is between them;
where config.py says so, one kernel (triton_up.py) computes the first product of the forward, the
activation and its dropout. triton_steps.py binds kernels to arguments that depend only on widths,
strides and options. A plan of bound kernels is cached for each combination of these and used for
any number of rows; a call passes only pointers.

The precision of fp32 products follows torch.backends.cuda.matmul, which is IEEE by default.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fastattn.ops import _env
from fastattn.ops._triton_launch import (
    DTYPES,
    LaunchCache,
    aligned,
    rows_signature,
    signature,
    too_old,
)
from fastattn.ops.ffn import triton_steps as steps
from fastattn.ops.ffn.calls import BackwardCall, ForwardCall
from fastattn.ops.ffn.config import GATED, Up, up_config

# Row indices may be 32-bit; offsets are 64-bit.
_MAX_ROWS = (1 << 31) - (1 << 16)

Workspace = list[tuple[tuple[int, ...], torch.dtype, bool]]


def _arch(x: Tensor) -> str:
    return _env.architecture(x.device.type, x.device.index or 0)


def _rows(x: Tensor) -> Tensor:
    """[..., N] -> [rows, N]."""
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _kernel_rows(x: Tensor) -> Tensor:
    """[..., N] -> [rows, N] with the last dimension contiguous."""
    x = _rows(x)
    return x if x.shape[1] <= 1 or x.stride(1) == 1 else x.contiguous()


def _dense(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


def _relu_in_product(call: ForwardCall) -> bool:
    """Whether PyTorch's product, which adds the bias, also computes the activation."""
    return call.activation == "relu" and call.dropout_p == 0.0 and call.b1 is not None


def _up_config(call: ForwardCall) -> Up:
    x, w1 = call.x, call.w1
    rows, work = x.shape[:-1].numel(), not _relu_in_product(call)
    return up_config(_arch(x), x.dtype, rows, x.shape[-1], w1.shape[0], work=work)


def _unsupported(x: Tensor, *others: Tensor | None) -> str | None:
    for name, tensor in zip(("x", "residual or gradient"), (x, *others), strict=False):
        if tensor is not None and tensor.dtype not in DTYPES:
            return f"has kernels for float16, bfloat16 and float32, got {tensor.dtype} {name}"
    if x.shape[:-1].numel() > _MAX_ROWS:
        return f"handles up to {_MAX_ROWS} rows, got {x.shape[:-1].numel()}"
    return too_old(_arch(x))


# -- forward --------------------------------------------------------------------------------------


def ffn_fwd_unsupported(call: ForwardCall) -> str | None:
    return _unsupported(call.x, call.residual)


def ffn_fwd_workspace(call: ForwardCall) -> Workspace:
    """The activation after dropout, which for relu is in `hidden`; and the second product, if y has
    another dtype.
    """
    x, residual, (E, F) = call.x, call.residual, call.w2.shape
    rows = x.shape[:-1].numel()
    workspace: Workspace = []
    if call.activation != "relu":
        workspace.append(((rows, F), x.dtype, False))
    if residual is not None and residual.dtype != x.dtype:
        workspace.append(((rows, E), x.dtype, False))
    return workspace


def ffn_fwd(call: ForwardCall, y: Tensor, hidden: Tensor, *workspace: Tensor) -> None:
    _forward(None, call, y, hidden, workspace)


class _ForwardPlan(NamedTuple):
    """Steps that are None are not needed. up: with it, PyTorch does not compute the first product.
    relu_in_product: PyTorch's product applies bias and relu.
    """

    up: steps.UpProduct | None
    relu_in_product: bool
    activate: steps.Elementwise | None
    finish: steps.Elementwise | None


_plans = LaunchCache()


def _forward(
    config: Up | None, call: ForwardCall, y: Tensor, hidden: Tensor, workspace: Sequence[Tensor]
) -> None:
    (
        x, w1, b1, w2, b2, residual, activation, dropout_p, output_dropout_p, dropout_seed,
        dropout_stream,
    ) = call  # fmt: skip
    x, y, hidden = _rows(x), _rows(y), _rows(hidden)
    residual = None if residual is None else _kernel_rows(residual)
    a = hidden if activation == "relu" else workspace[0]
    seed = dropout_seed if dropout_p > 0.0 else None
    output_seed = dropout_seed if output_dropout_p > 0.0 else None
    rows = x.shape[0]
    config = config or _up_config(call)
    key = (
        config, x.device, rows == 0, rows_signature(x), signature(w1), b1 is None, signature(w2),
        b2 is None, rows_signature(residual), y.dtype, activation, dropout_p, output_dropout_p,
        aligned(x, w1),
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        plan = _bind_forward(config, call._replace(x=x, residual=residual), key[-1])
        _plans.remember(key, plan)

    if plan.up is not None:
        plan.up(x, w1, _dense(b1), hidden, a, seed, dropout_stream)
    elif plan.relu_in_product:
        torch.ops.aten._addmm_activation.out(b1, x, w1.t(), out=hidden)
    else:
        _torch_product(x, w1.t(), b1, hidden)
    if plan.activate is not None:
        plan.activate(rows, hidden, a, seed, dropout_stream)
    if y.numel() == 0:
        return
    product = y if y.dtype == x.dtype else workspace[-1]
    _torch_product(a, w2.t(), b2, product)
    if plan.finish is not None:
        plan.finish(rows, product, residual, y, output_seed, dropout_stream)


def _torch_product(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)


def _bind_forward(config: Up, call: ForwardCall, tma_aligned: bool) -> _ForwardPlan:
    """tma_aligned: the operands' addresses are aligned for tensor descriptors."""
    x, w1, _, w2, _, residual, activation, dropout_p, output_dropout_p, *_ = call
    E, F = w2.shape
    tile, relu_in_product = config.tile, _relu_in_product(call)
    up = activate = finish = None
    if tile is not None and x.numel() and w1.numel():
        tile = replace(tile, tma=tile.tma and tma_aligned)
        up = steps.UpProduct(tile, x, w1, activation, dropout_p)
    elif not relu_in_product:
        activate = steps.activate(F, x.dtype, activation, dropout_p)
    if residual is not None or output_dropout_p > 0.0:
        finish = steps.finish(E, residual, output_dropout_p)
    return _ForwardPlan(up, relu_in_product, activate, finish)


# -- backward -------------------------------------------------------------------------------------


def ffn_bwd_unsupported(call: BackwardCall) -> str | None:
    return _unsupported(call.x, call.dy)


def ffn_bwd_workspace(call: BackwardCall) -> Workspace:
    return [(shape, dtype, False) for shape, dtype in _backward_workspace(call).values()]


def _backward_workspace(call: BackwardCall) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The workspace by name. dropped_dy: dy after dropout, in x's dtype. dpre: the gradient of the
    pre-activation. a: the activation after dropout. *_sums: partial sums of groups of rows.

    PyTorch writes dy w2 to dpre or, if gated, to a.
    """
    dy, x, w1, w2, activation = call.dy, call.x, call.w1, call.w2, call.activation
    rows, (E, F) = x.shape[:-1].numel(), w2.shape
    need_x, need_w1, need_b1, need_w2, need_b2 = call.needs
    below = need_x or need_w1 or need_b1
    workspace: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    if call.output_dropout_p > 0.0 or dy.dtype != x.dtype:
        workspace["dropped_dy"] = (rows, E), x.dtype
    if need_b2:
        workspace["dy_sums"] = (steps.group_count(rows, E), E), torch.float32
    if below:
        workspace["dpre"] = (rows, w1.shape[0]), x.dtype
    if activation != "relu" and (need_w2 or (below and activation in GATED)):
        workspace["a"] = (rows, F), x.dtype
    if need_b1:
        workspace["dpre_sums"] = (steps.group_count(rows, F), w1.shape[0]), torch.float32
    return workspace


def ffn_bwd(
    call: BackwardCall,
    dx: Tensor,
    dw1: Tensor,
    db1: Tensor,
    dw2: Tensor,
    db2: Tensor,
    *workspace: Tensor,
) -> None:
    (
        dy, x, w1, _, w2, _, hidden, activation, dropout_p, output_dropout_p, dropout_seed,
        dropout_stream, needs,
    ) = call  # fmt: skip
    need_x, need_w1, _, need_w2, _ = needs
    dy, x, hidden = _kernel_rows(dy), _rows(x), _rows(hidden).contiguous()
    rows = x.shape[0]
    key = (
        x.device, rows_signature(dy), x.dtype, signature(w1), signature(w2), activation, dropout_p,
        output_dropout_p, *needs,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        plan = _plans.remember(key, _bind_backward(call._replace(dy=dy)))
    buffers = dict(zip(plan.names, workspace, strict=True))
    dropped_dy, dy_sums, dpre, dpre_sums = (
        buffers.get(name) for name in ("dropped_dy", "dy_sums", "dpre", "dpre_sums")
    )
    a = hidden if activation == "relu" else buffers.get("a")
    a_out = a if need_w2 and activation != "relu" else None  # recomputed with the derivative
    seed = dropout_seed if dropout_p > 0.0 else None

    if plan.drop is not None:
        output_seed = dropout_seed if output_dropout_p > 0.0 else None
        plan.drop(rows, dy, dropped_dy, dy_sums, output_seed, dropout_stream)
    if plan.sum_dy is not None and dy_sums is not None:
        plan.sum_dy(dy_sums.shape[0], dy_sums, db2)
    dy = dy if dropped_dy is None else dropped_dy
    if plan.differentiate is not None:
        da = a if activation in GATED else dpre
        torch.mm(dy, w2, out=da)
        plan.differentiate(rows, da, hidden, dpre, a_out, dpre_sums, seed, dropout_stream)
    elif plan.activate is not None:
        plan.activate(rows, hidden, a, seed, dropout_stream)
    if plan.sum_dpre is not None and dpre_sums is not None:
        plan.sum_dpre(dpre_sums.shape[0], dpre_sums, db1)
    if need_w2:
        assert a is not None
        torch.mm(dy.t(), a, out=dw2)
    if need_w1:
        assert dpre is not None
        torch.mm(dpre.t(), x, out=dw1)
    if need_x:
        assert dpre is not None
        if dx.is_contiguous():
            torch.mm(dpre, w1, out=_rows(dx))
        else:
            dx.copy_(torch.mm(dpre, w1).view(dx.shape))


class _BackwardPlan(NamedTuple):
    """names: of the workspace, in order. Steps that are None are not needed."""

    names: tuple[str, ...]
    drop: steps.ElementwiseAndSums | None
    sum_dy: steps.SumOverGroups | None
    differentiate: steps.ElementwiseAndSums | None
    sum_dpre: steps.SumOverGroups | None
    activate: steps.Elementwise | None


def _bind_backward(call: BackwardCall) -> _BackwardPlan:
    """dy: [rows, E]."""
    dy, x, w1, _, w2, _, _, activation, dropout_p, output_dropout_p, *_ = call
    (E, F), W = w2.shape, w1.shape[0]
    names = tuple(_backward_workspace(call))
    drop = differentiate = activate = None
    if "dropped_dy" in names or "dy_sums" in names:
        drop = steps.drop_gradient(dy, x.dtype, output_dropout_p)
    if "dpre" in names:
        differentiate = steps.differentiate(F, x.dtype, activation, dropout_p)
    elif "a" in names:
        activate = steps.activate(F, x.dtype, activation, dropout_p)
    return _BackwardPlan(
        names,
        drop,
        steps.SumOverGroups(E) if "dy_sums" in names else None,
        differentiate,
        steps.SumOverGroups(W) if "dpre_sums" in names else None,
        activate,
    )


# -- the forward with a given config, for tuning and tests ----------------------------------------


def ffn_fwd_with_config(config: Up, call: ForwardCall, y: Tensor, hidden: Tensor) -> None:
    """ffn_fwd with the given config; allocates its workspace."""
    workspace = ffn_fwd_workspace(call)
    new = call.x.new_empty
    _forward(config, call, y, hidden, [new(shape, dtype=dtype) for shape, dtype, _ in workspace])
