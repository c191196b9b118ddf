"""The functions of `flash_attn` (Dao et al. 2022, 2023) under their own names and signatures.

    from fastattn.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func

Tensors are [B, S, H, D] and masks are aligned bottom right, as in flash_attn. The functions run on
every device of fastattn, a CPU included, also in fp32, and have gradients for the same arguments.
Differences: dropout rates are multiples of 1/256; a row without a key has lse -inf, not inf;
gradients are deterministic on a CPU and, under torch.use_deterministic_algorithms, on a GPU, where
`deterministic` raises without it; `num_splits` is ignored. ALiBi slopes and windows, except with
causal and those of equal lengths, become a dense mask of at most [B, H, M, N]: exact, but slower.
Pages of keys and values are read in place (`block_table` of `fastattn.attention`); in calls with
gradients or dropout they are copied first.
"""

import operator
from typing import Any

import torch
from torch import Tensor

from fastattn import functional

Window = tuple[int, int]
Result = Tensor | tuple[Tensor, Tensor, Tensor | None]
_INTEGERS = (torch.int32, torch.int64)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """softmax(softmax_scale q kᵀ) v.

    Args:
        q: [B, M, H, D]. k: [B, N, K, D], v: [B, N, K, E]; H a multiple of K.
        causal: query i attends keys j <= i + N - M.
        window_size: (left, right) of that diagonal; -1 = unlimited.
        softcap: scores become softcap * tanh(score / softcap); 0.0 = unchanged.
        alibi_slopes: fp32 [H] or [B, H]: -slope * |i + N - M - j| is added to the scores.
        return_attn_probs: for tests: also return lse [B, H, M] and, with dropout, the weights
            [B, H, M, N], negative where dropped (None without dropout). They are fp32 and each row
            has sum 1; flash_attn's are in q's dtype and lack the final scaling.

    Returns:
        out [B, M, H, E], or (out, lse, weights).
    """
    _check_deterministic(deterministic, q)
    window_size = _sides(window_size)
    heads = _heads_first(q, k, v)
    M, N = q.shape[1], k.shape[1]
    bounds = _bounds(causal or M == 1, window_size, alibi_slopes, M == N)
    if bounds is None:
        diagonal = torch.full((1,), N - M, device=q.device)
        bounds = {"mask": _dense(M, N, diagonal, None, window_size, alibi_slopes, q.shape[2])}
    return _attend(heads, bounds, dropout_p, softmax_scale, softcap, return_attn_probs)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Result:
    """`flash_attn_func` of q [B, M, H, D] and kv [B, N, 2, K, D]."""
    k, v = _unpacked("kv", kv, 2, 5)
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Result:
    """`flash_attn_func` of qkv [B, S, 3, H, D]."""
    q, k, v = _unpacked("qkv", qkv, 3, 5)
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """`flash_attn_func` of packed sequences.

    Args:
        q: [T, H, D]; k, v: [S, K, D], or pages [P, page size, K, D] under a block_table.
        cu_seqlens_q, cu_seqlens_k: int32 [B + 1], the offset of each sequence.
        max_seqlen_q, max_seqlen_k: the largest lengths, Python integers.
        block_table: int32 [B, pages of a sequence].
        The others as in `flash_attn_func`; with return_attn_probs, lse is [H, T] and the weights
        are [B, H, max_seqlen_q, max_seqlen_k].

    Returns:
        out [T, H, E], or (out, lse, weights).
    """
    _check_deterministic(deterministic, q)
    window_size = _sides(window_size)
    max_seqlen_q, max_seqlen_k = _integer(max_seqlen_q), _integer(max_seqlen_k)
    _check_table(block_table, cu_seqlens_q.shape[0] - 1)
    same = cu_seqlens_q is cu_seqlens_k and block_table is None
    bounds = _bounds(causal, window_size, alibi_slopes, same)
    padded_only = block_table is not None or (return_attn_probs and dropout_p > 0.0)
    if bounds is not None and not padded_only:
        out, lse = functional.attention_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale=softmax_scale,
            softcap=softcap or None, dropout_p=dropout_p, return_lse=True, **bounds,
        )  # fmt: skip
        return (out, lse, None) if return_attn_probs else out
    # Other calls run padded, also those with pages, which the op reads for padded queries alone.
    # Rows beyond the end of a sequence are not computed.
    queries, rows = cu_seqlens_q.diff(), _rows(cu_seqlens_q, max_seqlen_q)
    keys = cu_seqlens_k.diff()
    if block_table is None:
        positions = _rows(cu_seqlens_k, max_seqlen_k)
        k, v = _at(k, positions), _at(v, positions)
        N = max_seqlen_k
    else:
        block_table = block_table[:, : -(-max_seqlen_k // k.shape[1])]
        N = block_table.shape[1] * k.shape[1]
        tensors = {"q": q, "k": k, "v": v, "alibi_slopes": alibi_slopes}
        if dropout_p > 0.0 or functional.first_differentiated(**tensors) is not None:
            k, v = (_gathered(x, block_table) for x in (k, v))
            block_table = None
    M, H = max_seqlen_q, q.shape[1]
    if bounds is None:
        bounds = {"mask": _dense(M, N, keys - queries, None, window_size, alibi_slopes, H)}
    elif causal:
        bounds["causal"] = "bottom_right_lengths"
    padded = _attend(
        _heads_first(_at(q, rows), k, v),
        bounds | {"key_lengths": keys, "query_lengths": queries} | _pages(block_table),
        dropout_p,
        softmax_scale,
        softcap,
        True,
    )
    assert isinstance(padded, tuple)
    # Packed row t of sequence b is its row t - cu_seqlens_q[b].
    steps = torch.arange(q.shape[0], device=q.device, dtype=cu_seqlens_q.dtype)
    sequence = torch.searchsorted(cu_seqlens_q[1:], steps, right=True)
    beyond = sequence >= queries.shape[0]
    sequence = sequence.clamp(max=queries.shape[0] - 1)
    place = (steps - cu_seqlens_q[sequence]).clamp(0, M - 1)
    out, lse, weights = padded
    out = out[sequence, place].masked_fill(beyond[:, None, None], 0.0)
    lse = lse.transpose(1, 2)[sequence, place].masked_fill(beyond[:, None], float("-inf"))
    return (out, lse.t(), weights) if return_attn_probs else out


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Result:
    """`flash_attn_varlen_func` of q [T, H, D] and kv [S, 2, K, D]."""
    k, v = _unpacked("kv", kv, 2, 4)
    return flash_attn_varlen_func(q, k, v, *args, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **options: Any
) -> Result:
    """`flash_attn_varlen_func` of qkv [T, 3, H, D]."""
    q, k, v = _unpacked("qkv", qkv, 3, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **options
    )


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries over a cache, after new keys and values are written to it.

    Args:
        q: [B, M, H, D].
        k_cache, v_cache: [cache's B, N, K, D], or pages [P, page size, K, D] under a block_table;
            changed in place.
        k, v: [B, new, K, D], written after the first cache_seqlens positions; None: nothing is new.
        rotary_cos, rotary_sin: [positions, rotary D / 2], applied to k at its positions, and to q
            at the same ones if causal or windowed, else at cache_seqlens. rotary_interleaved: pairs
            are (0, 1), (2, 3), ..., else (0, D / 2), ....
        cache_seqlens: int or int32 [B], keys in the cache before the call; None: all.
        cache_batch_idx: int32 [B], the cache row of each query.
        cache_leftpad: int32 [B], the position of the first key of each row.
        block_table: int32 [B, pages of a sequence].
        The others as in `flash_attn_func`. No gradients.

    Returns:
        out [B, M, H, D], or (out, lse [B, H, M]).

    Raises ValueError if cache_seqlens and k do not fit the cache or a page that is read or written
    does not exist, for values on the CPU. Values on a GPU are not checked: there, lengths are
    clamped to the cache's size and writes outside it are device errors.
    """
    window_size = _sides(window_size)
    B, M, H, _ = q.shape
    _check_table(block_table, B)
    for name, other in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
        if block_table is not None and other is not None:
            raise ValueError(f"{name} must be None with a block_table, got a tensor")
    if (k is None) != (v is None):
        raise ValueError(f"k and v must both be given, got {'v' if k is None else 'k'} alone")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin must both be given, got one of them")
    bounded = causal or window_size != (-1, -1)
    page = k_cache.shape[1]
    size = page if block_table is None else page * block_table.shape[1]
    _check_new(k, v, k_cache, v_cache, B)
    cache_seqlens = size if cache_seqlens is None else _past(cache_seqlens, B)
    _check_cache(cache_seqlens, 0 if k is None else k.shape[1], size, block_table, k_cache)
    if not isinstance(cache_seqlens, Tensor):
        cache_seqlens = torch.full((B,), cache_seqlens, dtype=torch.int32, device=q.device)
    past = cache_seqlens.long()
    rows = torch.arange(B, device=q.device) if cache_batch_idx is None else cache_batch_idx.long()
    if rotary_cos is not None and rotary_sin is not None:
        steps = past[:, None] + torch.arange(M, device=q.device) * bounded
        q = _rotated(q, rotary_cos[steps], rotary_sin[steps], rotary_interleaved)
    lengths = past
    if k is not None and v is not None:
        positions = past[:, None] + torch.arange(k.shape[1], device=q.device)
        if rotary_cos is not None and rotary_sin is not None:
            k = _rotated(k, rotary_cos[positions], rotary_sin[positions], rotary_interleaved)
        if block_table is None:
            target = (rows[:, None], positions)
        else:
            target = (block_table.long().gather(1, positions // page), positions % page)
        k_cache[target] = k.to(k_cache.dtype)
        v_cache[target] = v.to(v_cache.dtype)
        lengths = past + k.shape[1]
    keys, values = k_cache, v_cache
    if cache_batch_idx is not None:
        keys, values = k_cache[rows], v_cache[rows]
    causal, N = causal or M == 1, size
    bounds = _bounds(causal, window_size, alibi_slopes, False)
    if bounds is None:
        bounds = {"mask": _dense(M, N, lengths - M, cache_leftpad, window_size, alibi_slopes, H)}
    else:
        if causal:
            bounds["causal"] = "bottom_right_lengths"
        if cache_leftpad is not None:
            j = torch.arange(N, device=q.device)
            bounds["mask"] = j >= cache_leftpad[:, None, None, None]
    bounds |= {"key_lengths": lengths} | _pages(block_table)
    heads = _heads_first(q, keys, values)
    result = _attend(heads, bounds, 0.0, softmax_scale, softcap, return_softmax_lse)
    return result[:2] if isinstance(result, tuple) else result


# -- parts -----------------------------------------------------------------------------------------


def _check_deterministic(deterministic: bool, q: Tensor) -> None:
    """The backward reads PyTorch's setting when it runs; a call cannot pass another."""
    if not (deterministic and q.is_cuda and torch.is_grad_enabled()):
        return
    if not torch.are_deterministic_algorithms_enabled():
        raise ValueError(
            "deterministic must be False without torch.use_deterministic_algorithms(True), got True"
        )


def _integer(value: Any) -> int:
    """`value` as an integer; like flash_attn, accepts a tensor of one element."""
    is_integer = isinstance(value, (int, torch.SymInt))
    return value if is_integer else operator.index(value)  # type: ignore[no-any-return]


def _sides(window: Any) -> Window:
    """(left, right) of a pair of integers; negative ones become -1."""
    try:
        left, right = (_integer(side) for side in window)
    except (TypeError, ValueError):
        wanted = "two integers (left, right), -1 for unlimited"
        raise TypeError(f"window_size must be {wanted}, got {window!r}") from None
    return max(left, -1), max(right, -1)


def _unpacked(name: str, x: Tensor, count: int, dimensions: int) -> tuple[Tensor, ...]:
    if x.dim() != dimensions or x.shape[-3] != count:
        raise ValueError(
            f"{name} must have {dimensions} dimensions, the third from the right of size {count}, "
            f"got {list(x.shape)}"
        )
    return x.unbind(-3)


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """[B, S, H, D] -> [B, H, S, D] as views."""
    for name, x in zip("qkv", tensors, strict=True):
        if x.dim() != 4:
            raise ValueError(f"{name} must be [B, S, H, D], got {list(x.shape)}")
    return tuple(x.transpose(1, 2) for x in tensors)


def _bounds(
    causal: bool, window: Window, slopes: Tensor | None, same: bool
) -> dict[str, Any] | None:
    """The op's own arguments for causal, window and ALiBi, or None if it cannot express them:
    without causal, flash_attn's diagonal is the bottom-right one and the op's the top-left one.
    same: whether these are equal, as each sequence has as many keys as queries.
    """
    bounds: dict[str, Any] = {} if slopes is None else {"alibi_slopes": slopes}
    if causal:
        return bounds | {"causal": "bottom_right", "window": (window[0], -1)}
    if window == (-1, -1) and (same or slopes is None):
        return bounds
    return bounds | {"window": window} if same else None


def _dense(
    M: int,
    N: int,
    diagonal: Tensor,
    leftpad: Tensor | None,
    window: Window,
    slopes: Tensor | None,
    H: int,
) -> Tensor:
    """The mask of window bounds along keys - queries = diagonal [B or 1]: bool [B, 1, M, N], or
    with ALiBi's slopes their biases [B, H, M, N] with -inf outside the bounds.
    """
    left, right = window
    j = torch.arange(N, device=diagonal.device)
    # The offset of key j from the diagonal of query i.
    distance = j - torch.arange(M, device=j.device)[:, None] - diagonal[:, None, None, None]
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if right >= 0:
        allowed &= distance <= right
    if left >= 0:
        allowed &= distance >= -left
    if leftpad is not None:
        allowed &= j >= leftpad[:, None, None, None]
    if slopes is None:
        return allowed
    if slopes.dim() not in (1, 2) or slopes.shape[-1] != H:
        raise ValueError(f"alibi_slopes must be [{H}] or [B, {H}], got {list(slopes.shape)}")
    bias = distance.abs() * -slopes.float()[..., None, None]
    return bias.masked_fill(~allowed, float("-inf"))


def _attend(
    heads: tuple[Tensor, ...],
    bounds: dict[str, Any],
    dropout_p: float,
    scale: float | None,
    softcap: float,
    return_all: bool,
) -> Result:
    q, k, v = heads
    seed = functional.new_dropout_seed(q.device) if dropout_p > 0.0 else None
    options = bounds | {"scale": scale, "softcap": softcap or None}
    dropout: dict[str, Any] = {"dropout_p": dropout_p, "dropout_seed": seed}
    out, lse = functional.attention(q, k, v, return_lse=True, **options, **dropout)
    out = out.transpose(1, 2)
    if not return_all:
        return out
    if dropout_p == 0.0:
        return out, lse, None
    # The dropout mask depends on the seed and the position only, so attention with the identity
    # matrix as values returns it.
    weights = functional.attention_weights(q, k, **options)
    units = torch.eye(k.shape[2], dtype=q.dtype, device=q.device)
    units = units.expand(*k.shape[:2], -1, -1)
    kept = functional.attention(torch.zeros_like(q), torch.zeros_like(k), units, **dropout)
    return out, lse, torch.where(kept > 0, weights, -weights)


def _past(cache_seqlens: Any, B: int) -> int | Tensor:
    """An integer, or [B]."""
    kind: type[Exception] = ValueError
    if isinstance(cache_seqlens, Tensor):
        if cache_seqlens.dtype in _INTEGERS and cache_seqlens.shape == (B,):
            return cache_seqlens
        got = f"{cache_seqlens.dtype} {list(cache_seqlens.shape)}"
    else:
        try:
            return _integer(cache_seqlens)
        except TypeError:
            kind, got = TypeError, repr(cache_seqlens)
    raise kind(f"cache_seqlens must be an integer or int32 [{B}], got {got}")


def _check_new(
    k: Tensor | None, v: Tensor | None, k_cache: Tensor, v_cache: Tensor, B: int
) -> None:
    """Indexed writes would broadcast other shapes."""
    if k is None or v is None:
        return
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if x.dim() != 4 or x.shape[:2] != (B, k.shape[1]) or x.shape[2:] != cache.shape[2:]:
            new = "new" if name == "k" else k.shape[1]
            wanted = ", ".join(map(str, (B, new, *cache.shape[2:])))
            raise ValueError(f"{name} must be [{wanted}], got {list(x.shape)}")


def _check_cache(
    cache_seqlens: int | Tensor, new: int, size: int, block_table: Tensor | None, cache: Tensor
) -> None:
    """Raises if positions are outside the cache, for values on the CPU."""
    if isinstance(cache_seqlens, Tensor):
        if not functional.is_on_host(cache_seqlens):
            return
        fits = bool(((cache_seqlens >= 0) & (cache_seqlens <= size - new)).all())
        got: Any = cache_seqlens.tolist()
    else:
        fits, got = 0 <= cache_seqlens <= size - new, cache_seqlens
    if not fits:
        raise ValueError(
            f"cache_seqlens must be from 0 to {size - new}, as the cache has {size} positions and "
            f"k has {new}, got {got}"
        )
    if block_table is None or not functional.is_on_host(block_table):
        return
    pages, page = cache.shape[:2]
    first = torch.arange(block_table.shape[1]) * page  # position of each page
    used = first < (torch.as_tensor(cache_seqlens) + new).view(-1, 1)  # [B or 1, pages]
    exists = (block_table >= 0) & (block_table < pages)
    if bool((used & ~exists).any()):
        raise ValueError(
            f"block_table must hold pages from 0 to {pages - 1} where a sequence has positions, "
            f"got {block_table.tolist()}"
        )


def _check_table(block_table: Any, B: int) -> None:
    if block_table is None:
        return
    functional.check_tensor("block_table", block_table)
    if block_table.dtype not in _INTEGERS:
        raise TypeError(f"block_table must be int32 or int64, got {block_table.dtype}")
    if block_table.dim() != 2 or block_table.shape[0] != B:
        got = list(block_table.shape)
        raise ValueError(f"block_table must be [{B}, pages of a sequence], got {got}")


def _pages(block_table: Tensor | None) -> dict[str, Any]:
    """The op's argument for pages."""
    if block_table is None:
        return {}
    if block_table.dtype == torch.int64:  # numbers that are no pages must not become some
        block_table = block_table.clamp(-1, torch.iinfo(torch.int32).max)
    return {"block_table": block_table.int()}


def _at(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows]; rows beyond the end are the last one, or zeros if there is none."""
    if x.shape[0] == 0:
        return x.new_zeros(*rows.shape, *x.shape[1:])
    return x[rows.clamp(max=x.shape[0] - 1)]


def _rows(offsets: Tensor, longest: int) -> Tensor:
    """[B, longest]: the index of row i of sequence b, also beyond its end."""
    return offsets[:-1, None].long() + torch.arange(longest, device=offsets.device)


def _gathered(pages: Tensor, table: Tensor) -> Tensor:
    """Pages [P, page size, K, D] -> the rows of each sequence [B, pages * page size, K, D]."""
    # Entries after a sequence's last page may hold any value.
    return pages[table.long().clamp(0, pages.shape[0] - 1)].flatten(1, 2)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotary positions (Su et al. 2021) of x [B, S, H, D] by angles [B, S, rotary D / 2]."""
    half = cos.shape[-1]
    rotary, rest = x[..., : 2 * half], x[..., 2 * half :]
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos[:, :, None].to(wide), sin[:, :, None].to(wide)
    pairs = rotary.to(wide).unflatten(-1, (half, 2) if interleaved else (2, half))
    along = -1 if interleaved else -2
    a, b = pairs.unbind(along)
    rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), along).flatten(-2)
    return torch.cat((rotated.to(x.dtype), rest), -1)
