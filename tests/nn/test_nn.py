"""Attention, norms and further modules: against PyTorch's modules, or against their definition."""

import copy
import dataclasses
import inspect
import io
import math
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from module_equivalence import assert_equivalent, assert_same, label, pairwise, random_mask
from torch import Tensor, nn

import fastattn.nn as fnn
from fastattn.nn import naive
from fastattn.nn.positional import sinusoids

E, H, D = 16, 4, 4
B, M, N = 3, 5, 7


def twins(name: str, *args, dtype=None, **kwargs) -> tuple[nn.Module, nn.Module]:
    """PyTorch's module and fastattn's with the same random parameters, biases included."""
    reference = getattr(nn, name)(*args, **kwargs)
    fast = getattr(fnn, name)(*args, **kwargs)
    for parameter in reference.parameters():
        nn.init.normal_(parameter, std=0.3)
    fast.load_state_dict(reference.state_dict())
    return reference.to(dtype), fast.to(dtype)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize(
    "mask", ["bool padding", "float padding", "bool 2-D", "float 3-D", "lowest float 2-D"]
)
def test_queries_without_keys_get_a_zero_context(mask, need_weights):
    torch.manual_seed(0)
    reference, fast = twins("MultiheadAttention", E, H, batch_first=True)
    x = torch.randn(B, M, E, requires_grad=True)
    blocked = torch.zeros(B, H, M, M, dtype=torch.bool)
    if "padding" in mask:
        blocked[1] = True
        kwargs = {"key_padding_mask": blocked[:, 0, 0]}
    else:
        blocked[:, :, 2] = True
        kwargs = {"attn_mask": blocked[0, 0] if "2-D" in mask else blocked.flatten(0, 1)}
    if "float" in mask:
        kwargs = {name: m * torch.tensor(1.0) for name, m in kwargs.items()}
        low = torch.finfo(torch.float32).min if "lowest" in mask else float("-inf")
        kwargs = {name: m.masked_fill(m > 0, low) for name, m in kwargs.items()}
    out, weights = fast(x, x, x, need_weights=need_weights, average_attn_weights=False, **kwargs)
    dead = blocked[:, 0, :, 0]
    assert torch.equal(out[dead], fast.out_proj.bias.expand_as(out[dead]))
    if need_weights:
        assert torch.equal(weights[blocked], torch.zeros_like(weights[blocked]))
    expected, _ = reference(x, x, x, **kwargs)
    assert_same("living rows", out[~dead], expected[~dead], expected[~dead].double())
    out.square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in (x, *fast.parameters()))


def malformed_attention_calls() -> dict[str, tuple[tuple, dict]]:
    x = torch.randn(B, M, E)
    row = torch.randn(M, E)
    return {
        "key without batch": ((x, row, x), {}),
        "value without batch": ((x, x, row), {}),
        "key with batch, query without": ((row, x, row), {}),
        "query 4-D": ((x[None], x, x), {}),
        "query 1-D": ((row[0], row[0], row[0]), {}),
        "wrong embedding": ((x[..., :8], x, x), {}),
        "wrong key size": ((x, x[..., :8], x[..., :8]), {}),
        "key and value of different length": ((x, x, x[:, :3]), {}),
        "key of another batch": ((x, x[:2], x[:2]), {}),
        "padding 1-D": ((x, x, x), {"key_padding_mask": torch.zeros(M, dtype=torch.bool)}),
        "padding too long": ((x, x, x), {"key_padding_mask": torch.zeros(B, M + 1).bool()}),
        "padding uint8": ((x, x, x), {"key_padding_mask": torch.zeros(B, M, dtype=torch.uint8)}),
        "mask of integers": ((x, x, x), {"attn_mask": torch.zeros(M, M, dtype=torch.long)}),
        "mask 1-D": ((x, x, x), {"attn_mask": torch.zeros(M)}),
        "mask 2-D of wrong size": ((x, x, x), {"attn_mask": torch.zeros(M, M + 1)}),
        "mask 3-D of wrong size": ((x, x, x), {"attn_mask": torch.zeros(B, M, M)}),
        "mask 3-D of wrong size, unbatched": ((row, row, row), {"attn_mask": torch.zeros(9, M, M)}),
        "causal hint without mask": ((x, x, x), {"is_causal": True}),
        "input of another dtype": ((x.double(), x.double(), x.double()), {}),
    }


