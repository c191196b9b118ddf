"""`attn_implementation="fastattn"` for the models of Hugging Face `transformers`.

`register()` registers an attention function and a mask function under two names, which differ as
transformers' own "sdpa" and "eager" do:

- "fastattn": masks are boolean, True = may attend, and where there is none, `module.is_causal` says
  whether attention is causal. A mask of padding alone is an expanded view of `[B, 1, 1, N]`. No
  mask is read to find out whether it can be dropped, which would synchronise with the GPU: the
  kernels skip empty tiles.
- "fastattn_eager": masks are explicit and additive, and no mask means that nothing is masked.
  Models without SDPA support are only known to be correct this way: their own code may add the mask
  to scores, and their `is_causal` may be wrong. For them "fastattn" means "fastattn_eager".

Queries with no allowed key, such as left padding, get zeros.

Shapes, as in transformers: query `[B, H, M, D]`, key `[B, K, N, D]`, value `[B, K, N, E]`, result
`[B, M, H, E]`.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fastattn import functional
from fastattn.integrations.relative_bias import RelativeBias

NAME = "fastattn"
EAGER_NAME = "fastattn_eager"
NAMES = (NAME, EAGER_NAME)
CACHED = "_fastattn_cached"  # of keys in a cache: the function that attends to them
_OLDEST = (5, 4)  # the first whose mask functions take `q_length` and `q_offset`
# Arguments that some models pass and `attention` would ignore.
_REFUSED = {
    "cache": "no paged cache",
    "indices": "no sparse attention by indices",
    "block_indices": "no sparse attention by block_indices",
    "sinks": "no sinks of each query",
}


# transformers.masking_utils after `register`: torch.compile cannot trace the import.
_masking_utils: Any = None


def register() -> None:
    """Registers `attn_implementation="fastattn"`, and "fastattn_eager", with `transformers`; may be
    called again.

    Raises ImportError without `transformers` 5.4 or newer.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"register needs the package transformers: {error}") from None
    version = transformers.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        wanted = ".".join(map(str, _OLDEST))
        raise ImportError(f"register needs transformers >= {wanted}, got {version}")
    global _masking_utils
    _masking_utils = importlib.import_module("transformers.masking_utils")
    transformers.AttentionInterface.register(NAME, attention_forward)
    transformers.AttentionMaskInterface.register(NAME, attention_mask)
    transformers.AttentionInterface.register(EAGER_NAME, eager_attention_forward)
    transformers.AttentionMaskInterface.register(EAGER_NAME, _masking_utils.eager_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | RelativeBias | None = None,
    has_zero_bias: bool = False,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function of `transformers`, on the `attention` op.

    attention_mask: bool (True = may attend) or additive, as for `attention`. position_bias: added
    to the scores, `[1 or B, H, M, N]` or T5's table, differentiable; an empty one and, with
    has_zero_bias, any is 0. softcap: as for `attention` (Gemma 2). s_aux: `[H]`, attention sinks
    (gpt-oss). With output_attentions the weights `[B, H, M, N]` after dropout are returned second.

    Raises NotImplementedError for paged caches and sparse attention that selects keys by other
    means than the mask.
    """
    for name, what in _REFUSED.items():
        if (given := kwargs.get(name)) is not None:
            got = given if isinstance(given, float) else type(given).__name__
            raise NotImplementedError(f"attn_implementation={NAME!r} has {what}, got {name}={got}")
    if (attend := getattr(key, CACHED, None)) is not None:
        if has_zero_bias or (isinstance(position_bias, Tensor) and position_bias.numel() == 0):
            position_bias = None
        return attend(query, key, value, position_bias, scale=scaling), None
    if query.shape[0] == 1 != key.shape[0]:  # queries that are parameters, without a batch
        query = query.expand(key.shape[0], -1, -1, -1)
    if key.shape[0] == 1 != query.shape[0]:  # one memory for all sentences
        key, value = (heads.expand(query.shape[0], -1, -1, -1) for heads in (key, value))
    if _is_eager(type(getattr(module, "config", None))):
        is_causal = False
    elif is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    causal = attention_mask is None and is_causal and query.shape[2] > 1
    M, N = query.shape[2], key.shape[2]
    if causal and M != N:
        # The alignment is unknown: queries may be the first positions of a cache or the last.
        raise ValueError(f"attention_mask must be given for causal {M} queries and {N} keys")
    options: dict[str, Any] = {"causal": causal, "softcap": softcap, "sinks": s_aux}
    if isinstance(position_bias, RelativeBias):
        if (table := position_bias.options(query, N)) is None:
            position_bias = position_bias.dense()
        else:
            options |= table
            position_bias = None
    if position_bias is not None and (has_zero_bias or position_bias.numel() == 0):
        position_bias = None
    options |= {"mask": _with_bias(attention_mask, position_bias), "scale": scaling}
    weights = None
    if output_attentions:
        out, weights = functional.attention_with_weights(
            query, key, value, dropout_p=dropout, **options
        )
    else:
        out = functional.attention(query, key, value, dropout_p=dropout, **options)
    return out.transpose(1, 2).contiguous(), weights


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """As `attention_forward`, but only the mask blocks keys: is_causal is not read."""
    return attention_forward(module, query, key, value, attention_mask, is_causal=False, **kwargs)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask function of `transformers`: bool `[B, 1, M, N]`, True = may attend. None where
    nothing is blocked or `is_causal` expresses the mask. For a model without SDPA support, what
    `masking_utils.eager_mask` returns.

    attention_mask: `[B, N]`, False = padding. The other arguments are those of
    `masking_utils.sdpa_mask`.

    Raises NotImplementedError for a model whose attention `transformers` cannot replace: its own
    attention would add this mask to the scores.
    """
    if _masking_utils is None:
        register()
    masking_utils = _masking_utils
    if not torch.compiler.is_compiling():
        _check_exchangeable(config)
    if mask_function is None:
        mask_function = masking_utils.causal_mask_function
    given: dict[str, Any] = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
    }
    if _is_eager(type(config)):
        return masking_utils.eager_mask(**given, config=config, **kwargs)  # type: ignore[no-any-return]
    causal_skip = kwargs.pop("allow_is_causal_skip", True)
    bidirectional_skip = kwargs.pop("allow_is_bidirectional_skip", False)
    if mask_function is masking_utils.bidirectional_mask_function:
        if attention_mask is None and bidirectional_skip:
            return None
        if attention_mask is not None and attention_mask.dim() == 2:
            padding: Tensor = masking_utils.prepare_padding_mask(  # type: ignore[assignment]
                attention_mask, kv_length, kv_offset
            )
            padding = padding[:, None, None, kv_offset : kv_offset + kv_length]
            # Expanded (a view), because some models combine it with other masks.
            return padding.expand(-1, -1, q_length, -1)
    if (
        causal_skip
        and mask_function is masking_utils.causal_mask_function
        and attention_mask is None
        and not isinstance(q_offset, Tensor)
        and kv_offset == 0
        and kv_length == q_length + q_offset
        and (q_offset == 0 or q_length == 1)
    ):
        return None
    return masking_utils.sdpa_mask(  # type: ignore[no-any-return]
        **given, allow_is_causal_skip=False, allow_is_bidirectional_skip=False, **kwargs
    )


