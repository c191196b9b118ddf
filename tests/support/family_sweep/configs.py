"""Tiny configs and random weights for any model of `transformers`, by the names of their fields.

Three sizes are tried in this order: "tiny" gives widths fixed values, "narrow" divides them by 4,
"shallow" reduces only the depth, the vocabulary and the numbers of experts and positions.
"""

import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

VOCABULARY = 160
SIZES = ("tiny", "narrow", "shallow")
_SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id",
            "sep_token_id", "is_encoder_decoder")  # fmt: skip
# Fields of every config that keep their defaults.
_BASE = {part.name for part in fields(PretrainedConfig)} - set(_SPECIAL) | {"model_type"}
_LAYERS = (
    r"(^|_)(num_|n_)?(hidden_|encoder_|decoder_|attention_|transformer_|text_|entity_|mtp_|stage_"
    r"|nextn_predict_)*layers?$|^depth$|n_layers?$|num_.*layers$|_depth$|num_(.*_)?blocks$|n_blocks"
)
_HEADS = "attention_heads|^num_heads|n_heads?$"
_OUTPUTS = "out_indices|segmentation_indices|out_layers"
_SERIES = {"prediction_length": 6, "context_length": 14, "lags_sequence": [1, 2],
           "num_time_features": 2}  # fmt: skip
_EFFICIENT_NET = {"depth_coefficient": 1.0, "width_coefficient": 0.5}
# Values that no rule gives, by model type.
_OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("informer", "time_series_transformer", "autoformer"), _SERIES),
    **dict.fromkeys(("efficientnet", "align_vision_model"), _EFFICIENT_NET),
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "bamba": {"attn_layer_indices": [1]},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "chameleon": {"vocabulary_map": {"<image>": 150}},
    "esm": {"pad_token_id": 1, "mask_token_id": 2, "vocab_size": VOCABULARY},
    "beit": {"out_indices": [1, 2, 3, 4], "num_hidden_layers": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
}
_Rule = Callable[[int, "_Shrinker"], int]


def _at_most(limit: int) -> _Rule:
    return lambda v, _: min(v, limit)


