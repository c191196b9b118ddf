"""Forms for `foreign_modules`: attention of T5 and its relatives in transformers.

They call the attention function that their config names, with a bias [1, H, M, N] made from a
table: if fastattn's function is chosen, the drop-in passes the table.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fastattn.integrations import huggingface
from fastattn.integrations.relative_bias import RelativeBias
from fastattn.nn.fusion import is_unmodified

Methods = dict[str, Any]  # of a drop-in
FORMS: list[tuple[str, Callable[[Any], Methods]]] = []


def _form(published: str) -> Callable[[Callable[[Any], Methods]], Callable[[Any], Methods]]:
    """Decorates a function that makes the drop-in's methods, given the class with the published
    code.
    """

    def add(make: Callable[[Any], Methods]) -> Callable[[Any], Methods]:
        FORMS.append((published, make))
        return make

    return add


_T5_BUCKETS = """
def _relative_position_bucket(
    relative_position, bidirectional=True, num_buckets=32, max_distance=128
):
    relative_buckets = 0
    if bidirectional:
        num_buckets //= 2
        relative_buckets += (relative_position > 0).to(torch.long) * num_buckets
        relative_position = torch.abs(relative_position)
    else:
        relative_position = -torch.min(relative_position, torch.zeros_like(relative_position))
    max_exact = num_buckets // 2
    is_small = relative_position < max_exact
    relative_position_if_large = max_exact + (
        torch.log(relative_position.float() / max_exact)
        / math.log(max_distance / max_exact)
        * (num_buckets - max_exact)
    ).to(torch.long)
    relative_position_if_large = torch.min(
        relative_position_if_large, torch.full_like(relative_position_if_large, num_buckets - 1)
    )
    relative_buckets += torch.where(is_small, relative_position, relative_position_if_large)
    return relative_buckets
"""
_UMT5_BUCKETS = """
def _relative_position_bucket(self, relative_position):
    relative_buckets = 0
    num_buckets = self.relative_attention_num_buckets
    max_distance = self.relative_attention_max_distance
    if not self.is_decoder:
        num_buckets //= 2
        relative_buckets += (relative_position > 0).to(torch.long) * num_buckets
        relative_position = torch.abs(relative_position)
    else:
        relative_position = -torch.min(relative_position, torch.zeros_like(relative_position))
    max_exact = num_buckets // 2
    is_small = relative_position < max_exact
    log_ratio = torch.log(relative_position.float() / max_exact) / math.log(
        max_distance / max_exact
    )
    log_ratio = log_ratio * (num_buckets - max_exact)
    relative_position_if_large = max_exact + log_ratio.to(torch.long)
    relative_position_if_large = torch.min(
        relative_position_if_large, torch.full_like(relative_position_if_large, num_buckets - 1)
    )
    relative_buckets += torch.where(is_small, relative_position, relative_position_if_large)
    return relative_buckets
"""


def _compute_bias(buckets: str) -> str:
    return f"""
def compute_bias(self, query_length, key_length, device=None, past_seen_tokens=0):
    if device is None:
        device = self.relative_attention_bias.weight.device
    context_position = (
        torch.arange(query_length, dtype=torch.long, device=device)[:, None] + past_seen_tokens
    )
    memory_position = torch.arange(key_length, dtype=torch.long, device=device)[None, :]
    relative_position = memory_position - context_position
    relative_position_bucket = self._relative_position_bucket({buckets})
    values = self.relative_attention_bias(relative_position_bucket)
    values = values.permute([2, 0, 1]).unsqueeze(0)
    return values
"""


def _t5_call(bidirectional: str) -> str:
    return f"""
        relative_position, bidirectional={bidirectional},
        num_buckets=self.relative_attention_num_buckets,
        max_distance=self.relative_attention_max_distance,
    """


@_form(_T5_BUCKETS + _compute_bias(_t5_call("(not self.is_decoder)")))
@_form(_UMT5_BUCKETS + _compute_bias("relative_position"))
def _t5(kind: Any) -> Methods:
    return _with_table(kind, lambda self: bool(self.is_decoder))


@_form(_T5_BUCKETS + _compute_bias(_t5_call("False")))
def _pix2struct(kind: Any) -> Methods:
    return _with_table(kind, lambda self: True)


def _with_table(kind: Any, is_causal: Callable[[Any], bool]) -> Methods:
    is_shared = "position_bias" in inspect.signature(kind.forward).parameters

    def compute_bias(self: Any, *args: Any, **kwargs: Any) -> Any:
        dense = functools.partial(kind.compute_bias, self, *args, **kwargs)
        given = inspect.signature(kind.compute_bias).bind(self, *args, **kwargs).arguments
        table, causal = self.relative_attention_bias, is_causal(self)
        distance = self.relative_attention_max_distance
        if not (_is_chosen(self) and _is_plain_table(table, distance, causal)):
            return dense()
        buckets: Any = "t5_causal" if causal else "t5"
        past = given.get("past_seen_tokens", 0)
        return RelativeBias(table.weight, buckets, distance, past, dense)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Without zeros [1, H, M, N] for a bias in cross-attention."""
        if _is_chosen(self) and not self.has_relative_attention_bias:
            if not is_shared:
                kwargs["has_zero_bias"] = True
            elif kwargs.get("position_bias", 0) is None:
                kwargs["position_bias"] = torch.empty(0)
        return kind.forward(self, *args, **kwargs)

    return {"compute_bias": compute_bias, "forward": forward}


def _is_chosen(module: Any) -> bool:
    return module.config._attn_implementation in huggingface.NAMES


def _is_plain_table(table: Any, distance: int, causal: bool) -> bool:
    """Whether `attention` has these buckets."""
    if not is_unmodified(table, nn.Embedding) or table.max_norm is not None:
        return False
    count = table.num_embeddings
    if causal:
        return bool(count >= 2 and distance > count // 2)
    return bool(count >= 4 and count % 2 == 0 and distance > count // 4)
