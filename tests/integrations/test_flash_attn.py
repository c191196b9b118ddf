"""`flash_attn`'s functions against a definition written for one sequence and one head."""

import math

import pytest
import torch
from call_recorder import CallRecorder
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fastattn.integrations import flash_attn
from fastattn.testing.properties import deterministic_algorithms

H, K, D = 4, 2, 8


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def define(q, k, v, *, causal=False, window=(-1, -1), slopes=None, softcap=0.0, first=0):
    """q [M, H, D], k and v [N, K, D] of one sequence -> out [M, H, D], lse [H, M]."""
    M, N, group = len(q), len(k), q.shape[1] // k.shape[1]
    out, lse = torch.zeros(*q.shape[:2], v.shape[2], dtype=q.dtype), normal(q.shape[1], M)
    for h in range(q.shape[1]):
        for i in range(M):
            scores = k[:, h // group] @ q[i, h] * q.shape[2] ** -0.5
            if softcap:
                scores = softcap * (scores / softcap).tanh()
            for j in range(N):
                right = j - (i + N - M)
                blocked = j < first or (causal and right > 0)
                blocked |= 0 <= window[0] < -right or 0 <= window[1] < right
                if slopes is not None:
                    scores[j] -= slopes[h] * abs(right)
                if blocked:
                    scores[j] = -math.inf
            lse[h, i] = scores.logsumexp(0) if N else -math.inf
            if N and lse[h, i] > -math.inf:
                out[i, h] = scores.softmax(0) @ v[:, h // group]
    return out, lse


BOUNDS = [
    (False, (-1, -1)), (True, (-1, -1)), (True, (2, -1)), (True, (2, 3)), (False, (2, 1)),
    (False, (0, 0)), (False, (-1, 0)), (False, (3, -1)),
]  # fmt: skip
bounds = pytest.mark.parametrize(("causal", "window"), BOUNDS)


@bounds
@pytest.mark.parametrize(("M", "N"), [(5, 5), (3, 7), (7, 3), (1, 6)])
@pytest.mark.parametrize("alibi", [None, "H", "BH"])
@pytest.mark.parametrize("softcap", [0.0, 0.7])
def test_dense(causal, window, M, N, alibi, softcap) -> None:
    q, k, v = normal(2, M, H, D), normal(2, N, K, D), normal(2, N, K, D)
    slopes = None if alibi is None else torch.rand(*((2, H) if alibi == "BH" else (H,)))
    out, lse, weights = flash_attn.flash_attn_func(
        q, k, v, causal=causal, window_size=window, softcap=softcap, alibi_slopes=slopes,
        return_attn_probs=True,
    )  # fmt: skip
    assert weights is None
    for b in range(2):
        own = {"slopes": slopes[b] if alibi == "BH" else slopes, "softcap": softcap}
        expected = define(q[b], k[b], v[b], causal=causal, window=window, **own)
        torch.testing.assert_close(out[b], expected[0])
        torch.testing.assert_close(lse[b], expected[1])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("N", [6, 9])
def test_integers_may_be_tensors(causal, N) -> None:
    q, k, v = normal(2, 6, H, D), normal(2, N, K, D), normal(2, N, K, D)
    cu_q, cu_k = (torch.arange(0, 3 * n, n, dtype=torch.int32) for n in (6, N))
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    window = {"causal": causal, "window_size": torch.tensor([2, 1])}
    expected = flash_attn.flash_attn_func(q, k, v, causal=causal, window_size=(2, 1))
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, **window), expected)
    cached = flash_attn.flash_attn_with_kvcache(q, k, v, **window)
    torch.testing.assert_close(cached, expected)
    longest = (torch.tensor(6), torch.tensor(N))
    out = flash_attn.flash_attn_varlen_func(*packed, cu_q, cu_k, *longest, **window)
    torch.testing.assert_close(out.unflatten(0, (2, 6)), expected)


def test_a_negative_window_side_is_unlimited() -> None:
    q, k, v = (normal(1, 5, n, D) for n in (H, K, K))
    for window in (3, (None, None), (1, 2, 3), "12"):
        with pytest.raises(TypeError, match="window_size must be two integers"):
            flash_attn.flash_attn_func(q, k, v, window_size=window)
    expected = flash_attn.flash_attn_func(q, k, v, window_size=(-1, 1))
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, window_size=(-7, 1)), expected)


