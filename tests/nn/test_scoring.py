"""Additive and cosine scores, and weight functions: against their formulas written out in loops."""

import math

import pytest
import torch
from torch import nn

from fastattn.nn.scoring import (
    SCORES,
    WEIGHTS,
    AdditiveAttention,
    ScoredMultiheadAttention,
    attention_weights_of,
)

B, M, N, E, H = 2, 3, 5, 8, 2


def sparsemax_by_bisection(scores: torch.Tensor) -> torch.Tensor:
    """The threshold at which the positive differences sum to 1, found without sorting."""
    low, high = scores.min(-1, keepdim=True)[0] - 1, scores.max(-1, keepdim=True)[0]
    for _ in range(60):
        middle = (low + high) / 2
        above = (scores - middle).clamp(min=0).sum(-1, keepdim=True) > 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (scores - low).clamp(min=0)


def test_weight_functions():
    scores = (3 * torch.randn(4, 7, dtype=torch.float64)).requires_grad_()
    expected = {
        "softmax": scores.softmax(-1),
        "sparsemax": sparsemax_by_bisection(scores),
        "sigmoid": scores.sigmoid(),
    }
    for name in WEIGHTS:
        torch.testing.assert_close(attention_weights_of(scores, None, name), expected[name])
        assert torch.autograd.gradcheck(lambda s, n=name: attention_weights_of(s, None, n), scores)
    assert (attention_weights_of(scores, None, "sparsemax") == 0).any()
    allowed = torch.arange(7) < torch.tensor([7, 3, 1, 0])[:, None]
    for name in WEIGHTS:
        weights = attention_weights_of(scores, allowed, name)
        assert weights[~allowed].abs().max() == 0
        torch.testing.assert_close(weights[1, :3], attention_weights_of(scores[1, :3], None, name))
        (gradient,) = torch.autograd.grad(weights.square().sum(), scores)
        assert gradient.isfinite().all() and gradient[~allowed].abs().max() == 0
    with pytest.raises(ValueError, match=r"function must be one of .* got 'hard'"):
        attention_weights_of(scores, None, "hard")


def test_additive_attention_equals_its_formula():
    attention = AdditiveAttention(4, 6, 5)
    queries, keys, values = torch.randn(B, M, 4), torch.randn(B, N, 6), torch.randn(B, N, 3)
    lengths = torch.tensor([N, 2])
    context, weights = attention(queries, keys, values, lengths, need_weights=True)
    for b in range(B):
        for m in range(M):
            scores = torch.stack(
                [
                    attention.score.weight[0]
                    @ torch.tanh(
                        attention.q_proj.weight @ queries[b, m]
                        + attention.k_proj.weight @ keys[b, n]
                    )
                    for n in range(lengths[b])
                ]
            )
            expected = scores.softmax(0)
            torch.testing.assert_close(weights[b, m, : lengths[b]], expected)
            torch.testing.assert_close(context[b, m], expected @ values[b, : lengths[b]])
    assert weights[1, :, 2:].abs().max() == 0
    torch.testing.assert_close(attention(queries, keys, values, lengths), context)
    per_query = attention(queries, keys, values, torch.tensor([[1, 2, 3], [0, 5, 2]]))
    torch.testing.assert_close(per_query[0, 0], values[0, 0])
    assert per_query[1, 0].abs().max() == 0
    for change, error, message in (
        ({"keys": keys[..., :4]}, ValueError, r"keys must be \[2, S, 6\], got \[2, 5, 4\]"),
        ({"values": values[0]}, ValueError, r"values must be \[2, S, V\], got \[5, 3\]"),
        ({"values": values[:, :4]}, ValueError, "values must have one row for each of the 5 keys"),
        ({"valid_lens": torch.tensor([2, 3, 1])}, ValueError, r"valid_lens must be .*got .*\[3\]"),
        ({"valid_lens": torch.tensor([2.5, 3])}, ValueError, "valid_lens must be int32 or int64"),
        ({"valid_lens": [2.5, 3]}, TypeError, r"valid_lens must hold integers, got \[2.5, 3\]"),
    ):
        with pytest.raises(error, match=message):
            attention(**{"queries": queries, "keys": keys, "values": values} | change)


def masks() -> dict[str, torch.Tensor]:
    blocked = torch.tensor([[False, True, False, False, True]] * M)
    return {
        "key_padding_mask": torch.arange(N) >= torch.tensor([N, 3])[:, None],
        "attn_mask": blocked,
    }