# Rules for integers by the name of the field; the first pattern that is found decides.
_ALL_SIZES: dict[str, _Rule] = {
    "^vocab_size|vocab_size$": _at_most(VOCABULARY),
    _LAYERS: lambda v, s: min(v, s.layers),
    "interval|frequency|every|_freq$|step$": _at_most(2),
    r"num_experts_per|top_?k$|num_selected|experts_per|moe_k$": _at_most(2),
    "^(?!.*(ssm|mamba)).*(n_groups?$|topk_group|expert_groups?$|num_expert_group)":
        lambda v, s: 1 if any("experts" in name for name in s.values) else v,
    "^(?=.*shared).*(experts|n_routed)": lambda v, _: min(v, 1) if v < 10 else 32,
    "^(?=.*(intermediate|dim|size)).*(experts|n_routed)": lambda v, _: 32,
    "experts|num_local_exp|n_routed": _at_most(8),
    "max_(position|target|source|seq)|^max_length|n_positions|n_ctx|seq_length|context_length":
        _at_most(256),
    "(sliding|attention)_window|window$|local_attention|attention_chunk_size":
        lambda v, _: 6 if v > 4 else v,
}  # fmt: skip
_KV_HEADS: dict[str, _Rule] = {
    "(key_value|kv)_heads|multi_query_group_num|num_kv|n_head_kv":
        lambda v, s: 1 if v == 1 else 4 if v in s.integers(_HEADS) else 2,
}  # fmt: skip
_RULES: dict[str, dict[str, _Rule]] = {
    "tiny": _ALL_SIZES | _KV_HEADS | {
        "heads$|_heads|n_head": _at_most(4),
        "head_dim|d_kv$|kv_channels|head_size|d_head|kv_dim$": _at_most(16),
        "rank$": _at_most(32),
        "intermediate|ffn|d_ff|n_inner|mlp_dim|inner_size|feedforward": _at_most(96),
        "image_size|^img_size|input_size": lambda v, s: min(v, 64 if s.small_patches() else 32),
        "patch_size$": _at_most(8),
        "window_size": _at_most(4),
        "num_queries|num_latents|query_tokens|num_image_tokens|mm_tokens|num_query": _at_most(8),
        "num_frames|num_labels": _at_most(4),
        "pe_dim|max_ep_len": lambda v, _: v,
        "bins|channels$|kernel|stride|padding|factor|merge|temporal|groups|conv$|_bits|codebook":
            _at_most(128),
        "hidden_size|d_model|n_embd|embedding_size|_dim$|^dims?$|hidden_dim|_size$|width|proj":
            lambda v, _: 64 if v >= 48 else v,
    },
    "narrow": _ALL_SIZES | _KV_HEADS | {
        "heads$|_heads|n_head": lambda v, _: v if v % 4 else max(1, v // 4),
        "^(?!.*(image|patch|head_dim)).*(hidden_size|d_model|n_embd|embed|_dim$|^dim$|intermediate"
        "|ffn|d_ff|width|channels|_size$|rank)": lambda v, _: v // 4 if v >= 64 else v,
    },
    "shallow": _ALL_SIZES,
}  # fmt: skip
# Optional numbers whose defaults have the original sizes.
_WHERE_NONE = {"^vocab_size$": VOCABULARY, "num_experts_per_tok": 2, "n_shared_experts": 1,
               "n_routed_experts|num_experts$|num_local_experts": 8}  # fmt: skip


def arguments(kind: type[Any], size: str) -> dict[str, Any]:
    """Arguments for the config class `kind`."""
    return _Shrinker(kind(), size, {}).arguments()


class _Shrinker:
    """Makes the arguments of one config from another one. Nested configs share `tokens`: the new
    numbers of special tokens. layers: two, or one for each kind of layer or output.
    """

    def __init__(self, base: Any, size: str, tokens: dict[int, int], depth: int = 0) -> None:
        self.kind, self.size, self.tokens, self.depth = type(base), size, tokens, depth
        names = [*(part.name for part in fields(base)), *(x for x in _SPECIAL if hasattr(base, x))]
        self.values = {name: _read(base, name) for name in names}
        depths, needed = self.integers(_LAYERS), [2]
        for name, value in self.values.items():
            if isinstance(value, list | tuple) and value:
                if len(value) in depths and all(isinstance(kind, str) for kind in value):
                    needed.append(len(set(value)))
                if re.search(_OUTPUTS + "|reassemble", name):
                    needed.append(len(value))
        self.layers = max(needed)

    def integers(self, pattern: str) -> list[int]:
        return [v for k, v in self.values.items() if re.search(pattern, k) and type(v) is int]

    def small_patches(self) -> bool:
        patch = self.values.get("patch_size")
        pyramid = isinstance(self.values.get("depths"), list | tuple)
        return pyramid or (isinstance(patch, int) and patch < 8)

    def arguments(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, value in self.values.items():
            if name in _BASE or name.startswith("_"):
                continue
            parts = ("vision_config", "audio_config", "text_config")
            if value is None and self.depth == 0 and name in parts:
                value = _default((getattr(self.kind, "sub_configs", None) or {}).get(name))
            if isinstance(value, PretrainedConfig):
                nested = _Shrinker(value, self.size, self.tokens, self.depth + 1)
                out[name] = nested.arguments()
                out[name] |= {"model_type": value.model_type} if value.model_type else {}
            else:
                out[name] = self._value(name, value)
        if self.size == "tiny":
            _reconcile(out, self.kind.model_type)
        return out | _OVERRIDES.get(self.kind.model_type, {})

    def _value(self, name: str, value: Any) -> Any:
        if re.search(r"(?<!num)(_|^)(token_index|ids?)$", name):
            many = isinstance(value, list | tuple)
            return [self._token(x) for x in value] if many else self._token(value)
        if value is None and self.size == "tiny":
            return next((v for pattern, v in _WHERE_NONE.items() if re.search(pattern, name)), None)
        if type(value) is int:
            rules = _RULES[self.size].items()
            return next((rule(value, self) for p, rule in rules if re.search(p, name)), value)
        if isinstance(value, list | tuple) and value:
            return self._sequence(name, list(value))
        if isinstance(value, dict) and self.size == "tiny":
            if "mrope_section" in getattr(self.kind, "ignore_keys_at_rope_validation", ()):
                value = {"mrope_section": [2, 1, 1]} | value
            return _rope(value, self.values.get("partial_rotary_factor") or 1)
        return value

    def _token(self, token: Any) -> Any:
        if type(token) is not int or token < 100:
            return token
        return self.tokens.setdefault(token, VOCABULARY - 1 - len(self.tokens))

    def _sequence(self, name: str, value: list[Any]) -> list[Any]:
        """A list with an element for each layer, stage or dimension."""
        count, integers = len(value), all(type(x) is int for x in value)
        if re.search(_OUTPUTS, name) and integers and max(value) > self.layers:
            first = (
                self.layers - count + 1 if "stage" in str(self.values.get("out_features")) else 0
            )
            return list(range(first, first + count))
        if self.layers < count in self.integers(_LAYERS):
            kinds = list(dict.fromkeys(value)) if isinstance(value[0], str) else value
            return (kinds * self.layers)[: self.layers]
        if not integers:
            return value
        if re.search("depths|layers|num_block", name) and not re.search("ind|out|stage", name):
            return [min(x, 1 if "depth" in name else 2) for x in value]
        if self.size == "shallow":
            return value
        if name.endswith("conv_dim"):
            return [32] * count
        if re.search("image_size|img_size|input_size", name):
            return [min(x, 64) for x in value]
        widths = (
            "hidden_sizes|embed_dims?$|^dims?|hidden_dim|encoder_hidden|decoder_.*sizes|channels"
        )
        if re.search(widths, name) and max(value) >= 32:
            heads = self.values.get("num_attention_heads") or self.values.get("num_heads")
            if isinstance(heads, list | tuple) and len(heads) == count:
                return [8 * x if x else 16 for x in heads]
            return [max(8, x * 16 // (min(value) or x)) for x in value]
        return value


def _read(config: Any, name: str) -> Any:
    try:
        return getattr(config, name)
    except Exception:  # derived from fields that are not set
        return vars(config).get(name)


def _default(kind: Any) -> Any:
    """The config of a part that is left out by default; None for AutoConfig, which has none."""
    try:
        return kind()
    except Exception:
        return None


def _rope(value: dict[str, Any], factor: float) -> dict[str, Any]:
    """A dict of fields, with the lengths of rotary embeddings for heads of 16."""
    half = int(8 * value.get("partial_rotary_factor", factor))
    out = dict(value)
    for name, part in value.items():
        if name == "mrope_section":
            sections = [max(1, x * half // sum(part)) for x in part]
            out[name] = [sections[0] + half - sum(sections), *sections[1:]]
        elif name in ("short_factor", "long_factor"):
            out[name] = part[:half]
        elif isinstance(part, dict):
            out[name] = _rope(part, factor)
    return out


def _reconcile(out: dict[str, Any], model_type: str) -> None:
    """Sets fields that depend on each other: state space models, latent attention, stages."""
    if isinstance(out.get("num_heads"), list) and isinstance(out.get("embed_dim"), int):
        out["embed_dim"] = 8 * out["num_heads"][0]
    width = out.get("hidden_size", 64)
    mamba = next((name for name in ("mamba_n_heads", "mamba_num_heads") if name in out), None)
    if mamba is not None:
        out[mamba] = int((out.get("mamba_expand", out.get("expand")) or 2) * width) // 16
        wanted = dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16)
        wanted |= dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_d_groups"), 1)
        out |= {k: v for k, v in wanted.items() if isinstance(out.get(k), int)}
    elif model_type == "mamba2" or {"state_size", "num_heads", "head_dim"} <= out.keys():
        heads = int(out.get("expand", 2) * width) // 16
        out |= {"num_heads": heads, "head_dim": 16, "n_groups": 1}
    if "qk_rope_head_dim" in out:
        latent = ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        out |= {name: 16 for name in latent if out.get(name)}
        for name in ("qk_head_dim", "head_dim"):
            out.pop(name, None)


_QUERY_KEY = re.compile(
    r"(^|[._])(q|k|qkv|kv|wqkv|wq|wk|to_q|to_k|query|key|query_key_value|in|c_attn|qkv_a|q_a|q_b)"
    r"(_proj|_lin|)(\.linear)?([._]weight)?$", re.I
)  # fmt: skip


@torch.no_grad()
def reinitialise(model: nn.Module) -> nn.Module:
    """Random weights with which attention matters: as a rule, it is nearly uniform before training.

    Matrices get a standard deviation of 1 / sqrt(fan-in), those of queries and keys twice that;
    gates and scales that start at 0 become 0.3.
    """
    generator = torch.Generator().manual_seed(0)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, weight in model.named_parameters():
        if not weight.is_floating_point() or weight.numel() == 0:
            continue
        noise = torch.randn(weight.shape, generator=generator)
        if weight.dim() >= 2:
            whole = weight.dim() != 3 or "conv" in name or "patch" in name
            fan_in = weight[0].numel() if whole else weight.shape[-1]  # of 3: one matrix an expert
            gain = 2.0 if _QUERY_KEY.search(name) else 1.0
            weight.copy_(noise * (0.5 if id(weight) in tables else gain / fan_in**0.5))
        else:
            closed = re.search("gate|alpha|gamma|lambda|layer_?scale", name) is not None
            weight.add_(noise * 0.1 + (0.3 if closed and weight.abs().max() < 0.05 else 0.0))
        if re.search("A_log|dt_bias|time_decay", name):
            weight.clamp_(-2, 2)
    for name, buffer in model.named_buffers():
        if "running_var" in name:
            buffer.clamp_(0.5)
    return model.eval()
