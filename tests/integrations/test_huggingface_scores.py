"""Models of `transformers` whose attention has a soft cap, sinks, ALiBi or T5's tables, patched,
against eager attention.
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

transformers = pytest.importorskip("transformers")

from transformers_models import (  # noqa: E402
    LLAMA_SIZES,
    SMALL,
    assert_as_exact,
    assert_equal,
    build,
    kind_of,
    outcome,
    tokens,
)

import fastattn  # noqa: E402

GEMMA_SIZES = {
    **LLAMA_SIZES, **SMALL, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4,
    "attn_logit_softcapping": 3.0,
}  # fmt: skip
T5_SIZES = {
    **SMALL, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 1, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 6,
}  # fmt: skip


def _t5gemma() -> Any:
    stack = {**GEMMA_SIZES, "sliding_window": 64}
    return transformers.T5GemmaForConditionalGeneration, transformers.T5GemmaConfig(
        encoder=stack, decoder=stack, **SMALL
    )


SOFTCAP: dict[str, Callable[[], Any]] = {
    "gemma2": kind_of("Gemma2ForCausalLM", "Gemma2Config", **GEMMA_SIZES),
    "gemma3": kind_of("Gemma3ForCausalLM", "Gemma3TextConfig", **GEMMA_SIZES),
    "vaultgemma": kind_of("VaultGemmaForCausalLM", "VaultGemmaConfig", **GEMMA_SIZES),
    "t5gemma": _t5gemma,
}
SINKS: dict[str, Callable[[], Any]] = {
    "gpt_oss": kind_of(
        "GptOssForCausalLM", "GptOssConfig", head_dim=8, sliding_window=4, num_local_experts=2,
        num_experts_per_tok=1, layer_types=["sliding_attention", "full_attention"],
        **LLAMA_SIZES, **SMALL,
    ),
    "granite_swa": kind_of(
        "GraniteSWAForCausalLM", "GraniteSWAConfig", sliding_window=4, **LLAMA_SIZES, **SMALL
    ),
    "mimo_v2_flash": kind_of("MiMoV2FlashForCausalLM", "MiMoV2FlashConfig", **LLAMA_SIZES, **SMALL),
}  # fmt: skip
ALIBI: dict[str, Callable[[], Any]] = {
    "falcon": kind_of(
        "FalconForCausalLM", "FalconConfig", hidden_size=32, num_hidden_layers=2,
        num_attention_heads=4, alibi=True, **SMALL,
    ),
}  # fmt: skip
TABLES: dict[str, Callable[[], Any]] = {
    "t5": kind_of("T5ForConditionalGeneration", "T5Config", **T5_SIZES),
    "mt5": kind_of("MT5ForConditionalGeneration", "MT5Config", **T5_SIZES),
    "umt5": kind_of("UMT5ForConditionalGeneration", "UMT5Config", **T5_SIZES),
    "longt5": kind_of("LongT5ForConditionalGeneration", "LongT5Config", local_radius=3, **T5_SIZES),
    "pop2piano": kind_of("Pop2PianoForConditionalGeneration", "Pop2PianoConfig", **T5_SIZES),
    "switch_transformers": kind_of(
        "SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig", num_experts=2,
        **T5_SIZES,
    ),
}  # fmt: skip
OTHER: dict[str, Callable[[], Any]] = {
    "pix2struct": kind_of(
        "Pix2StructTextModel", "Pix2StructTextConfig", hidden_size=32, d_kv=8, d_ff=48,
        num_layers=2, num_heads=4, relative_attention_num_buckets=8,
        relative_attention_max_distance=6, initializer_range=0.02, **SMALL,
    ),
}  # fmt: skip
MODELS = SOFTCAP | SINKS | ALIBI | TABLES | OTHER
# Models with attentions that compute their scores themselves, by the class of these.
KEPT: dict[str, Callable[[], Any]] = {
    "BloomAttention": kind_of(
        "BloomForCausalLM", "BloomConfig", hidden_size=32, n_layer=2, n_head=4, **SMALL
    ),
    "MptAttention": kind_of(
        "MptForCausalLM", "MptConfig", d_model=32, n_layers=2, n_heads=4, max_seq_len=32, **SMALL
    ),
    "LongT5LocalAttention": TABLES["longt5"],
    "LongT5TransientGlobalAttention": kind_of(
        "LongT5ForConditionalGeneration", "LongT5Config", local_radius=3, global_block_size=2,
        encoder_attention_type="transient-global", **T5_SIZES,
    ),
}  # fmt: skip
QUICK = ("gemma2", "gpt_oss", "t5")
# They do not generate from tokens, or not with these configurations.
WITHOUT_GENERATION = ("switch_transformers", "pop2piano", "pix2struct")
# Products of experts in fp64 are not implemented on a CPU.
NO_DOUBLE = ("gpt_oss", "mimo_v2_flash")


def each(*names: str) -> Any:
    params = [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in names]
    return pytest.mark.parametrize("name", params)


def model_of(name: str) -> Any:
    # Falcon's eager attention adds ALiBi twice: to the mask and to the scores.
    model = build((MODELS | KEPT)[name], "sdpa" if name == "falcon" else "eager")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:  # sinks and the weights of norms are 0 or 1
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif hasattr(model.config, "relative_attention_num_buckets") and "relative" not in key:
                parameter.mul_(0.25)  # T5's scores have no scale
    return model


def inputs_of(model: Any, side: str | None) -> tuple[dict[str, Tensor], Tensor]:
    """side: that of the padding, None for none; and which results are compared."""
    ids, mask = tokens(side or "left")
    mask = mask if side else torch.ones_like(mask)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        mask = mask[:, :5].flip(1)
        inputs |= {"decoder_input_ids": ids[:, 4:], "decoder_attention_mask": mask}
    return inputs, mask.bool()


def without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0


class Recorded(TorchDispatchMode):
    """The ops and the shapes of all results."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = op(*args, **(kwargs or {}))
        self.ops.append(op.name())
        self.shapes += [x.shape for x in tree_leaves(results) if isinstance(x, Tensor)]
        return results