@pytest.mark.parametrize("call", malformed_attention_calls())
def test_malformed_attention_calls_raise_what_torch_raises(call):
    reference, fast = twins("MultiheadAttention", E, H, batch_first=True)
    args, kwargs = malformed_attention_calls()[call]
    for need_weights in (True, False):
        with pytest.raises((AssertionError, RuntimeError, ValueError)) as expected:
            reference(*args, need_weights=need_weights, **kwargs)
        with pytest.raises(expected.type) as got:
            fast(*args, need_weights=need_weights, **kwargs)
        said = {"causal hint without mask": "attn_mask", "input of another dtype": "same dtype"}
        assert said.get(call, str(expected.value)) in str(got.value)


@pytest.mark.parametrize("need_weights", [False, True])
def test_a_bias_of_another_dtype_goes_to_torch(need_weights):
    reference, fast = twins("MultiheadAttention", E, H, batch_first=True)
    for module in (reference, fast):
        module.in_proj_bias.data = module.in_proj_bias.data.double()
    x = torch.randn(B, M, E)
    expected, _ = reference(x, x, x, need_weights=need_weights)
    assert torch.equal(fast(x, x, x, need_weights=need_weights)[0], expected)


def test_masks_of_different_types_warn_as_in_torch():
    reference, fast = twins("MultiheadAttention", E, H, batch_first=True)
    x = torch.randn(B, M, E)
    masks = {"attn_mask": random_mask(M, M, dtype=torch.float32)}
    masks["key_padding_mask"] = random_mask(B, M)
    for module in (reference, fast):
        with pytest.warns(UserWarning, match="deprecated"):
            module(x, x, x, **masks)
    masks["attn_mask"] = random_mask(M, M)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast(x, x, x, **masks)


def test_returned_weights_are_the_dropped_ones():
    torch.manual_seed(0)
    fast = fnn.MultiheadAttention(E, H, dropout=0.5, batch_first=True)
    x = torch.randn(8, 64, E)
    out, weights = fast(x, x, x, average_attn_weights=False)
    v = F.linear(x, fast.in_proj_weight[2 * E :]).unflatten(-1, (H, D)).transpose(1, 2)
    again = fast.out_proj((weights @ v).transpose(1, 2).flatten(-2))
    torch.testing.assert_close(out, again)
    dropped = (weights == 0).double().mean().item()
    assert abs(dropped - 0.5) < 5 * math.sqrt(0.25 / weights.numel())
    averaged = fast.eval()(x, x, x)[1]
    assert torch.equal(averaged, fast(x, x, x, average_attn_weights=False)[1].mean(1))


@pytest.mark.parametrize("need_weights", [False, True])
def test_attention_dropout_repeats_and_keeps_its_rate(need_weights):
    torch.manual_seed(0)
    fast = fnn.MultiheadAttention(E, H, dropout=0.25, batch_first=True)
    with torch.no_grad():
        # Equal scores and values of 1: a context is the kept share of the weights, rescaled.
        fast.in_proj_weight.zero_()
        fast.in_proj_bias[2 * E :] = 1.0
        fast.out_proj.weight.copy_(torch.eye(E))
    x = torch.randn(4, 256, E)

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return fast(x, x, x, need_weights=need_weights)[0]

    first = run(1)
    assert torch.equal(first, run(1))
    assert not torch.equal(first, run(2))
    assert not torch.equal(first, fast(x, x, x, need_weights=need_weights)[0])
    # 4 * 4 * 256 * 256 independent weights, each 4/3 with probability 3/4.
    deviation = math.sqrt(1 / 3 / (4 * H * 256 * 256))
    assert abs(first.double().mean().item() - 1) < 5 * deviation
    assert torch.allclose(fast.eval()(x, x, x, need_weights=need_weights)[0], torch.ones(1))


