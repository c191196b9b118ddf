"""The rows that checks give."""

from dataclasses import dataclass

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Row:
    """One check of one sample. kind: value (the error of one output or gradient) or a property.
    result: an output or gradient, or "all". status: ok, FAIL, refused with a reason, or skipped
    because there was no time. applies_to: a digest of the kernels, versions and architecture.
    """

    op: str
    backend: str
    device: str
    dtype: str
    sample: str
    result: str
    status: str
    error: float = 0.0
    allowed: float = 0.0
    torch_error: float | None = None
    message: str = ""
    kind: str = "value"
    applies_to: str = ""
