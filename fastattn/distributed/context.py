"""Attention over a sequence that is divided between processes."""

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from typing_extensions import Unpack

from fastattn.distributed.all_to_all import gather_rows, to_heads, to_sequence
from fastattn.distributed.blocks import DROPOUT_TILE, Call, Inputs
from fastattn.distributed.ring import Ring, RingAttention
from fastattn.distributed.sequence import place
from fastattn.functional import PaddedOptions, attention_call, attention_op, refuse_unknown

Method = Literal["ring", "all_to_all"]


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    method: Method = "ring",
    balanced: bool = False,
    key_balanced: bool | None = None,
    group: dist.ProcessGroup | None = None,
    return_lse: bool = False,
    **options: Unpack[PaddedOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` of sequences that are divided between the P processes of `group`, for this
    process's queries. Every process calls with the same options, shapes and `requires_grad`.

    options are the other arguments of `attention` but `block_table` and `backend`, for the whole
    sequences, M queries and N keys, if they are not described here.

    Args:
        q: [B, H, M / P, D]; k: [B, K, N / P, D]; v: [B, K, N / P, E], from `shard_sequence`.
        method: "ring" passes keys and values from process to process (Liu et al. 2023).
            "all_to_all" gives each process the whole sequences of H / P heads (DeepSpeed-Ulysses,
            Jacobs et al. 2023), for which P must divide H and K. In the ring, weights of a block of
            keys have an error relative to those of others, of up to |lse| x 2^-23 in fp32: if a
            number such as -1e9 is added to all keys of a row, every block has the same weight.
        balanced, key_balanced: the layouts of q and of k and v, as in `shard_sequence`; default of
            key_balanced: balanced. In the ring, causal attention should be balanced. Gradients,
            `out` and `lse` have the layout of their input, or of q.
        group: default all processes.
        mask: broadcastable to [B, H, M / P, N]: the rows of this process's queries, with all keys
            in their order. Tiles of a prepared mask are not used.
        key_lengths: [B], or [B, M / P] for this process's queries.
        alibi_slopes, sinks, relative_bias: the same on every process, with all heads.
        dropout_p: the ring needs chunks of a multiple of 16 queries and keys.
        dropout_seed: the same on every process, so that the same weights are dropped as by
            `attention` of the whole sequences. A seed of 5 numbers is that of the whole sequences.
            None: each process draws its own.

    Returns:
        out [B, H, M / P, E], or (out, lse), lse [B, H, M / P]. Differentiable once.

    Gradients of sinks, relative_bias and alibi_slopes, and of a mask with one row for all queries,
    are this process's parts: their sum over the processes is the gradient. DDP and FSDP add or
    average gradients of parameters in this way.

    Each process sends, in bytes, with L = P - 1 and k, v, ... for the bytes of its own shard:

    - Ring: L (k + v) forward; L (k + v) + L (dk + dv) backward, where dk and dv are fp32 (fp64 for
      fp64 inputs), and are sent if k or v requires a gradient. Causal and window restrictions that
      do not depend on lengths reduce it: a chunk is passed to the last process that needs it, so
      that with s steps in place of L, s (k + v) and s (dk + dv) are sent for it.
    - All to all: L / P (q + k + v + out) forward and L / P (dq + dk + dv + dout) backward, of which
      only required gradients are sent; with return_lse, L / P lse both times. In addition
      L / P of a mask with heads and rows, or L of one with rows alone, both times (backward L for
      one that requires a gradient); L of key_lengths [B, M / P].
    """
    if method not in ("ring", "all_to_all"):
        raise ValueError(f'method must be "ring" or "all_to_all", got {method!r}')
    known = PaddedOptions.__optional_keys__ - {"block_table", "backend"}
    if unknown := {name: x for name, x in options.items() if name not in known}:
        refuse_unknown(context_parallel_attention, unknown)
    P, rank = place(group)
    key_balanced = balanced if key_balanced is None else key_balanced
    whole = attention_call(q, k, v, **options, processes=P)  # type: ignore[misc]
    q, k, v, mask = whole[:4]
    inputs = q, k, v, mask, whole.distance_bias, whole.sinks
    in_tiles = whole.dropout_seed is not None and method == "ring"
    _check_chunks("q", q, balanced, in_tiles)
    _check_chunks("k", k, key_balanced, in_tiles)
    without_inputs: dict[str, Any] = dict.fromkeys(("mask_tiles", *Inputs._fields, "sinks"))
    without_inputs["dropout_seed"] = _with_origin(whole.dropout_seed)
    call = Call(
        q.shape[2] * P, k.shape[2] * P, whole._replace(**without_inputs), attention_op.choice(None)
    )
    if method == "ring":
        ring = Ring(group, P, rank, balanced, key_balanced)
        out, lse = RingAttention.apply(*inputs, ring, call)
    else:
        if k.shape[1] % P:
            raise ValueError(
                f'k must have a number of heads that {P} divides for method="all_to_all", '
                f"got {k.shape[1]}"
            )
        out, lse = _by_heads(*inputs, call, balanced, key_balanced, group, return_lse)
    return (out, lse) if return_lse else out


def _check_chunks(name: str, x: Tensor, balanced: bool, in_tiles: bool) -> None:
    positions = x.shape[2]
    if balanced and positions % 2:
        raise ValueError(f"{name} must hold two chunks of equal length, got {positions} positions")
    size = positions // 2 if balanced else positions
    if in_tiles and size % DROPOUT_TILE:
        raise ValueError(
            f"{name} must hold chunks of a multiple of {DROPOUT_TILE} positions for dropout with "
            f'method="ring", got {size}'
        )


def _with_origin(seed: Tensor | None) -> Tensor | None:
    """[5]: the seed and the index of the first sequence, head, query and key."""
    return seed if seed is None or seed.shape[0] == 5 else functional.pad(seed, (0, 4))


def _by_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    call: Call,
    balanced: bool,
    key_balanced: bool,
    group: dist.ProcessGroup | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attention of whole sequences with 1 / P of the heads; results are divided by sequence."""
    P, rank = place(group)
    H = q.shape[1] // P
    heads = slice(rank * H, (rank + 1) * H)
    if mask is not None:
        has_rows = mask.shape[2] > 1 or q.shape[2] == 1
        if mask.shape[1] > 1 and has_rows:
            [mask] = to_heads([mask], [balanced], group)
        elif has_rows:
            mask = gather_rows(mask, balanced, group)
        elif mask.shape[1] > 1:
            mask = mask[:, heads]
    key_lengths, seed = call.options.key_lengths, call.options.dropout_seed
    if key_lengths is not None and key_lengths.dim() == 2:
        key_lengths = gather_rows(key_lengths[:, None], balanced, group)[:, 0]
    if seed is not None:
        seed = torch.cat([seed[:2], seed[2:3] + heads.start, seed[3:]])
    q, k, v = to_heads([q, k, v], [balanced, key_balanced, key_balanced], group)
    of_heads = call.options._replace(
        q=q, k=k, v=v, mask=mask, key_lengths=key_lengths, dropout_seed=seed,
        distance_bias=None if bias is None else bias[:, heads],
        sinks=None if sinks is None else sinks[heads],
    )  # fmt: skip
    out, lse = attention_op(*of_heads, backend=call.backend)
    results = [out, lse] if return_lse else [out]
    results = to_sequence(results, [balanced] * len(results), group)
    return results[0], results[1] if return_lse else None
