"""fastattn as SDPA's flash backend: the ops it overrides, and on a GPU SDPA itself."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastattn
from fastattn.integrations import sdpa

attention = pytest.importorskip("torch.nn.attention")
if not hasattr(attention, "register_flash_attention_impl"):
    pytest.skip("this torch has no list of implementations", allow_module_level=True)


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """The same functions under the CPU key, for which torch has none."""
    handle = sdpa.override("CPU")
    yield
    handle.remove()


@pytest.mark.parametrize("keys", [9, 13])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_the_overridden_ops(on_cpu: None, causal: bool, dropout_p: float, keys: int) -> None:
    """Their is_causal means "bottom_right", which torch's causal_lower_right relies on."""
    ops = torch.ops.aten
    q, weights = torch.randn(2, 2, 3, 9, 8).unbind()
    k, v = torch.randn(2, 2, 3, keys, 8).unbind()
    out, lse, _, _, M, N, seed, offset, _ = ops._scaled_dot_product_flash_attention(
        q, k, v, dropout_p, causal, scale=0.3
    )
    grads = ops._scaled_dot_product_flash_attention_backward(
        weights, q, k, v, out, lse, None, None, M, N, dropout_p, causal, seed, offset, scale=0.3
    )
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = fastattn.attention(
        *inputs, causal="bottom_right" if causal else False, scale=0.3, dropout_p=dropout_p,
        dropout_seed=seed.view(torch.int64)[:1] if dropout_p else None, return_lse=True,
    )  # fmt: skip
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    for gradient, wanted in zip(
        grads, torch.autograd.grad((expected * weights).sum(), inputs), strict=True
    ):
        torch.testing.assert_close(gradient, wanted)


def test_results_match_torchs_meta_functions(on_cpu: None) -> None:
    op = torch.ops.aten._scaled_dot_product_flash_attention
    for q in (torch.randn(2, 3, 9, 8), torch.randn(2, 9, 3, 8).transpose(1, 2)):
        with FakeTensorMode() as mode:
            described = op(*3 * [mode.from_tensor(q)], 0.3, True)
        for actual, expected in zip(op(q, q, q, 0.3, True), described, strict=True):
            if isinstance(actual, torch.Tensor):
                assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
                assert actual.stride() == expected.stride()
            else:
                assert actual == expected


def test_removal_restores_the_op() -> None:
    q = torch.randn(1, 2, 3, 8)
    sdpa.override("CPU").remove()
    with pytest.raises(NotImplementedError):
        torch.ops.aten._scaled_dot_product_flash_attention(q, q, q)


def test_torch_knows_the_name() -> None:
    sdpa.register()
    sdpa.register()
    assert sdpa.NAME in attention.list_flash_attention_impls()


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_on_a_gpu(causal: bool) -> None:
    q, k, v = torch.randn(3, 2, 4, 128, 64, device="cuda", dtype=torch.bfloat16).unbind()
    sdpa.register()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        attention.activate_flash_attention_impl(sdpa.NAME)
        try:
            actual = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        finally:
            attention.restore_flash_attention_impl()
    assert torch.equal(actual, fastattn.attention(q, k, v, causal=causal))
    torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2e-2)