def _with_bias(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    if bias is None or mask is None:
        return mask if bias is None else bias
    lowest = torch.finfo(bias.dtype).min
    if mask.dtype is torch.bool:
        return torch.where(mask, bias, lowest)
    # The sum could exceed the blocking threshold where the bias is positive.
    return torch.where(mask <= torch.finfo(mask.dtype).min, lowest, bias + mask)


def _check_exchangeable(config: Any) -> None:
    if not all(model._can_set_attn_implementation() for model in _models_of(type(config))):
        raise NotImplementedError(
            f"attn_implementation={NAME!r} needs a model whose attention transformers can "
            f"replace, got one of {type(config).__name__}"
        )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_eager(config: type) -> bool:
    """Whether models with this class of configuration have eager attention only."""
    models = _models_of(config)
    return bool(models) and not any(model._supports_sdpa for model in models)


def _models_of(config: type) -> list[Any]:
    """The loaded classes of models with this class of configuration, or with its next base class
    that has any.
    """
    # Classes of a notebook may be defined again.
    is_fixed = config.__module__.startswith(("transformers.", "builtins"))
    return (_cached_models_of if is_fixed else _found_models_of)(config)


def _found_models_of(config: type) -> list[Any]:
    by_config: dict[Any, dict[str, Any]] = {}
    found = [importlib.import_module("transformers").PreTrainedModel]
    for kind in found:
        found += kind.__subclasses__()
        # The newest of the classes with one name.
        by_config.setdefault(getattr(kind, "config_class", None), {})[kind.__qualname__] = kind
    known = next((by_config[base] for base in config.__mro__ if base in by_config), {})
    return [*known.values()]


_cached_models_of = functools.cache(_found_models_of)
