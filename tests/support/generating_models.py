"""Tiny encoder-decoders of transformers with random weights, and their `generate`."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers_models import SMALL, kind_of, tokens

import fastattn

# The name of the cache in arguments and results.
OUTPUT_FIELDS = transformers.modeling_outputs.Seq2SeqLMOutput.__dataclass_fields__
CACHE = "cache" if "cache" in OUTPUT_FIELDS else "past_key_values"
SIZES = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "decoder_start_token_id": 1, "max_position_embeddings": 64,
}  # fmt: skip
T5_SIZES = {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 1,
}  # fmt: skip


def seq2seq(model: str, config: str, **options: Any) -> Callable[[], Any]:
    sizes = T5_SIZES if "T5" in config else SIZES | {"forced_eos_token_id": None}
    return kind_of(model, config, **sizes | SMALL | options)


MODELS = {
    "marian": seq2seq("MarianMTModel", "MarianConfig"),
    "marian-scaled": seq2seq(
        "MarianMTModel", "MarianConfig", scale_embedding=True, activation_function="swish",
        decoder_layers=1,
    ),
    "bart": seq2seq("BartForConditionalGeneration", "BartConfig"),
    "bart-forced": seq2seq(
        "BartForConditionalGeneration", "BartConfig", forced_bos_token_id=5, forced_eos_token_id=2
    ),
    "mbart": seq2seq("MBartForConditionalGeneration", "MBartConfig"),
    "pegasus": seq2seq("PegasusForConditionalGeneration", "PegasusConfig"),
    "m2m100": seq2seq("M2M100ForConditionalGeneration", "M2M100Config"),
    "t5": seq2seq("T5ForConditionalGeneration", "T5Config"),
    "t5-gated": seq2seq(
        "T5ForConditionalGeneration", "T5Config", feed_forward_proj="gated-gelu",
        relative_attention_num_buckets=8, relative_attention_max_distance=12,
    ),
    "mt5": seq2seq("MT5ForConditionalGeneration", "MT5Config"),
}  # fmt: skip
WHISPER = seq2seq(
    "WhisperForConditionalGeneration", "WhisperConfig", max_source_positions=20, num_mel_bins=8,
    max_target_positions=64, suppress_tokens=None, begin_suppress_tokens=None,
)  # fmt: skip
STRATEGIES: dict[str, dict[str, Any]] = {
    # Random weights repeat one token, which hides wrong steps.
    "greedy": {"num_beams": 1, "no_repeat_ngram_size": 1},
    "beams": {"num_beams": 4},
    "sampling": {"do_sample": True},
}


def generated(model: Any, side: str = "left", new: int = 8, **options: Any) -> Any:
    ids, mask = tokens(side)
    torch.manual_seed(7)
    return model.generate(
        ids, attention_mask=mask, **{"max_new_tokens": new, "do_sample": False} | options
    )


def before_and_after(model: Any, **options: Any) -> tuple[Any, Any, dict[str, int]]:
    """The model's output before it is patched and after, the second time, and its calls by the
    model's code.
    """
    expected = generated(model, **options)
    with fastattn.patch(model, quiet=True) as report:
        generated(model, **options)
        return expected, generated(model, **options), report.generate[""]