@bounds
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize(("alibi", "softcap"), [(False, 0.0), (True, 0.0), (True, 0.7)])
def test_packed(causal, window, same, alibi, softcap) -> None:
    queries = [3, 0, 2, 6]
    keys = queries if same else [5, 2, 0, 4]
    cu_q = torch.tensor([0, *queries]).cumsum(0, dtype=torch.int32)
    cu_k = cu_q if same else torch.tensor([0, *keys]).cumsum(0, dtype=torch.int32)
    beyond = 2  # rows after the last sequence
    q = normal(sum(queries) + beyond, H, D).requires_grad_()
    k, v = (normal(sum(keys), K, D).requires_grad_() for _ in range(2))
    slopes = torch.rand(H) if alibi else None
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, max(queries), max(keys), causal=causal, window_size=window,
        softcap=softcap, alibi_slopes=slopes, return_attn_probs=True,
    )  # fmt: skip
    scores = {"causal": causal, "window": window, "slopes": slopes, "softcap": softcap}
    expected_out, expected_lse = [], []
    for n, (rows, of) in enumerate(zip(queries, keys, strict=True)):
        one = slice(cu_q[n], cu_q[n] + rows)
        other = slice(cu_k[n], cu_k[n] + of)
        found = define(q[one], k[other], v[other], **scores)
        expected_out.append(found[0])
        expected_lse.append(found[1])
    right = torch.cat(expected_out)
    torch.testing.assert_close(out[:-beyond], right)
    torch.testing.assert_close(lse[:, :-beyond], torch.cat(expected_lse, 1))
    assert bool((out[-beyond:] == 0).all()) and bool((lse[:, -beyond:] == -math.inf).all())
    dout = normal(*right.shape)
    got = torch.autograd.grad((out[:-beyond] * dout).sum(), (q, k, v))
    for actual, expected in zip(got, torch.autograd.grad(right, (q, k, v), dout), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("longest", [0, 3])
def test_packed_without_tokens(paged: bool, longest: int) -> None:
    some, none = torch.tensor([0, 3, 7]).int(), torch.zeros(3, dtype=torch.int32)
    k, table = normal(7, K, D), None
    if paged:
        k, table = normal(4, 16, K, D), torch.tensor([[2], [0]]).int()
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        normal(0, H, D), k, k, none, some, longest, 4, window_size=(1, 1), block_table=table,
        return_attn_probs=True,
    )  # fmt: skip
    assert out.shape == (0, H, D) and lse.shape == (H, 0)
    if not paged:
        k = k[:0]
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        normal(7, H, D), k, k, some, none, 4, longest, window_size=(1, 1), block_table=table,
        return_attn_probs=True,
    )  # fmt: skip
    assert not out.any() and bool(lse.isneginf().all())


def test_packed_tensors() -> None:
    qkv = normal(2, 5, 3, H, D)
    out = flash_attn.flash_attn_qkvpacked_func(qkv, causal=True)
    torch.testing.assert_close(out, flash_attn.flash_attn_func(*qkv.unbind(2), causal=True))
    kv = qkv[:, :, 1:]
    torch.testing.assert_close(
        flash_attn.flash_attn_kvpacked_func(qkv[:, :, 0], kv, causal=True), out
    )
    offsets = torch.tensor([0, 5, 10], dtype=torch.int32)
    rows = qkv.flatten(0, 1)
    packed = flash_attn.flash_attn_varlen_qkvpacked_func(rows, offsets, 5, causal=True)
    torch.testing.assert_close(packed, out.flatten(0, 1))
    packed = flash_attn.flash_attn_varlen_kvpacked_func(
        rows[:, 0], rows[:, 1:], offsets, offsets, 5, 5, causal=True
    )
    torch.testing.assert_close(packed, out.flatten(0, 1))


