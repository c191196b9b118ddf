"""Models on meshes of four gloo processes: training equals that of one process."""

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import in_processes, needs_distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from fastattn import nn as fnn
from fastattn.distributed import (
    Plan,
    clip_grad_norm_,
    full_state_dict,
    full_tensors,
    join_parts,
    loss_sum,
    parallelize,
    shard_sequence,
    split_parts,
    sum_over_data,
    sum_over_processes,
    weight_blocks,
)
from fastattn.nn.sharding import sharding_of
from fastattn.seq2seq.data import Batch
from fastattn.seq2seq.generation import generate
from fastattn.seq2seq.losses import label_smoothed_cross_entropy
from fastattn.seq2seq.model import ModelConfig, Seq2SeqTransformer
from fastattn.testing.compare import compare

pytestmark = needs_distributed


@dataclass(frozen=True)
class Config(ModelConfig):
    """attention_dropout: of attention weights, if not `dropout`."""

    attention_dropout: float | None = None


SMALL = Config(
    vocabulary=48, width=16, heads=4, encoder_layers=2, decoder_layers=1, ffn_width=32,
    dropout=0.0, max_length=32,
)  # fmt: skip
SMOOTHING, CLIP = 0.1, 0.5


def make_model(config: Config) -> Seq2SeqTransformer:
    torch.manual_seed(1)
    model = Seq2SeqTransformer(config)
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention) and config.attention_dropout is not None:
            module.dropout = config.attention_dropout
    return model


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
def alone(config: Config, steps: int) -> tuple[list[float], dict[str, Tensor], Any]:
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


@cache
def gradients_in_fp64(config: Config) -> dict[str, Tensor]:
    """The first gradients of one process, in fp64."""
    model = make_model(config).double()
    torch.manual_seed(3)
    ((source, target_in, target_out),) = batches(1)
    logits = model(source, target_in, source == 0)
    nn.functional.cross_entropy(
        logits.flatten(0, 1), target_out.flatten(), label_smoothing=SMOOTHING, ignore_index=0
    ).backward()
    return {name: p.grad for name, p in model.named_parameters()}  # type: ignore[misc]


def require_within_budget(
    found: dict[str, Tensor], fp64: dict[str, Tensor], fp32: dict[str, Tensor]
) -> None:
    assert found.keys() == fp64.keys()
    for name, expected in fp64.items():
        result = compare(found[name], expected, fp32[name], expected.abs(), 0)
        assert result.ok, (name, result)


def shapes_of(model: nn.Module) -> list[tuple[str, torch.Size]]:
    return [(name, x.shape) for name, x in model.state_dict().items()]


def shapes_of_parts(config: Config) -> list[tuple[str, torch.Size]]:
    """Names and shapes in checkpoints of any mesh; conversions are exact."""
    plain = make_model(config)
    state = plain.state_dict()
    parts = split_parts(state, weight_blocks(plain))
    again = join_parts(parts)
    assert list(again) == list(state)
    assert all(torch.equal(again[name], x) for name, x in state.items())
    return [(name, x.shape) for name, x in parts.items()]


def mesh_of(**sizes: int) -> Any:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def forward(
    model: Seq2SeqTransformer, batch: tuple[Tensor, Tensor, Tensor], packed: bool
) -> tuple[Tensor, Tensor]:
    """Logits and targets."""
    source, target_in, target_out = batch
    if not packed:
        return model(source, target_in, source == 0), target_out
    lengths = [tuple((x != 0).sum(dim=1).tolist()) for x in (source, target_out)]
    with Launches() as launches:
        result = model.forward_packed(
            Batch(source, source == 0, target_in, target_out, 0, *lengths)
        )
    assert launches.names.count("fastattn::attention_fwd") == 4
    return result


