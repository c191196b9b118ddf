"""`attn_implementation="fastattn"` and `patch` against eager attention, on tiny random models."""

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from generating_models import MODELS, SIZES, WHISPER  # noqa: E402
from transformers_models import (  # noqa: E402
    LLAMA_SIZES,
    SMALL,
    assert_equal,
    build,
    kind_of,
    outcome,
    tokens,
)

import fastattn  # noqa: E402
from fastattn.integrations import huggingface  # noqa: E402

TEXT: dict[str, Callable[[], Any]] = {
    "bert": kind_of(
        "BertForMaskedLM", "BertConfig", hidden_size=32, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=48, **SMALL,
    ),
    "gpt2": kind_of("GPT2LMHeadModel", "GPT2Config", n_embd=32, n_layer=2, n_head=4, **SMALL),
    "llama": kind_of("LlamaForCausalLM", "LlamaConfig", **LLAMA_SIZES, **SMALL),
    "mistral": kind_of(
        "MistralForCausalLM", "MistralConfig", sliding_window=4, **LLAMA_SIZES, **SMALL
    ),
    "t5": MODELS["t5"],
    "marian": MODELS["marian"],
}  # fmt: skip


def _detr() -> Any:
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"]
    )
    sizes = {n: x for n, x in SIZES.items() if not n.endswith(("_token_id", "_embeddings"))}
    return transformers.DetrModel, transformers.DetrConfig(
        use_timm_backbone=False, backbone_config=backbone, backbone=None, num_queries=5, **sizes
    )


OTHER: dict[str, Callable[[], Any]] = {
    "whisper": WHISPER,
    "vit": kind_of(
        "ViTModel", "ViTConfig", hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, image_size=16, patch_size=4,
    ),
    "detr": _detr,
}  # fmt: skip
SIDES = ["left", "right"]


def arguments(name: str, side: str = "left") -> tuple[dict[str, Tensor], Tensor | None]:
    """A forward's inputs, and which of its results are compared (None: all)."""
    generator = torch.Generator().manual_seed(4)
    ids, mask = tokens(side)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}, None
    if name == "detr":
        pixels = torch.ones(2, 32, 32, dtype=torch.int64)
        pixels[0, 20:] = 0
        images = torch.randn(2, 3, 32, 32, generator=generator)
        return {"pixel_values": images, "pixel_mask": pixels}, None
    if name == "whisper":
        frames = torch.randn(3, 8, 40, generator=generator)
        return {"input_features": frames, "decoder_input_ids": ids[:, 4:]}, None
    inputs = {"input_ids": ids, "attention_mask": mask}
    if name in ("t5", "marian"):
        decoder_mask = mask[:, :5].flip(1)
        inputs |= {"decoder_input_ids": ids[:, 4:], "decoder_attention_mask": decoder_mask}
        return inputs, decoder_mask.bool()
    return inputs, mask.bool()


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", TEXT)
def test_text_models(name: str, side: str) -> None:
    inputs, real = arguments(name, side)
    eager = outcome(build(TEXT[name], "eager"), inputs, real)
    assert_equal(outcome(build(TEXT[name], "fastattn"), inputs, real), eager)


