"""Samples, errors and workloads of attention."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastattn import functional
from fastattn._scores import buckets_of
from fastattn.ops.attention import reference
from fastattn.ops.attention.spec_drawn import drawn
from fastattn.ops.attention.spec_inputs import (
    RELATIVE,
    allowed_of,
    call_of,
    dead,
    dead_positions,
    distances_of,
    entries,
    make_inputs,
)
from fastattn.ops.attention.spec_paged import SAMPLES as PAGED_SAMPLES
from fastattn.ops.attention.spec_paged import in_pages
from fastattn.ops.attention.spec_workloads import PADDED_WORKLOADS
from fastattn.testing.dropout import dropout_mask
from fastattn.testing.spec import ErrorSample, Inputs, OpSpec, Sample, widen


def prepare(inputs: Inputs) -> Inputs:
    """The arguments of the public function. prepared: whether to prepare the mask. page,
    shared_pages: as in `in_pages`.
    """
    if "prepared" not in inputs and "page" not in inputs:
        return inputs
    inputs = dict(inputs)
    page, shared_pages = inputs.pop("page", None), inputs.pop("shared_pages", 0)
    if inputs.pop("prepared", False):
        inputs["mask"] = functional.prepare_mask(inputs["mask"])
    return inputs if page is None else in_pages(inputs, page, shared_pages)


def arguments(inputs: Inputs) -> Inputs:
    """Arguments of the public function in one spelling: causal=True where M = N, lengths of at most
    M and N; pages without NaN, and a block table of existing pages.
    """
    M, N = inputs["q"].shape[2], inputs["k"].shape[2]
    given = dict(prepare(inputs))
    if M == N and given.get("causal") in ("top_left", "bottom_right"):
        given["causal"] = True
    for name, largest in (("key_lengths", N), ("query_lengths", M)):
        if given.get(name) is not None:
            given[name] = given[name].clamp(0, largest)
    if "block_table" in given:
        given["block_table"] = given["block_table"].clamp(0, given["k"].shape[0] - 1)
        given |= {name: given[name].nan_to_num(0.25) for name in ("k", "v")}
    return given


def attention(**inputs: Any) -> Any:
    """The public function, with the additional arguments of `prepare`."""
    return functional.attention(**prepare(inputs))


# Samples of rows whose lse is so large that fp32 cannot hold it: `triton` and `sm90` compute the
# weights of the backward from it. And samples of scores above 1e8, which may overflow in exp2.
_LARGE_LSE = frozenset((
    "bias_padding", "bias_padding_1e10", "bias_padding_dropout", "add_1e9", "add_min",
    "add_high", "add_one_query", "huge_logits", "huge_logits_single",
))  # fmt: skip
_LARGE_SCORES = frozenset(("exact_1e9", "exact_1e10"))
# Gradients that almost vanish: `sm90` computes delta from the rounded out.
_VANISHING = frozenset(("two_keys", "two_keys_padded", "one_key_bias"))


def _s(name: str, reason: str, *tags: str, **options: Any) -> Sample:
    return Sample(
        name, reason, partial(make_inputs, **options),
        ("q", "k", "v", "mask", "alibi_slopes", "sinks", "relative_bias"), tags=frozenset(tags),
        wrong_gradients=frozenset(
            ("sm90", "triton") if name in _LARGE_LSE else ("sm90",) if name in _VANISHING else ()
        ),
        wrong_results=frozenset(("sm90", "triton") if name in _LARGE_SCORES else ()),
    )  # fmt: skip


# Options of one sample with every kind of score modification that kernels know.
SCORES: dict[str, Any] = {"softcap": 2.0, "alibi": "H", "sinks": 0.0}
# Values of restrictions. The combinations contain all pairs of values of any two restrictions.
COMBINED = {
    "mask": (None, "bool BMN", "min HMN"),
    "key_lengths": (None, [41, 17], "per query"),
    "query_lengths": (None, [33, 20]),
    "causal": (False, "top_left", "bottom_right"),
    "window": (None, (9, 4), (12, -1)),
}
COMBINATIONS = (
    (None, None, None, False, (12, -1)),
    (None, [41, 17], [33, 20], "bottom_right", (9, 4)),
    (None, "per query", None, "top_left", None),
    ("bool BMN", None, [33, 20], False, None),
    ("bool BMN", [41, 17], None, "top_left", (9, 4)),
    ("bool BMN", "per query", [33, 20], "bottom_right", (12, -1)),
    ("min HMN", None, None, "bottom_right", (9, 4)),
    ("min HMN", [41, 17], [33, 20], "top_left", (12, -1)),
    ("min HMN", "per query", None, False, (9, 4)),
    ("min HMN", [41, 17], None, False, None),
    ("bool BMN", None, [33, 20], "top_left", (12, -1)),
    ("bool BMN", None, None, "bottom_right", None),
)


def _combinations() -> tuple[Sample, ...]:
    reason = "all combined samples together contain every pair of restrictions"
    options = (dict(zip(COMBINED, values, strict=True)) for values in COMBINATIONS)
    return tuple(
        _s(f"combined_{i}", reason, M=33, N=41, D=16, **given) for i, given in enumerate(options)
    )


SAMPLES = (
    _s("plain", "no restriction at all", "interpreter", M=65, N=130, D=64),
    _s("one_by_one", "a single pair", "interpreter", M=1, N=1, D=8),
    _s("two_by_two", "causal blocks a single pair", "interpreter", causal=True, M=2, D=8),
    _s("two_by_nine", "causal blocks a single pair, with the last key", "interpreter",
       causal="bottom_right", M=2, N=9, D=8),
    _s("one_query", "decoding: one row, many keys", "interpreter", H=4, K=2, M=1, N=257, D=64),
    _s("one_query_d40", "decoding with a head dim smaller than its tile", H=4, K=2, M=1, N=70,
       D=40),
    _s("one_query_long", "decoding with several splits of the keys, the last with one key", H=4,
       K=2, M=1, N=2049, D=16, key_lengths=[2049, 1025]),
    _s("one_query_odd", "decoding from an odd key on, with an odd number of heads in a group",
       H=6, K=2, M=1, N=135, D=72, E=41, causal="bottom_right", window=(129, 0)),
    _s("one_query_everything", "decoding with different masks for heads of a group, and dead keys",
       H=4, K=2, M=1, N=1100, D=8, E=72, mask="inf BHN", key_lengths=[1100, 150], dropout_p=0.3),
    _s("one_query_extreme", "decoding with much larger scores in one split", H=4, K=2,
       M=1, N=1100, D=16, amplitude=1e4, scale=0.125),
    _s("one_query_blocked", "decoding with a mask that blocks whole tiles after the first key",
       H=4, K=2, M=1, N=300, D=16, mask="min_causal MN"),
    _s("few_queries", "beams: rows of a group that attend to keys of their own", H=4, K=2, M=4,
       N=130, D=64, mask="bool BMN"),
    _s("few_queries_long", "several splits of the keys, the last with one key", H=4, K=2, M=3,
       N=2049, D=16, key_lengths=[2049, 1025]),
    _s("few_queries_window", "rows that begin and end at different keys", H=6, K=3, M=3, N=300,
       D=72, E=41, causal="bottom_right", window=(129, 0)),
    _s("few_queries_everything", "different masks for heads of a group, dead keys and rows", H=4,
       K=2, M=3, N=1100, D=8, E=72, mask="inf BHMN", key_lengths=[1100, 150],
       query_lengths=[2, 3], dropout_p=0.3),
    _s("few_queries_scores", "biases by distance, a soft cap and sinks", H=4, K=2, M=4, N=150,
       D=24, causal="bottom_right_lengths", key_lengths=[150, 90], query_lengths=[4, 2],
       alibi="H", softcap=2.0, sinks=0.0),
    _s("one_key", "every weight is 1", M=63, N=1, D=16),
    _s("two_keys", "gradients that almost vanish show out's rounding in delta", B=8, H=4, K=2, M=1,
       N=2, D=24, E=40, scale=-0.5),
    _s("two_keys_padded", "the same for lengths of two keys", B=8, H=4, K=2, M=1, N=9, D=24, E=40,
       scale=-0.5, key_lengths=[2] * 8),
    _s("one_key_bias", "as two_keys, for one key and a bias by distance", H=4, K=2, M=33, N=1,
       D=33, causal="bottom_right", alibi="BH", dropout_p=0.1),
    _s("odd_sizes", "no tile divides them", M=257, N=127, D=40),
    _s("tile_sizes", "whole tiles only", M=128, N=256, D=64, H=1),
    _s("s1_s257", "one key, and rows that no tile divides", M=257, N=1, D=24, B=1),
    _s("s63", "one less than a tile", causal=True, M=63, D=64),
    _s("s127", "one less than a tile on both sides", M=127, N=127, D=64, B=1,
       key_lengths=[63]),
    _s("s257", "one more than two tiles", causal=True, M=257, D=64, B=1, H=1),
    _s("d8", "the smallest head dim", M=33, N=33, D=8),
    _s("d33", "an odd head dim", M=33, N=40, D=33, B=1),
    _s("d48", "a head dim between powers of two", M=33, N=40, D=48, B=1),
    _s("d80", "a head dim between powers of two", "interpreter", M=65, N=70, D=80, B=1),
    _s("d96", "a head dim between powers of two", M=65, N=70, D=96, B=1),
    _s("d128", "the most common head dim", M=130, N=129, D=128, B=1),
    _s("d160", "a head dim between powers of two", M=33, N=40, D=160, B=1),
    _s("d192_e128", "head dims of multi-head latent attention", M=65, N=66, D=192, E=128, B=1),
    _s("d256", "the largest head dim", M=65, N=127, D=256, B=1),
    _s("d256_e8", "the largest head dim with the smallest", causal=True, M=65, D=256, E=8, B=1),
    _s("d80_bias_dropout", "other tile sizes for wide heads", M=65, N=70, D=80, mask="float HMN",
       causal="bottom_right", dropout_p=0.2),
    _s("d128_mask_dropout", "other tile sizes for wide heads", H=4, K=2, M=130, N=129, D=128,
       mask="bool BMN", key_lengths=[129, 65], query_lengths=[70, 130], dropout_p=0.2),
    _s("d128_bias_dropout", "other tile sizes for wide heads", M=130, N=136, D=128, H=1,
       mask="float HMN", key_lengths=[136, 65], dropout_p=0.2),
    _s("d192_bias_window", "other tile sizes for wide heads", M=65, N=136, D=192,
       mask="float HMN", causal="bottom_right", window=(70, -1)),
    _s("d256_mask_dropout", "other tile sizes for wide heads", H=4, K=2, M=65, N=129, D=256,
       mask="bool BMN", causal="bottom_right", dropout_p=0.2),
    _s("d256_bias_lengths", "other tile sizes for wide heads", M=65, N=136, D=256,
       mask="float HMN", key_lengths=[136, 65], query_lengths=[65, 33]),
    _s("e_larger", "E > D", M=17, N=33, D=16, E=72),
    _s("bshd", "[B, M, H, D] storage, as projections write it", "interpreter", layout="bshd", M=70),
    _s("packed", "a slice of one projection", layout="packed", M=70, N=70),
    _s("columns", "last dimension not contiguous", layout="columns", M=33, N=40),
    _s("shared", "stride 0 over the batch", layout="shared", M=33, N=40),
    _s("gqa", "grouped queries", "interpreter", H=6, K=2, M=50, N=66),
    _s("mqa", "one key/value head", H=4, K=1, M=33, N=65),
    _s("gqa_window_e", "grouped queries with a window, E > D", "interpreter", H=4, K=2, M=63, N=127,
       D=16, E=40, causal="bottom_right", window=(30, 0)),
    _s("gqa_lengths", "grouped queries, padded", H=6, K=3, B=3, M=65, N=63, D=24, E=8,
       key_lengths=[63, 0, 17], query_lengths=[1, 65, 64]),
    _s("gqa_bias", "a bias for every query head", H=4, K=2, M=40, N=65, mask="float HMN"),
    _s("causal", "the decoder's mask", "interpreter", causal=True, M=130),
    _s("top_left", "more keys than queries", causal="top_left", M=65, N=130),
    _s("top_left_tall", "more queries than keys", causal="top_left", M=130, N=65),
    _s("bottom_right", "the queries are the last positions", "interpreter", causal="bottom_right",
       M=65, N=130),
    _s("bottom_right_tall", "the first rows have no key", causal="bottom_right", M=130, N=65),
    _s("window", "both sides", "interpreter", window=(20, 7), M=130),
    _s("window_self", "the diagonal alone", window=(0, 0), M=65),
    _s("window_but_one", "full tiles, except that the last row may not attend to the first key",
       window=(63, -1), M=65, N=128, D=16),
    _s("window_long", "rows whose first key is the last of a tile", window=(20, 7), M=257, D=16,
       B=1, H=1),
    _s("window_causal", "sliding window", causal=True, window=(17, -1), M=130),
    _s("window_right", "limited on the right only", window=(-1, 3), M=65, N=40),
    _s("window_bottom_right", "relative to the bottom-right diagonal", causal="bottom_right",
       window=(30, 0), M=40, N=100),
    _s("key_lengths", "padded keys: some, all, none", "interpreter", B=4, M=40, N=70,
       key_lengths=[70, 0, 33, 1]),
    _s("key_lengths_clamped", "lengths beyond the tensor", M=20, N=40, key_lengths=[1000, -5]),
    _s("key_lengths_full", "lengths that restrict nothing", M=65, key_lengths=[65, 65]),
    _s("key_lengths_zero", "no key at all: everything is dead", "interpreter", M=33, N=65,
       key_lengths=[0, 0]),
    _s("key_lengths_one", "single-key rows", M=65, key_lengths=[1, 1]),
    _s("query_lengths", "padded queries: some, all, none", B=4, M=65, N=40,
       query_lengths=[0, 65, 1, 64]),
    _s("query_lengths_clamped", "lengths beyond the tensor", M=20, N=40,
       query_lengths=[1000, -5]),
    _s("query_lengths_causal", "keys to which only padded queries may attend are dead", M=64,
       causal=True, query_lengths=[64, 20]),
    _s("key_lengths_rows", "a length for every query", "interpreter", M=66, N=70,
       key_lengths="per query"),
    _s("both_lengths", "padded batch", "interpreter", B=4, M=70, key_lengths=[70, 0, 33, 64],
       query_lengths=[70, 40, 0, 65]),
    _s("both_lengths_causal", "padded decoder", B=3, M=130, causal=True,
       key_lengths=[130, 65, 7], query_lengths=[130, 65, 7]),
    _s("own_diagonals", "each sequence's last query at its last key: all, no, some, few keys",
       "interpreter", B=4, M=40, N=70, causal="bottom_right_lengths", key_lengths=[70, 0, 57, 33]),
    _s("own_diagonals_queries", "the diagonals of padded queries", B=4, M=65, N=70,
       causal="bottom_right_lengths", query_lengths=[65, 0, 20, 1]),
    _s("own_diagonals_both", "more and fewer keys than queries, equally many, none", "interpreter",
       B=5, M=66, N=70, causal="bottom_right_lengths", key_lengths=[70, 9, 33, 50, 0],
       query_lengths=[20, 66, 33, 0, 66]),
    _s("own_diagonals_neither", "without lengths they are those of the tensors", M=40, N=65,
       causal="bottom_right_lengths"),
    _s("own_diagonals_tall", "the first rows have no key", M=130, N=65,
       causal="bottom_right_lengths", key_lengths=[65, 20]),
    _s("own_diagonals_clamped", "lengths beyond the tensor", M=20, N=40,
       causal="bottom_right_lengths", key_lengths=[1000, -5], query_lengths=[-1, 1000]),
    _s("own_diagonals_gqa_window", "a window counts from each sequence's diagonal", "interpreter",
       B=3, H=4, K=2, M=65, N=127, D=16, E=40, causal="bottom_right_lengths", window=(30, 5),
       key_lengths=[127, 65, 40], query_lengths=[65, 33, 65]),
    _s("own_diagonals_queries_window", "keys before every window are dead", B=2, M=33, N=130, D=16,
       causal="bottom_right_lengths", window=(9, -1), query_lengths=[33, 7]),
    _s("own_diagonals_mask", "with a mask of any pattern", "interpreter", M=65, N=90, D=16,
       mask="bool BMN", causal="bottom_right_lengths", key_lengths=[90, 41],
       query_lengths=[37, 65]),
    _s("own_diagonals_bias", "with a mask's gradient, in several tiles", M=130, N=136, D=16,
       mask="float HMN", causal="bottom_right_lengths", key_lengths=[136, 70],
       query_lengths=[66, 130]),
    _s("own_diagonals_prepared", "prepared, with a window", M=70, N=90, D=16, mask="blocks MN",
       causal="bottom_right_lengths", window=(40, -1), key_lengths=[90, 41], prepared=True),
    _s("own_diagonals_dropout", "bits depend on positions in the padded tensor", B=3, M=65, N=70,
       causal="bottom_right_lengths", key_lengths=[70, 0, 33], query_lengths=[65, 65, 20],
       dropout_p=0.3),
    _s("own_diagonals_one_query", "decoding: every key of the sequence", H=4, K=2, B=3, M=1, N=300,
       D=16, causal="bottom_right_lengths", key_lengths=[300, 0, 129]),
    _s("own_diagonals_one_query_window", "decoding with a sliding window", H=4, K=2, B=3, M=1,
       N=300, D=16, causal="bottom_right_lengths", window=(100, 0), key_lengths=[300, 7, 129]),
    _s("own_diagonals_five_queries", "decoding of several positions over a long cache", H=4, K=2,
       B=3, M=5, N=1100, D=16, causal="bottom_right_lengths", key_lengths=[1100, 3, 640]),
    _s("bool_mask", "any pattern", "interpreter", mask="bool BHMN", M=66, N=70),
    _s("bool_mask_keys", "a padding mask, not expanded", "interpreter", mask="bool BN", N=129),
    _s("bool_mask_rows", "dead rows and dead keys in a mask", "interpreter", mask="rows BMN", M=70,
       N=65),
    _s("bool_mask_dead", "whole rows blocked by a mask without a key dimension", mask="rows BM",
       M=65),
    _s("bool_mask_expanded", "stride 0 over batch and heads", mask="expanded BHMN", M=40),
    _s("bool_mask_column", "one value per row", mask="bool HM", M=65),
    _s("bool_mask_none", "no allowed pair", mask="none MN", M=33, N=40),
    _s("bool_mask_transposed", "columns of the mask are contiguous", mask="bool BHMN",
       mask_layout="transposed", M=40, N=65),
    _s("bool_mask_slice", "a slice of a larger mask", mask="rows BMN", mask_layout="slice", M=65,
       N=63),
    _s("bool_mask_vector", "one dimension", mask="bool N", mask_layout="few dimensions", M=40,
       N=65),
    _s("bool_mask_lengths", "a mask and padding", mask="bool BMN", B=3, M=63, N=65, causal=
       "top_left", key_lengths=[65, 0, 40], query_lengths=[63, 63, 20]),
    _s("bias", "an additive mask with its gradient", "interpreter", mask="float BHMN", M=65, N=66),
    _s("bias_broadcast", "gradient summed over batch", mask="float HMN", M=65, N=66),
    _s("bias_row", "gradient summed over queries", "interpreter", mask="float HN", M=70, N=65),
    _s("bias_column", "gradient summed over keys: 0 up to rounding", mask="float BHM", M=130,
       N=33),
    _s("bias_matrix", "two dimensions, sliced", mask="float MN", mask_layout="slice", M=65, N=40),
    _s("bias_transposed", "columns of the mask are contiguous", mask="float BHMN",
       mask_layout="transposed", M=33, N=65),
    _s("bias_dead", "NaN in a mask where causal and lengths block", "interpreter",
       mask="float BHMN", M=65, causal=True, key_lengths=[65, 40], query_lengths=[65, 50]),
    _s("bias_dead_keys", "NaN in a broadcast mask at padded keys", mask="float BN", M=40, N=65,
       key_lengths=[65, 9]),
    _s("bias_dead_window", "NaN in a mask outside the window", mask="min BMN", M=65, N=63,
       window=(9, 2)),
    _s("bias_fp32", "fp32 mask with half-precision data", "interpreter", mask="fp32 MN", M=65),
    _s("bias_min", "finfo.min blocks", "interpreter", mask="min BHMN", M=65),
    _s("bias_min_rows", "a row of only finfo.min is dead; naive code would average its values",
       "interpreter", mask="min_rows BMN", M=65, N=66),
    _s("bias_min_causal", "a causal mask of finfo.min", mask="min_causal MN", M=65),
    _s("bias_min_causal_lengths", "keys dead because a mask allows them to padded queries only",
       mask="min_causal MN", M=65, D=16, query_lengths=[65, 40]),
    _s("bias_near_min", "half of finfo.min does not block: weight 0, not dead",
       mask="near_min HMN", M=40, N=65),
    _s("bias_padding", "causal and left padding by a large number; some rows have no other value",
       "interpreter", mask="padding1e9 BMN", M=65),
    _s("bias_padding_1e10", "the same with a larger number", mask="padding1e10 BMN", M=65),
    _s("bias_padding_dropout", "dropout with a large lse", "interpreter",
       mask="padding1e9 BMN", M=33, dropout_p=0.5),
    _s("bias_low", "other kernels: NaN dQ at S % 128 == 64 where lse < -88", "interpreter",
       mask="low BHMN", M=64, D=64),
    _s("bias_low_192", "the same with several tiles", mask="low MN", M=192, D=64, B=1, H=1),
    _s("bias_fp32_padded", "other kernels misread an fp32 mask with half-precision data",
       mask="fp32 BN", M=40, N=65, key_lengths=[65, 33]),
    _s("bias_inf", "-inf blocks", mask="inf BMN", M=65),
    _s("prepared_mask", "prepared: empty, full and partial tiles, dead rows and keys",
       "interpreter", mask="blocks BMN", M=70, N=90, D=16, prepared=True),
    _s("prepared_mask_keys", "prepared: one row for all queries", mask="bool BN", M=40, N=65,
       prepared=True),
    _s("prepared_mask_expanded", "prepared: stride 0 over batch and heads", mask="expanded BHMN",
       M=33, prepared=True),
    _s("prepared_mask_restricted", "prepared, with lengths and causal", "interpreter",
       mask="blocks MN", M=70, N=90, D=16, causal="bottom_right", key_lengths=[90, 41],
       query_lengths=[70, 37], prepared=True),
    _s("prepared_bias", "prepared, with its gradient", "interpreter", mask="min HMN", M=40, N=65,
       D=16, prepared=True),
    _s("prepared_bias_column", "prepared, one value per row", mask="float BHM", M=33,
       prepared=True),
    _s("all_restrictions", "all restrictions together", "interpreter", B=3, H=4, K=2, M=70, N=90,
       D=24, mask="min BMN", causal="bottom_right", window=(40, -1), key_lengths=[90, 50, 0],
       query_lengths=[70, 33, 20], dropout_p=0.2),
    *_combinations(),
    _s("add_1e4", "rows with a number added to all scores: it is exact to ±1e-3 in fp32",
       "interpreter", mask="add-1e4 BMN", M=33, N=140, D=16),
    _s("add_1e9", "lse cannot hold the number of keys beside such a number", "interpreter",
       mask="add-1e9 BMN", M=33, N=140, D=16),
    _s("add_min", "the same with half of finfo.min, causal and with padding", mask="add-1e39 HMN",
       M=65, causal=True, key_lengths=[65, 40]),
    _s("add_high", "a positive number, for grouped queries", H=4, K=2, mask="add2e7 BMN", M=40,
       N=300, D=16, dropout_p=0.2),
    _s("add_one_query", "decoding", H=4, K=2, M=1, N=1100, D=16, mask="add-1e9 BHN"),
    _s("add_scores", "with a soft cap, sinks of the same size and a bias by distance", M=65, N=130,
       D=16, mask="add-1e4 BMN", softcap=2.0, sinks=-1e4, alibi="H"),
    _s("exact_1e6", "whole numbers times a power of two, of which some are equal", "interpreter",
       whole=True, M=33, N=140, D=16, amplitude=2.0**9, key_amplitude=2.0**9, scale=1.0),
    _s("exact_1e9", "the same, 2^8 times as large", "interpreter", whole=True, H=4, K=2, M=33,
       N=140, D=16, amplitude=2.0**13, key_amplitude=2.0**13, scale=1.0),
    replace(
        _s("exact_1e10", "the same, with a sink that has no weight, or all", whole=True, H=4, K=2,
           M=33, N=140, D=16, scale=2.0**29, sinks=5e9),
        dtypes=(torch.float32, torch.bfloat16),  # gradients overflow in fp16
    ),
    _s("exact_one_key", "one key, scores of up to ±3e7", whole=True, M=33, N=1, D=16,
       scale=2.0**20),
    _s("scale_zero", "mean of the allowed values", scale=0.0, M=33, causal=True),
    _s("scale_zero_lengths", "0 times NaN at dead keys", scale=0.0, M=33, key_lengths=[33, 5]),
    _s("scale_large", "one weight is 1", scale=50.0, M=63, N=65),
    _s("scale_negative", "the order of scores is reversed", scale=-0.5, M=65, key_lengths=[65, 30]),
    _s("scale_negative_large", "the highest score is the lowest product", scale=-16.0, M=64, N=128),
    _s("extreme_logits", "scores of ±1e4", amplitude=1e4, M=65, N=70, scale=0.125),
    _s("extreme_logits_causal", "scores of ±1e4, some blocked", amplitude=1e4, causal=True, M=65,
       scale=0.125, key_lengths=[65, 31]),
    _s("extreme_logits_long", "a key of a later tile has weight 1", amplitude=1e4, M=33, N=300,
       scale=0.125),
    _s("huge_logits", "scores of ±1e8, whose rounding errors are large in exp", "interpreter",
       amplitude=1e4, key_amplitude=1e4, M=65, N=128, scale=0.0625),
    # In half precision exp2 of such an error overflows in Triton (docs/pages/backends.md).
    replace(
        _s("huge_logits_single", "scores of ±1e11, whose rounding errors exceed the range of exp",
           amplitude=1e4, key_amplitude=1e4, M=65, N=128, scale=100.0),
        dtypes=(torch.float32,),
    ),
    _s("zero_queries", "all scores 0", amplitude=0.0, M=33, N=65),
    _s("dropout", "the specified bits", "interpreter", dropout_p=0.25, M=70, N=130, H=3),
    _s("dropout_causal_gqa", "bits depend on the query head", causal=True, dropout_p=0.1, H=4, K=2,
       M=65),
    _s("dropout_long", "bits of several tiles", dropout_p=0.25, H=1, M=200, N=140, D=16),
    _s("dropout_all", "p = 1: output 0", dropout_p=1.0, M=33),
    _s("dropout_small", "p below 1/256 drops 1/256", dropout_p=1e-4, M=65, N=127),
    _s("dropout_lengths", "bits depend on positions in the padded tensor", dropout_p=0.5, B=3, M=65,
       key_lengths=[65, 0, 20], query_lengths=[65, 65, 30]),
    _s("dropout_origin", "bits of a part of a larger attention", "interpreter", dropout_p=0.25,
       M=70, N=130, H=3, origin=(1, 5, 48, 16)),
    _s("dropout_origin_large", "indices beyond 32 bits", H=4, K=2, M=65, N=130, D=64,
       causal="bottom_right", mask="float HMN", alibi="H", dropout_p=0.3,
       origin=(2**32 - 1, 2**40 + 3, 2**33 - 16, -64)),
    _s("alibi", "a bias that is linear in the distance", "interpreter", causal=True, M=130,
       alibi="H"),
    _s("alibi_both_sides", "keys after the query too", "interpreter", M=65, N=90, alibi="H"),
    _s("alibi_batch", "slopes of each batch entry", causal="bottom_right", M=65, N=130, alibi="BH"),
    _s("alibi_tall", "the first rows have no key", causal="bottom_right", M=130, N=65, alibi="H"),
    _s("alibi_gqa_lengths", "grouped queries, padded", H=4, K=2, B=3, M=65, N=127, D=16, E=40,
       alibi="H", key_lengths=[127, 0, 40], query_lengths=[65, 33, 65]),
    _s("alibi_own_diagonals", "distances count from each sequence's diagonal", "interpreter", B=3,
       M=65, N=70, causal="bottom_right_lengths", key_lengths=[70, 9, 33],
       query_lengths=[20, 65, 33], alibi="BH"),
    _s("alibi_own_diagonals_rows", "and without a length of the queries", B=2, M=40, N=130, D=16,
       causal="bottom_right_lengths", window=(60, 5), key_lengths=[130, 57], alibi="H"),
    _s("alibi_window_dropout", "with a window and dropped weights", M=130, causal="top_left",
       window=(70, -1), alibi="H", dropout_p=0.3),
    _s("alibi_bias", "with an additive mask and both gradients", M=66, N=136, D=16,
       mask="float HMN", alibi="H"),
    _s("alibi_one_query", "decoding: distances to the last key", H=4, K=2, M=1, N=300, D=16,
       causal="bottom_right", alibi="H"),
    _s("alibi_one_query_own", "decoding over padded caches", H=4, K=2, B=3, M=1, N=1100, D=16,
       causal="bottom_right_lengths", key_lengths=[1100, 0, 129], alibi="BH"),
    _s("relative_t5", "T5's encoder", "interpreter", M=130, relative=("t5", 32, 128)),
    _s("relative_t5_causal", "T5's decoder", "interpreter", causal=True, M=130,
       relative=("t5_causal", 32, 128)),
    _s("relative_t5_cross", "more keys than queries, beyond the largest distance", M=33, N=300,
       D=16, causal="bottom_right", relative=("t5", 8, 20)),
    _s("relative_clipped", "a bucket for each small distance", "interpreter", M=65, N=90,
       window=(40, 30), relative=("clipped", 17, 1)),
    _s("relative_gqa_mask", "with a mask of any pattern", H=4, K=2, M=70, N=65, D=16,
       mask="rows BMN", relative=("clipped", 33, 1)),
    _s("relative_own_diagonals", "buckets count from each sequence's diagonal", B=3, M=66, N=70,
       D=16, causal="bottom_right_lengths", key_lengths=[70, 9, 33], query_lengths=[20, 66, 33],
       relative=("t5_causal", 16, 40)),
    _s("relative_one_query", "decoding", H=4, K=2, M=1, N=300, D=16, causal="bottom_right",
       relative=("t5_causal", 32, 128)),
    _s("softcap", "scores of all sizes", "interpreter", M=65, N=130, D=64, amplitude=4.0,
       softcap=5.0),
    _s("softcap_large", "a cap that scores do not reach", causal=True, M=130, softcap=50.0),
    _s("softcap_reached", "almost every score is at the cap", M=65, N=70, amplitude=40.0,
       softcap=3.0),
    _s("softcap_bias_lengths", "before a mask's values are added", "interpreter", M=65, N=70,
       mask="min HMN", key_lengths=[70, 41], query_lengths=[65, 33], amplitude=3.0, softcap=2.0),
    _s("softcap_negative", "the order of scores is reversed", M=65, N=127, scale=-0.5, softcap=4.0),
    _s("softcap_gqa_dropout", "grouped queries with dropped weights and a window", H=4, K=2, M=130,
       D=16, causal=True, window=(70, 0), amplitude=3.0, softcap=2.0, dropout_p=0.2),
    _s("softcap_one_query", "decoding", H=4, K=2, M=1, N=1100, D=16, amplitude=3.0, softcap=2.0),
    _s("sinks", "weights of less than 1 in all", "interpreter", causal=True, M=130, sinks=0.0),
    _s("sinks_gqa_window", "gpt-oss: grouped queries with a sliding window", "interpreter", H=4,
       K=2, M=130, D=16, causal=True, window=(20, 0), sinks=1.0),
    _s("sinks_dead_rows", "rows without a key have the sink as lse, padded ones -inf",
       "interpreter", M=65, N=70, key_lengths=[70, 0], query_lengths=[65, 30], sinks=0.0),
    _s("sinks_mask_rows", "dead rows of a mask, which hold NaN", "interpreter", M=70, N=65,
       mask="rows BMN", sinks=-1.0),
    _s("sinks_high", "weights below 1e-12", M=65, N=70, mask="rows BMN", sinks=30.0),
    _s("sinks_bias_column", "one value for all keys of a row competes with the sink", M=65, N=260,
       D=16, mask="float HM", sinks=30.0),
    _s("sinks_low", "weights of sinks below 1e-12", M=65, causal=True, sinks=-30.0),
    _s("sinks_lowest", "weights of sinks below the smallest normal number", M=20, sinks=-94.0),
    _s("sinks_dropout", "the sink is not dropped", M=65, N=130, dropout_p=0.3, sinks=1.0),
    _s("sinks_tall", "the first rows have no key", causal="bottom_right", M=130, N=65, sinks=0.0),
    _s("sinks_one_query_long", "decoding with several splits of the keys", H=4, K=2, M=1, N=2049,
       D=16, key_lengths=[2049, 1025], sinks=5.0),
    _s("sinks_one_query_dead", "decoding, with an empty cache", H=4, K=2, M=1, N=300, D=16,
       key_lengths=[0, 129], sinks=0.0),
    _s("sinks_no_keys", "lse is the sink", M=5, N=0, sinks=0.0),
    _s("alibi_softcap", "the cap comes before the bias", M=65, N=70, causal="bottom_right",
       alibi="H", amplitude=3.0, softcap=2.0),
    _s("alibi_sinks", "a bias that leaves the sink", M=65, N=70, causal="bottom_right", alibi="H",
       sinks=-2.0),
    _s("alibi_relative", "both biases are added", M=70, N=65, alibi="BH",
       relative=("clipped", 9, 1)),
    _s("softcap_sinks", "sinks are not capped", M=65, N=70, amplitude=3.0, softcap=2.0, sinks=4.0),
    _s("softcap_relative", "the table's values are not capped", M=65, N=70, amplitude=3.0,
       softcap=1.0, relative=("t5", 16, 40)),
    _s("sinks_relative", "a table and sinks", causal=True, M=65, sinks=1.0,
       relative=("t5_causal", 16, 40)),
    _s("all_scores", "all score modifications with all restrictions", "interpreter", B=3, H=4, K=2,
       M=70, N=90, D=24, mask="min BMN", causal="bottom_right", window=(40, -1),
       key_lengths=[90, 50, 0], query_lengths=[70, 33, 20], alibi="BH", softcap=2.0, sinks=0.5,
       relative=("t5", 16, 40), amplitude=2.0, dropout_p=0.2),
    _s("all_scores_own_diagonals", "all of them with each sequence's diagonal", B=3, H=4, K=2, M=65,
       N=90, D=16, causal="bottom_right_lengths", key_lengths=[90, 41, 7],
       query_lengths=[37, 65, 20], alibi="H", softcap=3.0, sinks=0.0, relative=("clipped", 21, 1)),
    _s("no_batch", "empty batch", B=0, M=5),
    _s("no_queries", "empty rows", M=0, N=5),
    _s("no_keys", "rows without a key", "interpreter", M=5, N=0),
    _s("no_heads", "empty heads", H=0, M=5),
    _s("no_heads_scores", "score modifications of no head", H=0, M=5, alibi="H", sinks=0.0,
       relative=("clipped", 9, 1)),
    *PAGED_SAMPLES,
)  # fmt: skip


# The rounding errors of larger scores are those of the reference in the data's dtype: beside them a
# weight may have an error of 1/16 of it, not one above it.
_LARGEST_SIZE = 2.0**16
# Weights below the smallest normal fp32 number may be 0, as those of GPUs' exp2 and of the CPU
# kernels are: an error of 2^-126, over the budget's factor of magnitudes.
_FLUSHED = 2.0**-126 / (8 * 2.0**-23)


def magnitudes(
    inputs: Inputs, douts: tuple[Tensor, ...], dweights: Tensor | float = 0.0
) -> dict[str, Tensor]:
    """The formulas on absolute values. The error of a weight grows with the size of its score.
    dweights: the gradient of the weights after dropout, broadcastable to [B, H, M, N].
    """
    call = call_of(inputs)
    q, k, v = call[:3]
    t, scale = reference._softmax(call), abs(call.scale)
    B, H, M, _ = q.shape
    N = k.shape[2]
    grouped = t.q.shape[:4]
    dout = torch.where(t.live_rows, douts[0], 0).abs().reshape(*grouped, v.shape[3])
    dlse = torch.where(t.live_rows[..., 0], douts[1], 0).abs().reshape(grouped)
    dlse_of_dead = torch.where(t.lse.isneginf(), 0, douts[1].reshape(grouped)).abs()
    size = (t.q.abs() @ t.k.abs().transpose(-1, -2)) * scale  # of the terms of a score
    capped: Tensor | float = 1.0  # of ds, in the gradients of q and k
    if t.slope is not None:
        capped = 2 - t.slope + 2 * t.slope * size / inputs["softcap"]
        size = size * t.slope + inputs["softcap"] * (1 - t.slope).clamp(min=0).sqrt()
    mask = inputs.get("mask")
    if mask is not None and mask.is_floating_point():
        bias = torch.where(allowed_of(inputs), mask, 0).abs()
        size = size + bias.reshape(size.shape)
    if call.distance_bias is not None:
        bias = reference.bias_of_pairs(call._replace(distance_bias=call.distance_bias.abs()))
        size = size + torch.where(allowed_of(inputs), bias, 0).reshape(size.shape)
    size = torch.where(t.p > 0, size, 0)
    p = t.p * (1 + size.clamp(max=_LARGEST_SIZE)) + torch.where(t.p > 0, _FLUSHED, 0.0)
    dropped = p if t.drop is None else p * t.drop
    dp = dout @ t.v.abs().transpose(-1, -2)
    dp = dp + torch.where(t.live_rows, dweights, 0).abs().expand(B, H, M, N).reshape(dp.shape)
    dp = dp if t.drop is None else dp * t.drop
    ds = p * (dp + (p * dp).sum(-1, keepdim=True) + dlse[..., None])
    largest = size.amax(-1) if N else size.sum(-1)
    product = ds * capped * scale  # of dq and dk
    mags = {
        "out": (dropped @ t.v.abs()).reshape(B, H, M, v.shape[3]),
        "lse": (largest + t.lse.abs().nan_to_num(posinf=0.0)).reshape(B, H, M),
        "weights": dropped.reshape(B, H, M, N),
        "dq": (product @ t.k.abs()).reshape(q.shape),
        "dk": (product.transpose(-1, -2) @ t.q.abs()).sum(2),
        "dv": (dropped.transpose(-1, -2) @ dout).sum(2),
    }
    if mask is not None and mask.is_floating_point():
        shape = (1,) * (4 - mask.dim()) + mask.shape
        mags["dmask"] = ds.reshape(B, H, M, N).sum_to_size(shape).reshape(mask.shape)
    d, ds = distances_of(inputs), ds.reshape(B, H, M, N)
    if (slopes := inputs.get("alibi_slopes")) is not None:
        mags["dalibi_slopes"] = (ds * d.abs()).sum((2, 3)).sum_to_size(slopes.shape)
    if (table := inputs.get("relative_bias")) is not None:
        index = buckets_of(d, table.shape[1], *(inputs[name] for name in RELATIVE[1:]))
        sums = torch.zeros_like(table)[None].repeat(B, 1, 1)
        index = index.expand(ds.shape)
        mags["drelative_bias"] = sums.scatter_add(2, index.flatten(2), ds.flatten(2)).sum(0)
    if inputs.get("sinks") is not None:
        row = (p * dp).sum(-1) + dlse_of_dead
        sink = t.p_sink * (1 + t.lse.abs().nan_to_num(posinf=0.0))
        sink = sink + torch.where(t.p_sink > 0, _FLUSHED, 0.0)
        mags["dsinks"] = (sink * row).sum((0, 3)).view(H)
    return mags


def torch_form(inputs: Inputs) -> tuple[Tensor, ...]:
    return torch_results(inputs)[:2]


def torch_results(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """attention by torch.softmax, logsumexp and einsum, with key/value heads repeated: out, lse and
    the weights after dropout.
    """
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    allowed = allowed_of(inputs)
    rows, keys = dead(inputs)
    G = q.shape[1] // k.shape[1] if k.shape[1] else 1
    q = q.masked_fill(rows[..., None], 0)
    k = k.masked_fill(keys[..., None], 0).repeat_interleave(G, 1)
    v = v.masked_fill(keys[..., None], 0).repeat_interleave(G, 1)
    s = torch.einsum("bhmd,bhnd->bhmn", q, k) * call_of(inputs).scale
    if (cap := inputs.get("softcap")) is not None:
        s = torch.tanh(s / cap) * cap
    mask = inputs.get("mask")
    if mask is not None and mask.is_floating_point():
        s = s + torch.where(allowed, mask, 0)
    d = distances_of(inputs)
    if (slopes := inputs.get("alibi_slopes")) is not None:
        s = s - (slopes if slopes.dim() == 2 else slopes[None])[..., None, None] * d.abs()
    if (table := inputs.get("relative_bias")) is not None:
        index = buckets_of(d, table.shape[1], *(inputs[name] for name in RELATIVE[1:]))
        s = s + table[:, index[:, 0]].transpose(0, 1)
    s = s.masked_fill(~allowed, -torch.inf).masked_fill(rows[..., None], 0)
    if (sinks := inputs.get("sinks")) is not None:  # a key without a value
        with_sink = torch.cat([s, sinks.to(s.dtype).view(-1, 1, 1).expand_as(s[..., :1])], -1)
        lse, p = torch.logsumexp(with_sink, -1), torch.softmax(with_sink, -1)[..., :-1]
    else:
        lse = torch.logsumexp(s, -1) if s.shape[-1] else s.sum(-1)
        p = torch.softmax(s, -1)
    p = p.masked_fill(rows[..., None], 0)
    p_drop = inputs.get("dropout_p", 0.0)
    if p_drop:
        keep = dropout_mask(
            inputs["dropout_seed"], inputs["dropout_stream"], p_drop, tuple(p.shape)
        )
        t = min(255, max(1, int(256 * p_drop + 0.5))) if p_drop < 1 else 256
        p = torch.where(keep, p * (256 / (256 - t) if t < 256 else 0), 0)
    lse = lse.masked_fill(rows, -torch.inf)
    if sinks is not None:
        beyond = dead_positions(inputs)["lse"]
        lse = torch.where(rows & ~beyond, sinks.to(lse.dtype)[:, None], lse)
    return torch.einsum("bhmn,bhnd->bhmd", p, v), lse, p


def widen_inputs(inputs: Inputs) -> Inputs:
    """The inputs in fp64; pairs that the mask blocks stay blocked (-inf)."""
    wide = widen(inputs)
    mask = inputs.get("mask")
    if mask is not None and mask.is_floating_point():
        blocked = mask <= torch.finfo(mask.dtype).min
        value = torch.where(blocked, -torch.inf, mask.detach().double())
        wide["mask"] = value.requires_grad_(mask.requires_grad)
    return wide


def slice_dims(name: str, result: Tensor) -> int:
    """Each (batch, head) is a slice; a mask of two or fewer dimensions is one slice."""
    return min(2, max(0, result.dim() - 2))


def _qkv(**changes: Any) -> Inputs:
    inputs: Inputs = {name: torch.zeros(2, 4, 6, 8) for name in "qkv"}
    return inputs | changes


def _error(name: str, error: type[Exception], message: str, **changes: Any) -> ErrorSample:
    return ErrorSample(name, partial(_qkv, **changes), error, message)


def _paged_error(name: str, error: type[Exception], message: str, **changes: Any) -> ErrorSample:
    """An error of a call with two sequences of two pages of 16 keys each."""
    pages: Inputs = {name: torch.zeros(4, 4, 16, 8) for name in "kv"}
    pages["block_table"] = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    return _error(f"block_table_{name}", error, message, **pages | changes)


_WITH_GRADIENT = {name: torch.zeros(4, 4, 16, 8, requires_grad=True) for name in "kv"}
ERRORS = (
    _paged_error("not_a_tensor", TypeError, "block_table must be a tensor", block_table=[[0], [1]]),
    _paged_error("dtype", TypeError, "block_table must be int32, got torch.int64",
                 block_table=torch.zeros(2, 2).long()),
    _paged_error("shape", ValueError, r"block_table must be \[2, T\], got \[3, 2\]",
                 block_table=torch.zeros(3, 2).int()),
    _paged_error("page", ValueError, r"got block_table\[1, 0\] = 4",
                 block_table=torch.tensor([[0, 1], [4, 3]]).int()),
    _paged_error("page_before_the_length", ValueError, r"got block_table\[1, 1\] = -1",
                 block_table=torch.tensor([[0, -1], [1, -1]]).int(),
                 key_lengths=torch.tensor([16, 17])),
    _paged_error("three_dimensions", ValueError, r"k must have 4 dimensions \[P, K, page, D\]",
                 k=torch.zeros(4, 4, 8)),
    _paged_error("v_like_k", ValueError, r"v must be \[4, 4, 16, E\]", v=torch.zeros(4, 4, 32, 8)),
    _paged_error("dtypes", TypeError, "k must have q's dtype", k=torch.zeros(4, 4, 16, 8).half()),
    _paged_error("heads", ValueError, "q must have a multiple of k's 3 heads",
                 k=torch.zeros(4, 3, 16, 8), v=torch.zeros(4, 3, 16, 8)),
    _paged_error("empty_pages", ValueError, "k must have at least one key in a page",
                 k=torch.zeros(4, 4, 0, 8), v=torch.zeros(4, 4, 0, 8)),
    _paged_error("dropout", ValueError, "dropout_p must be 0 with block_table", dropout_p=0.1),
    *(_paged_error(f"gradient_{name}", ValueError, f"{name} must not require a gradient",
                   **{name: x}) for name, x in _WITH_GRADIENT.items()),
    _paged_error("gradient_of_q", ValueError, "q must not require a gradient with block_table",
                 q=torch.zeros(2, 4, 6, 8, requires_grad=True)),
    _paged_error("gradient_of_slopes", ValueError, "alibi_slopes must not require a gradient",
                 alibi_slopes=torch.zeros(4, requires_grad=True)),
    _error("not_a_tensor", TypeError, "q must be a tensor", q=[1.0]),
    _error("integers", TypeError, "q must be fp16", q=torch.zeros(2, 4, 6, 8).int()),
    _error("three_dimensions", ValueError, "k must have 4 dimensions", k=torch.zeros(2, 6, 8)),
    _error("dtypes", TypeError, "v must have q's dtype", v=torch.zeros(2, 4, 6, 8).half()),
    _error("batch", ValueError, "k must have q's batch size 2", k=torch.zeros(3, 4, 6, 8)),
    _error("head_dim", ValueError, "k must have q's head dim 8", k=torch.zeros(2, 4, 6, 16)),
    _error("v_like_k", ValueError, r"v must be \[2, 4, 6, E\]", v=torch.zeros(2, 4, 5, 8)),
    _error("heads", ValueError, "q must have a multiple", k=torch.zeros(2, 3, 6, 8),
           v=torch.zeros(2, 3, 6, 8)),
    _error("mask_shape", ValueError, "mask must be broadcastable", mask=torch.ones(5, 6).bool()),
    _error("mask_dtype", TypeError, "mask must be bool or floating", mask=torch.ones(6, 6).int()),
    _error("mask_dims", ValueError, "mask must be broadcastable", mask=torch.ones(1, 1, 1, 6, 6)),
    _error("lengths_dtype", TypeError, "key_lengths must be int32", key_lengths=torch.ones(2)),
    _error("lengths_shape", ValueError, r"key_lengths must be \[2\] or \[2, 6\]",
           key_lengths=torch.ones(3).int()),
    _error("lengths_of_queries_align_nothing", ValueError,
           r"key_lengths must be \[B\] with causal=.bottom_right_lengths., .*got \[2, 6\]",
           causal="bottom_right_lengths", key_lengths=torch.ones(2, 6).int()),
    _error("query_lengths_shape", ValueError, r"query_lengths must be \[2\]",
           query_lengths=torch.ones(2, 6).int()),
    _error("causal_ambiguous", ValueError, "ambiguous", q=torch.zeros(2, 4, 5, 8), causal=True),
    _error("causal_word", ValueError, "causal must be", causal="lower"),
    _error("window_length", ValueError, r"window must be \(left, right\)", window=(1,)),
    _error("window_negative", ValueError, "window must hold", window=(-2, 0)),
    _error("scale", ValueError, "scale must be finite", scale=float("nan")),
    _error("alibi_shape", ValueError, r"alibi_slopes must be \[4\] or \[2, 4\], got \[3\]",
           alibi_slopes=torch.ones(3)),
    _error("alibi_dtype", TypeError, "alibi_slopes must be fp16", alibi_slopes=torch.ones(4).int()),
    _error("softcap", ValueError, "softcap must be a number from 1e-30", softcap=0.0),
    _error("softcap_type", TypeError, "softcap must be a number", softcap="50"),
    _error("sinks", ValueError, r"sinks must be \[4\]", sinks=torch.ones(2, 4)),
    _error("relative_kind", ValueError, "relative_buckets must be", relative_bias=torch.ones(4, 8)),
    _error("relative_kind_type", ValueError, "relative_buckets must be",
           relative_bias=torch.ones(4, 8), relative_buckets=["t5"]),
    _error("relative_table", ValueError, "relative_bias must be given", relative_buckets="t5"),
    _error("relative_shape", ValueError, r"relative_bias must be \[4, buckets\]",
           relative_bias=torch.ones(8, 4), relative_buckets="t5"),
    _error("relative_odd", ValueError, "relative_bias must have an even number of buckets",
           relative_bias=torch.ones(4, 7), relative_buckets="t5"),
    _error("relative_even", ValueError, "relative_bias must have an odd number of buckets",
           relative_bias=torch.ones(4, 8), relative_buckets="clipped"),
    _error("relative_distance", ValueError, "relative_max_distance must be greater than 8",
           relative_bias=torch.ones(4, 16), relative_buckets="t5_causal", relative_max_distance=8),
    _error("dropout_p", ValueError, "dropout_p must be between", dropout_p=-0.1),
    _error("dropout_seed", ValueError, "dropout_seed must be int64", dropout_p=0.1,
           dropout_seed=torch.zeros(1)),
    _error("dropout_seed_shape", ValueError, r"dropout_seed must be int64 \[1\], or \[5\] with the "
           r"index of the first sequence, head, query and key, got torch.int64 \[2\]",
           dropout_p=0.1, dropout_seed=torch.tensor([7, 0])),
    _error("dropout_stream", ValueError, "dropout_stream must be", dropout_stream=1 << 31),
    _error("backend", ValueError, "backend must be one of", backend="cudnn"),
    _error("backend_refuses", NotImplementedError, "backend triton runs on cuda tensors, got cpu",
           backend="triton"),
)  # fmt: skip

SPECS = (
    OpSpec(
        "attention",
        attention,
        ("out", "lse"),
        SAMPLES,
        ERRORS,
        PADDED_WORKLOADS,
        torch_form,
        magnitudes,
        slice_dims,
        widen_inputs,
        entries,
        dead=dead_positions,
        prepare=prepare,
        drawn=drawn,
        arguments=arguments,
    ),
)