@each(*(name for name in MODELS if name != "longt5"))
def test_outputs_and_gradients(name: str) -> None:
    model = model_of(name)
    padded, real = inputs_of(model, "left")
    whole, every = inputs_of(model, None)
    expected = outcome(model, padded, real), outcome(model, whole, every)
    exact = None if name in NO_DOUBLE else outcome(copy.deepcopy(model).double(), whole, every)
    with fastattn.patch(model, quiet=True) as report:
        assert all(why.startswith("keeps its generate") for why in report.kept.values())
        with Recorded() as recorded, torch.no_grad():
            model(**whole)
        kinds = [type(module).__name__ for module in model.modules()]
        calls = sum(kind.endswith("Attention") and "Layer" not in kind for kind in kinds)
        calls = calls // 2 if name == "pix2struct" else calls  # without its cross-attention
        assert recorded.ops.count("fastattn::attention_fwd") == calls > 0
        assert_equal(outcome(model, padded, real), expected[0])
        if exact is not None:
            assert_as_exact(outcome(model, whole, every), expected[1], exact)
    for a, b in zip(outcome(model, padded, real), expected[0], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kept", KEPT)
def test_attention_without_a_drop_in_is_kept(kept: str) -> None:
    """Only the norms and LongT5's decoder are converted."""
    model = model_of(kept).train()
    without_dropout(model)
    cases = [inputs_of(model, side) for side in ("left", "right", None)]
    expected = [outcome(model, *case) for case in cases]
    report = fastattn.patch(model, quiet=True)
    reasons = list(report.kept.values())
    assert reasons.count(f"is {kept}, which fastattn has no drop-in for") == 2
    assert kept not in report.replaced.values() and kept in str(report)
    is_decoder = not model.config.is_encoder_decoder
    assert ("has an attention that transformers cannot replace" in reasons) == is_decoder
    with Recorded() as recorded, torch.no_grad():
        model(**cases[0][0])
    assert recorded.ops.count("fastattn::attention_fwd") == (0 if is_decoder else 4)
    for case, wanted in zip(cases, expected, strict=True):
        assert_equal(outcome(model, *case), wanted)


@each(*(name for name in MODELS if name not in WITHOUT_GENERATION))
def test_generation(name: str) -> None:
    model = model_of(name)
    ids, mask = tokens("left")
    # One token repeated would have the same context for any weights.
    start = {"decoder_input_ids": ids[:, 4:8]} if model.config.is_encoder_decoder else {}

    def generated(cache: str | None) -> Any:
        return model.generate(
            ids, attention_mask=mask, min_new_tokens=7, max_new_tokens=7, do_sample=False,
            cache_implementation=cache, output_logits=True, return_dict_in_generate=True, **start,
        )  # fmt: skip

    caches = [None] if name == "falcon" else [None, "static"]
    expected = [generated(cache) for cache in caches]
    fastattn.patch(model, quiet=True)
    for cache, wanted in zip(caches, expected, strict=True):
        got = generated(cache)
        assert torch.equal(got.sequences, wanted.sequences)
        a, b = (torch.stack(result.logits) for result in (got, wanted))
        torch.testing.assert_close(a / b.abs().max(), b / b.abs().max(), atol=3e-5, rtol=1e-4)


@each(*(name for name in (TABLES | ALIBI) if name != "switch_transformers"))
@torch.no_grad()
def test_a_prompt_in_chunks(name: str) -> None:
    """Later chunks have several queries after the cache."""
    model = model_of(name)
    ids, _ = tokens("left")
    fixed = {"input_ids": ids} if model.config.is_encoder_decoder else {}
    argument = "decoder_input_ids" if fixed else "input_ids"
    whole = model(**fixed, **{argument: ids}).logits
    fastattn.patch(model, quiet=True)
    cache, chunks = None, []
    for chunk in ids.split([4, 3, 1, 1], dim=1):
        result = model(**fixed, **{argument: chunk}, past_key_values=cache, use_cache=True)
        chunks.append(result.logits)
        cache = result.past_key_values
    scale = whole.abs().max()
    torch.testing.assert_close(torch.cat(chunks, 1) / scale, whole / scale, atol=1e-4, rtol=0.0)


@each(*TABLES)
def test_tables_become_no_bias_of_pairs(name: str) -> None:
    """In both directions. UMT5 itself allocates zeros for the bias of its cross-attention."""
    model, S = model_of(name), 96
    fastattn.patch(model, quiet=True)
    ids = torch.randint(3, 40, (1, S))
    with Recorded() as recorded:
        model(input_ids=ids, decoder_input_ids=ids)[0].sum().backward()
    table = model.decoder.block[0].layer[0].SelfAttention.relative_attention_bias
    assert table.weight.grad.abs().max() > 0
    dense = [shape for shape in recorded.shapes if shape[-3:] == (4, S, S)]
    assert len(dense) == (2 if name == "umt5" else 0)


@each("gpt_oss", "gemma2", "t5")
@torch.no_grad()
def test_weights_on_request(name: str) -> None:
    model = model_of(name)
    inputs, _ = inputs_of(model, None)
    wanted = "decoder_attentions" if name == "t5" else "attentions"
    expected = model(**inputs, output_attentions=True)[wanted]
    fastattn.patch(model, quiet=True)
    got = model(**inputs, output_attentions=True)[wanted]
    assert len(got) == len(expected) == 2
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model = model_of("t5").train()
    without_dropout(model)
    inputs, _ = inputs_of(model, None)
    gradients = []
    fastattn.patch(model, quiet=True)
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        model(**inputs, use_cache=False)[0].square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
@torch.no_grad()
def test_compiled_without_graph_breaks() -> None:
    model = model_of("t5")
    inputs, real = inputs_of(model, "left")
    fastattn.patch(model, quiet=True)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    got, expected = (f(**inputs, use_cache=False)[0][real] for f in (compiled, model))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_what_is_replaced_in_a_model_with_its_own_attention() -> None:
    for implementation in ("eager", "sdpa"):
        model = build(ALIBI["falcon"], implementation)
        report = fastattn.patch(model, quiet=True)
        again = fastattn.patch(model, quiet=True)
        assert list(report.replaced.values()).count("FalconAttention") == 2
        assert report.kept == again.kept
        why = {"has an attention that transformers cannot replace"}
        assert set(report.kept.values()) == (set() if implementation == "sdpa" else why)


@torch.no_grad()
def test_copies_pickles_and_exported_programs() -> None:
    model = model_of("t5")
    inputs, real = inputs_of(model, "left")
    before = model(**inputs)[0][real]
    fastattn.patch(model, quiet=True)
    expected = model(**inputs)[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(**inputs)[0], expected)
        fastattn.unpatch(other)
        assert torch.equal(other(**inputs)[0][real], before)
    arguments = {**inputs, "use_cache": False}
    program = torch.export.export(model, (), arguments, strict=False)
    assert any("fastattn.attention_fwd" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(**arguments)[0][real], expected[real])


def test_a_table_with_a_hook_is_called() -> None:
    model = model_of("t5")
    inputs, real = inputs_of(model, "left")
    for stack in (model.encoder, model.decoder):
        table = stack.block[0].layer[0].SelfAttention.relative_attention_bias
        table.register_forward_hook(lambda module, args, y: -2 * y)
    expected = outcome(model, inputs, real)
    double = outcome(copy.deepcopy(model).double(), inputs, real)
    fastattn.patch(model, quiet=True)
    assert_as_exact(outcome(model, inputs, real), expected, double)