@pytest.mark.parametrize("name", ["MultiheadAttention", "LayerNorm", "RMSNorm"])
def test_drop_ins_are_torch_modules(name):
    args = (E, H) if name == "MultiheadAttention" else (E,)
    torch.manual_seed(0)
    reference = getattr(nn, name)(*args)
    torch.manual_seed(0)
    fast = getattr(fnn, name)(*args)
    assert isinstance(fast, getattr(nn, name))
    assert repr(fast) == repr(reference)
    for (a, x), (b, y) in zip(fast.named_parameters(), reference.named_parameters(), strict=True):
        assert a == b and torch.equal(x, y)
    reference.load_state_dict(fast.state_dict())
    for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert type(twin) is type(fast)
        assert twin.state_dict().keys() == fast.state_dict().keys()
    file = io.BytesIO()
    torch.save(fast, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=False)) is type(fast)


def test_wrapped_tensors_go_to_torch():
    class Counted(Tensor):
        functions: list = []  # noqa: RUF012

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            cls.functions.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    fast = fnn.MultiheadAttention(E, H, batch_first=True)
    x = torch.randn(B, M, E).as_subclass(Counted)
    fast(x, x, x)
    assert F.multi_head_attention_forward in Counted.functions


NORM_CASES = pairwise(
    name=("LayerNorm", "RMSNorm"),
    shape=((E,), (M, E), (63,)),
    affine=(True, False),
    leading=((), (3,), (2, 3), (0,)),
    dtype=(torch.float32, torch.bfloat16, torch.float64),
    transposed=(True, False),
)


@pytest.mark.parametrize("case", NORM_CASES, ids=label)
def test_norms_equal_torch(case):
    torch.manual_seed(0)
    reference, fast = twins(
        case["name"], case["shape"], elementwise_affine=case["affine"], dtype=case["dtype"]
    )
    # Small enough for eps to matter.
    x = 0.01 * torch.randn(*case["leading"], *case["shape"], dtype=case["dtype"])
    if case["transposed"] and x.dim() > 1:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert_equivalent(reference, fast, x)


