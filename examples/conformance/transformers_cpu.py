"""Reproduces failures of transformers' eager attention that the conformance page lists, without
fastattn: products of queries and keys above 65,504 overflow in fp16.

    python -m examples.conformance.transformers_cpu
"""

from types import SimpleNamespace

import torch
import transformers
from transformers.models.llama.modeling_llama import eager_attention_forward


def not_finite(amplitude: float, dtype: torch.dtype) -> int:
    """How many results are NaN or inf, of 2,080: for queries and keys of about `amplitude`."""
    torch.manual_seed(0)
    q, k = ((amplitude * torch.randn(1, 2, 65, 16)).to(dtype) for _ in range(2))
    v = torch.randn(1, 2, 65, 16).to(dtype)
    module = SimpleNamespace(num_key_value_groups=1, training=False)
    out, _ = eager_attention_forward(module, q, k, v, None, scaling=0.25, dropout=0.0)
    return int((~out.isfinite()).sum())


def main() -> None:
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for amplitude in (1.0, 300.0):
            count = not_finite(amplitude, dtype)
            print(f"{dtype}, queries and keys of about {amplitude:g}: {count} results not finite")


if __name__ == "__main__":
    main()
