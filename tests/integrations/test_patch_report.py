"""The report of `patch` on third-party models, and patched models in another process."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from subprocesses import python_output
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from transformers_models import LLAMA_SIZES, SMALL, tokens  # noqa: E402

import fastattn  # noqa: E402
from fastattn.integrations import huggingface  # noqa: E402

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def bert(implementation: str = "sdpa") -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(intermediate_size=48, **SIZES, **SMALL)
    return transformers.BertModel._from_config(config, attn_implementation=implementation).eval()


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "fastattn"])
def test_what_used_fastattn_before(implementation: str) -> None:
    huggingface.register()
    model = bert(implementation)
    for again in (False, True):
        report = fastattn.patch(model, quiet=True)
        is_new = implementation != "fastattn" and not again
        assert report.attention == ({"": f"BertModel, {implementation}"} if is_new else {})
        assert (report.already.get("") == "attention of BertModel") == (not is_new)
        assert len(report.replaced) == (0 if again else 5)
        assert list(report.already.values()).count("LayerNorm") == (5 if again else 0)
        assert not report.kept
        assert ("used fastattn already:" in str(report)) == bool(report.already)
        used = "fastattn_eager" if implementation == "eager" else "fastattn"
        assert model.config._attn_implementation == used


def test_a_second_patch_of_an_encoder_decoder_and_of_what_is_new() -> None:
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, decoder_start_token_id=1, **SMALL
    )
    model = nn.ModuleDict({"t5": transformers.T5ForConditionalGeneration(config).eval()})
    assert "t5" in fastattn.patch(model, quiet=True).generate
    model["bert"] = bert()
    report = fastattn.patch(model, quiet=True)
    both = "attention of T5ForConditionalGeneration, T5ForConditionalGeneration"
    assert report.already["t5"] == both
    assert report.attention == {"bert": "BertModel, sdpa"}


def test_attention_that_was_chosen_after_a_patch_comes_back() -> None:
    model = bert("eager")
    fastattn.patch(model, quiet=True)
    model.set_attn_implementation("sdpa")
    with fastattn.patch(model, quiet=True) as report:
        assert report.attention == {"": "BertModel, sdpa"}
    assert model.config._attn_implementation == "sdpa"


class MaybeNorm(nn.Module):
    """As in neuralforecast."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LayerNorm(8)


class SpeechLayerNorm(MaybeNorm):
    """As in speechbrain, whose class has the name of torch's."""


SpeechLayerNorm.__name__ = "LayerNorm"


class SpeechAttention(nn.Module):
    """As in speechbrain, whose class has the name of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.att = nn.MultiheadAttention(8, 2)


SpeechAttention.__name__ = "MultiheadAttention"


class RelPosMHAXL(nn.Module):
    """As in speechbrain: attention in matrix products."""


class RotaryAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


class MemoryAttention(nn.Module):
    """As in sam2: a stack of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([RotaryAttention(), RotaryAttention()])


class OwnAttention(nn.Module):
    """Attention in matrix products, with a norm of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1) @ self.norm(x)


def test_wrappers_of_what_was_replaced_are_not_left_over() -> None:
    wrappers = (MaybeNorm, SpeechLayerNorm, SpeechAttention, MemoryAttention)
    model = nn.ModuleList([*(kind() for kind in wrappers), OwnAttention(), RelPosMHAXL()])
    report = fastattn.patch(model, quiet=True)
    assert report.kept == {
        "4": "is OwnAttention, which fastattn has no drop-in for",
        "5": "is RelPosMHAXL, which fastattn has no drop-in for",
    }
    assert report.replaced == {
        "0.layer": "LayerNorm", "1.layer": "LayerNorm", "2.att": "MultiheadAttention",
        "3.layers.0": "RotaryAttention", "3.layers.1": "RotaryAttention", "4.norm": "LayerNorm",
    }  # fmt: skip


def test_a_composite_says_which_of_its_models_stays() -> None:
    encoder = transformers.ViTConfig(image_size=16, patch_size=4, intermediate_size=48, **SIZES)
    decoder = transformers.TrOCRConfig(
        d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48, **SMALL
    )
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    model: Any = transformers.VisionEncoderDecoderModel(config).eval()
    pixels, (ids, _) = torch.randn(3, 3, 16, 16), tokens("right")
    expected = model(pixel_values=pixels, decoder_input_ids=ids).logits
    report = fastattn.patch(model, quiet=True)
    assert report.attention == {"": "VisionEncoderDecoderModel, sdpa"}
    assert model.encoder.config._attn_implementation == "fastattn"
    assert model.decoder.config._attn_implementation == "eager"
    own = "is TrOCRAttention, which fastattn has no drop-in for"
    assert list(report.kept.values()).count(own) == 4
    got = model(pixel_values=pixels, decoder_input_ids=ids).logits
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_models_without_attention_and_attention_of_their_own() -> None:
    config = transformers.MambaConfig(**SMALL, hidden_size=32, num_hidden_layers=1)
    mamba = transformers.MambaModel(config)
    report = fastattn.patch(mamba, quiet=True)
    assert not report.attention and not report.kept
    funnel = transformers.FunnelModel(transformers.FunnelConfig(
        **SMALL, block_sizes=[1, 1], d_model=32, n_head=4, d_head=8, d_inner=48,
    ))  # fmt: skip
    report = fastattn.patch(funnel, quiet=True)
    assert not report.attention and report.kept[""].startswith("has an attention that")


@torch.no_grad()
def _run(model: Any, inputs: dict[str, Tensor], queue: Any) -> None:
    queue.put(model(**inputs)[0].numpy())


def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaModel(transformers.LlamaConfig(**LLAMA_SIZES, **SMALL)).eval()


@pytest.mark.slow
def test_patched_models_in_a_new_process(tmp_path: Path) -> None:
    """The process imports only fastattn; models with and without modules of drop-in classes."""
    ids, mask = tokens("right")
    inputs = {"input_ids": ids, "attention_mask": mask}
    models = [llama(), bert("sdpa"), bert("eager")]
    for model in models:
        fastattn.patch(model, quiet=True)
    stored = [(model, inputs, model(**inputs)[0].detach()) for model in models]
    torch.save(stored, tmp_path / "models")
    code = f"""
import torch, fastattn
for model, inputs, expected in torch.load({str(tmp_path / "models")!r}, weights_only=False):
    assert torch.equal(model(**inputs)[0], expected)
    fastattn.unpatch(model)
    print(model.config._attn_implementation)
"""
    assert python_output("-c", code).split() == ["sdpa", "sdpa", "eager"]


@pytest.mark.slow
def test_a_patched_model_sent_to_a_spawned_process() -> None:
    model = bert("eager")
    ids, mask = tokens("left")
    inputs = {"input_ids": ids, "attention_mask": mask}
    fastattn.patch(model, quiet=True)
    expected = model(**inputs)[0].detach()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_run, args=(model, inputs, queue))
    process.start()
    got = torch.from_numpy(queue.get(timeout=120))
    process.join()
    assert torch.equal(got, expected)
