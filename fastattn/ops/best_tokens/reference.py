"""The logarithm of the sum of exponentials and the largest logits, by torch's functions."""

import torch
from torch import Tensor


def best_tokens(logits: Tensor, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    allowed = logits[:, first:]
    # On a GPU max is quicker than topk.
    best, tokens = allowed.max(-1, keepdim=True) if count == 1 else allowed.topk(count, -1)
    return torch.logsumexp(logits, -1), best, tokens + first
