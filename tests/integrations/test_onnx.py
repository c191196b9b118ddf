"""Models exported by torch.onnx.export, run by onnxruntime on the CPU.

An export takes seconds whatever the model's size, so several calls are exported as one model; not
all, because the time of onnxscript's optimizer is quadratic in the nodes.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from module_equivalence import pairwise, random_mask
from torch import Tensor, nn
from torch.export import Dim
from transformer_twins import CLASSES, B, E, H, S, T, build

import fastattn
import fastattn.nn as fnn
from fastattn.nn.decoding import DecoderCache, LayerCache
from fastattn.ops import _op
from fastattn.testing import all_specs
from fastattn.testing.oracle import Oracle
from fastattn.testing.spec import OpSpec, Sample

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*(axis name|dynamic axes|in training mode):UserWarning"),
]


_CALLS_OF_A_MODEL = 16


class Together(nn.Module):
    """Calls, each with its own tensors; returns the results of all in one tuple."""

    def __init__(self, calls: Sequence[Callable[..., Any]]) -> None:
        super().__init__()
        self.calls = calls
        functions = [call.func for call in calls if isinstance(call, functools.partial)]
        self.modules_called = nn.ModuleList(f for f in functions if isinstance(f, nn.Module))
        self.eval()

    def forward(self, inputs: Sequence[dict[str, Tensor]]) -> tuple[Tensor, ...]:
        results: list[Tensor] = []
        for call, tensors in zip(self.calls, inputs, strict=True):
            found = call(**tensors)
            found = found if isinstance(found, tuple) else (found,)
            results += [x for x in found if x is not None]
        return tuple(results)


def export(module: nn.Module, *args: Any, **options: Any) -> Any:
    """The ONNX program; a call of it runs onnxruntime."""
    return torch.onnx.export(module, args, dynamo=True, verbose=False, **options)


def operators(program: Any) -> set[str]:
    return {node.op_type for node in program.model.graph}


def assert_agrees(program: Any, module: nn.Module, *args: Any, tolerance: float = 1e-5) -> None:
    with torch.no_grad():
        expected = module(*args)
    expected = expected if isinstance(expected, tuple) else (expected,)
    torch.testing.assert_close(tuple(program(*args)), expected, rtol=tolerance, atol=tolerance)


# -- ops -------------------------------------------------------------------------------------------
def check_samples(samples: Sequence[tuple[OpSpec, Sample]], opset: int) -> set[str]:
    """Compares the results of samples, exported as one model, by their error budget."""
    calls, inputs = [], []
    for spec, sample in samples:
        made = sample.inputs("cpu", torch.float32)
        tensors = {name: x.detach() for name, x in made.items() if isinstance(x, Tensor)}
        others = {name: x for name, x in made.items() if name not in tensors}
        calls.append(functools.partial(spec.function, **others))
        inputs.append(tensors)
    program = export(Together(calls), inputs, opset_version=opset)
    results = iter(program(inputs))
    for spec, sample in samples:
        oracle = Oracle(spec, sample, torch.float32)
        for name in spec.results:
            comparison = oracle.judge(name, next(results))
            assert comparison.ok, (spec.name, sample.name, name, comparison)
    assert next(results, None) is None
    return operators(program)


QUICK = (
    *("attention-gqa_lengths", "attention-bias_dead_window", "attention-top_left_tall"),
    *("attention_varlen-empty_sequences", "layer_norm-far_from_zero", "add_layer_norm-x_bias"),
    *("rms_norm-odd_width", "ffn-swiglu_plain", "linear-plain"),
)


def exported_samples() -> list[tuple[OpSpec, Sample]]:
    """fp32, no dropout, pages or empty tensors: of some, onnxruntime does not know the rank."""
    found = []
    for spec in all_specs().values():
        for sample in spec.samples:
            if torch.float32 not in sample.dtypes or not sample.gradients:
                continue
            inputs = sample.inputs("cpu", torch.float32)
            dropout = inputs.get("dropout_p") or inputs.get("output_dropout_p")
            if not dropout and all(x.numel() for x in inputs.values() if isinstance(x, Tensor)):
                found.append((spec, sample))
    return found


def test_ops() -> None:
    samples = [x for x in exported_samples() if f"{x[0].name}-{x[1].name}" in QUICK]
    assert len(samples) == len(QUICK)
    assert "LayerNormalization" in check_samples(samples, opset=18)


@pytest.mark.slow
@pytest.mark.parametrize("opset, first", [(18, 0), (23, 2)])
def test_many_samples(opset: int, first: int) -> None:
    samples, found = exported_samples()[first::4], set()
    for start in range(0, len(samples), _CALLS_OF_A_MODEL):
        found |= check_samples(samples[start : start + _CALLS_OF_A_MODEL], opset)
    assert ({"Attention", "RMSNormalization"} <= found) == (opset == 23)


def test_pages() -> None:
    class Module(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, n: Tensor) -> Tensor:
            return fastattn.attention(
                q, k, v, block_table=table, key_lengths=n, causal="bottom_right_lengths"
            )

    q, (k, v) = torch.randn(2, 4, 3, 16), torch.randn(2, 5, 2, 16, 16)
    table = torch.tensor([[4, 2], [3, -1]], dtype=torch.int32)
    args = (q, k, v, table, torch.tensor([20, 7]))
    assert_agrees(export(Module(), *args), Module(), *args)


def test_exported_program() -> None:
    module = Together([functools.partial(torch.ops.fastattn.topk_logsumexp, first=3, count=4)])
    inputs = [{"logits": torch.randn(5, 50)}]
    exported = torch.export.export(module, (inputs,))
    assert_agrees(torch.onnx.export(exported, dynamo=True, verbose=False), module, inputs)
    targets = [node.target for node in exported.run_decompositions().graph.nodes]
    assert torch.ops.fastattn.topk_logsumexp.default in targets


class Derivative(nn.Module):
    def forward(self, x: Tensor) -> Any:
        row = torch.ones(x.shape[0])
        return torch.ops.fastattn.layer_norm_bwd(x, x, x[0], None, row, row, 1e-5, [True] * 3)


def test_dropout_and_derivatives_are_refused() -> None:
    layer = build(fnn, "TransformerEncoderLayer", dropout=0.1)
    with pytest.raises(Exception, match=r"dropout_p=0\.1: call model\.eval\(\)"):
        export(layer, torch.randn(5, 2, E))
    with pytest.raises(Exception, match="layer_norm_bwd computes a derivative"):
        export(Derivative(), torch.randn(5, E))


@pytest.mark.slow
def test_torch_without_the_class_of_the_tracing_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_op, "_TracingMode", None)
    norm, x = fnn.LayerNorm(E), torch.randn(5, E)
    with pytest.raises(Exception, match=r"run_decompositions.*or call fastattn\.unpatch"):
        export(norm, x)
    program = torch.export.export(norm, (x,)).run_decompositions(fastattn.decompositions())
    assert_agrees(torch.onnx.export(program, dynamo=True, verbose=False), norm, x)


# -- modules ---------------------------------------------------------------------------------------
def padding_of(batch: int, length: int) -> Tensor:
    """True = padding; the first sequence has nothing else."""
    return torch.arange(length) >= torch.arange(batch)[:, None]


@pytest.mark.slow
def test_dynamic_sizes() -> None:
    torch.manual_seed(0)
    model = build(fnn, "Transformer", layers=1, batch_first=True).eval()

    def inputs(batch: int, source: int, target: int) -> tuple[Any, ...]:
        mask = nn.Transformer.generate_square_subsequent_mask(target)
        padding = padding_of(batch, source)
        masks = (None, mask, None, padding, None, padding)
        return torch.randn(batch, source, E), torch.randn(batch, target, E), *masks

    batch, source, target = Dim("batch"), Dim("source"), Dim("target")
    of_padding = {0: batch, 1: source}
    shapes = (
        {0: batch, 1: source},
        {0: batch, 1: target},
        *(None, {0: target, 1: target}, None, of_padding, None, of_padding),
    )
    program = export(model, *inputs(3, 7, 5), dynamic_shapes=shapes)
    for sizes in ((3, 7, 5), (2, 12, 3), (5, 4, 9)):
        assert_agrees(program, model, *inputs(*sizes))


MODULES = {
    "name": ("MultiheadAttention", *CLASSES),
    "batch_first": (True, False),
    "norm_first": (True, False),
    "activation": ("relu", "gelu", torch.tanh),
    "bias": (True, False),
    "mask": ("none", "bool", "bool 3-D", "float", "causal hint"),
    "extra": ("none", "bias_kv", "zero_attn"),  # of MultiheadAttention, like "weights"
    "padding": ("none", "bool", "float"),
    "weights": ("none", "average", "heads"),
}


def module_call(case: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Tensor]]:
    """A call of the case's module, and its tensors."""
    name, first = case["name"], case["batch_first"]
    options = {"batch_first": first, "bias": case["bias"]}
    if name == "MultiheadAttention":
        options |= {"add_bias_kv": case["extra"] == "bias_kv"}
        options |= {"add_zero_attn": case["extra"] == "zero_attn"}
    else:
        options |= {"norm_first": case["norm_first"], "activation": case["activation"]}
    module = build(fnn, name, **options, **({} if name in _SINGLE else {"layers": 1})).eval()

    def sequence(length: int) -> Tensor:
        return torch.randn(B, length, E) if first else torch.randn(length, B, E)

    static: dict[str, Any] = {}
    if name == "MultiheadAttention":
        key = sequence(S)
        tensors = {"query": sequence(T), "key": key, "value": key}
        mask, padding, hint, shape = "attn_mask", "key_padding_mask", "is_causal", (T, S)
        static["need_weights"] = case["weights"] != "none"
        static["average_attn_weights"] = case["weights"] == "average"
    elif "Encoder" in name:
        tensors = {"src": sequence(S)}
        mask = "src_mask" if name.endswith("Layer") else "mask"
        padding, hint, shape = "src_key_padding_mask", "is_causal", (S, S)
    else:
        tensors = {"src" if name == "Transformer" else "memory": sequence(S), "tgt": sequence(T)}
        mask, padding, hint = "tgt_mask", "memory_key_padding_mask", "tgt_is_causal"
        shape = (T, T)
    if case["mask"] == "causal hint":
        tensors[mask] = torch.ones(shape, dtype=torch.bool).triu(1)
        static[hint] = True
    elif case["mask"] != "none":
        heads = (B * H,) if "3-D" in case["mask"] else ()
        dtype = torch.float32 if case["mask"] == "float" else torch.bool
        tensors[mask] = random_mask(*heads, *shape, dtype=dtype)
    if case["padding"] != "none":
        tensors[padding] = padding_of(B, S)
        if case["padding"] == "float":
            tensors[padding] = torch.zeros(B, S).masked_fill(tensors[padding], -torch.inf)
    return functools.partial(module, **static), tensors


