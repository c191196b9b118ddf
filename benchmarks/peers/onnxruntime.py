"""onnxruntime with fastattn's model exported to ONNX: the encoder, and the decoder's cached step.

The search is greedy; the cache goes into each step and comes out of it. For the conformance of
implementations: ONNX's operator Attention.
"""

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fastattn
from benchmarks.generation import GENERATION, DecodeWorkload, build_model
from benchmarks.implementations import (
    Implementation,
    Task,
    can_import,
    needs_package,
    package_version,
    with_dense_mask,
)
from benchmarks.own_process import Decode, DecoderTask, OwnProcess, Tokens


class _Start(nn.Module):
    """Source -> the keys and values that each decoder layer reads from the encoder."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: Tensor) -> tuple[Tensor, ...]:
        memory = self.model.encode(source, torch.zeros_like(source, dtype=torch.bool))
        cache = self.model.transformer.decoder.init_cache(memory.output, max_length=1)
        return tuple(layer.memory for layer in cache.layers)


class _Step(nn.Module):
    """The last tokens and the cache -> the next tokens and the cache."""

    def __init__(self, model: Any, max_length: int) -> None:
        super().__init__()
        self.model, self.max_length = model, max_length

    def forward(
        self, tokens: Tensor, position: Tensor, targets: list[Tensor], memories: list[Tensor]
    ) -> tuple[Tensor, ...]:
        from fastattn.nn.decoding import DecoderCache, LayerCache

        pairs = zip(targets, memories, strict=True)
        layers = [LayerCache(target.clone(), memory) for target, memory in pairs]
        cache = DecoderCache(layers, self.max_length)
        cache.seek(position)
        x = self.model.embed_target(tokens, start=position)
        hidden = self.model.transformer.decoder.step(x, cache)
        best = self.model.logits(hidden).argmax(-1)  # never PAD, BEGIN or END (`build_model`)
        return best, *[layer.target for layer in layers]


def _decoder(task: DecoderTask) -> Decode:
    import numpy as np

    from fastattn.seq2seq.data import BEGIN

    size = task.size
    model = build_model(size, fastattn.nn.Transformer, dtype=torch.float32)
    source = torch.ones(size.B, size.S, dtype=torch.long)
    heads = (2, size.heads, size.d // size.heads)
    empty = [torch.zeros(size.B, size.new, *heads) for _ in range(size.layers)]
    memory = [torch.zeros(size.B, size.S, *heads) for _ in range(size.layers)]
    start = _session(_Start(model), (source,), task.threads)
    step = _session(_Step(model, size.new), (source[:, :1], torch.tensor([0]), empty, memory),
                    task.threads)  # fmt: skip
    names = [tensor.name for tensor in step.get_inputs()]

    def decode(source: Tokens) -> tuple[Tokens, None]:
        memories = start.run(None, {start.get_inputs()[0].name: np.array(source)})
        targets: list[Any] = [target.numpy() for target in empty]
        token, found = np.full((size.B, 1), BEGIN), []
        for position in range(size.new):
            inputs = (token, np.array([position]), *targets, *memories)
            token, *targets = step.run(None, dict(zip(names, inputs, strict=True)))
            found.append(token)
        return np.concatenate(found, 1).tolist(), None

    return decode


def _session(module: nn.Module, inputs: tuple[Any, ...], threads: int) -> Any:
    import onnxruntime

    with torch.no_grad():
        program = torch.export.export(module.eval(), inputs)
        program = program.run_decompositions(fastattn.decompositions())
        exported = torch.onnx.export(program, dynamo=True, verbose=False)
    assert exported is not None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        exported.save(path)
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


@functools.cache
def _operator(dtype: torch.dtype, mask: torch.dtype | None, options: tuple[Any, ...]) -> Any:
    """A session with ONNX's operator Attention and these attributes."""
    import onnxruntime
    from onnx import TensorProto, helper

    types = {torch.float32: TensorProto.FLOAT, torch.float16: TensorProto.FLOAT16,
             torch.bool: TensorProto.BOOL}  # fmt: skip
    named = {"q": dtype, "k": dtype, "v": dtype, **({} if mask is None else {"mask": mask})}
    inputs, [out] = (
        [helper.make_tensor_value_info(n, types[t], [None] * 4) for n, t in each.items()]
        for each in (named, {"out": dtype})
    )
    node = helper.make_node("Attention", list(named), ["out"], **dict(options))
    graph = helper.make_graph([node], "attention", inputs, [out])
    opset = helper.make_opsetid("", 23)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=11)  # those of 2025
    content = model.SerializeToString()
    return onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])


@with_dense_mask
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    if q.dtype == torch.bfloat16 or (mask is not None and mask.dtype not in (torch.bool, q.dtype)):
        raise NotImplementedError("has kernels for fp32 and fp16, with masks of that dtype")
    if scale is not None and scale <= 0:
        raise NotImplementedError("takes scales above 0")
    if softcap is not None and mask is not None:
        raise NotImplementedError("limits the sum of score and mask")
    given = {"scale": scale, "softcap": softcap}
    options = tuple((name, value) for name, value in given.items() if value is not None)
    session = _operator(q.dtype, None if mask is None else mask.dtype, options)
    inputs = {"q": q, "k": k, "v": v, **({} if mask is None else {"mask": mask})}
    feed = {name: x.detach().contiguous().numpy() for name, x in inputs.items()}
    return torch.from_numpy(session.run(None, feed)[0])


def _unavailable() -> str | None:
    if not can_import("onnxscript"):  # what exports
        return needs_package("onnxscript", "onnxscript")()
    return needs_package("onnxruntime", "onnxruntime")()


def _unsupported(task: Task) -> str | None:
    assert isinstance(task.workload, DecodeWorkload)
    if task.workload.size.beams > 1:
        return "is measured with greedy search: the exported step has one beam"
    if task.dtype is not torch.float32:
        return f"has no kernels for {task.dtype} on CPUs"
    return None


PEERS = (
    Implementation(
        "onnxruntime",
        (GENERATION,),
        lambda task: OwnProcess(_decoder, task),
        device_types=("cpu",),
        unavailable=_unavailable,
        unsupported=_unsupported,
        version=lambda: package_version("onnxruntime"),
        backend="CPUExecutionProvider",
        compiles=True,
    ),
)
