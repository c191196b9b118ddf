"""Models on meshes of four gloo processes: training equals that of one process."""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from support import in_processes, needs_distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fastattn.seq2seq.losses import label_smoothed_cross_entropy
from fastattn.seq2seq.model import ModelConfig, Seq2SeqTransformer

pytestmark = needs_distributed
SMALL = ModelConfig(
    vocabulary=48, width=16, heads=4, encoder_layers=2, decoder_layers=2, ffn_width=32,
    dropout=0.0, max_length=32,
)  # fmt: skip
SMOOTHING, CLIP = 0.1, 0.5


def make_model(config: ModelConfig) -> Seq2SeqTransformer:
    torch.manual_seed(1)
    return Seq2SeqTransformer(config)


def batches(count: int, sentences: int = 4) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Source ids, target inputs and target outputs, padded, of odd lengths."""
    generator = torch.Generator().manual_seed(2)
    result = []
    for index in range(count):
        made = []
        for length in (7 + index % 3, 6 + index % 2):
            ids = torch.randint(3, 48, (sentences, length), generator=generator)
            lengths = torch.randint(2, length + 1, (sentences, 1), generator=generator)
            made.append(ids.where(torch.arange(length) < lengths, 0))
        source, target = made
        made_input = torch.cat([torch.ones(sentences, 1, dtype=torch.int64), target[:, :-1]], 1)
        result.append((source, made_input.where(target != 0, 0), target))
    return result


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, fused=True)


@cache
def alone(config: ModelConfig, steps: int) -> tuple[list[float], dict[str, Tensor], Any]:
    """Losses of one process, its first gradients, and names and shapes of its weights."""
    model = make_model(config)
    optimizer = optimizer_of(model)
    torch.manual_seed(3)
    losses, first = [], {}
    for source, target_in, target_out in batches(steps):
        logits = model(source, target_in, source == 0)
        loss = label_smoothed_cross_entropy(logits, target_out, smoothing=SMOOTHING, ignore_index=0)
        loss.backward()
        if not first:
            first = {name: p.grad.clone() for name, p in model.named_parameters()}  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, first, [(name, x.shape) for name, x in model.state_dict().items()]


def mesh_of(**sizes: int) -> Any:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def trained_like_one_process(
    sizes: dict[str, int], config: ModelConfig = SMALL, steps: int = 20, **plan: Any
) -> None:
    from fastattn.distributed import (
        Plan,
        clip_grad_norm_,
        full_state_dict,
        full_tensors,
        loss_sum,
        parallelize,
        sum_over_data,
        sum_over_processes,
    )

    expected, gradients, weights = alone(config, steps)
    model = make_model(config)
    mesh = mesh_of(**sizes)
    report = parallelize(model, mesh, Plan(**plan))
    assert "transformer.encoder.layers.1" in str(report)
    optimizer = optimizer_of(model)
    torch.manual_seed(3)
    data = sizes.get("data", 1)
    rank = mesh.get_local_rank("data") if "data" in sizes else 0
    losses = []
    for whole in batches(steps):
        source, target_in, target_out = (x.chunk(data)[rank] for x in whole)
        logits = model(source, target_in, source == 0)
        total = sum_over_data(model, (target_out != 0).sum())
        loss = loss_sum(model, logits, target_out, smoothing=SMOOTHING, ignore_index=0) / total
        loss.backward()
        if not losses:
            found = full_tensors({n: p.grad for n, p in model.named_parameters()})  # type: ignore[misc]
            assert found.keys() == gradients.keys()
            for name, gradient in gradients.items():
                torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-4)
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(sum_over_processes(model, loss)))
    torch.testing.assert_close(losses, expected, atol=1e-5, rtol=0.0)
    state = full_state_dict(model)
    assert [(name, x.shape) for name, x in state.items()] == weights


# -- plans -----------------------------------------------------------------------------------------
def data_alone() -> None:
    trained_like_one_process({"data": 4})


def tensor_alone() -> None:
    trained_like_one_process({"tensor": 4})


def data_and_tensor() -> None:
    trained_like_one_process({"data": 2, "tensor": 2})


def context_alone() -> None:
    trained_like_one_process({"context": 4})


def context_by_heads() -> None:
    trained_like_one_process({"context": 4}, context="all_to_all")


def data_and_context() -> None:
    trained_like_one_process({"data": 2, "context": 2})


def tensor_and_context() -> None:
    trained_like_one_process({"context": 2, "tensor": 2})


def test_of_four() -> None:
    in_processes(
        data_alone,
        tensor_alone,
        data_and_tensor,
        context_alone,
        context_by_heads,
        data_and_context,
        tensor_and_context,
        other_models,
    )


# -- options ---------------------------------------------------------------------------------------
def other_models() -> None:
    """Gradients of the first and the second loss, of models with other options."""
    post = replace(SMALL, norm_first=False, activation="swiglu", positions="t5", tied=False)
    rms = replace(SMALL, norm="rms", positions="alibi", bias=False, tied="target")
    wide = replace(
        SMALL, positions="rotary", head_dim=None, target_vocabulary=64, tied="target",
        head_bias=True, padding_gradient=False, embedding_norm=True, head_scale=0.5,
    )  # fmt: skip
    learned = replace(
        SMALL, positions="learned", shared_positions=False, final_norm=False, activation="gelu",
        tied="embeddings", head_dim=6,
    )  # fmt: skip
    both = {"data": 2, "tensor": 2}
    trained_like_one_process(both, post, 2)
    trained_like_one_process(both, rms, 2, sequence=False)
    trained_like_one_process(both, wide, 2, vocabulary=False)
    trained_like_one_process({"tensor": 2, "data": 2}, learned, 2)
    copying = replace(SMALL, copy=True, memory_layers="same", activation="geglu_tanh")
    trained_like_one_process({"data": 4}, copying, 2)
    crossed = {"tensor": 2, "context": 2}
    trained_like_one_process(crossed, post, 2, sequence=False)
    trained_like_one_process(crossed, rms, 2, context="all_to_all")
    trained_like_one_process(crossed, wide, 2)
    trained_like_one_process({"context": 2, "data": 2}, learned, 2)