_SINGLE = ("MultiheadAttention", "TransformerEncoderLayer", "TransformerDecoderLayer")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*mask:UserWarning")
def test_modules() -> None:
    """Every pair of values of any two factors."""
    torch.manual_seed(0)
    calls = [module_call(case) for case in pairwise(**MODULES)]
    assert len(calls) >= 30
    for start in range(0, len(calls), _CALLS_OF_A_MODEL):
        some = calls[start : start + _CALLS_OF_A_MODEL]
        together, inputs = Together([call for call, _ in some]), [tensors for _, tensors in some]
        assert_agrees(export(together, inputs), together, inputs)


# -- patched models --------------------------------------------------------------------------------
class Attention(nn.Module):
    """As published models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(E), nn.Linear(E, 3 * E)

    def forward(self, x: Tensor) -> Tensor:
        B, S, E = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(B, S, 3, 2, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + y.transpose(1, 2).reshape(B, S, E)


def test_patched_modules() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = Attention(), nn.RMSNorm(E)
            self.second = nn.TransformerEncoderLayer(E, H, 2 * E, batch_first=True)

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            return self.norm(self.second(self.first(x), src_key_padding_mask=padding))

    torch.manual_seed(0)
    model, args = Model().eval(), (torch.randn(B, S, E), padding_of(B, S))
    report = fastattn.patch(model, quiet=True)
    assert {"first", "first.norm", "norm", "second"} <= {*report.replaced} and not report.kept
    assert_agrees(export(model, *args), model, *args)


class Result(nn.Module):
    """The first result of a model of transformers, called with the named arguments."""

    def __init__(self, model: Any, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, names
        model.config.use_cache = False

    def forward(self, *args: Tensor) -> Tensor:
        return self.model(**dict(zip(self.names, args, strict=True)))[0]  # type: ignore[no-any-return]


_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES |= {"intermediate_size": 48}
PATCHED: dict[str, tuple[str, str, dict[str, int]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", _SIZES),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _SIZES | {"num_key_value_heads": 2}),
    "t5": (
        *("T5ForConditionalGeneration", "T5Config"),
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4},
    ),
    "vit": ("ViTModel", "ViTConfig", _SIZES | {"image_size": 16, "patch_size": 4}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PATCHED, "bert-fp16"])
def test_patched_transformers(name: str) -> None:
    """With padding on the left, and other sizes than exported. For bf16 onnxruntime lacks kernels
    of additions and products, with or without fastattn.
    """
    transformers = pytest.importorskip("transformers")
    name, *half = name.split("-")
    dtype, tolerance = (torch.float16, 1e-3) if half else (torch.float32, 1e-5)
    kind, config, sizes = PATCHED[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes, vocab_size=40))
    model = model.eval().to(dtype)

    def inputs(batch: int, length: int) -> dict[str, Tensor]:
        if name == "vit":
            return {"pixel_values": torch.randn(batch, 3, 16, 16, dtype=dtype)}
        ids = torch.randint(3, 40, (batch, length))
        mask = (torch.arange(length) >= torch.arange(batch)[:, None]).long()
        text = {"input_ids": ids, "attention_mask": mask}
        if name == "t5":
            text |= {f"decoder_{key}": x[:, 1:] for key, x in text.items()}
        return text

    report = fastattn.patch(model, quiet=True)
    assert report.attention and not report.kept
    first = inputs(3, 9)
    result = Result(model, [*first])
    sizes_of = {2: {0: Dim.AUTO, 1: Dim.AUTO}, 4: {0: Dim.AUTO}}  # tokens and images
    shapes = tuple(sizes_of[x.dim()] for x in first.values())
    program = export(result, *first.values(), dynamic_shapes=(shapes,))
    for args in (first, inputs(4, 6)):
        assert_agrees(program, result, *args.values(), tolerance=tolerance)


# -- decoding --------------------------------------------------------------------------------------
class Start(nn.Module):
    """The projected memory of each decoder layer."""

    def __init__(self, decoder: fnn.TransformerDecoder) -> None:
        super().__init__()
        self.decoder = decoder
        self.eval()

    def forward(self, memory: Tensor) -> tuple[Tensor, ...]:
        cache = self.decoder.init_cache(memory, max_length=1)
        return tuple(layer.memory for layer in cache.layers)


class Step(nn.Module):
    """The next position: the keys and values of earlier ones go in and come out."""

    def __init__(self, decoder: fnn.TransformerDecoder, max_length: int) -> None:
        super().__init__()
        self.decoder, self.max_length = decoder, max_length
        self.eval()

    def forward(
        self, x: Tensor, position: Tensor, targets: list[Tensor], memories: list[Tensor],
        memory_lengths: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        pairs = zip(targets, memories, strict=True)
        layers = [LayerCache(target.clone(), memory) for target, memory in pairs]
        cache = DecoderCache(layers, self.max_length, memory_lengths=memory_lengths)
        cache.seek(position)
        y = self.decoder.step(x, cache)
        return y, *[layer.target for layer in layers]


@pytest.mark.slow
def test_cached_steps() -> None:
    """Position by position, with another batch and memory than exported, as over whole rows."""
    torch.manual_seed(0)
    max_length, decoder = 6, build(fnn, "TransformerDecoder", layers=2, batch_first=True).eval()

    def inputs(B: int, N: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        targets = [torch.zeros(B, max_length, 2, H, E // H) for _ in decoder.layers]
        return torch.randn(B, N, E), torch.randint(1, N + 1, (B,)), targets

    batch, length = Dim("batch"), Dim("memory")
    memory, memory_lengths, targets = inputs(3, 5)
    of_memory = {0: batch, 1: length}
    start = export(Start(decoder), memory, dynamic_shapes=(of_memory,))
    step = export(
        Step(decoder, max_length),
        *(torch.randn(3, 1, E), torch.tensor([0]), targets, [*start(memory)], memory_lengths),
        dynamic_shapes=({0: batch}, None, [{0: batch}] * 2, [of_memory] * 2, {0: batch}),
    )
    for sizes in ((3, 5), (4, 8)):
        memory, memory_lengths, targets = inputs(*sizes)
        x = torch.randn(sizes[0], max_length, E)
        with torch.no_grad():
            expected = decoder(
                x,
                memory,
                nn.Transformer.generate_square_subsequent_mask(max_length),
                memory_key_padding_mask=torch.arange(sizes[1]) >= memory_lengths[:, None],
            )
        memories, found = [*start(memory)], []
        for t in range(max_length):
            y, *targets = step(
                x[:, t : t + 1], torch.tensor([t]), targets, memories, memory_lengths
            )
            found.append(y)
        torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-5, atol=1e-5)