@pytest.mark.parametrize("name", [name for name in TEXT if name != "bert"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation(name: str, cache: str | None) -> None:
    ids, mask = tokens("left")
    options = {"max_new_tokens": 7, "do_sample": False, "cache_implementation": cache}
    eager, fast = (build(TEXT[name], which) for which in ("eager", "fastattn"))
    for beams in (1, 2):
        expected, got = (
            model.generate(ids, attention_mask=mask, num_beams=beams, **options)  # type: ignore[operator]
            for model in (eager, fast)
        )
        assert torch.equal(got, expected)


@torch.no_grad()
def test_a_prompt_in_chunks() -> None:
    """Later chunks are causal after the cache, although no padding mask restricts them."""
    ids, _ = tokens("left")
    model = build(TEXT["llama"], "fastattn")
    whole, cache, chunks = model(ids).logits, None, []
    for chunk in ids.split([4, 3, 2], dim=1):
        result = model(chunk, past_key_values=cache, use_cache=True)
        chunks.append(result.logits)
        cache = result.past_key_values
    torch.testing.assert_close(torch.cat(chunks, dim=1), whole)


@pytest.mark.parametrize("name", [*TEXT, *OTHER])
def test_patched_models(name: str) -> None:
    make = (TEXT | OTHER)[name]
    inputs, real = arguments(name)
    model = build(make, "eager")
    for key, parameter in model.named_parameters():
        if name == "t5" and key.endswith(".q.weight"):
            parameter.data.mul_(0.1)  # there is no scale: differences of large scores would grow
    expected, state = outcome(model, inputs, real), list(model.state_dict())
    with fastattn.patch(model, quiet=True) as report:
        assert model.config._attn_implementation in huggingface.NAMES
        assert report.attention == {"": f"{type(model).__name__}, eager"}
        assert not report.kept
        norms = [m for m in model.modules() if type(m).__name__.endswith(("LayerNorm", "RMSNorm"))]
        assert all("replaces" in type(m).__dict__ for m in norms) and norms
        assert list(model.state_dict()) == state
        assert_equal(outcome(model, inputs, real), expected)
    assert model.config._attn_implementation == "eager"
    assert_equal(outcome(model, inputs, real), expected)


WITHOUT_SDPA = {
    "nllb_moe": kind_of(
        "NllbMoeForConditionalGeneration", "NllbMoeConfig", num_experts=2, expert_capacity=64,
        encoder_sparse_step=2, decoder_sparse_step=2, **SIZES, **SMALL,
    ),
    "informer": kind_of(
        "InformerForPrediction", "InformerConfig", prediction_length=4, context_length=8,
        lags_sequence=[1], attention_type="full", d_model=32, encoder_layers=1, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, num_time_features=1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_SDPA)
@pytest.mark.parametrize("how", ["direct", "patched"])
@torch.no_grad()
def test_a_model_without_sdpa_keeps_eager_semantics(name: str, how: str) -> None:
    """Its decoder's `is_causal` is False, and its code adds the mask to scores of its own."""
    make = WITHOUT_SDPA[name]
    plain = build(make, "eager")
    if how == "direct":
        model = build(make, "fastattn")
    else:
        model = copy.deepcopy(plain)
        fastattn.patch(model, quiet=True)
    if name == "nllb_moe":
        ids, mask = tokens("right")
        inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids}
        changed = inputs | {"decoder_input_ids": torch.cat([ids[:, :-1], ids[:, :1]], 1)}
    else:
        generator = torch.Generator().manual_seed(3)
        inputs = {
            "past_values": torch.randn(3, 9, generator=generator),
            "past_time_features": torch.randn(3, 9, 1, generator=generator),
            "past_observed_mask": torch.ones(3, 9),
            "future_values": torch.randn(3, 4, generator=generator),
            "future_time_features": torch.randn(3, 4, 1, generator=generator),
        }
        later = inputs["future_time_features"].clone()
        later[:, -1] += 1
        changed = inputs | {"future_time_features": later}

    def hidden(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        result = model(**inputs, output_hidden_states=True)
        return result.decoder_hidden_states[-1]  # type: ignore[no-any-return]

    torch.testing.assert_close(hidden(model, inputs), hidden(plain, inputs), atol=2e-5, rtol=1e-4)
    # The last position affects itself and no earlier one.
    difference = (hidden(model, changed) - hidden(model, inputs)).abs().amax((0, 2))
    assert not difference[:-1].any() and difference[-1] > 0.01


def test_a_configuration_without_models_of_its_own_is_as_its_base() -> None:
    class OwnConfig(transformers.NllbMoeConfig):  # type: ignore[misc, name-defined]
        pass

    kind, config = WITHOUT_SDPA["nllb_moe"]()
    own = OwnConfig(**{k: v for k, v in config.to_dict().items() if k != "model_type"})
    model = build(lambda: (kind, own), "fastattn")
    ids, mask = tokens("right")
    inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids}
    changed = inputs | {"decoder_input_ids": torch.cat([ids[:, :-1], ids[:, :1]], 1)}
    difference = (model(**changed).logits - model(**inputs).logits).abs().amax((0, 2))
    assert not difference[:-1].any() and difference[-1] > 0.01


def test_a_model_whose_attention_cannot_be_replaced_is_refused_directly() -> None:
    """Bloom's attention would add the boolean mask to the scores."""
    bloom = kind_of("BloomModel", "BloomConfig", hidden_size=32, n_layer=1, n_head=4, **SMALL)
    config = transformers.BlipTextConfig(
        is_decoder=True, hidden_size=32, encoder_hidden_size=32, num_hidden_layers=1,
        num_attention_heads=4, intermediate_size=48, **SMALL,
    )  # fmt: skip
    blip = transformers.models.blip.modeling_blip_text.BlipTextModel
    ids, mask = tokens("left")
    for make, inputs, name in (
        (bloom, {"attention_mask": mask}, "transformers can replace, got one of Bloom"),
        (lambda: (blip, config), {"is_decoder": True}, "got one of BlipTextConfig"),
    ):
        model = build(make, "fastattn")
        with pytest.raises(NotImplementedError, match=name):
            model(input_ids=ids, **inputs)


def test_attention_outside_a_model_is_kept() -> None:
    class OwnAttention(nn.Module):
        pass

    model = nn.ModuleDict({"bert": build(TEXT["bert"], "sdpa"), "bert2": OwnAttention()})
    report = fastattn.patch(model, quiet=True)
    assert list(report.attention) == ["bert"]
    assert report.kept == {"bert2": "is OwnAttention, which fastattn has no drop-in for"}


def test_a_patched_copy_is_restored_alone() -> None:
    model = build(TEXT["bert"], "sdpa")
    fastattn.patch(model, quiet=True)
    other = copy.deepcopy(model)
    fastattn.unpatch(other)
    assert other.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation in huggingface.NAMES


def test_training_with_dropout_follows_the_seed() -> None:
    inputs, real = arguments("bert")
    model = build(TEXT["bert"], "fastattn").train()

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return outcome(model, inputs, real)[0]

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_weights_on_request() -> None:
    model = build(WHISPER, "fastattn")
    attention = model.model.decoder.layers[0].encoder_attn  # type: ignore[union-attr]
    q = torch.randn(2, 4, 3, 8)
    out, weights = huggingface.attention_forward(
        attention, q, q, q, None, scaling=1.0, output_attentions=True
    )
    assert weights is not None
    torch.testing.assert_close((weights @ q).transpose(1, 2), out)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_compiled_without_graph_breaks(name: str) -> None:
    inputs, real = arguments(name)
    model = build(TEXT[name], "fastattn")
    options = {"use_cache": False} if name == "llama" else {}
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        got, expected = (f(**inputs, **options)[0][real] for f in (compiled, model))
    torch.testing.assert_close(got, expected)


def test_attention_sinks() -> None:
    q, k, v = (
        torch.randn(2, 4, 5, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)
    )
    sinks = torch.randn(4)
    out, _ = huggingface.attention_forward(nn.Identity(), q, k, v, None, is_causal=False,
                                           s_aux=sinks)  # fmt: skip
    scores = torch.cat([q @ k.mT * 8**-0.5, sinks[:, None, None].expand(2, 4, 5, 1)], -1)
    expected = scores.softmax(-1)[..., :-1] @ v
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_learned_queries() -> None:
    q, k = torch.randn(1, 4, 3, 8), torch.randn(2, 4, 5, 8)
    out, _ = huggingface.attention_forward(nn.Identity(), q, k, k, None, is_causal=False)
    expected = (q @ k.mT * 8**-0.5).softmax(-1) @ k
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_no_mask_where_none_is_needed() -> None:
    masks = transformers.masking_utils
    bidirectional = {
        "mask_function": masks.bidirectional_mask_function,
        "allow_is_bidirectional_skip": True,
    }
    assert huggingface.attention_mask(2, 5, 5) is None
    assert huggingface.attention_mask(2, 1, 9, q_offset=8) is None
    assert huggingface.attention_mask(2, 5, 5, **bidirectional) is None
    padding = torch.tensor([[True, True, False], [True, True, True]])
    small = huggingface.attention_mask(2, 7, 3, attention_mask=padding, **bidirectional)
    assert small is not None
    assert torch.equal(small, padding[:, None, None].expand(2, 1, 7, 3)) and small.stride(2) == 0
    behind = huggingface.attention_mask(
        2, 7, 2, kv_offset=1, attention_mask=padding, **bidirectional
    )
    assert behind is not None
    assert torch.equal(behind, padding[:, None, None, 1:].expand(2, 1, 7, 2))
    # Keys with an offset: not the causal mask of equal lengths.
    behind = huggingface.attention_mask(2, 5, 5, kv_offset=2)
    assert behind is not None
    assert torch.equal(behind[0, 0], torch.ones(5, 5, dtype=torch.bool).tril(-2))


def test_what_is_not_supported() -> None:
    q = torch.randn(1, 2, 3, 8)
    for name, given, got in (
        ("cache", object(), "no paged cache, got cache=object"),
        ("indices", q, "no sparse attention by indices, got indices=Tensor"),
        ("block_indices", q, "no sparse attention by block_indices"),
        ("sinks", q, "no sinks of each query"),
    ):
        with pytest.raises(NotImplementedError, match=f"'fastattn' has {got}"):
            huggingface.attention_forward(nn.Identity(), q, q, q, None, **{name: given})
    with pytest.raises(ValueError, match="must be given for causal 2 queries and 3 keys"):
        huggingface.attention_forward(nn.Identity(), q[:, :, 1:], q, q, None, is_causal=True)


def test_patch_leaves_attention_that_would_be_refused() -> None:
    inputs, real = arguments("llama")
    sizes = {**LLAMA_SIZES, "num_key_value_heads": 4, "num_hidden_layers": 1}
    make = kind_of(
        "DeepseekV32ForCausalLM", "DeepseekV32Config", first_k_dense_replace=1, q_lora_rank=16,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, index_topk=2,
        index_n_heads=2, index_head_dim=16, **sizes, **SMALL,
    )  # fmt: skip
    model = build(make, "eager")
    expected = model(**inputs)[0][real]
    with fastattn.patch(model, quiet=True) as report:
        assert "indexer" in report.kept[""] and not report.attention
        assert model.config._attn_implementation == "eager"
        torch.testing.assert_close(model(**inputs)[0][real], expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(model(**inputs)[0][real], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_bias_does_not_unblock_masked_keys(dtype: torch.dtype) -> None:
    q = torch.randn(1, 2, 3, 8, dtype=dtype)
    mask = torch.zeros(1, 1, 3, 3).half()
    mask[..., 1, :] = torch.finfo(torch.float16).min
    bias = torch.full((1, 2, 3, 3), 40.0, dtype=dtype)
    out, _ = huggingface.attention_forward(nn.Identity(), q, q, q, mask, position_bias=bias)
    assert torch.equal(out[:, 1], torch.zeros_like(out[:, 1]))
    assert out[:, 0].abs().min() > 0


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.3.0")
    with pytest.raises(ImportError, match=r"needs transformers >= 5\.4, got 5\.3\.0"):
        huggingface.register()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="register needs the package transformers"):
        huggingface.register()
