"""The functions with which models of transformers compute attention, for the conformance of
implementations. Blocked pairs are finfo.min, as in the masks that these models make.
"""

import importlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.implementations import with_dense_mask

PEERS = ()


def _eager(
    model: str, q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: Any, sinks: Any, **options: Any
) -> Tensor:
    name = f"transformers.models.{model}.modeling_{model}"
    function = importlib.import_module(name).eager_attention_forward
    if mask is not None and mask.dtype == torch.bool:
        added = torch.zeros(mask.shape, dtype=q.dtype, device=q.device)
        mask = added.masked_fill(~mask, torch.finfo(q.dtype).min)
    groups = q.shape[1] // k.shape[1] if k.shape[1] else 1
    module = SimpleNamespace(num_key_value_groups=groups, training=False, sinks=sinks)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return function(module, q, k, v, mask, scaling=scale, dropout=0.0, **options)[0].transpose(1, 2)


@with_dense_mask
def llama(q: Tensor, k: Tensor, v: Tensor, *, mask: Any = None, scale: Any = None) -> Tensor:
    return _eager("llama", q, k, v, mask, scale, None)


@with_dense_mask
def gemma2(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Any = None, scale: Any = None, softcap: Any = None
) -> Tensor:
    return _eager("gemma2", q, k, v, mask, scale, None, softcap=softcap)


@with_dense_mask
def gpt_oss(
    q: Tensor, k: Tensor, v: Tensor, sinks: Any, *, mask: Any = None, scale: Any = None
) -> Tensor:
    if sinks is None:
        raise NotImplementedError("has sinks")
    return _eager("gpt_oss", q, k, v, mask, scale, sinks)
