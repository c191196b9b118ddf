"""Hugging Face's Marian, an encoder-decoder with a cache, of the same sizes and random weights."""

from typing import Any

import torch

from benchmarks.generation import GENERATION, Decoded, DecodeWorkload
from benchmarks.implementations import Implementation, Task, of_package
from fastattn.testing.spec import Inputs


def _build(task: Task) -> Any:
    from transformers import MarianConfig, MarianMTModel

    assert isinstance(task.workload, DecodeWorkload)
    size = task.workload.size
    pad = size.vocabulary - 1
    config = MarianConfig(
        vocab_size=size.vocabulary,
        d_model=size.d,
        encoder_layers=size.layers,
        decoder_layers=size.layers,
        encoder_attention_heads=size.heads,
        decoder_attention_heads=size.heads,
        encoder_ffn_dim=size.ff,
        decoder_ffn_dim=size.ff,
        max_position_embeddings=max(size.S, size.new + 1),
        activation_function="relu",
        scale_embedding=True,
        pad_token_id=pad,
        eos_token_id=0,
        forced_eos_token_id=None,
        decoder_start_token_id=pad,
    )
    torch.manual_seed(0)
    model: Any = MarianMTModel(config)
    model = model.to(task.device, task.dtype).eval()

    def forward(inputs: Inputs) -> Decoded:
        source = inputs["source"].clamp_max(pad - 1)
        out = model.generate(
            source,
            attention_mask=torch.ones_like(source),
            max_new_tokens=size.new,
            min_new_tokens=size.new,
            num_beams=size.beams,
            do_sample=False,
        )
        return Decoded(out[:, 1:], own_weights=True)  # without the start token

    return forward


PEERS = (
    Implementation(
        "marian",
        (GENERATION,),
        _build,
        **of_package("transformers", "transformers.models.marian"),
        backend="transformers",
    ),
)
