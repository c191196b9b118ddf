"""Linear attention against its definition, and its recurrence against the parallel form."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastattn.nn.linear_attention import CHUNK, LinearMultiheadAttention, linear_attention

B, E, H = 2, 12, 3
DOUBLE = torch.float64


def by_definition(q, k, v, allowed):
    """Every pair of positions, with the weight (elu(q) + 1) (elu(k) + 1)."""
    weights = ((F.elu(q) + 1.0) @ (F.elu(k) + 1.0).mT) * allowed
    return (weights @ v / weights.sum(-1, keepdim=True)).nan_to_num(0.0)


@pytest.mark.parametrize("S", [0, 1, CHUNK - 1, CHUNK, 2 * CHUNK + 1])
@pytest.mark.parametrize("causal", [False, True])
def test_parallel_form_equals_its_definition(S, causal):
    q, k, v = torch.randn(3, B, H, S, 4, dtype=DOUBLE).unbind()
    allowed = torch.ones(S, S).tril() if causal else torch.ones(S, S)
    found = linear_attention(q, k, v, causal=causal)
    torch.testing.assert_close(found, by_definition(q, k, v, allowed))


@pytest.mark.parametrize("causal", [False, True])
def test_lengths_and_their_gradients(causal):
    """Keys beyond a length have no effect and no gradient; a length of 0 gives 0."""
    S, lengths = 7, [5, 0]
    q, k, v = torch.randn(3, B, H, S, 4, dtype=DOUBLE).requires_grad_().unbind()
    real = torch.arange(S) < torch.tensor(lengths)[:, None, None, None]  # [B, 1, 1, N]
    allowed = real * (torch.ones(S, S).tril() if causal else torch.ones(S, S))
    found = linear_attention(q, k, v, key_lengths=torch.tensor(lengths), causal=causal)
    torch.testing.assert_close(found, by_definition(q, k, v, allowed))
    assert (found[1] == 0).all()
    dk, dv = torch.autograd.grad(found.sin().sum(), (k, v))
    for gradient in (dk, dv):
        assert gradient.isfinite().all() and gradient[0].abs().sum(-1)[:, :5].all()
        assert not gradient[0, :, 5:].any() and not gradient[1].any()


@pytest.mark.parametrize("causal", [False, True])
def test_padding_may_hold_nan(causal):
    S, lengths = 7, torch.tensor([5, 0])
    q, k, v = torch.randn(3, B, H, S, 4).requires_grad_().unbind()
    expected = linear_attention(q, k, v, key_lengths=lengths, causal=causal)
    padding = (torch.arange(S) >= lengths[:, None])[:, None, :, None]
    k, v = (x.masked_fill(padding, torch.nan).detach().requires_grad_() for x in (k, v))
    found = linear_attention(q, k, v, key_lengths=lengths, causal=causal)
    assert torch.equal(found, expected)
    gradients = torch.autograd.grad(found.sin().sum(), (q, k, v))
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_later_keys_do_not_change_earlier_outputs():
    q, k, v = torch.randn(3, B, H, 3 * CHUNK, 4).unbind()
    expected = linear_attention(q, k, v, causal=True)
    later = 2 * CHUNK + 9
    k[:, :, later] = v[:, :, later] = 1e6
    found = linear_attention(q, k, v, causal=True)
    assert torch.equal(found[:, :, :later], expected[:, :, :later])


def test_gradients():
    q, k, v = torch.randn(3, 1, 1, CHUNK + 2, 2, dtype=DOUBLE).requires_grad_().unbind()
    assert torch.autograd.gradcheck(
        lambda *x: linear_attention(*x, causal=True), (q, k, v), fast_mode=True
    )


def test_very_negative_keys_keep_their_weights():
    """elu(-20) + 1 is 0 in fp32; the weights of two such keys are still in the ratio e : 1."""
    q, v = torch.ones(1, 1, 1, 1), torch.tensor([1.0, 0.0]).view(1, 1, 2, 1)
    k = torch.tensor([-20.0, -21.0]).view(1, 1, 2, 1)
    expected = torch.tensor(1.0).sigmoid()  # e / (e + 1)
    torch.testing.assert_close(linear_attention(q, k, v)[0, 0, 0, 0], expected)


def test_module_has_the_parameters_of_multihead_attention():
    for bias in (True, False):
        torch.manual_seed(0)
        usual = nn.MultiheadAttention(E, H, bias=bias)
        torch.manual_seed(0)
        module = LinearMultiheadAttention(E, H, bias=bias)
        assert module.state_dict().keys() == usual.state_dict().keys()
        for name, value in usual.state_dict().items():
            torch.testing.assert_close(module.state_dict()[name], value, rtol=0, atol=0)


def test_module_attends_other_sequences():
    module = LinearMultiheadAttention(E, H, dtype=DOUBLE)
    queries, keys, values = (torch.randn(B, n, E, dtype=DOUBLE) for n in (5, 9, 9))
    found = module(queries, keys, values, [9, 4])
    parts = zip((queries, keys, values), module.in_proj_weight.chunk(3), strict=True)
    q, k, v = ((x @ w.mT).view(B, -1, H, E // H).transpose(1, 2) for x, w in parts)
    allowed = (torch.arange(9) < torch.tensor([9, 4])[:, None, None, None]).double()
    context = by_definition(q, k, v, allowed).transpose(1, 2).flatten(-2)
    torch.testing.assert_close(found, module.out_proj(context))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_equal_the_parallel_form(dtype):
    """A prompt longer than a chunk, single positions, then several at once; with a second prefix
    after a restart, in the same tensor of the same size.
    """
    module = LinearMultiheadAttention(E, H, dtype=dtype)
    exact = copy.deepcopy(module).double()
    state = module.init_state(B)
    size, address = state.sums.numel(), state.sums.data_ptr()
    assert size == B * E * (E // H + 1)
    for _ in range(2):
        x = torch.randn(B, CHUNK + 9, E, dtype=dtype)
        parts = x.split([CHUNK + 1, 1, 1, 1, 5], dim=1)
        found = torch.cat([module.step(part, state) for part in parts], dim=1)
        assert found.dtype is dtype and state.sums.dtype is torch.float32
        expected = exact(*[x.double()] * 3, causal=True)
        parallel = module(x, x, x, causal=True)
        allowed = 2 * (parallel - expected).abs().max() + 4 * torch.finfo(dtype).eps
        assert (found - expected).abs().max() <= allowed
        assert (state.sums.numel(), state.sums.data_ptr()) == (size, address)
        state.restart()


def test_steps_under_autocast_keep_the_state_in_fp32():
    """Sums of bf16 would stop growing after 256 positions."""
    module = LinearMultiheadAttention(E, H)
    state = module.init_state(1)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(600):
            module.step(torch.zeros(1, 1, E), state)
    # phi(0) = 1: the last column counts the positions.
    assert (state.sums[..., -1] == 600).all()


def test_forward_compiles_whole_and_step_changes_the_state():
    module, x = LinearMultiheadAttention(E, H), torch.randn(B, 5, E)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, x, x, causal=True), module(x, x, x, causal=True))
    state, other = module.init_state(B), module.init_state(B)
    step = torch.compile(module.step, backend="eager", fullgraph=True)
    torch.testing.assert_close(step(x[:, :1], state), module.step(x[:, :1], other))
    torch.testing.assert_close(state.sums, other.sums)
    assert state.sums.any()


def test_errors():
    with pytest.raises(ValueError, match="embed_dim must be a multiple of num_heads, got 12 and 5"):
        LinearMultiheadAttention(E, 5)
    module = LinearMultiheadAttention(E, H)
    x = torch.randn(B, 4, E)
    with pytest.raises(ValueError, match="as many as the 4 queries if causal, got 3"):
        module(x, x[:, :3], x[:, :3], causal=True)
    with pytest.raises(ValueError, match=r"valid_lens must be \[B\], got \[2, 4\]"):
        module(x, x, x, torch.ones(B, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"x must be \[3, T, 12\], got \[2, 4, 12\]"):
        module.step(x, module.init_state(3))
    with pytest.raises(ValueError, match=r"x must be \[2, T, 12\], got \[2, 0, 12\]"):
        module.step(x[:, :0], module.init_state(B))
