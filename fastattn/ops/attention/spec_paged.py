"""Samples of attention over keys and values in pages (`block_table`).

Their inputs k and v are contiguous, and so are those of the reference in fp64 and of all that a
sample is compared with; `in_pages` puts them into pages for the call under test. Attention over
pages has no derivative, so these samples have no gradients.
"""

import random
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastattn.ops.attention.spec_inputs import make_inputs, write_poison
from fastattn.testing.spec import Inputs, Sample

_SPARE = 3  # pages that no sequence uses


def in_pages(inputs: Inputs, page: int, shared_pages: int = 0) -> Inputs:
    """The inputs with k and v in pages of `page` keys, in a random order, and their block table.
    The first `shared_pages` pages of all sequences are those of the first one. Pages that no
    sequence uses hold NaN; entries of the table that no key uses are -1 or too large.
    """
    k, v = inputs["k"], inputs["v"]
    (B, K, N, _), device = k.shape, k.device
    T = N // page
    assert T * page == N, f"{N} keys are no whole pages of {page}"
    lengths = inputs.get("key_lengths")
    if lengths is None:
        used = torch.full((B,), T)
    elif lengths.dim() == 2 and not lengths.shape[1]:  # no query, no page
        used = torch.zeros(B, dtype=torch.long)
    else:
        longest = lengths if lengths.dim() == 1 else lengths.amax(1)
        used = (-(-longest.cpu().long() // page)).clamp(0, T)
    has_page = torch.arange(T) < used[:, None]  # [B, T]
    P = B * T + _SPARE
    # Not of a torch generator, whose numbers `explaining` leaves uninitialised.
    table = torch.tensor(random.Random(page).sample(range(P), B * T), dtype=torch.long).view(B, T)
    table[1:, :shared_pages] = table[:1, :shared_pages]
    slots = table[has_page].to(device)

    def pages_of(x: Tensor) -> Tensor:
        paged = x.unflatten(2, (T, page)).transpose(1, 2)[has_page.to(device)]  # [., K, page, D]
        heads_last = x.stride(1) < x.stride(2)
        shape = (P, page, K, x.shape[3]) if heads_last else (P, K, page, x.shape[3])
        pages = x.new_full(shape, torch.nan)
        pages = pages.transpose(1, 2) if heads_last else pages
        pages[slots] = paged
        return pages

    unused = torch.where(torch.arange(T) % 2 == 0, -1, P + 9)
    table = torch.where(has_page, table, unused).int().to(device)
    return inputs | {"k": pages_of(k), "v": pages_of(v), "block_table": table}


def _make(
    generator: torch.Generator,
    dtype: torch.dtype,
    *,
    page: int,
    shared_pages: int = 0,
    layout: str = "bshd",
    **options: Any,
) -> Inputs:
    inputs = make_inputs(generator, dtype, layout=layout, poison=False, **options)
    for name in ("k", "v"):
        inputs[name][1:, :, : shared_pages * page] = inputs[name][:1, :, : shared_pages * page]
    write_poison(inputs)
    return inputs | {"page": page, "shared_pages": shared_pages}


def _s(name: str, reason: str, *tags: str, **options: Any) -> Sample:
    return Sample(f"paged_{name}", reason, partial(_make, **options), (), tags=frozenset(tags))


SAMPLES = (
    _s("one_query", "decoding: one row, pages in any order", H=4, K=2, M=1, N=256, D=64, page=16),
    _s("one_query_lengths", "no key, one key, whole pages, all but one key", B=4, H=4, K=2, M=1,
       N=192, D=64, page=64, key_lengths=[0, 1, 128, 191]),
    _s("one_query_page256", "the largest pages", B=3, H=4, K=2, M=1, N=512, D=128, page=256,
       key_lengths=[512, 256, 300]),
    _s("one_query_page128", "parts of pages as long as tiles: before a window, after a length",
       B=5, H=4, K=2, M=1, N=384, D=32, page=128, causal="bottom_right_lengths", window=(90, 0),
       key_lengths=[384, 129, 128, 1, 0]),
    _s("one_query_d40", "a head dim smaller than its tile", B=3, H=2, M=1, N=80, D=40, page=16,
       key_lengths=[80, 33, 16]),
    _s("one_query_heads_first", "pages stored as [P, K, page, D]", layout="bhsd", B=3, H=4, K=2,
       M=1, N=96, D=64, page=32, key_lengths=[96, 32, 1]),
    _s("one_query_long", "several splits of the keys, the last with one key", H=4, K=2, M=1, N=2064,
       D=16, page=16, key_lengths=[2049, 1025]),
    _s("one_query_window", "pages before the window are dead", B=3, H=4, K=2, M=1, N=320, D=32,
       page=32, causal="bottom_right_lengths", window=(70, 0), key_lengths=[320, 64, 7]),
    _s("one_query_mask", "a mask of other keys for each sequence", B=3, H=4, K=2, M=1, N=160, D=32,
       page=16, mask="bool BN", key_lengths=[160, 40, 129]),
    _s("shared", "two sequences share the pages of their prefix", H=4, K=2, M=1, N=128, D=64,
       page=16, shared_pages=3, key_lengths=[128, 61]),
    _s("two_queries", "two new positions over a cache", B=3, H=4, K=2, M=2, N=192, D=64, page=64,
       causal="bottom_right_lengths", key_lengths=[192, 64, 2]),
    _s("seven_queries", "several new positions, of some sequences fewer", B=4, H=4, K=2, M=7, N=256,
       D=128, page=16, causal="bottom_right_lengths", key_lengths=[256, 100, 48, 5],
       query_lengths=[7, 3, 0, 5]),
    _s("seven_queries_mqa", "one key/value head", H=6, K=1, M=7, N=320, D=40, E=72, page=64,
       causal="bottom_right_lengths", key_lengths=[320, 129]),
    _s("chunk", "a chunk of a long input", H=4, K=2, M=65, N=256, D=64, page=16,
       causal="bottom_right_lengths", key_lengths=[256, 97]),
    _s("chunk_page64", "a chunk over whole pages", M=65, N=192, D=40, page=64,
       causal="bottom_right_lengths", key_lengths=[192, 128]),
    _s("chunk_page256", "a chunk that begins and ends inside the largest pages", H=4, K=2, M=65,
       N=512, D=128, page=256, causal="bottom_right_lengths", key_lengths=[300, 512]),
    _s("chunk_bounds", "the bounds of the tensors, and a window", M=65, N=160, D=32, page=32,
       causal="bottom_right", window=(50, 3)),
    _s("chunk_lengths_rows", "a length for every query", M=65, N=128, D=32, page=16,
       key_lengths="per query"),
    _s("chunk_mask", "blocked pairs of any pattern", M=65, N=128, D=32, page=16, mask="bool BMN",
       key_lengths=[128, 77], query_lengths=[65, 33]),
    _s("chunk_bias", "added to the scores", M=65, N=128, D=32, page=64, mask="min HMN",
       key_lengths=[128, 50]),
    _s("alibi", "distances from the last key", B=3, H=4, K=2, M=1, N=160, D=32, page=16, alibi="BH",
       causal="bottom_right_lengths", key_lengths=[160, 40, 129]),
    _s("relative", "T5's buckets", H=4, K=2, M=7, N=128, D=16, page=64, causal="bottom_right",
       relative=("t5_causal", 16, 40)),
    _s("softcap", "scores of all sizes", H=4, K=2, M=1, N=192, D=64, page=64, amplitude=3.0,
       softcap=2.0, key_lengths=[192, 100]),
    _s("sinks", "weights of less than 1 in all; a sequence without keys", B=3, H=4, K=2, M=2, N=96,
       D=64, page=16, sinks=0.0, key_lengths=[96, 0, 40]),
    _s("all_scores", "all score modifications with all restrictions", B=3, H=4, K=2, M=65, N=128,
       D=24, page=16, mask="min BMN", causal="bottom_right_lengths", window=(70, -1),
       key_lengths=[128, 90, 0], query_lengths=[65, 40, 20], alibi="BH", softcap=2.0, sinks=0.5,
       relative=("t5", 16, 40), amplitude=2.0),
    _s("negative_scale", "the order of scores is reversed", H=4, K=2, M=1, N=96, D=32, page=16,
       scale=-0.5, key_lengths=[96, 33]),
    _s("no_keys", "a block table without entries", M=2, N=0, D=16, page=16),
    _s("no_batch", "an empty batch", B=0, M=1, N=32, D=16, page=16),
)  # fmt: skip
