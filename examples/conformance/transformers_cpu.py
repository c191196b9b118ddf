"""Reproduces failures of transformers' eager attention that the conformance page lists, without
fastattn. Products of queries and keys above 65,504 overflow in fp16; scores and the numbers of a
mask are rounded to the dtype before the softmax; gpt-oss rounds the scores of a row and its sink
after their maximum is subtracted.

    python -m examples.conformance.transformers_cpu
"""

from types import SimpleNamespace

import torch
import transformers
from torch import Tensor
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.llama.modeling_llama import eager_attention_forward


def not_finite(amplitude: float, dtype: torch.dtype) -> int:
    """How many results are NaN or inf, of 2,080: for queries and keys of about `amplitude`."""
    torch.manual_seed(0)
    q, k = ((amplitude * torch.randn(1, 2, 65, 16)).to(dtype) for _ in range(2))
    v = torch.randn(1, 2, 65, 16).to(dtype)
    module = SimpleNamespace(num_key_value_groups=1, training=False)
    out, _ = eager_attention_forward(module, q, k, v, None, scaling=0.25, dropout=0.0)
    return int((~out.isfinite()).sum())


def error_with(dtype: torch.dtype, amplitude: float = 1.0, number: float = 0.0) -> float:
    """The largest error of one query of 64 heads over 300 keys with a mask that adds the number to
    all scores, which leaves the softmax as it is.
    """
    torch.manual_seed(1)
    q, k, v = (
        (a * torch.randn(1, 64, m, 16)).to(dtype) for a, m in ((amplitude, 1), (1, 300), (1, 300))
    )
    module, mask = SimpleNamespace(num_key_value_groups=1, training=False), None
    if number:
        mask = torch.full((1, 1, 1, 300), number, dtype=dtype)
    out, _ = eager_attention_forward(module, q, k, v, mask, scaling=0.25, dropout=0.0)
    exact = ((q.double() @ k.double().mT) * 0.25).softmax(-1) @ v.double()
    return float((out.transpose(1, 2) - exact).abs().nan_to_num(torch.inf).max())


def gradients_beside_a_sink(dtype: torch.dtype, sink: float) -> list[float]:
    """The errors of gpt-oss's dk and dv beside a sink, relative to the largest element."""
    torch.manual_seed(2)
    tensors = [torch.randn(1, 2, 65, 16).to(dtype) for _ in range(3)]

    def gradients(tensors: list[Tensor]) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in tensors]
        sinks = torch.full((2,), sink, dtype=leaves[0].dtype)
        module = SimpleNamespace(num_key_value_groups=1, training=False, sinks=sinks)
        out, _ = gpt_oss.eager_attention_forward(module, *leaves, None, scaling=0.25, dropout=0.0)
        return torch.autograd.grad(out, leaves[1:], torch.ones_like(out))

    pairs = zip(gradients(tensors), gradients([x.double() for x in tensors]), strict=True)
    return [float((x - y).abs().max() / y.abs().max()) for x, y in pairs]


def main() -> None:
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for amplitude in (1.0, 300.0):
            count = not_finite(amplitude, dtype)
            print(f"{dtype}, queries and keys of about {amplitude:g}: {count} results not finite")
        for amplitude, number in ((1.0, 0.0), (1e3, 0.0), (1.0, -1e4)):
            error = error_with(dtype, amplitude, number)
            print(
                f"{dtype}, queries of {amplitude:g}, mask of {number:g}: largest error {error:.2g}"
            )
    for dtype in (torch.bfloat16, torch.float32):
        errors = ", ".join(f"{e:.2g}" for e in gradients_beside_a_sink(dtype, 30.0))
        print(f"{dtype}, gpt-oss with sinks of 30: relative errors of dk, dv {errors}")


if __name__ == "__main__":
    main()
