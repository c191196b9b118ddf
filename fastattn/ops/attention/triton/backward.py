"""The launchers of attention's backward in Triton.

A call launches dq (with lse and delta of every row, which the others need), then dk and dv, then
the gradients of an additive mask and of a bias by distance, each only if it is needed. Formulas are
in bwd_parts.py, a kernel each in bwd_{dq,dkdv,dmask,distance}_kernel.py, the lists of tiles in
base_tiles.py and mask_lists.py, tilings in bwd_config.py. bwd_bind.py binds the kernels' arguments,
once per combination of shapes, strides and options.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastattn.ops._triton_launch import LaunchCache, signature
from fastattn.ops.attention.calls import BackwardCall, Gradients, options_of, why_no_pages
from fastattn.ops.attention.triton.bwd_bind import Plan, bind, layout_of
from fastattn.ops.attention.triton.bwd_config import BwdConfig
from fastattn.ops.attention.triton.call_shape import (
    Workspace,
    architecture,
    attention_seed,
    has_origin,
    length_tensors,
    packed_of,
    score_tensors,
    unsupported,
)
from fastattn.ops.attention.triton.tiles import dropout_numbers

_plans = LaunchCache()


def attention_bwd_unsupported(call: BackwardCall) -> str | None:
    return why_no_pages(call) or unsupported(call, out=call.out, dout=call.dout)


def attention_bwd_uses_lse(call: BackwardCall) -> bool:
    """Some calls need a delta that is not computed from `out`."""
    return call.q.dtype.itemsize >= 4 and not call.needs[3]


def attention_bwd_workspace(call: BackwardCall) -> Workspace:
    return layout_of(None, call).workspace


def attention_bwd(call: BackwardCall, *tensors: Tensor) -> None:
    """tensors: the gradients and the workspace."""
    gradients, workspace = tensors[: len(Gradients._fields)], tensors[len(Gradients._fields) :]
    _run(None, call, Gradients._make(gradients), workspace)


def attention_bwd_with_config(config: BwdConfig, call: BackwardCall, *gradients: Tensor) -> None:
    """attention_bwd in a given tiling, for tuning and tests; allocates its workspace."""
    workspace = [
        torch.empty(size, dtype=dtype, device=call.q.device)
        for size, dtype, _ in layout_of(config, call).workspace
    ]
    _run(config, call, Gradients(*gradients), workspace)


def _run(
    tiling: BwdConfig | None, call: BackwardCall, gradients: Gradients, workspace: Sequence[Tensor]
) -> None:
    reduced = _without_zeros(call, gradients)
    if reduced is None:
        return
    dout, dlse, out, lse, q, k, v, mask, mask_tiles = reduced[:9]
    needs, lengths = reduced.needs, length_tensors(reduced)
    changes, stream = score_tensors(reduced), reduced.dropout_stream
    seed = attention_seed(reduced.dropout_seed if reduced.dropout_p > 0.0 else None)
    dq, dk, dv, dmask, *_ = gradients
    addresses = q.data_ptr() | k.data_ptr() | v.data_ptr()
    addresses |= 0 if dout is None else dout.data_ptr()
    key = (
        tiling or architecture(q), q.device, q.dtype, q.shape, q.stride(), k.shape, k.stride(),
        v.shape, v.stride(), out.stride(), None if dout is None else dout.stride(), dlse is None,
        signature(mask), signature(mask_tiles), *map(signature, (*lengths, *changes)),
        *options_of(reduced), has_origin(seed), *needs, dq.stride(), dk.stride(), dv.stride(),
        dmask.stride(), packed_of(call), addresses & 15 == 0,
    )  # fmt: skip
    plan: Plan | None = _plans.get(key)
    if plan is None:
        plan = _plans.remember(key, bind(tiling, reduced, gradients, key[-1]))

    lse_delta, *rest = workspace
    sink_sums = None
    if needs[5]:
        sink_sums, *rest = rest
    distance_sums = None
    if plan.distance is not None:
        distance_sums, *rest = rest
    base_bits = alive = lists_dq = lists_dkdv = None
    if plan.classify is not None:
        base_bits, alive, lists_dq, lists_dkdv, *rest = rest
        plan.classify(mask, mask_tiles, lengths, base_bits, alive)
    row_keys = None if seed is None else workspace[-2]
    column_keys = None
    if plan.hash_columns is not None:
        column_keys = workspace[-1]
        plan.hash_columns(seed, column_keys, stream)
    if plan.list_dq is not None:
        plan.list_dq(base_bits, lists_dq)
    plan.dq(
        q, k, v, out, dout, k, k, v, v, lse, dlse, lse_delta, dq if needs[0] else None, sink_sums,
        mask, lists_dq, alive, lengths, changes, seed, column_keys, row_keys, stream,
    )  # fmt: skip
    if sink_sums is not None:
        torch.sum(sink_sums, (0, 2), out=gradients.dsinks)
    if plan.list_dkdv is not None:
        plan.list_dkdv(base_bits, lists_dkdv)
    for launch, writes_dk, writes_dv in plan.dkdv:
        launch(
            q, k, v, dout, q, q, dout, dout, lse_delta, dk if writes_dk else None,
            dv if writes_dv else None, mask, lists_dkdv, alive, lengths, changes, seed, row_keys,
            stream,
        )  # fmt: skip
    if plan.dmask is not None:
        target = rest[0] if plan.sum_splits is not None else dmask
        plan.dmask(
            q, k, v, dout, lse_delta, mask, base_bits, lengths, changes, seed, target, stream,
        )  # fmt: skip
        if plan.sum_splits is not None:
            plan.sum_splits(target, dmask)
    if plan.distance is not None and distance_sums is not None:
        plan.distance(
            q, k, v, dout, lse_delta, mask, base_bits, lengths, changes, seed, distance_sums,
            stream,
        )  # fmt: skip
        ddistance_bias = gradients.ddistance_bias
        entries = distance_sums.narrow(3, plan.distance_spare, ddistance_bias.shape[2])
        if ddistance_bias.shape[0] == 1:
            torch.sum(entries, (0, 1), out=ddistance_bias[0])
        else:
            torch.sum(entries, 0, out=ddistance_bias)


def _without_zeros(call: BackwardCall, gradients: Gradients) -> BackwardCall | None:
    """The call without gradients that are zero, which are written here; None if all are."""
    offsets = call.cu_seqlens_q
    dout, dlse, dropout_p = call.dout, call.dlse, call.dropout_p
    need_dq, need_dk, need_dv, need_dmask, need_dbias, need_dsinks = call.needs
    need_dmask = need_dmask and call.mask is not None
    need_dbias = need_dbias and call.distance_bias is not None
    need_dsinks = need_dsinks and call.sinks is not None
    needs = need_dq, need_dk, need_dv, need_dmask, need_dbias, need_dsinks
    if dropout_p > 0.0 and dropout_numbers(dropout_p)[1] == 0.0:
        dout, dropout_p = None, 0.0  # everything is dropped: out depends on nothing
    nothing = call.q.numel() == 0 or call.k.numel() == 0 or (dout is None and dlse is None)
    if offsets is not None:
        nothing |= 0 in (offsets.numel() - 1, call.max_seqlen_q, call.max_seqlen_k)
    if nothing or offsets is not None:
        # Packed rows behind the last sequence belong to no program.
        for result, needed in zip(gradients, needs, strict=True):
            if needed:
                result.zero_()
        if nothing:
            if need_dsinks and dlse is not None:  # a row without keys has the sink as lse
                dlse = torch.where(call.lse.isneginf(), 0.0, dlse)
                heads = dlse[None] if offsets is not None else dlse  # [.., H, rows]
                torch.sum(heads, (0, 2), out=gradients.dsinks)
            return None
    if need_dv and dout is None:
        gradients.dv.zero_()
        needs = need_dq, need_dk, False, need_dmask, need_dbias, need_dsinks
    if dlse is not None:
        dlse = dlse.contiguous()
    if dout is call.dout and dlse is call.dlse and needs == tuple(call.needs):
        return call
    return call._replace(dout=dout, dlse=dlse, dropout_p=dropout_p, needs=needs)