class Launches(TorchDispatchMode):
    """Names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def trained_like_one_process(
    sizes: dict[str, int],
    config: Config = SMALL,
    steps: int = 7,
    *,
    packed: bool = False,
    **plan: Any,
) -> None:  # fmt: skip
    expected, gradients, weights = alone(config, steps)
    model = make_model(config)
    mesh = mesh_of(**sizes)
    report = parallelize(model, mesh, Plan(**plan))
    assert "transformer.encoder.layers.1" in str(report)
    assert shapes_of(model) == shapes_of_parts(config)
    optimizer = optimizer_of(model)
    torch.manual_seed(3)
    data = sizes.get("data", 1)
    rank = mesh.get_local_rank("data") if "data" in sizes else 0
    losses = []
    for batch in batches(steps):
        part = tuple(x.chunk(data)[rank] for x in batch)
        logits, targets = forward(model, part, packed)  # type: ignore[arg-type]
        total = sum_over_data(model, (targets != 0).sum())
        loss = loss_sum(model, logits, targets, smoothing=SMOOTHING, ignore_index=0) / total
        loss.backward()
        if not losses:
            found = full_tensors({n: p.grad for n, p in model.named_parameters()})  # type: ignore[misc]
            require_within_budget(found, gradients_in_fp64(config), gradients)
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(sum_over_processes(model, loss)))
    torch.testing.assert_close(losses, expected, atol=1e-5, rtol=0.0)
    whole_model = make_model(config).eval()
    state = full_state_dict(model)
    assert [(name, x.shape) for name, x in state.items()] == weights
    whole_model.load_state_dict(state)
    with torch.no_grad():
        logits, targets = forward(model.eval(), part, packed)
        found_loss = loss_sum(model, logits, targets, ignore_index=0)
        logits, targets = forward(whole_model, batch, packed)
        whole_loss = label_smoothed_cross_entropy(logits, targets, ignore_index=0)
    mean = sum_over_processes(model, found_loss) / total
    torch.testing.assert_close(mean, whole_loss, atol=1e-5, rtol=0.0)
    assert all(torch.equal(x, state[name]) for name, x in full_state_dict(model).items())


def rotary_positions() -> None:
    """Rotary positions, with an odd number of target tokens in the second step."""
    rotary = replace(SMALL, positions="rotary")
    trained_like_one_process({"data": 4}, rotary, 2)
    trained_like_one_process({"data": 2, "tensor": 2}, rotary, 2, sequence=False)


def other_models() -> None:
    """Gradients of the first and the second loss, of models with other options."""
    post = replace(SMALL, norm_first=False, activation="swiglu", positions="t5", tied=False)
    rms = replace(SMALL, norm="rms", positions="alibi")
    rotary = replace(SMALL, positions="rotary", tied=False)
    learned = replace(SMALL, positions="learned", activation="gelu")
    both = {"data": 2, "tensor": 2}
    trained_like_one_process(both, post, 2)
    trained_like_one_process(both, rms, 2, sequence=False)
    trained_like_one_process(both, rotary, 2, vocabulary=False)
    trained_like_one_process({"tensor": 2, "data": 2}, learned, 2)
    copying = replace(
        SMALL, copy=True, memory_layers="same", activation="geglu_tanh", vocabulary=50
    )
    trained_like_one_process({"data": 4}, copying, 2)
    crossed = {"tensor": 2, "context": 2}
    trained_like_one_process(both, post, 2, packed=True)
    trained_like_one_process(both, rms, 2, packed=True, sequence=False)
    trained_like_one_process({"data": 4}, learned, 2, packed=True)
    trained_like_one_process(crossed, post, 2, sequence=False)
    trained_like_one_process(crossed, rms, 2, context="all_to_all")
    trained_like_one_process(crossed, rotary, 2)
    trained_like_one_process({"context": 2, "data": 2}, learned, 2)


def stacks() -> None:
    """nn.Transformer, also with the sequence first, masks, and shards of sequences."""
    torch.manual_seed(4)
    tensors = torch.randn(4, 16, 16), torch.randn(4, 8, 16), torch.randn(4, 8, 16)
    src_mask, padding = (
        torch.randn(16, 16),
        torch.zeros(4, 16).masked_fill_(
            torch.arange(16) >= torch.tensor([[16], [9], [1], [12]]), float("-inf")
        ),
    )
    causal = nn.Transformer.generate_square_subsequent_mask(8)
    cases: list[tuple[dict[str, int], bool, Any]] = [
        ({"data": 2, "tensor": 2}, False, Plan()),
        ({"data": 2, "tensor": 2}, True, Plan(sequence=False)),
        ({"context": 4}, True, Plan()),
        ({"tensor": 2, "context": 2}, True, Plan(context="all_to_all")),
    ]
    for sizes, batch_first, plan in cases:
        dim = 1 if batch_first else 0
        src, tgt, weight = (x.movedim(1, dim) for x in tensors)

        def model_of(batch_first: bool = batch_first) -> fnn.Transformer:
            torch.manual_seed(5)
            return fnn.Transformer(
                16, 4, 1, 2, 32, 0.0, batch_first=batch_first, norm_first=not batch_first
            )

        options = {"tgt_mask": causal, "tgt_is_causal": True}
        paddings = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
        gradients = {}
        for dtype in (torch.float64, torch.float32):
            plain, given = model_of().to(dtype), [x.to(dtype) for x in (src, tgt, src_mask)]
            masks = {"tgt_mask": causal.to(dtype)} | {n: x.to(dtype) for n, x in paddings.items()}
            expected = plain(*given, tgt_is_causal=True, **masks)
            (expected * weight).sum().backward()
            gradients[dtype] = {name: p.grad for name, p in plain.named_parameters()}

        model, mesh = model_of(), mesh_of(**sizes)
        parallelize(model, mesh, plan)
        if "data" in sizes:
            rank = mesh.get_local_rank("data")
            src, tgt, weight, expected = (
                x.chunk(2, 1 - dim)[rank] for x in (src, tgt, weight, expected)
            )
            paddings = {name: x.chunk(2)[rank] for name, x in paddings.items()}
        rows = src_mask
        if "context" in sizes:
            group = mesh.get_group("context")
            src, rows = (shard_sequence(x, d, group=group) for x, d in ((src, dim), (src_mask, 0)))
            tgt, weight, expected, options["tgt_mask"] = (
                shard_sequence(x, d, balanced=True, group=group)
                for x, d in ((tgt, dim), (weight, dim), (expected, dim), (causal, 0))
            )
        result = model(src, tgt, src_mask=rows, **options, **paddings)
        torch.testing.assert_close(result, expected, atol=2e-5, rtol=1e-4)
        (result * weight).sum().backward()
        found = full_tensors({name: p.grad for name, p in model.named_parameters()})  # type: ignore[misc]
        require_within_budget(found, *gradients.values())  # type: ignore[arg-type]


def layers_keep_no_weights() -> None:
    """Between forward and backward FSDP frees the weights of layers that products saved: none is a
    copy.
    """
    config = replace(SMALL, vocabulary=56)
    (batch,) = batches(1, sentences=5)  # no number of rows is one of a weight
    for sizes in ({"data": 4}, {"data": 2, "tensor": 2}):
        model, saved = make_model(config), list[Tensor]()
        parallelize(model, mesh_of(**sizes))

        def pack(x: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(x)
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            logits, _ = forward(model, batch, False)
        E = config.width
        blocks = {count * E // sizes.get("tensor", 1) for count in (1, 2, 3)}
        weights = [x for x in saved if x.dim() == 2 and E in x.shape and {*x.shape} <= {E} | blocks]
        kept = [x.shape for x in weights if x.untyped_storage().nbytes()]
        assert weights
        assert not kept, (sizes, kept)
        logits.sum().backward()


class Doubling(nn.TransformerEncoderLayer):
    """Not a layer that runs on packed rows."""

    def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):  # type: ignore[no-untyped-def]
        return 2 * super().forward(src, src_mask, src_key_padding_mask, is_causal)


def layers_of_other_classes() -> None:
    encoder = fnn.TransformerEncoder(Doubling(16, 4, 32, 0.0, batch_first=True), 2)
    x, lengths, rank = torch.randn(4, 6, 16), [6, 2, 4, 1], dist.get_rank()
    expected = encoder(x, src_lengths=lengths)[rank : rank + 1]
    parallelize(encoder, mesh_of(data=4))
    result = encoder(x[rank : rank + 1], src_lengths=lengths[rank : rank + 1])
    torch.testing.assert_close(result, expected)


def attention_drops_what_one_process_drops() -> None:
    config = replace(SMALL, attention_dropout=0.4)
    rms = replace(config, norm="rms")
    for sizes, given, plan in (
        ({"data": 2, "tensor": 2}, rms, {}),
        ({"data": 2, "tensor": 2}, config, {"packed": True}),
        ({"tensor": 2, "context": 2}, config, {}),
        ({"data": 2, "context": 2}, rms, {"context": "all_to_all"}),
    ):
        trained_like_one_process(sizes, given, 3, **plan)


def gathered(x: Tensor) -> Tensor:
    """The tensors of all processes, one after the other."""
    tensors = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, x)
    return torch.cat(tensors)


def other_dropouts() -> None:
    """Values that processes share have the same bits, others do not; in evaluation none drops."""
    config = replace(SMALL, dropout=0.5, norm="rms")
    (batch,) = batches(1)
    for sequence, places in ((True, 4), (False, 2)):
        model = make_model(config)
        parallelize(model, mesh_of(data=2, tensor=2), Plan(sequence=sequence))
        layer = sharding_of(model.transformer.encoder.layers[0])  # type: ignore[arg-type, union-attr, index]
        for of, distinct in (("rows", places), ("hidden", 4), ("tokens", 2), ("heads", 1)):
            seeds = gathered(layer.seed(torch.tensor([7]), of))
            assert len(seeds.unique()) == distinct, of
        torch.manual_seed(3)
        hidden, _ = forward(model, batch, False)  # logits [B, T, V / 2], the same sentences
        whole = gathered(hidden.detach()[None])
        assert not torch.isclose(whole[0], whole[2]).all(dim=-1).any()  # other sentences
        loss = hidden.square().mean()
        loss.backward()
        assert len(gathered(torch.randint(1 << 60, (1,))).unique()) == 1
    whole_model, model = (make_model(config).eval() for _ in range(2))
    report = dict(parallelize(model, mesh_of(context=2, tensor=2)).rows)
    assert report["positions.dropout"] == "dropout of this process's tokens"
    expected = label_smoothed_cross_entropy(
        forward(whole_model, batch, False)[0], batch[2], ignore_index=0
    )
    found = loss_sum(model, forward(model, batch, False)[0], batch[2], ignore_index=0)
    mean = sum_over_processes(model, found) / (batch[2] != 0).sum()
    torch.testing.assert_close(mean, expected)


def refusals() -> None:
    def refused(model: nn.Module, message: str, plan: Any = None, **sizes: int) -> None:
        before = dict(model.named_parameters())
        with pytest.raises((TypeError, ValueError), match=message):
            parallelize(model, mesh_of(**sizes), plan)
        after = dict(model.named_parameters())
        assert before.keys() == after.keys()
        assert all(before[name] is after[name] for name in before)

    with pytest.raises(ValueError, match=r"context must be one of .* got 'rings'"):
        Plan(context="rings")  # type: ignore[arg-type]
    heads = r'encoder.layers.0.self_attn must have heads that the 4 processes of "tensor" divide, '
    refused(fnn.Transformer(12, 6, 1, 1, 12, 0.0), heads + "got 6", tensor=4)
    refused(
        fnn.Transformer(16, 4, 1, 1, 18, 0.0), "decoder.layers.0.linear1 must .* got 18", tensor=4
    )
    refused(make_model(replace(SMALL, vocabulary=50)), "embedding.weight must .* got 50", tensor=4)
    refused(make_model(SMALL), "mesh must have dimensions named among .*'rows'", rows=4)
    with pytest.raises(ValueError, match=r"mesh must hold all 4 processes.*'tensor'.*got 2"):
        parallelize(make_model(SMALL), DeviceMesh("cpu", [0, 2], mesh_dim_names=("tensor",)))
    by_heads = Plan(context="all_to_all")
    wide = replace(SMALL, heads=2)
    refused(make_model(wide), '"tensor" and "context", 2 x 2', by_heads, tensor=2, context=2)
    for options, what in (
        ({"norm": "batch"}, "norm1 must not normalise over tokens, got TokenBatchNorm"),
        ({"scoring": "cosine"}, "self_attn must be an unmodified attention, got ScoredMulti"),
        ({"activation": "geglu_tanh"}, "an activation of the op ffn, got GatedActivation"),
        ({"memory_layers": "same"}, '"tensor" must .* reads the encoder\'s layers same'),
        ({"copy": True}, '(?s)"vocabulary" must .* copies source tokens.*"sequence" must'),
    ):
        refused(make_model(replace(SMALL, **options)), what, tensor=2, data=2)  # type: ignore[arg-type]
    strided = fnn.TransformerEncoder(fnn.TransformerEncoderLayer(16, 4, 16), 1)
    strided.layers[0].linear1.weight = nn.Parameter(torch.randn(16, 16).t())
    refused(strided, r"layers.0.linear1.weight must be contiguous .* strides \(1, 16\)", data=4)
    refused(nn.Transformer(16, 4, 1, 1), r"must be a Transformer.* got torch\.nn", data=4)
    refused(nn.Linear(2, 2), "must be a Transformer.* got torch.nn.modules.linear.Linear", data=4)
    biased = fnn.TransformerEncoder(fnn.TransformerEncoderLayer(16, 4, 32), 1)
    biased.layers[0].self_attn = fnn.MultiheadAttention(16, 4, add_bias_kv=True)
    refused(biased, "layers.0.self_attn must have no kdim", context=4)
    shared = fnn.TransformerEncoder(fnn.TransformerEncoderLayer(16, 4, 32), 2)
    shared.layers[1].self_attn.in_proj_bias = shared.layers[0].self_attn.in_proj_bias
    refused(shared, r"layers.1.*in_proj_bias must not be the parameter layers.0.*_bias", data=4)
    shared.layers[1] = shared.layers[0]
    refused(shared, "layers.1 must not be the layer layers.0 again", data=4)
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh, got NoneType"):
        parallelize(shared, None)  # type: ignore[arg-type]
    refused(shared, "plan must be a Plan, got dict", {"context": "ring"}, data=4)
    model = make_model(SMALL)
    parallelize(model, mesh_of(data=4))
    again = r"embedding.weight must be a plain tensor, got DTensor, and \d\d other parameters$"
    refused(model, again, data=4)
    tokens = torch.full((1, 3), 5)
    with pytest.raises(ValueError, match="model must be whole, got one that parallelize has divid"):
        generate(model.eval(), tokens, tokens == 0, max_lengths=[4])
    last = dist.get_rank() == 3
    other = make_model(SMALL)
    nn.init.constant_(other.embedding.weight[1], float(last))
    refused(other, "same on every process of the mesh, got other values", data=2, tensor=2)
    other.embedding.weight.requires_grad_(last)
    refused(other, "got other model, parameters or plan", tensor=2, context=2)
    refused(make_model(SMALL), "got other model, parameters or plan", Plan(sequence=last), data=4)
    # Reasons of some processes alone: the others do not wait for them.
    others = make_model(SMALL), make_model(replace(SMALL, vocabulary=50)), nn.Linear(2, 2)
    refused(others[last], "got other model, parameters or plan", tensor=4)
    refused(others[2 * last], "got other model, parameters or plan", data=4)

    stack = fnn.TransformerEncoder(fnn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 1)
    parallelize(stack, mesh_of(tensor=4))
    with pytest.raises(ValueError, match='length that the 4 processes of "tensor" divide, got 6'):
        stack(torch.randn(1, 6, 16))
    stack.layers[0].self_attn.register_forward_hook(lambda *_: None)
    with pytest.raises(NotImplementedError, match="attention of a layer that several processes"):
        stack(torch.randn(1, 8, 16))


def inputs_out_of_range() -> None:
    """Raise on every process, also if its rows of the vocabulary are others."""
    ((source, target_in, targets),) = batches(1)
    model, padding = make_model(SMALL), source == 0
    parallelize(model, mesh_of(data=2, tensor=2))
    for wrong in (48, -1):
        tokens = source.index_fill(1, torch.tensor([2]), wrong)
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
            model(tokens, target_in, padding)
        tokens = targets.index_fill(1, torch.tensor([2]), wrong)
        logits = model(source, target_in, padding)
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
            loss_sum(model, logits, tokens, ignore_index=0)
    model = make_model(SMALL)
    parallelize(model, mesh_of(context=2, tensor=2))
    with pytest.raises(ValueError, match=r"source_padding must be \[4, 7\] .* got \[4, 6\]"):
        model(source, target_in, padding[:, 1:])


def losses_of_lengths_like_those_of_shards() -> None:
    """A target of one process's number of positions is still that of the whole sequence."""
    tiles = replace(SMALL, attention_dropout=0.1)
    for config, length, sizes in (
        (SMALL, 2, {"context": 4}),
        (SMALL, 2, {"tensor": 2, "context": 2}),
        (tiles, 32, {"data": 2, "context": 2}),
    ):
        source, target = torch.randint(3, 48, (2, 7)), torch.randint(3, 48, (2, length))
        given, options = (source, target.roll(1, 1), source == 0), {"ignore_index": 0}
        with torch.no_grad():
            logits = make_model(config).eval()(*given)
            expected = label_smoothed_cross_entropy(logits, target, **options) * target.numel()  # type: ignore[arg-type]
            model = make_model(config).eval()
            parallelize(model, mesh_of(**sizes))
            found = sum_over_processes(model, loss_sum(model, model(*given), target, **options))  # type: ignore[arg-type]
        torch.testing.assert_close(found, expected * sizes.get("data", 1))


@pytest.mark.slow
def test_of_four() -> None:
    in_processes(
        partial(trained_like_one_process, {"data": 4}), rotary_positions,
        partial(trained_like_one_process, {"data": 2, "tensor": 2}),
        partial(trained_like_one_process, {"context": 2, "tensor": 2}), stacks,
        layers_keep_no_weights, layers_of_other_classes, refusals, inputs_out_of_range,
        losses_of_lengths_like_those_of_shards, attention_drops_what_one_process_drops,
        other_dropouts,
    )  # fmt: skip


@pytest.mark.slow
def test_other_plans_and_models_of_four() -> None:
    in_processes(
        partial(trained_like_one_process, {"tensor": 4}),
        partial(trained_like_one_process, {"context": 4}),
        partial(trained_like_one_process, {"context": 4}, context="all_to_all"),
        partial(trained_like_one_process, {"data": 2, "context": 2}),
        other_models,
    )
