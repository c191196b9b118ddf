"""`generate` of patched encoder-decoders against the same model before, on tiny random models."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers_models import SMALL, build, tokens  # noqa: E402

import fastattn  # noqa: E402
from fastattn.integrations import foreign_generation  # noqa: E402

SIZES = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "decoder_start_token_id": 1, "max_position_embeddings": 64,
}  # fmt: skip
T5_SIZES = {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 1,
}  # fmt: skip


def _kind(model: str, config: str, **options: Any) -> Callable[[], Any]:
    sizes = T5_SIZES if "T5" in config else SIZES | {"forced_eos_token_id": None}
    return lambda: (
        getattr(transformers, model),
        getattr(transformers, config)(**sizes | SMALL | options),
    )


MODELS = {
    "marian": _kind("MarianMTModel", "MarianConfig"),
    "marian-scaled": _kind(
        "MarianMTModel", "MarianConfig", scale_embedding=True, activation_function="swish",
        decoder_layers=1,
    ),
    "bart": _kind("BartForConditionalGeneration", "BartConfig"),
    "bart-forced": _kind(
        "BartForConditionalGeneration", "BartConfig", forced_bos_token_id=5, forced_eos_token_id=2
    ),
    "mbart": _kind("MBartForConditionalGeneration", "MBartConfig"),
    "pegasus": _kind("PegasusForConditionalGeneration", "PegasusConfig"),
    "m2m100": _kind("M2M100ForConditionalGeneration", "M2M100Config"),
    "t5": _kind("T5ForConditionalGeneration", "T5Config"),
    "t5-gated": _kind(
        "T5ForConditionalGeneration", "T5Config", feed_forward_proj="gated-gelu",
        relative_attention_num_buckets=8, relative_attention_max_distance=12,
    ),
    "mt5": _kind("MT5ForConditionalGeneration", "MT5Config"),
}  # fmt: skip
WHISPER = _kind(
    "WhisperForConditionalGeneration", "WhisperConfig", max_source_positions=20, num_mel_bins=8,
    max_target_positions=64, suppress_tokens=None, begin_suppress_tokens=None,
)  # fmt: skip
STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {"num_beams": 1},
    "beams": {"num_beams": 4},
    "sampling": {"do_sample": True},
}


def _generate(model: Any, side: str = "left", new: int = 8, **options: Any) -> Any:
    ids, mask = tokens(side)
    torch.manual_seed(7)
    return model.generate(
        ids, attention_mask=mask, **{"max_new_tokens": new, "do_sample": False} | options
    )


def _both(model: Any, **options: Any) -> tuple[Any, Any, dict[str, int]]:
    """What the model generates before it is patched and after, the second time, and its calls by
    the model's own path.
    """
    expected = _generate(model, **options)
    with fastattn.patch(model, quiet=True) as report:
        _generate(model, **options)
        return expected, _generate(model, **options), report.generate[""]


@pytest.mark.parametrize("name", MODELS)
def test_tokens(name: str) -> None:
    model = build(MODELS[name], "eager")
    for side in ("left", "right"):
        for strategy, options in STRATEGIES.items():
            expected, got, fallbacks = _both(model, side=side, **options)
            assert torch.equal(got, expected), (side, strategy)
            assert not fallbacks


@pytest.mark.parametrize("name", MODELS)
def test_steps_are_replayed(name: str) -> None:
    model = build(MODELS[name], "eager")
    with fastattn.patch(model, quiet=True):
        _generate(model)
        (program,) = model.__dict__[foreign_generation.STATE].programs.values()
        assert program._replay._calls != [program._replay._step]
        calls = 0
        forward = program._forward

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return forward(*args, **kwargs)

        program._forward = counted
        _generate(model)
        assert calls == 1  # the prompt