IMAGES = torch.arange(360.0).sin().view(3, 4, 5, 6)
LAYOUTS = {
    "contiguous": IMAGES,
    "contiguous, one channel": IMAGES[:, :1].contiguous(),
    "channels_last": IMAGES.to(memory_format=torch.channels_last),
    "channels_last, one channel": IMAGES[:, :1].to(memory_format=torch.channels_last),
    "channels_last_3d": IMAGES[:, :, None].to(memory_format=torch.channels_last_3d),
    "permuted": IMAGES.permute(2, 3, 0, 1),
    "permuted, 3 dimensions": IMAGES[0].permute(1, 2, 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_norms_keep_the_memory_format_where_torch_does(name, rank, layout):
    x = LAYOUTS[layout]
    reference, fast = twins(name, x.shape[-rank:])
    assert fast(x).stride() == reference(x).stride()
    assert_equivalent(reference, fast, x)


def test_layer_norm_without_bias_and_with_a_wrong_shape():
    reference, fast = twins("LayerNorm", E, bias=False)
    assert_equivalent(reference, fast, torch.randn(B, E))
    for x in (torch.randn(B, E + 1), torch.tensor(1.0)):
        with pytest.raises(RuntimeError) as expected:
            reference(x)
        with pytest.raises(RuntimeError) as got:
            fast(x)
        assert str(got.value) == str(expected.value)


class PlainAddNorm(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.norm = nn.LayerNorm(shape)

    def forward(self, x, y):
        return self.norm(x + y)


@pytest.mark.parametrize("shape", [E, (M, E)])
def test_add_norm(shape):
    torch.manual_seed(0)
    fast = fnn.AddNorm(shape, dropout=0.3).eval()
    nn.init.normal_(fast.norm.weight)
    reference = PlainAddNorm(shape)
    reference.load_state_dict(fast.state_dict())
    x, y = torch.randn(B, M, E), torch.randn(B, M, E)
    assert_equivalent(reference, fast, x, y)
    assert_equivalent(reference, fast, x.bfloat16(), y)  # the sum has the wider dtype
    assert_equivalent(reference, fast, x, y.bfloat16())
    with pytest.raises(ValueError, match=r"the shape of x, \[3, 5, 16\], got \[3, 4, 16\]"):
        fast(x, y[:, :4])
    fast.train()
    torch.manual_seed(1)
    first = fast(x, y)
    torch.manual_seed(1)
    assert torch.equal(first, fast(x, y)) and not torch.equal(first, fast(x, y))


class PlainFFN(nn.Module):
    def __init__(self, linear1, linear2, activation):
        super().__init__()
        self.linear1, self.linear2 = linear1, linear2
        self.activation = activation

    def forward(self, x):
        return self.linear2(self.activation(self.linear1(x)))


def gated(function):
    def activation(hidden):
        gate, up = hidden[..., : hidden.shape[-1] // 2], hidden[..., hidden.shape[-1] // 2 :]
        return function(gate) * up

    return activation


ACTIVATIONS = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "reglu": gated(torch.relu),
    "geglu": gated(F.gelu),
    "swiglu": gated(F.silu),
}


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "with a hook"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_position_wise_ffn(activation, fused):
    torch.manual_seed(0)
    bias = activation not in ("silu", "geglu")
    fast = fnn.PositionWiseFFN(E, 24, 10, activation=activation, dropout=0.5, bias=bias).eval()
    if not fused:
        fast.linear1.register_forward_hook(lambda *_: None)
    linears = copy.deepcopy(fast.linear1), copy.deepcopy(fast.linear2)
    reference = PlainFFN(*linears, ACTIVATIONS[activation])
    assert_equivalent(reference, fast, torch.randn(B, M, E))
    x = torch.ones(64, E)
    fast.train()
    torch.manual_seed(1)
    first = fast(x)
    torch.manual_seed(1)
    assert torch.equal(first, fast(x)) and not torch.equal(first, fast(x))
    # Equal rows differ only in their dropout; their mean is the result of evaluation.
    assert not torch.equal(first[0], first[1])


def test_position_wise_ffn_rejects():
    with pytest.raises(ValueError, match=r"activation must be one of relu, .* got 'tanh'"):
        fnn.PositionWiseFFN(E, 24, activation="tanh")
    with pytest.raises(ValueError, match=r"x must be \[..., 16\], got \[3, 8\]"):
        fnn.PositionWiseFFN(E, 24)(torch.randn(3, 8))


@pytest.mark.parametrize("size", [1, 6, 7])
def test_sinusoidal_positions(size):
    module = fnn.SinusoidalPositionalEncoding(size, max_length=50)
    assert not module.state_dict()
    added = module(torch.zeros(2, 9, size), offset=40)
    for position in range(9):
        for column in range(size):
            angle = (40 + position) / 10000 ** (2 * (column // 2) / size)
            wanted = math.cos(angle) if column % 2 else math.sin(angle)
            assert abs(added[1, position, column].item() - wanted) < 1e-7 * max(1, angle)
    x = torch.randn(2, 3, size, dtype=torch.bfloat16)
    assert torch.equal(module(x), x + sinusoids(3, size).bfloat16())


def test_learned_positions():
    module = fnn.LearnedPositionalEncoding(E, max_length=10, dropout=0.5)
    x = torch.randn(2, 4, E)
    module(x)[:, :, :].sum().backward()
    assert (module.weight.grad[4:] == 0).all() and (module.weight.grad[:4] != 0).any()
    module.eval()
    assert torch.equal(module(x, offset=3), x + module.weight[3:7])


@pytest.mark.parametrize("kind", [fnn.SinusoidalPositionalEncoding, fnn.LearnedPositionalEncoding])
def test_positions_reject(kind):
    module = kind(E, 10)
    with pytest.raises(ValueError, match=r"\[0, max_length=10\), got 8 to 11"):
        module(torch.zeros(1, 4, E), offset=8)
    with pytest.raises(ValueError, match=r"\[0, max_length=10\), got -1 to 2"):
        module(torch.zeros(1, 4, E), offset=-1)
    with pytest.raises(ValueError, match=r"x must be \[..., S, 16\], got \[1, 4, 8\]"):
        module(torch.zeros(1, 4, 8))
    with pytest.raises(ValueError, match="at least 1"):
        kind(0, 10)
    with pytest.raises(TypeError, match=r"x must be floating, got torch.int64"):
        module(torch.zeros(1, 4, E, dtype=torch.int64))
    for offset in (1.5, "1", None):
        with pytest.raises(TypeError, match=r"offset must be an integer or int64 \[1\], got"):
            module(torch.zeros(1, 4, E), offset=offset)
    assert torch.equal(
        module.eval()(torch.ones(1, 4, E), offset=torch.tensor(3)),
        module(torch.ones(1, 4, E), offset=3),
    )
    for offset in (torch.tensor([1, 2]), torch.tensor([1.0])):
        with pytest.raises(ValueError, match=r"offset must be an integer or int64 \[1\], got"):
            module(torch.zeros(1, 4, E), offset=offset)


@pytest.mark.parametrize("kind", [fnn.SinusoidalPositionalEncoding, fnn.LearnedPositionalEncoding])
def test_positions_from_the_meta_device(kind):
    with torch.device("meta"):
        module = kind(E, 10)
    module = module.to_empty(device="cpu")
    module.reset_parameters()
    added = module(torch.zeros(1, 4, E))
    if kind is fnn.SinusoidalPositionalEncoding:
        assert torch.equal(added, kind(E, 10)(torch.zeros(1, 4, E)))
    assert added.isfinite().all() and added.abs().max() <= 1.0


@pytest.mark.parametrize("attention", ["length-masked", "multi-head", "multi-head, floating"])
def test_keys_that_no_query_may_attend_may_hold_any_value(attention):
    """Also with need_weights, which no op computes."""
    x = torch.randn(2, 4, E)
    x[1, 2:] = torch.nan
    if attention == "length-masked":
        module = fnn.LengthMaskedMultiheadAttention(E, E, E, E, H)
        given = {"valid_lens": torch.tensor([4, 2])}
    else:
        module = fnn.MultiheadAttention(E, H, batch_first=True)
        padding = torch.arange(4) >= torch.tensor([4, 2])[:, None]
        if attention == "multi-head, floating":
            padding = torch.zeros(2, 4).masked_fill(padding, float("-inf"))
        given = {"key_padding_mask": padding}
    query = torch.randn(2, 3, E, requires_grad=True)
    context, weights = module(query, x, x, **given, need_weights=True)
    (gradient,) = torch.autograd.grad(context.sum(), query)
    assert context.isfinite().all() and weights.isfinite().all() and gradient.isfinite().all()
    fused = module(query, x, x, **given, need_weights=False)
    torch.testing.assert_close(context, fused[0] if isinstance(fused, tuple) else fused)


@pytest.mark.parametrize("need_weights", [False, True])
def test_queries_without_keys_may_hold_any_value(need_weights):
    """They give no gradient to the keys that other queries attend."""
    module = fnn.MultiheadAttention(E, H, batch_first=True)
    query, keys = torch.randn(B, M, E), torch.randn(B, N, E, requires_grad=True)
    query[:, 2] = torch.nan
    blocked = torch.zeros(M, N, dtype=torch.bool)
    blocked[2] = True
    context, _ = module(query, keys, keys, attn_mask=blocked, need_weights=need_weights)
    (gradient,) = torch.autograd.grad(context.sum(), keys)
    assert context.isfinite().all() and gradient.isfinite().all()


class PlainLengthMasked(nn.Module):
    """One query and one head at a time, over the keys within the length."""

    def __init__(self, fast: nn.Module) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            setattr(self, name, copy.deepcopy(getattr(fast, name)))

    def forward(self, queries, keys, values, valid_lens=None):
        q, k, v = self.q_proj(queries), self.k_proj(keys), self.v_proj(values)
        rows = []
        for b in range(B):
            for i in range(M):
                length = N if valid_lens is None else int(valid_lens.view(B, -1)[b].expand(M)[i])
                heads = []
                for h in range(H):
                    part = slice(h * D, (h + 1) * D)
                    scores = k[b, :length, part] @ q[b, i, part] / math.sqrt(D)
                    weights = torch.exp(scores) / torch.exp(scores).sum()
                    heads.append(weights @ v[b, :length, part])
                rows.append(torch.cat(heads))
        return self.out_proj(torch.stack(rows).view(B, M, -1))


@pytest.mark.parametrize("lens", ["none", "per sequence", "per query"])
@pytest.mark.parametrize("bias", [True, False])
def test_length_masked_attention(lens, bias):
    torch.manual_seed(0)
    fast = fnn.LengthMaskedMultiheadAttention(6, 10, 12, E, H, dropout=0.5, bias=bias).eval()
    inputs = torch.randn(B, M, 6), torch.randn(B, N, 10), torch.randn(B, N, 12)
    valid_lens = {
        "none": None,
        "per sequence": torch.tensor([3, N, 0]),
        "per query": torch.randint(0, N + 1, (B, M), dtype=torch.int32),
    }[lens]
    assert_equivalent(PlainLengthMasked(fast), fast, *inputs, valid_lens)
    out, weights = fast(*inputs, valid_lens, need_weights=True)
    assert_same("need_weights", out, out, fast(*inputs, valid_lens).double())
    lengths = torch.full((B, 1), N) if valid_lens is None else valid_lens.view(B, -1)
    allowed = (torch.arange(N) < lengths[..., None]).expand(B, M, N)[:, None].expand_as(weights)
    assert (weights[~allowed] == 0).all() and (weights[allowed] > 0).all()
    total = weights.sum(-1)
    torch.testing.assert_close(total, allowed.any(-1).to(total.dtype))


def test_length_masked_attention_rejects():
    module = fnn.LengthMaskedMultiheadAttention(6, 10, 12, E, H)
    q, k, v = torch.randn(B, M, 6), torch.randn(B, N, 10), torch.randn(B, N, 12)
    for args, message in (
        ((k, k, v), r"queries must be \[B, S, 6\], got \[3, 7, 10\]"),
        ((q, k[:2], v), r"keys must be \[3, S, 10\], got \[2, 7, 10\]"),
        ((q, k, v[:, :4]), "values must have one row for each of the 7 keys, got 4"),
        ((q, k, v, torch.ones(B)), r"valid_lens must be int32 or int64.*got torch.float32 \[3\]"),
        ((q, k, v, torch.ones(B, N, dtype=torch.long)), r"\[3\] or \[3, 5\].*\[3, 7\]"),
    ):
        with pytest.raises(ValueError, match=message):
            module(*args)
    with pytest.raises(ValueError, match="multiple of num_heads, got 16 and 5"):
        fnn.LengthMaskedMultiheadAttention(6, 10, 12, E, 5)
    with pytest.raises(ValueError, match=r"between 0 and 1, got 1\.5"):
        fnn.LengthMaskedMultiheadAttention(6, 10, 12, E, H, dropout=1.5)


def test_naive_defaults_are_torchs():
    parameters = inspect.signature(nn.Transformer).parameters
    for name, value in dataclasses.asdict(naive.Config()).items():
        default = parameters[name].default
        assert value == (default.__name__ if callable(default) else default), name


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_naive_transformer_equals_torch(norm_first, activation):
    torch.manual_seed(0)
    sizes = {
        "d_model": E,
        "nhead": H,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "dim_feedforward": 24,
        "dropout": 0.0,
        "activation": activation,
        "norm_first": norm_first,
        "bias": not norm_first,
    }
    reference = nn.Transformer(**sizes, batch_first=True)
    plain = naive.Transformer(naive.Config(**sizes))
    plain.load_state_dict(reference.state_dict())
    fast = fnn.Transformer(**sizes, batch_first=True)
    fast.load_state_dict(plain.state_dict())
    padding = random_mask(B, N)
    masks = {
        "tgt_mask": torch.ones(M, M, dtype=torch.bool).triu(1),
        "src_mask": random_mask(N, N),
        "memory_mask": random_mask(M, N),
        "src_key_padding_mask": padding,
        "tgt_key_padding_mask": random_mask(B, M),
        "memory_key_padding_mask": padding,
    }
    src, tgt = torch.randn(B, N, E), torch.randn(B, M, E)
    assert_equivalent(reference, plain, src, tgt, **masks)
    assert_equivalent(plain, fast, src, tgt, **masks)
    masks["memory_key_padding_mask"] = padding.index_fill(0, torch.tensor([1]), True)
    masks["src_key_padding_mask"] = masks["memory_key_padding_mask"]
    assert_equivalent(plain, fast, src, tgt, **masks)


def test_convert_changes_exactly_torch_classes():
    class Custom(nn.LayerNorm):
        pass

    model = nn.Sequential(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 24, batch_first=True), 2),
        Custom(E),
        nn.RMSNorm(E),
    ).eval()
    x = torch.randn(B, M, E)
    expected = model(x)
    parameters = list(model.parameters())
    assert fnn.convert(model) is model
    assert type(model[0]) is fnn.TransformerEncoder and not model[0].use_nested_tensor
    assert type(model[0].layers[1].self_attn) is fnn.MultiheadAttention
    assert type(model[0].layers[1].norm2) is fnn.LayerNorm
    assert type(model[1]) is Custom and type(model[2]) is fnn.RMSNorm
    assert all(x is y for x, y in zip(parameters, model.parameters(), strict=True))
    assert_same("converted", model(x), expected, expected.double())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_jit_script_compiles_torchs_forward_and_leaves_the_modules_alone():
    class Subclass(fnn.TransformerEncoderLayer):
        pass

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([fnn.LayerNorm(E), nn.Sequential(fnn.RMSNorm(E))])
            self.transformer = fnn.Transformer(E, H, 1, 1, 24, dropout=0.0)
            self.transformer.encoder.layers[0] = Subclass(E, H, 24, dropout=0.0)

        def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
            for norm in self.norms:
                src = norm(src)
            return self.transformer(src, tgt)

    torch.manual_seed(0)
    model = Model()
    modules = [(module, type(module)) for module in model.modules()]
    scripted = torch.jit.script(model)
    assert [(module, type(module)) for module in model.modules()] == modules
    src, tgt = torch.randn(N, B, E), torch.randn(M, B, E)
    for _ in range(2):
        expected = model(src, tgt)
        assert_same("scripted", scripted(src, tgt), expected, expected.double())
        with torch.no_grad():
            model.norms[1][0].weight.copy_(torch.randn(E))  # the tensors are shared
    signature = inspect.signature(fnn.TransformerEncoder.forward)
    assert "src_lengths" in signature.parameters

    class Doubled(fnn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    module = Doubled(E)
    expected = module(src)
    assert torch.equal(torch.jit.script(module)(src), expected)
