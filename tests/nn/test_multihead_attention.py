"""MultiheadAttention compared with PyTorch's: masks, errors, weights, dropout, dead positions."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from module_equivalence import assert_same, random_mask, twins
from torch import Tensor, nn

import fastattn.nn as fnn

E, H, D = 16, 4, 4
B, M, N = 3, 5, 7


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
    empty = blocked[:, 0, :, 0]  # rows without a key
    assert torch.equal(out[empty], fast.out_proj.bias.expand_as(out[empty]))
    if need_weights:
        assert torch.equal(weights[blocked], torch.zeros_like(weights[blocked]))
    expected, _ = reference(x, x, x, **kwargs)
    assert_same("rows with keys", out[~empty], expected[~empty], expected[~empty].double())
    out.square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in (x, *fast.parameters()))


@pytest.mark.parametrize("need_weights", [False, True])
def test_a_bias_of_another_dtype_uses_pytorch(need_weights):
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


def test_returned_weights_are_those_after_dropout():
    torch.manual_seed(0)
    fast = fnn.MultiheadAttention(E, H, dropout=0.5, batch_first=True)
    x = torch.randn(8, 64, E)
    out, weights = fast(x, x, x, average_attn_weights=False)
    v = F.linear(x, fast.in_proj_weight[2 * E :]).unflatten(-1, (H, D)).transpose(1, 2)
    expected = fast.out_proj((weights @ v).transpose(1, 2).flatten(-2))
    torch.testing.assert_close(out, expected)
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


def test_tensor_subclasses_use_pytorch():
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


@pytest.mark.parametrize("attention", ["length-masked", "multi-head", "multi-head, floating"])
def test_keys_that_no_query_may_attend_may_hold_any_value(attention):
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


def _with_weights(kind: str, **options: float) -> tuple[nn.Module, Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    module = fnn.MultiheadAttention(E, H, batch_first=True, **options)
    masks = {}
    if "padding" in kind:
        masks["key_padding_mask"] = torch.arange(M) >= torch.tensor([M, 3, 1])[:, None]
    if "causal" in kind:
        masks["attn_mask"] = torch.ones(M, M, dtype=torch.bool).triu(1)
    if "float" in kind:
        masks = {
            name: torch.randn(m.shape).masked_fill(m, float("-inf")) for name, m in masks.items()
        }
    return module, torch.randn(B, M, E, requires_grad=True), masks


each_mask = pytest.mark.parametrize("kind", ["none", "padding", "float causal and padding"])


@each_mask
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}])
def test_the_context_does_not_depend_on_the_weights(kind, dtype, options):
    """The same bits, also with dropout."""
    module, x, masks = _with_weights(kind, dropout=0.3, **options)
    masks = {name: m if m.dtype is torch.bool else m.to(dtype) for name, m in masks.items()}
    module, x = module.to(dtype), x.detach().to(dtype)
    contexts = []
    for given in ({"need_weights": False}, {}, {"average_attn_weights": False}):
        torch.manual_seed(3)
        contexts.append(module(x, x, x, **masks, **given)[0])
    assert all(torch.equal(context, contexts[0]) for context in contexts)


@each_mask
@pytest.mark.parametrize("average", [False, True])
def test_weights_under_autocast(kind, average):
    """In its dtype, as in PyTorch, with fp32 gradients of the parameters."""
    module, x, masks = _with_weights(kind)
    reference = nn.MultiheadAttention(E, H, batch_first=True)
    reference.load_state_dict(module.state_dict())
    found = []
    for each in (module, reference):
        with torch.autocast("cpu", torch.bfloat16):
            out, weights = each(x, x, x, average_attn_weights=average, **masks)
        loss = out.float().square().sum() + weights.float().square().sum()
        found.append((out, weights, *torch.autograd.grad(loss, [x, *each.parameters()])))
    for a, b in zip(*found, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a.float(), b.float(), atol=0.1, rtol=0.05)


def test_weights_compiled_and_exported():
    module, x, masks = _with_weights("float causal and padding")
    expected = module(x, x, x, **masks)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")(x, x, x, **masks)
    exported = torch.export.export(module.eval(), (x, x, x), masks).module()(x, x, x, **masks)
    for found in (compiled, exported):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("average", [False, True])
def test_weights_under_vmap(average):
    module, x, masks = _with_weights("padding")
    xs = torch.stack([x.detach(), x.detach().flip(0)])

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return module(x, x, x, average_attn_weights=average, **masks)

    found = torch.vmap(function)(xs)
    for a, b in zip(found, zip(*map(function, xs), strict=True), strict=True):
        torch.testing.assert_close(a, torch.stack(b))


class _DataDependentSizes(nn.Module):
    """Chosen sequences, then a padding mask as long as the longest of them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = fnn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        padding = torch.arange(lengths.max().item()) >= lengths[:, None]
        y, _ = self.attention(x, x, x, padding, need_weights=False)
        chosen, memory = y[lengths > 2], x[lengths > 2]  # two sizes to the compiler
        z, _ = self.attention(chosen, memory, memory, memory[..., 0] > 1)
        return (
            y.sum() + self.attention(chosen, chosen, chosen, chosen[..., 0] > 1)[0].sum() + z.sum()
        )


def test_sizes_that_depend_on_data() -> None:
    model, lengths = _DataDependentSizes(), torch.tensor([5, 2, 3])
    x = torch.randn(3, 5, 16, requires_grad=True)
    options = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(options):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        (found,) = torch.autograd.grad(compiled(x, lengths), x)
        torch.testing.assert_close(found, torch.autograd.grad(model(x, lengths), x)[0])
        with pytest.raises(RuntimeError, match="u0"):
            compiled(x, lengths - 1)  # padding of four tokens for five
    program = torch.export.export(model, (x, lengths))
    torch.testing.assert_close(program.module()(x, lengths), model(x, lengths))