@pytest.mark.parametrize("packed", [False, True])
def test_weights_show_what_was_dropped(packed) -> None:
    q, k, v = normal(2, 9, H, D), normal(2, 9, K, D), normal(2, 9, K, D)
    if packed:
        offsets = torch.tensor([0, 9, 18], dtype=torch.int32)
        rows = [x.flatten(0, 1) for x in (q, k, v)]
        out, _, weights = flash_attn.flash_attn_varlen_func(
            *rows, offsets, offsets, 9, 9, dropout_p=0.25, causal=True, return_attn_probs=True
        )
        out = out.unflatten(0, (2, 9))
    else:
        out, _, weights = flash_attn.flash_attn_func(
            q, k, v, dropout_p=0.25, causal=True, return_attn_probs=True
        )
    torch.testing.assert_close(weights.abs().sum(-1), torch.ones(2, H, 9, dtype=torch.float64))
    assert 0.05 < float((weights < 0).double().mean()) < 0.25
    values = v.transpose(1, 2).repeat_interleave(H // K, 1)
    torch.testing.assert_close(out.transpose(1, 2), weights.clamp(min=0) / 0.75 @ values)


def rotated(x, cos, sin, first, interleaved, fixed=False):
    """One sequence x [S, H, D], from position `first`, written with complex numbers."""
    half = cos.shape[1]
    factors = torch.complex(cos, sin)[[first + (0 if fixed else i) for i in range(len(x))], None]
    rotary = x[..., : 2 * half]
    if interleaved:
        pairs = torch.complex(rotary[..., 0::2], rotary[..., 1::2]) * factors
        turned = torch.stack((pairs.real, pairs.imag), -1).flatten(-2)
    else:
        pairs = torch.complex(rotary[..., :half], rotary[..., half:]) * factors
        turned = torch.cat((pairs.real, pairs.imag), -1)
    return torch.cat((turned, x[..., 2 * half :]), -1)


@bounds
@pytest.mark.parametrize("new", [0, 1, 3])
@pytest.mark.parametrize("way", ["rows", "chosen rows", "left padding", "pages"])
def test_cache(causal, window, new, way) -> None:
    interleaved = (new == 1) == (way in ("rows", "pages"))
    B, M, N, page = 3, max(new, 2), 12, 4
    q = normal(B, M, H, D)
    k, v = (normal(B, new, K, D) if new else None for _ in range(2))
    past = torch.tensor([4, 0, 9], dtype=torch.int32)
    options: dict = {}
    stored = normal(2, B, N, K, D)
    if way == "pages":
        table = torch.randperm(B * N // page).view(B, -1).int()
        options["block_table"] = table
        caches = torch.empty(2, B * N // page, page, K, D, dtype=q.dtype)
        caches[:, table.long().flatten()] = stored.view(2, -1, page, K, D)
    elif way == "chosen rows":
        chosen = torch.tensor([3, 0, 4], dtype=torch.int32)
        options["cache_batch_idx"] = chosen
        caches = torch.full((2, 5, N, K, D), math.nan, dtype=q.dtype)
        caches[:, chosen.long()] = stored
    else:
        caches = stored.clone()
    pad = torch.tensor([1, 0, 3], dtype=torch.int32)
    if way == "left padding":
        options["cache_leftpad"] = pad
    angles = torch.rand(N, D // 4, dtype=torch.float64)
    if new:
        options |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    slopes, softcap = (torch.rand(H), 0.7) if new == 3 else (None, 0.0)
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=past, causal=causal, window_size=window,
        softcap=softcap, alibi_slopes=slopes, rotary_interleaved=interleaved,
        return_softmax_lse=True, **options,
    )  # fmt: skip
    bounded = causal or window != (-1, -1)
    for b in range(B):
        n, query = int(past[b]), q[b]
        keys, values = stored[0, b].clone(), stored[1, b].clone()
        if new:
            factors = (angles.cos(), angles.sin(), n, interleaved)
            query = rotated(query, *factors, fixed=not bounded)
            keys[n : n + new], values[n : n + new] = rotated(k[b], *factors), v[b]
            if way == "pages":
                written = caches[:, table[b].long()].flatten(1, 2)
            else:
                written = caches[:, chosen[b] if way == "chosen rows" else b]
            torch.testing.assert_close(written[0], keys)
            torch.testing.assert_close(written[1], values)
        first = int(pad[b]) if way == "left padding" else 0
        expected = define(
            query, keys[: n + new], values[: n + new], causal=causal, window=window,
            slopes=slopes, softcap=softcap, first=first,
        )  # fmt: skip
        torch.testing.assert_close(out[b], expected[0])
        torch.testing.assert_close(lse[b], expected[1])


def test_alibi_in_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mask of queries x keys."""
    monkeypatch.setattr(flash_attn, "_dense", None)
    q, k = normal(2, 3, H, D), normal(2, 7, H, D)
    options = {"alibi_slopes": torch.rand(H), "softcap": 3.0}
    flash_attn.flash_attn_func(q, k, k, causal=True, window_size=(2, 0), **options)
    flash_attn.flash_attn_func(k, k, k, window_size=(2, 1), **options)
    flash_attn.flash_attn_func(q[:, :1], k, k, **options)
    offsets = torch.tensor([[0, 3, 6], [0, 7, 14]], dtype=torch.int32)
    rows = [x.flatten(0, 1) for x in (q, k, k)]
    flash_attn.flash_attn_varlen_func(*rows, *offsets, 3, 7, causal=True, **options)
    ends = offsets[1]
    flash_attn.flash_attn_varlen_func(*rows[1:2] * 3, ends, ends, 7, 7, **options)
    table = torch.arange(2, dtype=torch.int32)[:, None]
    flash_attn.flash_attn_varlen_func(
        rows[0], k, k, *offsets, 3, 7, causal=True, block_table=table, **options
    )
    leftpad = torch.tensor([1, 0], dtype=torch.int32)
    for length, causal in ((1, False), (3, True)):
        flash_attn.flash_attn_with_kvcache(
            q[:, :length], k, k, cache_seqlens=5, cache_leftpad=leftpad, causal=causal, **options
        )


def test_whole_cache_and_one_length() -> None:
    q, k, v = normal(2, 1, H, D), normal(2, 6, K, D), normal(2, 6, K, D)
    whole = flash_attn.flash_attn_with_kvcache(q, k, v)
    torch.testing.assert_close(whole, flash_attn.flash_attn_func(q, k, v))
    part = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=4)
    torch.testing.assert_close(part, flash_attn.flash_attn_func(q, k[:, :4], v[:, :4]))


def test_input_errors() -> None:
    q = normal(1, 2, H, D)
    with pytest.raises(
        ValueError, match=r"softcap must be a number from 1e-30 to 1e30, or None, got -1\.0"
    ):
        flash_attn.flash_attn_func(q, q, q, softcap=-1.0)
    with pytest.raises(ValueError, match=r"k must be \[B, S, H, D\], got \[2, 4, 8\]"):
        flash_attn.flash_attn_func(q, q[0], q)
    with pytest.raises(ValueError, match="qkv must have 5 dimensions"):
        flash_attn.flash_attn_qkvpacked_func(q)
    with pytest.raises(ValueError, match=r"alibi_slopes must be \[4\] or \[1, 4\], got \[3\]"):
        flash_attn.flash_attn_func(q, q, q, alibi_slopes=torch.ones(3))
    with pytest.raises(ValueError, match=r"alibi_slopes must be \[4\] or \[B, 4\], got \[3\]"):
        flash_attn.flash_attn_func(q, normal(1, 3, H, D), q, alibi_slopes=torch.ones(3))
    with pytest.raises(ValueError, match="k and v must both be given, got k alone"):
        flash_attn.flash_attn_with_kvcache(q, q, q, k=q)
    with pytest.raises(ValueError, match="cache_leftpad must be None with a block_table"):
        flash_attn.flash_attn_with_kvcache(
            q, q, q, block_table=torch.zeros(1, 1).int(), cache_leftpad=torch.zeros(1).int()
        )


def test_deterministic_gradients_on_a_gpu() -> None:
    """They follow PyTorch's setting, which the argument cannot replace."""
    functions = (flash_attn.flash_attn_qkvpacked_func, flash_attn.flash_attn_varlen_qkvpacked_func)
    with FakeTensorMode():
        tensors = (
            torch.empty(1, 9, 3, H, D, device="cuda"),
            torch.empty(9, 3, H, D, device="cuda"),
        )
        offsets = torch.empty(2, dtype=torch.int32, device="cuda")
        for function, qkv, lengths in zip(functions, tensors, ((), (offsets, 9)), strict=True):
            with pytest.raises(ValueError, match="deterministic must be False without torch"):
                function(qkv, *lengths, deterministic=True)
            with deterministic_algorithms():
                assert function(qkv, *lengths, deterministic=True).is_cuda
            with torch.no_grad():
                assert function(qkv, *lengths, deterministic=True).is_cuda


@pytest.mark.parametrize("unused", [-1, 99])
def test_pages_after_the_end_may_hold_anything(unused) -> None:
    q, pages = normal(1, 1, H, D), normal(3, 4, K, D)
    table = torch.tensor([[2, 0, unused]], dtype=torch.int32)
    out = flash_attn.flash_attn_with_kvcache(q, pages, pages, cache_seqlens=6, block_table=table)
    keys = torch.cat([pages[2], pages[0]])[None, :6]
    torch.testing.assert_close(out, flash_attn.flash_attn_func(q, keys, keys))


@torch.no_grad()
def test_pages_are_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a copy of keys and values of the sequences; only gradients and dropout need one."""
    pages, table = normal(2, 6, 16, K, D).float(), torch.tensor([[5, 1], [0, 4]]).int()
    k, v = pages[:, table.long()].flatten(2, 3)  # [B, 32, K, D]
    lengths, offsets_k = torch.tensor([20, 32]).int(), torch.tensor([0, 20, 52]).int()
    packed = [torch.cat([x[0, :20], x[1]]) for x in (k, v)]
    offsets_q, rows = torch.tensor([0, 2, 7]).int(), normal(7, H, D).float()
    q = normal(2, 3, H, D).float()

    def both() -> list[torch.Tensor]:
        cached = flash_attn.flash_attn_with_kvcache(
            q, *pages, cache_seqlens=lengths, causal=True, block_table=table
        )
        arguments = (rows, *pages, offsets_q, offsets_k, 5, 32)
        return [
            cached, flash_attn.flash_attn_varlen_func(*arguments, causal=True, block_table=table)
        ]  # fmt: skip

    with monkeypatch.context() as patched, CallRecorder() as recorder:
        patched.setattr(flash_attn, "_gathered", None)
        found = both()
    assert recorder.names == ["attention_fwd"] * 2
    cached = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True)
    assert torch.equal(found[0], cached)
    varlen = flash_attn.flash_attn_varlen_func(
        rows, *packed, offsets_q, offsets_k, 5, 32, causal=True
    )
    torch.testing.assert_close(found[1], varlen)
    rows.requires_grad_()
    with torch.enable_grad():
        varlen = both()[1]
    torch.testing.assert_close(varlen, found[1])
    assert varlen.requires_grad


@pytest.mark.parametrize("entry", [2, -1, 2**32, -(2**32)])
def test_pages_that_do_not_exist_are_named(entry: int) -> None:
    pages, offsets = normal(2, 16, K, D).float(), torch.tensor([0, 3]).int()
    table = torch.tensor([[1, 0]])
    arguments = (normal(3, H, D).float(), pages, pages, offsets, offsets * 10, 3, 30)
    used = flash_attn.flash_attn_varlen_func(*arguments, block_table=table)
    assert torch.equal(used, flash_attn.flash_attn_varlen_func(*arguments, block_table=table.int()))
    table[0, 1] = entry
    with pytest.raises(ValueError, match=r"block_table must hold pages from 0 to 1"):
        flash_attn.flash_attn_varlen_func(*arguments, block_table=table)


def test_block_tables_that_are_none_are_named() -> None:
    pages, offsets = normal(2, 16, K, D).float(), torch.tensor([0, 3]).int()
    q = normal(3, H, D).float()
    for table, error in (
        ([[1, 0]], (TypeError, "block_table must be a tensor, got list")),
        (torch.tensor([1, 0]), (ValueError, r"block_table must be \[1, pages .* got \[2\]")),
        (torch.zeros(2, 2).int(), (ValueError, r"block_table must be \[1, .* got \[2, 2\]")),
        (torch.ones(1, 2), (TypeError, "block_table must be int32 or int64, got torch.float32")),
    ):
        with pytest.raises(error[0], match=error[1]):
            flash_attn.flash_attn_varlen_func(
                q, pages, pages, offsets, offsets, 3, 3, block_table=table
            )
        with pytest.raises(error[0], match=error[1]):
            flash_attn.flash_attn_with_kvcache(q[None], pages, pages, block_table=table)


@pytest.mark.parametrize("paged", [True, False])
def test_new_keys_and_lengths_of_other_shapes_are_named(paged) -> None:
    q, new, cache = normal(2, 1, 2, 8), normal(2, 2, 2, 8), normal(2, 8, 2, 8)
    options: dict = {"cache_seqlens": 3}
    if paged:
        cache = cache.view(4, 4, 2, 8)
        options["block_table"] = torch.arange(4, dtype=torch.int32).view(2, 2)
    before = cache.clone()
    for k, v, wanted in (
        (new[:, :, :1], new, r"k must be \[2, new, 2, 8\], got \[2, 2, 1, 8\]"),
        (new[:1], new, r"k must be \[2, new, 2, 8\], got \[1, 2, 2, 8\]"),
        (new[:, 0], new[:, 0], r"k must be \[2, new, 2, 8\], got \[2, 2, 8\]"),
        (new, new[:, :1], r"v must be \[2, 2, 2, 8\], got \[2, 1, 2, 8\]"),
    ):
        with pytest.raises(ValueError, match=wanted):
            flash_attn.flash_attn_with_kvcache(q, cache, cache, k, v, **options)
    wanted = r"cache_seqlens must be an integer or int32 \[2\], got"
    for lengths, error, got in (
        ([3, 4], TypeError, r"\[3, 4\]"),
        (2.5, TypeError, r"2\.5"),
        (torch.tensor([3]), ValueError, r"torch.int64 \[1\]"),
        (torch.tensor([3.0, 4.0]), ValueError, r"torch.float32 \[2\]"),
    ):
        with pytest.raises(error, match=f"{wanted} {got}"):
            flash_attn.flash_attn_with_kvcache(
                q, cache, cache, new, new, **options | {"cache_seqlens": lengths}
            )
    assert torch.equal(cache, before)
    if paged:
        with pytest.raises(ValueError, match="k must have at least one key in a page"):
            flash_attn.flash_attn_with_kvcache(
                q, cache[:, :0], cache[:, :0], **options | {"cache_seqlens": 0}
            )


@pytest.mark.parametrize("lengths", ["one", "tensor"])
@pytest.mark.parametrize("paged", [True, False])
def test_positions_outside_the_cache_are_named(paged, lengths) -> None:
    q, new = normal(2, 1, 2, 8), normal(2, 2, 2, 8)
    cache, table = normal(2, 8, 2, 8), None  # 8 positions
    if paged:
        cache, table = cache.view(4, 4, 2, 8), torch.arange(4, dtype=torch.int32).view(2, 2)
    for count, k, wanted in (
        (9, None, "0 to 8, .* k has 0"),
        (7, new, "0 to 6, .* k has 2"),
        (-1, None, "0 to 8, .* k has 0"),
    ):
        seqlens = count if lengths == "one" else torch.tensor([2, count], dtype=torch.int32)
        before = cache.clone()
        with pytest.raises(ValueError, match=f"cache_seqlens must be from {wanted}, got .*{count}"):
            flash_attn.flash_attn_with_kvcache(
                q, cache, cache, k, k, cache_seqlens=seqlens, block_table=table
            )
        assert torch.equal(cache, before)
    if table is not None:
        table[1, 1] = 4
        with pytest.raises(ValueError, match="block_table must hold pages from 0 to 3"):
            flash_attn.flash_attn_with_kvcache(
                q, cache, cache, new, new, cache_seqlens=3, block_table=table
            )


EXPORTED = {  # a call, and its tensors for B sequences
    "a window, which needs a dense mask": (
        lambda x, at: flash_attn.flash_attn_varlen_func(x, x, x, at, at + 0, 3, 3, 0.0, None, False,
                                                        (1, 1)),
        lambda B: (torch.randn(3 * B, H, D), torch.arange(0, 3 * B + 1, 3, dtype=torch.int32)),
    ),
    "a cache": (
        lambda q, cache, past: flash_attn.flash_attn_with_kvcache(q, cache, cache,
                                                                  cache_seqlens=past),
        lambda B: (normal(B, 1, H, D), normal(B, 7, H, D), torch.arange(B).int() % 7),
    ),
}  # fmt: skip


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", EXPORTED)
def test_an_exported_call_takes_other_numbers_of_sequences(name: str, strict: bool) -> None:
    function, inputs = EXPORTED[name]

    class Module(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            return function(*tensors)

    shapes = tuple({0: torch.export.Dim.AUTO} for _ in inputs(1))
    exported = torch.export.export(Module(), inputs(2), dynamic_shapes=(shapes,), strict=strict)
    args = inputs(5)
    torch.testing.assert_close(exported.module()(*args), Module()(*args))