@pytest.mark.parametrize("weight_function", WEIGHTS)
@pytest.mark.parametrize("scoring", SCORES)
@pytest.mark.parametrize("masked", [False, True])
def test_multihead_scores_are_their_formulas(scoring, weight_function, masked):
    attention = ScoredMultiheadAttention(E, H, scoring=scoring, weight_function=weight_function)
    query, memory = torch.randn(B, M, E), torch.randn(B, N, E)
    given = masks() if masked else {}
    output, weights = attention(query, memory, memory, average_attn_weights=False, **given)
    fused, no_weights = attention(query, memory, memory, need_weights=False, **given)
    torch.testing.assert_close(fused, output, rtol=1e-4, atol=1e-5)
    assert no_weights is None

    allowed = torch.ones(B, M, N, dtype=torch.bool)
    if masked:
        allowed = ~(given["attn_mask"] | given["key_padding_mask"][:, None])
    wq, wk, wv = attention.in_proj_weight.chunk(3)
    D, heads = E // H, []
    for h in range(H):
        rows = slice(h * D, (h + 1) * D)
        q, k, v = query @ wq[rows].T, memory @ wk[rows].T, memory @ wv[rows].T
        scores = torch.empty(B, M, N)
        for b in range(B):
            for m in range(M):
                for n in range(N):
                    x, y = q[b, m], k[b, n]
                    scores[b, m, n] = {
                        "dot": lambda x=x, y=y: x @ y / math.sqrt(D),
                        "additive": lambda x=x, y=y, h=h: (
                            attention.score_weight[h] @ (x + y).tanh()
                        ),
                        "cosine": lambda x=x, y=y, h=h: (
                            attention.sharpness[h] * nn.functional.cosine_similarity(x, y, dim=0)
                        ),
                    }[scoring]()
        expected = attention_weights_of(scores, allowed, weight_function)
        torch.testing.assert_close(weights[:, h], expected, rtol=1e-4, atol=1e-5)
        heads.append(expected @ v)
    expected = attention.out_proj(torch.cat(heads, dim=-1))
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    if masked:
        additive = {
            name: torch.zeros(mask.shape).masked_fill_(mask, float("-inf"))
            for name, mask in given.items()
        }
        again, _ = attention(query, memory, memory, **additive)
        torch.testing.assert_close(again, output)


@pytest.mark.parametrize("weight_function", WEIGHTS)
def test_a_query_whose_keys_have_the_lowest_number(weight_function):
    """It is blocked, in the fused form and with weights."""
    attention = ScoredMultiheadAttention(E, H, weight_function=weight_function)
    query, memory = torch.randn(B, M, E), torch.randn(B, N, E)
    mask = torch.zeros(M, N)
    mask[1] = torch.finfo(mask.dtype).min
    output, weights = attention(query, memory, memory, attn_mask=mask)
    assert weights[:, 1].abs().max() == 0 and weights[:, 0].abs().max() > 0
    fused, _ = attention(query, memory, memory, attn_mask=mask, need_weights=False)
    torch.testing.assert_close(fused, output, rtol=1e-4, atol=1e-5)


def test_dot_scoring_equals_torchs_attention():
    fast = ScoredMultiheadAttention(E, H, scoring="dot")
    reference = nn.MultiheadAttention(E, H, batch_first=True)
    reference.load_state_dict(fast.state_dict())
    query, memory = torch.randn(B, M, E), torch.randn(B, N, E)
    for actual, expected in zip(
        fast(query, memory, memory, **masks()),
        reference(query, memory, memory, **masks()),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected)


def test_weights_are_dropped_only_in_training():
    attention = ScoredMultiheadAttention(E, H, 0.5, scoring="additive")
    x = torch.randn(B, N, E)
    assert (attention(x, x, x)[1] == 0).any()
    attention.eval()
    first, second = attention(x, x, x)[0], attention(x, x, x)[0]
    assert torch.equal(first, second)


def test_option_errors():
    with pytest.raises(ValueError, match=r"scoring must be one of .* got 'bilinear'"):
        ScoredMultiheadAttention(E, H, scoring="bilinear")
    with pytest.raises(ValueError, match=r"weight_function must be one of .* got 'max'"):
        ScoredMultiheadAttention(E, H, weight_function="max")


@pytest.mark.parametrize("scoring", SCORES)
def test_torchs_layers_and_stacks_use_the_scores(scoring):
    """They call `forward` instead of reading the projections, also without gradients."""
    layer = nn.TransformerEncoderLayer(E, H, 16, 0.0, batch_first=True)
    layer.self_attn = ScoredMultiheadAttention(E, H, scoring=scoring, weight_function="sigmoid")
    layer.self_attn._reset_parameters()
    stack = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(B, N, E), torch.tensor([[False] * N, [False] * 3 + [True] * 2])
    expected = stack(x, src_key_padding_mask=padding)
    with torch.no_grad():
        torch.testing.assert_close(stack(x, src_key_padding_mask=padding), expected)
        torch.testing.assert_close(stack.layers[0](x), stack.layers[0](x.requires_grad_()))


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("scoring", SCORES)
@pytest.mark.parametrize("change, message", [
    ({"query": torch.zeros(M, E)}, r"query must be \[B, S, 8\], got \[3, 8\]"),
    ({"key": torch.zeros(1, N, E)}, r"key must hold 2 sequences of 5, got B, S of \[1, 5\]"),
    ({"value": torch.zeros(B, M, E)}, r"value must hold 2 sequences of 5, .*\[2, 3\]"),
    (
        {"key_padding_mask": torch.zeros(1, N).bool()},
        r"key_padding_mask must be bool or floating, \[2, 5\], got torch.bool \[1, 5\]",
    ),
    (
        {"attn_mask": torch.zeros(M, N, dtype=torch.int32)},
        r"attn_mask must be bool or floating, \[3, 5\] or \[4, 3, 5\], got torch.int32",
    ),
    ({"is_causal": True}, "is_causal=True is a hint about attn_mask and needs it"),
])  # fmt: skip
def test_input_errors(scoring, change, message, need_weights):
    memory = torch.zeros(B, N, E)
    given = {"query": torch.zeros(B, M, E), "key": memory, "value": memory} | change
    with pytest.raises((ValueError, RuntimeError), match=message):
        ScoredMultiheadAttention(E, H, scoring=scoring)(**given, need_weights=need_weights)
