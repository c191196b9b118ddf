"""Encoder-decoders of Hugging Face `transformers` as `Seq2SeqTransformer`.

`from_huggingface` converts a model or a folder that `save_pretrained` wrote. `ARCHITECTURES` says,
as data, how the configuration and the parameters of each model type are named there; everything
that differs between the types is an option of `ModelConfig`. The result has the same token ids,
logits and gradients, and needs no transformers: it is trained, saved and loaded as any other.
`translator_from_huggingface` adds the folder's tokenizer.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from .generation import Translator
from .model import ModelConfig, Seq2SeqTransformer
from .pretrained_tokenizer import load_pretrained_tokenizer, require_transformers

# Activation functions of transformers by their name there.
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
GATED = {"relu": "reglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "silu": "swiglu"}


@dataclass(frozen=True)
class Architecture:
    """The names of a model type in transformers.

    Attributes:
        keys: option of `ModelConfig` -> key of the configuration.
        options: options of `ModelConfig` that all models of the type have.
        equal: keys of the configuration that must have the value of another.
        parameters: beginning of the name of a parameter or buffer -> the beginning there, or
            several whose tensors are joined along the first dimension. `{}` is a layer's number.
        gated: `parameters` of models with gated feed-forward networks.
        skipped_positions: rows of a learned table before the first position.
    """

    keys: Mapping[str, str]
    options: Mapping[str, Any]
    parameters: Mapping[str, tuple[str, ...]]
    equal: Mapping[str, str] = field(default_factory=dict)
    gated: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    skipped_positions: int = 0


def _layers(
    theirs: str, attentions: Mapping[str, tuple[str, str]], others: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """Parameters of the layers of both stacks.

    theirs: the beginning of a layer's name, `{stack}` and `{}` inserted. attentions: attention ->
    its name and the names of its projections. others: module -> its name.
    """
    found: dict[str, tuple[str, ...]] = {}
    for name, (module, projections) in {
        **attentions,
        **{n: (o, "") for n, o in others.items()},
    }.items():
        stack, _, part = name.partition(".")
        prefix = theirs.format("{}", stack=stack) + module + "."
        own = f"transformer.{stack}.layers.{{}}.{part}."
        if not projections:
            found[own] = (prefix,)
            continue
        q, k, v, out = projections.split()
        found[own + "in_proj_"] = tuple(f"{prefix}{name}." for name in (q, k, v))
        found[own + "out_proj."] = (f"{prefix}{out}.",)
    return found


# BART and the models that share its layers

_BART_KEYS = {
    "vocabulary": "vocab_size",
    "width": "d_model",
    "heads": "encoder_attention_heads",
    "encoder_layers": "encoder_layers",
    "decoder_layers": "decoder_layers",
    "ffn_width": "encoder_ffn_dim",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "activation_dropout": "activation_dropout",
    "max_length": "max_position_embeddings",
}
_BART_EQUAL = {
    "decoder_attention_heads": "encoder_attention_heads",
    "decoder_ffn_dim": "encoder_ffn_dim",
}
_PROJECTIONS = "q_proj k_proj v_proj out_proj"
_BART_PARAMETERS = {
    **_layers(
        "model.{stack}.layers.{}.",
        {
            "encoder.self_attn": ("self_attn", _PROJECTIONS),
            "decoder.self_attn": ("self_attn", _PROJECTIONS),
            "decoder.multihead_attn": ("encoder_attn", _PROJECTIONS),
        },
        {
            "encoder.norm1": "self_attn_layer_norm",
            "encoder.norm2": "final_layer_norm",
            "decoder.norm1": "self_attn_layer_norm",
            "decoder.norm2": "encoder_attn_layer_norm",
            "decoder.norm3": "final_layer_norm",
            **{f"{stack}.linear1": "fc1" for stack in ("encoder", "decoder")},
            **{f"{stack}.linear2": "fc2" for stack in ("encoder", "decoder")},
        },
    ),
    "transformer.encoder.norm.": ("model.encoder.layer_norm.",),
    "transformer.decoder.norm.": ("model.decoder.layer_norm.",),
    "embedding.": ("model.encoder.embed_tokens.",),
    "target_embedding.": ("model.decoder.embed_tokens.",),
    "positions.": ("model.encoder.embed_positions.",),
    "target_positions.": ("model.decoder.embed_positions.",),
    "source_norm.": ("model.encoder.layernorm_embedding.",),
    "target_norm.": ("model.decoder.layernorm_embedding.",),
    "head.": ("lm_head.",),
    "head_bias": ("final_logits_bias",),
}
_SINUSOIDS = {"positions": "sinusoidal", "sinusoid_halves": True}
_TABLES = {"positions": "learned", "shared_positions": False, "embedding_norm": True}
_POST_NORM = {"norm_first": False, "final_norm": False}


def _bart(options: Mapping[str, Any], skipped_positions: int = 0) -> Architecture:
    options = {"padding_gradient": False, "embedding_scale": 1.0, "norm_first": True, **options}
    return Architecture(
        _BART_KEYS, options, _BART_PARAMETERS, _BART_EQUAL, skipped_positions=skipped_positions
    )


# T5

_T5_PROJECTIONS = "q k v o"
_T5_PARAMETERS = {
    **_layers(
        "{stack}.block.{}.layer.",
        {
            "encoder.self_attn": ("0.SelfAttention", _T5_PROJECTIONS),
            "decoder.self_attn": ("0.SelfAttention", _T5_PROJECTIONS),
            "decoder.multihead_attn": ("1.EncDecAttention", _T5_PROJECTIONS),
        },
        {
            "encoder.norm1": "0.layer_norm",
            "encoder.norm2": "1.layer_norm",
            "decoder.norm1": "0.layer_norm",
            "decoder.norm2": "1.layer_norm",
            "decoder.norm3": "2.layer_norm",
            "encoder.linear1": "1.DenseReluDense.wi",
            "encoder.linear2": "1.DenseReluDense.wo",
            "decoder.linear1": "2.DenseReluDense.wi",
            "decoder.linear2": "2.DenseReluDense.wo",
        },
    ),
    # A stack's norm is followed by dropout.
    "transformer.encoder.norm.0.": ("encoder.final_layer_norm.",),
    "transformer.decoder.norm.0.": ("decoder.final_layer_norm.",),
    # The layers of a stack share the table of the first.
    **{
        f"transformer.{stack}.layers.{{}}.self_attn.positions.relative_bias": (
            f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        )
        for stack in ("encoder", "decoder")
    },
    "embedding.": ("encoder.embed_tokens.",),
    "target_embedding.": ("decoder.embed_tokens.",),
    "head.": ("lm_head.",),
}
_T5_GATED = {
    f"transformer.{stack}.layers.{{}}.linear1.": tuple(
        f"{stack}.block.{{}}.layer.{number}.DenseReluDense.wi_{part}." for part in (0, 1)
    )
    for stack, number in (("encoder", 1), ("decoder", 2))
}
# Also mT5, whose decoder does not scale its output.
T5 = Architecture(
    keys={
        "vocabulary": "vocab_size",
        "width": "d_model",
        "heads": "num_heads",
        "head_dim": "d_kv",
        "encoder_layers": "num_layers",
        "decoder_layers": "num_decoder_layers",
        "ffn_width": "d_ff",
        "dropout": "dropout_rate",
        "relative_buckets": "relative_attention_num_buckets",
        "relative_distance": "relative_attention_max_distance",
        "norm_eps": "layer_norm_epsilon",
    },
    options={
        "positions": "t5",
        "max_length": 512,
        "norm": "rms",
        "norm_first": True,
        "final_dropout": True,
        "bias": False,
        "attention_scale": 1.0,
        "embedding_scale": 1.0,
    },
    parameters=_T5_PARAMETERS,
    gated=_T5_GATED,
)

ARCHITECTURES = {
    "bart": _bart({**_TABLES, **_POST_NORM}, skipped_positions=2),
    # Also NLLB.
    "m2m_100": _bart({**_SINUSOIDS, "sinusoid_inclusive": True, "first_position": 2}),
    "marian": _bart({**_SINUSOIDS, **_POST_NORM}),
    "mbart": _bart(_TABLES, skipped_positions=2),
    "mt5": T5,
    "pegasus": _bart(_SINUSOIDS),
    "t5": T5,
}


def from_huggingface(
    model_or_folder: nn.Module | Path | str,
    *,
    begin: int | None = None,
    max_length: int | None = None,
) -> Seq2SeqTransformer:
    """Return a model of transformers as a `Seq2SeqTransformer` with copies of its parameters.

    The logits are the same for the same token ids and padding on the right, and so are gradients
    and, without dropout, training steps. The model types are the keys of `ARCHITECTURES`; what a
    model has beyond the options of `ModelConfig` raises ValueError with the key and the value of
    its configuration. Dropping whole layers in training is not supported: a configuration that asks
    for it causes a warning. The result has the mode, the dtype and the device of the model; from a
    folder it is in fp32, in evaluation mode.

    Args:
        model_or_folder: a model with a language modelling head, such as `MarianMTModel`, or a
            folder with its `config.json` and parameters.
        begin: the decoder's first token, default the configuration's `decoder_start_token_id`.
        max_length: most tokens of a sentence, default the number of positions of the model; 512
            for T5, which has no limit.
    """
    require_transformers("from_huggingface")
    model: Any = model_or_folder
    if not isinstance(model_or_folder, nn.Module):
        model = _load(Path(model_or_folder))
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    architecture = ARCHITECTURES.get(kind)
    if architecture is None:
        raise ValueError(f"model_type must be one of {sorted(ARCHITECTURES)}, got {kind!r}")
    state = model.state_dict()
    config = _config(model, architecture, state, begin=begin, max_length=max_length)
    converted = Seq2SeqTransformer(config)
    parameters = _parameters(converted, architecture, state)
    weight = parameters["embedding.weight"]
    converted.to(weight.device, weight.dtype).load_state_dict(parameters)
    return converted.train(model.training)


def translator_from_huggingface(
    folder: Path | str,
    *,
    source_language: str | None = None,
    target_language: str | None = None,
    max_length: int | None = None,
    device: torch.device | str = "cpu",
) -> Translator:
    """Return the model and the tokenizer of a folder that transformers wrote.

    source_language, target_language: for a model of several languages (mBART, M2M100, NLLB), as its
    tokenizer names them, for example "en_XX", "en" or "eng_Latn". max_length: as in
    `from_huggingface`.
    """
    folder = Path(folder)
    theirs = _load(folder)
    loaded = load_pretrained_tokenizer(
        folder,
        source_language=source_language,
        target_language=target_language,
        forced=_generation_value(theirs, "forced_bos_token_id"),
        end=_token(theirs, "eos_token_id"),
    )
    model = from_huggingface(theirs, begin=loaded.begin, max_length=max_length)
    return Translator(model.to(device).eval(), loaded.tokenizer)


def _load(folder: Path) -> Any:
    require_transformers("a folder of transformers")
    import transformers

    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"the model folder must be one that transformers wrote, got {folder}, which has no "
            "config.json"
        )
    config = transformers.AutoConfig.from_pretrained(folder)
    if config.model_type not in ARCHITECTURES:
        raise ValueError(
            f"model_type must be one of {sorted(ARCHITECTURES)}, got {config.model_type!r} in "
            f"{folder}"
        )
    load = transformers.AutoModelForSeq2SeqLM.from_pretrained
    return load(folder, dtype=torch.float32).eval()


def _generation_value(model: Any, key: str) -> Any:
    """A value of the configuration, or of the generation configuration if there is none."""
    value = getattr(model.config, key, None)
    return getattr(getattr(model, "generation_config", None), key, None) if value is None else value


def _token(model: Any, key: str) -> int:
    value = _generation_value(model, key)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, int):
        raise ValueError(f"{key} must be one token, got {value!r}")
    return value


def _config(
    model: Any,
    architecture: Architecture,
    state: Mapping[str, Tensor],
    *,
    begin: int | None,
    max_length: int | None,
) -> ModelConfig:
    theirs = model.config
    for key, other in architecture.equal.items():
        value, wanted = getattr(theirs, key, None), getattr(theirs, other)
        if value is not None and value != wanted:
            raise ValueError(f"{key} must be {other}, {wanted}, got {value}")
    for key in ("encoder_layerdrop", "decoder_layerdrop"):
        if getattr(theirs, key, 0.0):
            warnings.warn(f"{key}={getattr(theirs, key)} is not applied in training", stacklevel=3)
    values = dict(architecture.options)
    for option, key in architecture.keys.items():
        values[option] = getattr(theirs, key)
    values["pad"], values["end"] = _token(model, "pad_token_id"), _token(model, "eos_token_id")
    values["begin"] = _token(model, "decoder_start_token_id") if begin is None else begin
    if max_length is not None:
        limit = values.get("max_length")
        if values["positions"] == "learned" and limit is not None and max_length > limit:
            key = architecture.keys["max_length"]
            raise ValueError(f"max_length must be at most {key}, {limit}, got {max_length}")
        values["max_length"] = max_length
    values["activation"] = _activation(theirs)
    values["tied"] = _tying(architecture, state)
    if (count := getattr(theirs, "decoder_vocab_size", None)) not in (None, theirs.vocab_size):
        values["target_vocabulary"] = count
    # T5 with one matrix for input and output; mT5 does not read this key.
    if theirs.model_type == "t5" and theirs.scale_decoder_outputs:
        values["head_scale"] = values["width"] ** -0.5
    if getattr(theirs, "scale_embedding", False):
        values["embedding_scale"] = math.sqrt(values["width"])
    bias = state.get("final_logits_bias")
    values["head_bias"] = bias is not None and bool(bias.any())
    return ModelConfig(**values)


def _activation(theirs: Any) -> str:
    key = "feed_forward_proj" if hasattr(theirs, "feed_forward_proj") else "activation_function"
    name = getattr(theirs, "dense_act_fn", None) or getattr(theirs, key)
    if name not in ACTIVATIONS:
        raise ValueError(
            f"{key} must be one of {sorted(ACTIVATIONS)}, got {getattr(theirs, key)!r}"
        )
    known = ACTIVATIONS[name]
    return GATED[known] if getattr(theirs, "is_gated_act", False) else known


def _tying(architecture: Architecture, state: Mapping[str, Tensor]) -> bool | str:
    """Which of source embedding, target embedding and head are one tensor: `ModelConfig.tied`."""
    source, target, head = (
        state[architecture.parameters[name][0] + "weight"].data_ptr()
        for name in ("embedding.", "target_embedding.", "head.")
    )
    if source == target:
        return True if head == target else "embeddings"
    return "target" if head == target else False


def _parameters(
    model: Seq2SeqTransformer, architecture: Architecture, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The `state_dict` of `model` from that of transformers, which must be used completely."""
    names = dict(architecture.parameters)
    if "glu" in model.config.activation:
        names.update(architecture.gated)
    found, used = {}, set()
    for name, own in model.state_dict().items():
        number = re.search(r"\.layers\.(\d+)\.", name)
        pattern = name if number is None else name.replace(number[0], ".layers.{}.")
        prefix = next(p for p in names if pattern.startswith(p))
        rest = pattern[len(prefix) :]
        sources = [p.format(number and number[1]) + rest for p in names[prefix]]
        if missing := [source for source in sources if source not in state]:
            raise ValueError(f"the model must have the parameters {missing} for {name}")
        used.update(sources)
        tensors = [state[source] for source in sources]
        tensor = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        if name.endswith("positions.weight"):
            tensor = tensor[architecture.skipped_positions :][: len(own)]
        elif name.endswith("relative_bias"):
            tensor = tensor.T
        if tensor.numel() != own.numel():
            raise ValueError(
                f"{' and '.join(sources)} must be plain parameters of shape {list(own.shape)}, "
                f"got {list(tensor.shape)}"
            )
        found[name] = tensor.reshape(own.shape)
    _require_used(model, state, used)
    return found


_OWN_EMBEDDINGS = {f"model.{stack}.embed_tokens.weight" for stack in ("encoder", "decoder")}


def _require_used(model: Seq2SeqTransformer, state: Mapping[str, Tensor], used: set[str]) -> None:
    addresses = {state[name].data_ptr() for name in used}
    for name, tensor in state.items():
        if name in used or tensor.data_ptr() in addresses:
            continue
        if name.endswith("embed_positions.weight") and model.config.positions == "sinusoidal":
            table = cast(Any, model.positions).table[: len(tensor)].to(tensor)
            if torch.allclose(tensor[: len(table)], table, atol=1e-2):
                continue
            raise ValueError(f"{name} must hold sinusoids, got other positions")
        if name == "final_logits_bias" and not model.config.head_bias:
            continue  # zeros
        if name == "model.shared.weight" and used.issuperset(_OWN_EMBEDDINGS):
            continue  # an embedding that no forward reads
        raise ValueError(f"the model has a parameter without a counterpart: {name}")
