"""The feed-forward network in Triton, the portable GPU path: the launchers.

config.py chooses for each matrix product between torch.mm, with elementwise kernels of
triton_elementwise.py before and after it, and a kernel of triton_gemm.py with that work in its
epilogue. triton_steps.py binds kernels to arguments that depend only on widths, strides and
options. A plan of bound kernels is cached for each combination of these and used for any number of
rows; a call passes only pointers.

Triton's fp32 products are IEEE or use three TF32 products for one. Those of torch.mm follow
torch.backends.cuda.matmul, which is IEEE by default.
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
from fastattn.ops.ffn.calls import BackwardCall, ForwardCall, Gradients
from fastattn.ops.ffn.config import (
    GATED,
    BackwardConfig,
    ForwardConfig,
    GemmTile,
    Product,
    backward_config,
    forward_config,
)

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


def _tile(choice: Product, tma_aligned: bool, elements: int) -> GemmTile | None:
    """The tile for a result of that many elements; None for torch.mm, which also computes empty
    results. tma_aligned: the operands' addresses are aligned for tensor descriptors.
    """
    if choice.tile is None or elements == 0:
        return None
    return choice.tile if tma_aligned else replace(choice.tile, tma=False)


def _forward_config(x: Tensor, w2: Tensor, activation: str) -> ForwardConfig:
    E, F = w2.shape
    rows = x.shape[:-1].numel()
    return forward_config(_arch(x), x.dtype, rows, x.shape[-1], F, E, activation)


def _backward_config(x: Tensor, w2: Tensor, activation: str) -> BackwardConfig:
    E, F = w2.shape
    rows = x.shape[:-1].numel()
    return backward_config(_arch(x), x.dtype, rows, x.shape[-1], F, E, activation)


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
    return _forward_workspace(_forward_config(call.x, call.w2, call.activation), call)


def _forward_workspace(config: ForwardConfig, call: ForwardCall) -> Workspace:
    """The activation after dropout, which for relu is in `hidden`; and the second product, if y has
    another dtype.
    """
    x, residual, (E, F) = call.x, call.residual, call.w2.shape
    rows = x.shape[:-1].numel()
    workspace: Workspace = []
    if call.activation != "relu":
        workspace.append(((rows, F), x.dtype, False))
    if config.down.tile is None and residual is not None and residual.dtype != x.dtype:
        workspace.append(((rows, E), x.dtype, False))
    return workspace


def ffn_fwd(call: ForwardCall, y: Tensor, hidden: Tensor, *workspace: Tensor) -> None:
    _forward(None, call, y, hidden, workspace)


class _ForwardPlan(NamedTuple):
    """Steps that are None are not needed; a product that is None is computed by torch.mm.
    relu_in_product: PyTorch's product applies bias and relu.
    """

    up: steps.Multiplication | None
    relu_in_product: bool
    activate: steps.Elementwise | None
    down: steps.Multiplication | None
    finish: steps.Elementwise | None


_plans = LaunchCache()


def _forward(
    config: ForwardConfig | None,
    call: ForwardCall,
    y: Tensor,
    hidden: Tensor,
    workspace: Sequence[Tensor],
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
    config = config or _forward_config(x, w2, activation)
    key = (
        config, x.device, rows == 0, rows_signature(x), signature(w1), b1 is None, signature(w2),
        b2 is None, rows_signature(residual), y.dtype, activation, dropout_p, output_dropout_p,
        aligned(x, w1, w2),
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        plan = _bind_forward(config, call._replace(x=x, residual=residual), a, key[-1])
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
    if plan.down is not None:
        plan.down(a, w2, _dense(b2), residual, y, output_seed, dropout_stream)
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


def _bind_forward(
    config: ForwardConfig, call: ForwardCall, a: Tensor, tma_aligned: bool
) -> _ForwardPlan:
    x, w1, b1, w2, _, residual, activation, dropout_p, output_dropout_p, *_ = call
    rows, (E, F) = x.shape[0], w2.shape
    relu_in_product = activation == "relu" and dropout_p == 0.0 and b1 is not None
    up = activate = down = finish = None
    if (tile := _tile(config.up, tma_aligned, rows * F)) is not None:
        up = steps.up(tile, x, w1, activation, dropout_p)
    elif not relu_in_product:
        activate = steps.activate(F, x.dtype, activation, dropout_p)
    if (tile := _tile(config.down, tma_aligned, rows * E)) is not None:
        down = steps.down(tile, a, w2, residual, output_dropout_p)
    elif residual is not None or output_dropout_p > 0.0:
        finish = steps.finish(E, residual, output_dropout_p)
    return _ForwardPlan(up, relu_in_product, activate, down, finish)


# -- backward -------------------------------------------------------------------------------------


def ffn_bwd_unsupported(call: BackwardCall) -> str | None:
    return _unsupported(call.x, call.dy)


def ffn_bwd_workspace(call: BackwardCall) -> Workspace:
    workspace = _backward_workspace(_backward_config(call.x, call.w2, call.activation), call)
    return [(shape, dtype, False) for shape, dtype in workspace.values()]


def _backward_workspace(
    config: BackwardConfig, call: BackwardCall
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The workspace by name. dropped_dy: dy after dropout, in x's dtype. dpre: the gradient of the
    pre-activation. a: the activation after dropout. *_sums: partial sums of groups of rows.
    *_partials: partial products of splits.

    torch.mm writes dy w2 to dpre or, if gated, to a.
    """
    dy, x, w1, w2, activation = call.dy, call.x, call.w1, call.w2, call.activation
    rows, (E, F) = x.shape[:-1].numel(), w2.shape
    need_x, need_w1, need_b1, need_w2, need_b2 = call.needs
    below = need_x or need_w1 or need_b1
    tile = _tile(config.dhidden, True, rows * F)
    workspace: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    if call.output_dropout_p > 0.0 or dy.dtype != x.dtype:
        workspace["dropped_dy"] = (rows, E), x.dtype
    if need_b2:
        workspace["dy_sums"] = (steps.group_count(rows, E), E), torch.float32
    if below:
        workspace["dpre"] = (rows, w1.shape[0]), x.dtype
    if activation != "relu" and (need_w2 or (below and tile is None and activation in GATED)):
        workspace["a"] = (rows, F), x.dtype
    if need_b1:
        count = steps.group_count(rows, F) if tile is None else steps.ceil_div(rows, tile.block_m)
        workspace["dpre_sums"] = (count, w1.shape[0]), torch.float32
    for name, choice, shape, needed in (
        ("dx_partials", config.dx, (rows, w1.shape[1]), need_x),
        ("dw1_partials", config.dw1, tuple(w1.shape), need_w1),
        ("dw2_partials", config.dw2, tuple(w2.shape), need_w2),
    ):
        if needed and choice.tile is not None and choice.tile.splits > 1:
            workspace[name] = (choice.tile.splits, *shape), torch.float32
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
    _backward(None, call, Gradients(dx, dw1, db1, dw2, db2), workspace)


