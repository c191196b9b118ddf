"""`parallelize`: a Transformer, or a model of tokens around one, on a mesh of processes.

1. Everything that does not divide or is not known is collected and refused.
2. Weights of several blocks become one parameter for each block (see `parameters`).
3. Along "tensor": projections and feed-forward networks by whole heads and hidden columns (Shoeybi
   et al. 2019), the residual stream by rows (Korthikanti et al. 2022), vocabularies by tokens.
4. Modules get a `Sharding`, which communicates where their forward asks for it (see `shards`).
5. FSDP2 shards all parameters over "data" and "context" together, layer by layer.
"""

import re
import zlib
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from fastattn.distributed import collectives
from fastattn.distributed.collectives import Group
from fastattn.distributed.parameters import (
    LocalWeights,
    divide,
    module_blocks,
    parts_of,
    shard,
    weight_blocks,
)
from fastattn.distributed.shards import Place, StackSharding, TokenSharding
from fastattn.nn import (
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from fastattn.nn.attention import projects_alike
from fastattn.nn.feed_forward import fused_activation
from fastattn.nn.fusion import is_plain_tensor, is_unmodified
from fastattn.nn.packing import can_pack
from fastattn.nn.positional_attention import attention_classes, positions_of
from fastattn.nn.power_norm import PowerNorm, TokenBatchNorm
from fastattn.nn.relative import AlibiPositions
from fastattn.nn.sharding import ShardedDropout, TokenModelParts

DIMENSIONS = ("data", "context", "tensor")  # outermost first
# Meshes whose first dimension is FSDP's.
SLICED = (("data",), ("context",), ("data", "tensor"), ("context", "tensor"))
METHODS = ("ring", "all_to_all")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_LAYERS = (TransformerEncoderLayer, TransformerDecoderLayer)


@dataclass(frozen=True)
class Plan:
    """The options of `parallelize` along the dimensions of a mesh.

    Attributes:
        context: how attention exchanges keys along "context", "ring" or "all_to_all".
        sequence: whether processes of "tensor" divide the rows of the residual stream, where norms,
            dropouts and sums are, or repeat this work.
        vocabulary: whether they divide embeddings and the output head by tokens, or repeat them.
    """

    context: Literal["ring", "all_to_all"] = "ring"
    sequence: bool = True
    vocabulary: bool = True

    def __post_init__(self) -> None:
        if self.context not in METHODS:
            raise ValueError(f"context must be one of {METHODS}, got {self.context!r}")


@dataclass(frozen=True)
class Report:
    """The changes that `parallelize` made: rows of a module's name and a description. str() is a
    table.
    """

    rows: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        width = max((len(name) for name, _ in self.rows), default=0)
        return "\n".join(f"{name:<{width}}  {what}" for name, what in self.rows)


def parallelize(model: nn.Module, mesh: DeviceMesh, plan: Plan | None = None) -> Report:
    """Divides a model and its work among the processes of a mesh, in place.

    Every process of the mesh calls it with a model of the same values, which is checked. Afterwards
    parameters are DTensors; optimizers are made then. Raises ValueError or TypeError with all
    reasons, before it changes anything.

    Args:
        model: `fastattn.nn.Transformer`, `TransformerEncoder`, `TransformerDecoder`, or a model
            with a method `parallel_parts`, such as `fastattn.seq2seq.Seq2SeqTransformer`.
        mesh: its dimensions are named "data", "tensor" and "context", any of them in any order.
        plan: default `Plan()`.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    plan = Plan() if plan is None else plan
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a Plan, got {type(plan).__name__}")
    sizes = _sizes(mesh)
    refusal = None
    try:
        if reasons := list(_refusals(_Pieces.of(model), sizes, plan, mesh.device_type)):
            raise ValueError(
                "the model cannot be divided:\n" + "\n".join(f"- {r}" for r in reasons)
            )
    except (TypeError, ValueError) as error:
        refusal = error
    _require_same(model, mesh, plan, refusal)
    if refusal is not None:
        raise refusal
    return Report(tuple(_Changes(_Pieces.of(model), mesh, sizes, plan).make()))


def _sizes(mesh: DeviceMesh) -> dict[str, int]:
    names = mesh.mesh_dim_names or ()
    if not names or not set(names) <= set(DIMENSIONS):
        raise ValueError(f"mesh must have dimensions named among {DIMENSIONS}, got {names}")
    if names not in SLICED and mesh.size() != dist.get_world_size():
        raise ValueError(
            f"mesh must hold all {dist.get_world_size()} processes, which make groups of other "
            f"dimensions than {names}, got {mesh.size()}"
        )
    return {name: mesh.size(names.index(name)) if name in names else 1 for name in DIMENSIONS}


@dataclass(frozen=True)
class _Pieces:
    """The stacks of a model by name, and what it says about the rest."""

    model: Any
    stacks: dict[str, Any]
    batch_first: bool
    parts: TokenModelParts | None = None

    @classmethod
    def of(cls, model: Any) -> "_Pieces":
        parts: TokenModelParts | None = None
        transformer, prefix = model, ""
        if hasattr(model, "parallel_parts"):
            parts = model.parallel_parts()
            transformer, prefix = model.get_submodule(parts.transformer), f"{parts.transformer}."
        if isinstance(transformer, Transformer):
            stacks = {
                prefix + "encoder": transformer.encoder,
                prefix + "decoder": transformer.decoder,
            }
        elif isinstance(transformer, (TransformerEncoder, TransformerDecoder)):
            stacks = {prefix.removesuffix("."): transformer}
        else:
            raise TypeError(
                "model must be a Transformer, TransformerEncoder or TransformerDecoder of "
                "fastattn.nn or have the method parallel_parts, got "
                f"{type(transformer).__module__}.{type(transformer).__name__}"
            )
        for name, stack in stacks.items():
            if not isinstance(stack, (TransformerEncoder, TransformerDecoder)):
                raise TypeError(
                    f"{name} must be a TransformerEncoder or TransformerDecoder of fastattn.nn, "
                    f"got {type(stack).__module__}.{type(stack).__name__}"
                )
        batch_first = any(
            layer.self_attn.batch_first for stack in stacks.values() for layer in stack.layers
        )
        return cls(model, stacks, batch_first, parts)

    def layers(self) -> Iterator[tuple[str, Any]]:
        for name, stack in self.stacks.items():
            for index, layer in enumerate(stack.layers):
                yield f"{name}.layers.{index}".removeprefix("."), layer


# -- unsupported models ---------------------------------------------------------------------------
def _refusals(
    pieces: _Pieces, sizes: dict[str, int], plan: Plan, device_type: str
) -> Iterator[str]:
    T, model = sizes["tensor"], pieces.model
    yield from _parameter_refusals(model, device_type)
    if pieces.parts is not None:
        for dimension, why in pieces.parts.refused.items():
            size = sizes[dimension] if dimension in sizes else T * getattr(plan, dimension)
            if size > 1:
                yield f'"{dimension}" must not be divided for a model that {why}'
        for name in pieces.parts.vocabulary if plan.vocabulary else ():
            rows = len(_tensor(model, name))
            if rows % T:
                yield (
                    f"{name} must have rows that {_processes(T)} divide, got {rows}: "
                    "use another vocabulary or Plan(vocabulary=False)"
                )
    yield from _shared_parameters(model, None if T > 1 else weight_blocks(model))
    seen: dict[Any, str] = {}
    for name, layer in pieces.layers():
        if seen.setdefault(layer, name) != name:
            yield f"{name} must not be the layer {seen[layer]} again"
    for name, module in model.named_modules():
        if isinstance(module, (PowerNorm, TokenBatchNorm)):
            yield f"{name} must not normalise over tokens, got {type(module).__name__}"
    for name, layer in pieces.layers():
        if T > 1 or sizes["context"] > 1:
            by_heads = sizes["context"] if plan.context == "all_to_all" else 1
            yield from _layer_refusals(name, layer, T, by_heads)


def _layer_refusals(name: str, layer: Any, T: int, P: int) -> Iterator[str]:
    """P: the number of processes that share the heads of an attention by all-to-all."""
    if not is_unmodified(layer, *_LAYERS):
        wanted = " or ".join(kind.__name__ for kind in _LAYERS)
        yield f"{name} must be an unmodified {wanted} of fastattn.nn, got {type(layer).__name__}"
        return
    for child in ("self_attn", "multihead_attn"):
        attention = getattr(layer, child, None)
        if attention is None:
            continue
        if not is_unmodified(attention, *attention_classes(child)):
            yield f"{name}.{child} must be an unmodified attention, got {type(attention).__name__}"
        elif not projects_alike(attention):
            yield f"{name}.{child} must have no kdim, vdim, add_bias_kv or add_zero_attn"
        elif attention.num_heads % T:
            yield (
                f"{name}.{child} must have heads that {_processes(T)} divide, "
                f"got {attention.num_heads}"
            )
        elif attention.num_heads // T % P:
            yield (
                f'{name}.{child} must have heads that "tensor" and "context", {T} x {P}, divide '
                f'for context="all_to_all", got {attention.num_heads}'
            )
    if fused_activation(layer.linear1, layer.activation, layer.dropout, layer.linear2) is None:
        yield (
            f"{name} must have unmodified linear maps and an activation of the op ffn, "
            f"got {layer.activation}"
        )
    elif layer.linear2.in_features % T:
        yield (
            f"{name}.linear1 must have hidden columns that {_processes(T)} divide, "
            f"got {layer.linear2.in_features}"
        )
    for child, module in layer.named_children():
        if child.startswith("dropout") and not is_unmodified(module, nn.Dropout):
            yield f"{name}.{child} must be an unmodified Dropout, got {type(module).__name__}"


def _parameter_refusals(model: nn.Module, device_type: str) -> Iterator[str]:
    """One reason of each kind, because it often holds for all parameters."""
    reasons: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters():
        if not is_plain_tensor(parameter):
            wanted, got = "a plain tensor", type(parameter).__name__
        elif parameter.device.type != device_type:
            wanted, got = f"on the mesh's device {device_type}", str(parameter.device)
        elif parameter.dim() == 0 or not parameter.is_contiguous():
            wanted = "contiguous and have rows"
            got = f"{list(parameter.shape)} with strides {parameter.stride()}"
        else:
            continue
        reasons.setdefault(wanted, []).append(f"{name} must be {wanted}, got {got}")
    for first, *others in reasons.values():
        yield first + (f", and {len(others)} other parameters" if others else "")


def _shared_parameters(model: nn.Module, names: Collection[str] | None) -> Iterator[str]:
    """Refuses parameters of several modules; with names, only those of which one is named."""
    first: dict[Tensor, str] = {}
    for prefix, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{own}".removeprefix(".")
            other = first.setdefault(parameter, name)
            if other != name and (names is None or name in names or other in names):
                yield f"{name} must not be the parameter {other} of another module"


def _processes(T: int) -> str:
    return f'the {T} processes of "tensor"'


def _tensor(model: nn.Module, name: str) -> Tensor:
    parent, _, own = name.rpartition(".")
    return getattr(model.get_submodule(parent), own)  # type: ignore[no-any-return]


def _require_same(
    model: nn.Module, mesh: DeviceMesh, plan: Plan, refusal: Exception | None
) -> None:
    """Raises if processes have other plans or weights, or only some have a refusal: they would wait
    for each other, or train weights of which their copies differ.
    """
    text, bits = "refused", torch.zeros((), dtype=torch.int64, device=mesh.device_type)
    if refusal is None:
        parameters = [*model.named_parameters()]
        kinds = [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in parameters]
        text = f"{type(model)} {kinds} {mesh.mesh_dim_names} {mesh.mesh.tolist()} {plan}"
        for index, (_, p) in enumerate(parameters, start=1):
            bits += index * p.detach().view(_INTEGERS[p.itemsize]).sum(dtype=torch.int64)
    own = torch.stack([bits.new_tensor(zlib.crc32(text.encode())), bits])
    extremes = torch.cat([own, -own])
    for dim in range(mesh.ndim):
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=mesh.get_group(dim))
    differ = (extremes[:2] != -extremes[2:]).tolist()
    if any(differ):
        what = "model, parameters or plan" if differ[0] else "values of parameters"
        raise ValueError(
            f"model and plan must be the same on every process of the mesh, got other {what}: "
            "call torch.manual_seed with one number, or load the same weights"
        ) from refusal


# -- changes --------------------------------------------------------------------------------------
class VocabularyEmbedding(nn.Embedding):
    """An `nn.Embedding` of which this process holds the rows of some tokens while it runs."""

    group: Group

    def forward(self, input: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        index, inside = self.group.index_in_part(input, rows)
        padding = None if self.padding_idx is None else self.padding_idx - self.group.rank * rows
        x = F.embedding(
            index, self.weight, padding if padding is not None and 0 <= padding < rows else None
        )
        return collectives.sum_whole(x.masked_fill(~inside[..., None], 0.0), self.group)


class _Changes:
    """The changes of one model: `make` returns the rows of the report."""

    def __init__(
        self, pieces: _Pieces, mesh: DeviceMesh, sizes: dict[str, int], plan: Plan
    ) -> None:
        self.pieces, self.sizes, self.plan = pieces, sizes, plan
        self.place = Place(**{name: _group(mesh, name, sizes[name]) for name in DIMENSIONS})
        self.shard_mesh, self.tensor_mesh = _meshes(mesh, sizes["tensor"])
        self.own_name = type(pieces.model).__name__
        self.divides_rows = plan.sequence and sizes["tensor"] > 1
        self.rows: dict[str, list[str]] = {}

    def make(self) -> list[tuple[str, str]]:
        model, layers = self.pieces.model, dict(self.pieces.layers())
        packable = {name: can_pack(layer, _LAYERS) for name, layer in layers.items()}
        in_layers = {module for layer in layers.values() for module in layer.modules()}
        weights = {}
        for name, layer in layers.items():
            weights[name] = self._own_weights(name, dict(layer.named_modules()))
            self._set_layer(name, layer, packable[name], weights[name])
        rest = {name: m for name, m in model.named_modules() if m not in in_layers}
        root_weights = self._own_weights("", rest)
        self._set_stacks()
        if self.pieces.parts is not None:
            self._set_model(self.pieces.parts, root_weights)
        self._fully_shard(layers)
        for name, layer in layers.items():
            weights[name].attach(layer)
        root_weights.attach(model)
        for method in self.pieces.parts.methods if self.pieces.parts else ():
            root_weights.attach_method(model, method)
            register_fsdp_forward_method(model, method)
        return [(name, ", ".join(what)) for name, what in self.rows.items()]

    def _note(self, name: str, what: str) -> None:
        self.rows.setdefault(name or self.own_name, []).append(what)

    # -- weights ----------------------------------------------------------------------------------
    def _own_weights(self, prefix: str, modules: dict[str, nn.Module]) -> LocalWeights:
        """Divides the parameters of these modules, by name below `prefix`."""
        local = LocalWeights(self.place.tensor)
        for name, module in modules.items():
            for weight, count in module_blocks(module).items():
                owner = weight.rpartition(".")[0]
                divide(module.get_submodule(owner), _own(weight), count)
                place = ".".join(part for part in (prefix, name, owner) if part)
                self._note(place, f"{_own(weight)} in {count} parts")
        for name, module in modules.items():
            path = ".".join(part for part in (prefix, name) if part)
            for weight in list(module._parameters):
                if module._parameters[weight] is None:
                    continue
                if self.tensor_mesh is not None:
                    dim, summed = self._placement(f"{path}.{weight}".removeprefix("."))
                    if is_plain_tensor(module._parameters[weight]):  # type: ignore[arg-type]
                        shard(module, weight, self.tensor_mesh, dim)
                    local.parameters.append((module, weight, summed))
            local.joined += parts_of(module)
        return local

    def _placement(self, name: str) -> tuple[int | None, bool]:
        """The dimension of a parameter along which "tensor" divides it, and whether its gradients
        of the processes are sums over other rows.
        """
        stack = next((s for s in self.pieces.stacks if name.startswith(f"{s}.".lstrip("."))), None)
        if stack is None:
            parts = self.pieces.parts
            divided = self.plan.vocabulary and parts is not None and name in parts.vocabulary
            return (0 if divided else None), False
        if re.search(r"\.(in_proj_(weight|bias)(_part\d)?|relative_bias)$", name) or re.search(
            r"\.linear1\.(weight|bias)(_part\d)?$", name
        ):
            return 0, False
        if name.endswith((".out_proj.weight", ".linear2.weight")):
            return 1, False
        return None, self.divides_rows

    # -- modules ----------------------------------------------------------------------------------
    def _set_layer(self, name: str, layer: Any, packable: bool, local: LocalWeights) -> None:
        T = self.place.tensor
        decoder = isinstance(layer, nn.TransformerDecoderLayer)
        layer.sharding = self._sharding(packable=packable, balanced=decoder)
        for child in ("self_attn", "multihead_attn"):
            attention = getattr(layer, child, None)
            if attention is None:
                continue
            keys_balanced = layer.sharding.balanced and child == "self_attn"
            attention.sharding = replace(layer.sharding, keys_balanced=keys_balanced)
            if T.size > 1:
                heads, attention.num_heads = attention.num_heads, attention.num_heads // T.size
                self._note(f"{name}.{child}", f"{attention.num_heads} of {heads} heads")
                if isinstance(positions := positions_of(attention), AlibiPositions):
                    local.buffers.append((positions, "table", lambda x: T.part(x, 0)))
            if self.place.context.size > 1:
                kind = self.plan.context.replace("_", "-")
                layout = "balanced" if decoder else "contiguous"
                self._note(f"{name}.{child}", f"{kind} attention, queries {layout}")
        if T.size > 1:
            width = layer.linear2.in_features
            self._note(f"{name}.linear1", f"{width // T.size} of {width} hidden columns")
            self._note(f"{name}.linear2", f"{width // T.size} of {width} hidden columns")
        if self.divides_rows:
            self._note(name, f"residual stream: 1 / {T.size} of the rows")

    def _sharding(self, *, packable: bool = False, balanced: bool) -> StackSharding:
        return StackSharding(
            self.place,
            rows=self.divides_rows,
            batch_first=self.pieces.batch_first,
            packable=packable,
            method=self.plan.context,
            balanced=balanced and self.place.context.size > 1,
        )

    def _set_stacks(self) -> None:
        for name, stack in self.pieces.stacks.items():
            stack.sharding = self._sharding(balanced=isinstance(stack, nn.TransformerDecoder))
            if self.divides_rows:
                size = self.place.tensor.size
                self._note(name, f"takes 1 / {size} of the rows, returns all")

    def _set_model(self, parts: TokenModelParts, local: LocalWeights) -> None:
        model, T = self.pieces.model, self.place.tensor
        divided = self.plan.vocabulary and T.size > 1
        model.sharding = TokenSharding(
            self.place,
            rows=self.divides_rows,
            batch_first=self.pieces.batch_first,
            method=self.plan.context,
            vocabulary=divided,
            max_length=parts.max_length,
            attention_dropout=any(
                module.dropout > 0.0
                for module in model.modules()
                if isinstance(module, nn.MultiheadAttention)
            ),
        )
        for name in parts.dropouts:
            self._set_dropout(name, model.sharding, "tokens")
        for name in parts.vocabulary if divided else ():
            owner = model.get_submodule(name.rpartition(".")[0])
            tokens = len(_tensor(model, name))
            self._note(name, f"{tokens} tokens in {T.size} shards")
            if isinstance(owner, nn.Embedding):
                owner.__class__ = VocabularyEmbedding
                owner.group = T  # type: ignore[assignment]

    def _set_dropout(self, name: str, sharding: StackSharding, of: str) -> None:
        model, name = self.pieces.model, name.removeprefix(".")
        dropout: Any = model.get_submodule(name)
        model.set_submodule(name, ShardedDropout(dropout.p, sharding, of).train(dropout.training))
        self._note(name, f"dropout of this process's {of}")

    # -- FSDP -------------------------------------------------------------------------------------
    def _fully_shard(self, layers: dict[str, Any]) -> None:
        """Layers are units of their own, except those of a stack that share parameters."""
        model, size = self.pieces.model, self.shard_mesh.size()
        units: list[tuple[str, Any]] = []
        for stack_name, stack in self.pieces.stacks.items():
            named = [(n, layer) for n, layer in layers.items() if layer in list(stack.layers)]
            counts = Counter(p for _, layer in named for p in layer.parameters())
            if max(counts.values(), default=0) > 1:
                units.append((f"{stack_name}.layers", [layer for _, layer in named]))
            else:
                units += named
        for name, unit in (*units, ("", model)):
            fully_shard(unit, mesh=self.shard_mesh)
            self._note(name, f"parameters in {size} shards (FSDP)")
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Gradients are sums, of losses that are divided by the number of all tokens. gloo
                # has no sum with a factor.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)


def _own(name: str) -> str:
    return name.rpartition(".")[2]


def _group(mesh: DeviceMesh, name: str, size: int) -> Group:
    return Group() if size == 1 else Group(size, mesh.get_local_rank(name), mesh.get_group(name))


def _meshes(mesh: DeviceMesh, T: int) -> tuple[DeviceMesh, DeviceMesh | None]:
    """The meshes of parameters: that of FSDP, "data" and "context" together, and "tensor".

    They are slices of `mesh`, if it has them, or of one with the same processes.
    """
    names = mesh.mesh_dim_names or ()
    if names in SLICED:
        return mesh[names[0]], mesh["tensor"] if T > 1 else None
    ranks = mesh.mesh.permute([names.index(name) for name in DIMENSIONS if name in names])
    if T == 1:
        return DeviceMesh(mesh.device_type, ranks.flatten(), mesh_dim_names=("shard",)), None
    both = DeviceMesh(mesh.device_type, ranks.reshape(-1, T), mesh_dim_names=("shard", "tensor"))
    return both["shard"], both["tensor"]
