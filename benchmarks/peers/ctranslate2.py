"""CTranslate2, an inference library for Transformers: the same weights, in fp32 on every CPU.

Its half precision needs a GPU, so bf16 rows compare with its fp32 on weights rounded to bf16.
"""

import tempfile
from typing import Any

from torch import nn

from benchmarks.generation import GENERATION, build_model
from benchmarks.implementations import Implementation, of_package
from benchmarks.own_process import Decode, DecoderTask, OwnProcess, Tokens


def _decoder(task: DecoderTask) -> Decode:
    import ctranslate2

    size = task.size
    names = [str(i) for i in range(size.vocabulary)]
    with tempfile.TemporaryDirectory() as folder:
        _specification(task, names).save(folder)
        translator = ctranslate2.Translator(
            folder, compute_type="float32", inter_threads=1, intra_threads=task.threads
        )
    numbers = {name: i for i, name in enumerate(names)}

    def decode(source: Tokens) -> tuple[Tokens, list[float]]:
        results = translator.translate_batch(
            [[names[token] for token in row] for row in source],
            beam_size=size.beams,
            length_penalty=0,
            max_decoding_length=size.new,
            min_decoding_length=0,  # else the first token is normalised without END
            return_scores=True,
        )
        tokens = [[numbers[token] for token in result.hypotheses[0]] for result in results]
        return tokens, [result.scores[0] for result in results]

    return decode


def _specification(task: DecoderTask, names: list[str]) -> Any:
    """CTranslate2's description of the model, with its weights in fp32."""
    from ctranslate2.specs import TransformerSpec

    from fastattn.seq2seq.data import BEGIN, END, PAD

    model = build_model(task.size, nn.Transformer, dtype=task.dtype).float()
    transformer, layers = model.transformer, task.size.layers
    spec = TransformerSpec.from_config((layers, layers), task.size.heads, pre_norm=True)
    for part, stack in ((spec.encoder, transformer.encoder), (spec.decoder, transformer.decoder)):
        embeddings = part.embeddings
        embeddings = embeddings[0] if isinstance(embeddings, list) else embeddings
        table = model.embedding if part is spec.encoder else model.target_embedding
        embeddings.weight = table.weight.detach().numpy()
        # Rounded as `Seq2SeqTransformer` rounds it before the addition.
        part.position_encodings.encodings = model.positions.table.to(task.dtype).float().numpy()
        part.scale_embeddings = True
        _set(part.layer_norm, stack.norm, "gamma", "beta")
        for own, layer in zip(part.layer, stack.layers, strict=True):
            attention = layer.self_attn
            _set_linear(own.self_attention.linear[0], attention.in_proj_weight,
                        attention.in_proj_bias)  # fmt: skip
            _set(own.self_attention.linear[1], attention.out_proj)
            _set(own.self_attention.layer_norm, layer.norm1, "gamma", "beta")
            last = layer.norm2
            if part is spec.decoder:
                cross, last, d = layer.multihead_attn, layer.norm3, task.size.d
                weight, bias = cross.in_proj_weight, cross.in_proj_bias
                _set_linear(own.attention.linear[0], weight[:d], bias[:d])
                _set_linear(own.attention.linear[1], weight[d:], bias[d:])
                _set(own.attention.linear[2], cross.out_proj)
                _set(own.attention.layer_norm, layer.norm2, "gamma", "beta")
            _set(own.ffn.layer_norm, last, "gamma", "beta")
            _set(own.ffn.linear_0, layer.linear1)
            _set(own.ffn.linear_1, layer.linear2)
    spec.decoder.projection.weight = model.head.weight.detach().numpy()
    spec.register_source_vocabulary(names)
    spec.register_target_vocabulary(names)
    spec.config.decoder_start_token = spec.config.bos_token = names[BEGIN]
    spec.config.eos_token, spec.config.unk_token = names[END], names[PAD]
    spec.config.add_source_bos = spec.config.add_source_eos = False
    spec.config.layer_norm_epsilon = 1e-5
    spec.validate()
    spec.optimize()
    return spec


def _set(own: Any, module: nn.Module, weight: str = "weight", bias: str = "bias") -> None:
    setattr(own, weight, module.weight.detach().numpy())  # type: ignore[operator]
    setattr(own, bias, module.bias.detach().numpy())  # type: ignore[operator]


def _set_linear(own: Any, weight: Any, bias: Any) -> None:
    own.weight, own.bias = weight.detach().numpy(), bias.detach().numpy()


PEERS = (
    Implementation(
        "ctranslate2",
        (GENERATION,),
        lambda task: OwnProcess(_decoder, task),
        device_types=("cpu",),
        **of_package("ctranslate2", "ctranslate2"),
        backend="float32",
    ),
)