class _BackwardPlan(NamedTuple):
    """names: of the workspace, in order. Steps that are None are not needed; a product that is None
    is computed by torch.mm.
    """

    names: tuple[str, ...]
    drop: steps.ElementwiseAndSums | None
    sum_dy: steps.SumOverGroups | None
    dhidden: steps.Multiplication | None
    differentiate: steps.ElementwiseAndSums | None
    sum_dpre: steps.SumOverGroups | None
    activate: steps.Elementwise | None
    dx: steps.PlainProduct | None
    dw1: steps.PlainProduct | None
    dw2: steps.PlainProduct | None


def _backward(
    config: BackwardConfig | None,
    call: BackwardCall,
    gradients: Gradients,
    workspace: Sequence[Tensor],
) -> None:
    (
        dy, x, w1, _, w2, _, hidden, activation, dropout_p, output_dropout_p, dropout_seed,
        dropout_stream, needs,
    ) = call  # fmt: skip
    dx, dw1, db1, dw2, db2 = gradients
    need_x, need_w1, _, need_w2, _ = needs
    dy, x, hidden = _kernel_rows(dy), _rows(x), _rows(hidden).contiguous()
    rows = x.shape[0]
    config = config or _backward_config(x, w2, activation)
    key = (
        config, x.device, rows == 0, rows_signature(dy), rows_signature(x), signature(w1),
        signature(w2), activation, dropout_p, output_dropout_p, *needs,
        dx.is_contiguous(), dw1.is_contiguous(), dw2.is_contiguous(),
        aligned(dy, x, w1, w2, hidden),
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        rows_call = call._replace(dy=dy, x=x, hidden=hidden)
        plan = _bind_backward(config, rows_call, gradients, workspace, key[-1])
        _plans.remember(key, plan)
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
    if plan.dhidden is not None:
        plan.dhidden(dy, w2.t(), hidden, dpre, a_out, dpre_sums, seed, dropout_stream)
    elif plan.differentiate is not None:
        da = a if activation in GATED else dpre
        torch.mm(dy, w2, out=da)
        plan.differentiate(rows, da, hidden, dpre, a_out, dpre_sums, seed, dropout_stream)
    elif plan.activate is not None:
        plan.activate(rows, hidden, a, seed, dropout_stream)
    if plan.sum_dpre is not None and dpre_sums is not None:
        plan.sum_dpre(dpre_sums.shape[0], dpre_sums, db1)
    if need_w2:
        assert a is not None
        _weight_gradient(plan.dw2, dy, a, dw2, buffers.get("dw2_partials"))
    if need_w1:
        assert dpre is not None
        _weight_gradient(plan.dw1, dpre, x, dw1, buffers.get("dw1_partials"))
    if need_x:
        assert dpre is not None
        if plan.dx is not None:
            plan.dx(dpre, w1.t(), dx, buffers.get("dx_partials"))
        elif dx.is_contiguous():
            torch.mm(dpre, w1, out=_rows(dx))
        else:
            dx.copy_(torch.mm(dpre, w1).view(dx.shape))


def _weight_gradient(
    product: steps.PlainProduct | None, dout: Tensor, x: Tensor, dw: Tensor, partials: Tensor | None
) -> None:
    """dw = doutᵀ x."""
    if product is None:
        torch.mm(dout.t(), x, out=dw)
    else:
        product(dout.t(), x.t(), dw, partials)


def _bind_backward(
    config: BackwardConfig,
    call: BackwardCall,
    gradients: Gradients,
    workspace: Sequence[Tensor],
    tma_aligned: bool,
) -> _BackwardPlan:
    dy, x, w1, _, w2, _, hidden, activation, dropout_p, output_dropout_p, *_ = call
    rows, (E, F), W = x.shape[0], w2.shape, w1.shape[0]
    need_x, need_w1, _, need_w2, _ = call.needs
    shapes = _backward_workspace(config, call)
    buffers = dict(zip(shapes, workspace, strict=True))
    drop = dhidden = differentiate = activate = None
    if "dropped_dy" in shapes or "dy_sums" in shapes:
        drop = steps.drop_gradient(dy, x.dtype, output_dropout_p)
    dy = buffers.get("dropped_dy", dy)
    if "dpre" in shapes:
        if (tile := _tile(config.dhidden, tma_aligned, rows * F)) is not None:
            dhidden = steps.dhidden(tile, dy, w2, activation, dropout_p)
        else:
            differentiate = steps.differentiate(F, x.dtype, activation, dropout_p)
    elif "a" in shapes:
        activate = steps.activate(F, x.dtype, activation, dropout_p)

    def product(
        choice: Product, a: Tensor, b: Tensor, out: Tensor, over_rows: bool
    ) -> steps.PlainProduct | None:
        # The Triton kernel writes row-major results only.
        tile = _tile(choice, tma_aligned, out.numel()) if out.is_contiguous() else None
        return None if tile is None else steps.PlainProduct(tile, a, b, over_rows=over_rows)

    a = hidden if activation == "relu" else buffers.get("a", hidden)
    return _BackwardPlan(
        tuple(shapes),
        drop,
        steps.SumOverGroups(E) if "dy_sums" in shapes else None,
        dhidden,
        differentiate,
        steps.SumOverGroups(W) if "dpre_sums" in shapes else None,
        activate,
        product(config.dx, buffers["dpre"], w1.t(), gradients.dx, False) if need_x else None,
        product(config.dw1, buffers["dpre"].t(), x.t(), gradients.dw1, True) if need_w1 else None,
        product(config.dw2, dy.t(), a.t(), gradients.dw2, True) if need_w2 else None,
    )


# -- launchers with a given config, for tuning and tests ------------------------------------------


def ffn_fwd_with_config(
    config: ForwardConfig, call: ForwardCall, y: Tensor, hidden: Tensor
) -> None:
    """ffn_fwd with the given config; allocates its workspace."""
    workspace = _forward_workspace(config, call)
    new = call.x.new_empty
    _forward(config, call, y, hidden, [new(shape, dtype=dtype) for shape, dtype, _ in workspace])


def ffn_bwd_with_config(config: BackwardConfig, call: BackwardCall, *gradients: Tensor) -> None:
    """ffn_bwd with the given config; allocates its workspace."""
    workspace = _backward_workspace(config, call).values()
    new = call.x.new_empty
    results = Gradients(*gradients)
    _backward(config, call, results, [new(shape, dtype=dtype) for shape, dtype in workspace])
