"""LayerNorm and RMSNorm compared with PyTorch's; AddNorm."""

import pytest
import torch
from module_equivalence import assert_equivalent, label, pairwise, twins
from torch import nn
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

import fastattn.nn as fnn

E = 16
B, M = 3, 5
NORM_CASES = pairwise(
    name=("LayerNorm", "RMSNorm"), shape=((E,), (M, E), (63,)), affine=(True, False),
    leading=((), (3,), (2, 3), (0,)), dtype=(torch.float32, torch.bfloat16, torch.float64),
    transposed=(True, False),
)  # fmt: skip


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


def test_gradients_of_each_sample():
    """Parameters that override PyTorch's functions are handled by these."""
    reference, fast = twins("LayerNorm", E)
    x = torch.randn(B, E)
    for module in (reference, fast):
        call_for_per_sample_grads(module)(x).square().sum().backward()
    for expected, got in zip(reference.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(got.grad_sample, expected.grad_sample)


def test_layer_norm_without_bias_and_with_a_wrong_shape():
    reference, fast = twins("LayerNorm", E, bias=False)
    assert_equivalent(reference, fast, torch.randn(B, E))
    for x in (torch.randn(B, E + 1), torch.tensor(1.0)):
        with pytest.raises(RuntimeError) as expected:
            reference(x)
        with pytest.raises(RuntimeError) as got:
            fast(x)
        assert str(got.value) == str(expected.value)


class NaiveAddNorm(nn.Module):
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
    reference = NaiveAddNorm(shape)
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
