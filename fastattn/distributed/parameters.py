"""Weights of a parallel model: parts, shards, and whole local tensors while a module runs.

A weight whose rows are several blocks, such as those of query, key and value in `in_proj_weight`,
becomes one parameter for each block, `in_proj_weight_part0` and so on, because a process needs the
same share of every block. Names and full shapes of the parts do not depend on the mesh.
`join_parts` and `split_parts` convert state dicts from and to PyTorch's names.

Outside a module's forward its parameters are DTensors. While it runs, its weights are this
process's plain tensors, under their usual names: `LocalWeights` puts them there.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from fastattn.distributed import collectives
from fastattn.distributed.collectives import Group
from fastattn.nn import GatedActivation
from fastattn.nn.fusion import linear

_PART = re.compile(r"(.*)_part(\d+)")


def part_name(name: str, index: int) -> str:
    return f"{name}_part{index}"


def split_parts(state: Mapping[str, Tensor], blocks: Mapping[str, int]) -> dict[str, Tensor]:
    """A state dict with PyTorch's names -> that of a parallel model. The parts are views.

    blocks: the names of divided weights -> their number of parts, see `weight_blocks`.
    """
    result = {}
    for name, tensor in state.items():
        if name not in blocks:
            result[name] = tensor
            continue
        for index, part in enumerate(tensor.chunk(blocks[name])):
            result[part_name(name, index)] = part
    return result


def join_parts(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Reverts `split_parts`, for tensors or DTensors that are replicated."""
    parts: dict[str, dict[int, Tensor]] = {}
    result: dict[str, Any] = {}
    for name, tensor in state.items():
        if (found := _PART.fullmatch(name)) is None:
            result[name] = tensor
            continue
        name, index = found[1], int(found[2])
        result[name] = None  # keeps the order
        parts.setdefault(name, {})[index] = tensor
    for name, tensors in parts.items():
        result[name] = torch.cat([tensors[index] for index in range(len(tensors))])
    return result


def weight_blocks(model: nn.Module) -> dict[str, int]:
    """The weights of a model that `parallelize` divides into parts -> the number of their parts,
    by their PyTorch names; of a model before or after `parallelize`.
    """
    blocks: dict[str, int] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        for weight, count in module_blocks(module).items():
            blocks[prefix + weight] = count
    return blocks


def module_blocks(module: nn.Module) -> dict[str, int]:
    """`weight_blocks` of the parameters that belong to the module itself or to its `linear1`."""
    blocks = {}
    if isinstance(module, nn.MultiheadAttention):
        for name in ("in_proj_weight", "in_proj_bias"):
            if _has(module, name):
                blocks[name] = 3
    if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        gated = isinstance(module.activation, GatedActivation)
        for name in ("weight", "bias"):
            if gated and _has(module.linear1, name):
                blocks[f"linear1.{name}"] = 2
    return blocks


def _has(module: nn.Module, name: str) -> bool:
    parameters = module._parameters
    return parameters.get(name) is not None or part_name(name, 0) in parameters


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The whole weights of a parallel model on every process, with PyTorch's names.

    Every process of the mesh calls it. The tensors are copies on the model's device.
    """
    return full_tensors(model.state_dict())


def full_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of a parallel model's weights, or of their gradients or optimizer state, by name: the
    whole tensors on every process, with PyTorch's names. Every process of the mesh calls it.
    """
    return join_parts({name: _full(tensor) for name, tensor in state.items()})


def _full(tensor: Any) -> Tensor:
    """A copy of `DTensor.full_tensor()`, which logs a warning on each process of a 2-d mesh."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    mesh, local = tensor.device_mesh, tensor.to_local()
    groups = [
        Group(mesh.size(i), mesh.get_local_rank(i), mesh.get_group(i)) for i in range(mesh.ndim)
    ]
    divided = [p.dim for p in tensor.placements[1:] if isinstance(p, Shard)]  # along "tensor"
    rows = tensor.shape[0] // (groups[1].size if 0 in divided else 1)
    # FSDP divides them into chunks of one size, of which the last ones are smaller or empty.
    missing = -(-rows // groups[0].size) - len(local)
    local = F.pad(local, [0, 0] * (local.dim() - 1) + [0, missing])
    whole = groups[0].join(local, 0)[:rows]
    for dim in divided:
        whole = groups[1].join(whole, dim)
    return whole.clone()


@dataclass
class LocalWeights:
    """Puts this process's plain tensors in place of the parameters of some modules.

    group: of "tensor". parameters: (module, name, whether the gradients of its processes are
    summed, all in one collective); joined: (module, name, number of parts); buffers: (module, name,
    how to take the share).
    """

    group: Group
    parameters: list[tuple[nn.Module, str, bool]] = field(default_factory=list)
    joined: list[tuple[nn.Module, str, int]] = field(default_factory=list)
    buffers: list[tuple[nn.Module, str, Callable[[Tensor], Tensor]]] = field(default_factory=list)
    _replaced: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        self.place()
        try:
            yield
        finally:
            self.restore()

    def place(self) -> None:
        summed: list[tuple[nn.Module, str]] = []
        for module, name, is_summed in self.parameters:
            parameter: Any = module._parameters[name]
            local = parameter.to_local(grad_placements=parameter.placements)
            self._replace(module, name, local)
            if is_summed and parameter.requires_grad:
                summed.append((module, name))
        tensors: Any = [module._parameters[name] for module, name in summed]
        tensors = collectives.sum_gradients(tensors, self.group)
        for (module, name), tensor in zip(summed, tensors, strict=True):
            module._parameters[name] = tensor
        for module, name, count in self.joined:
            parts = [module._parameters[part_name(name, index)] for index in range(count)]
            self._replace(module, name, torch.cat(parts))  # type: ignore[arg-type]
        for module, name, share in self.buffers:
            buffer = module._buffers[name]
            self._replaced.append((module._buffers, name, buffer))
            module._buffers[name] = share(buffer)  # type: ignore[arg-type]

    def restore(self) -> None:
        while self._replaced:
            table, name, before = self._replaced.pop()
            table[name] = before

    def _replace(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        self._replaced.append((module._parameters, name, module._parameters[name]))
        module._parameters[name] = tensor  # type: ignore[assignment]

    def attach(self, module: nn.Module) -> None:
        """Around every forward of `module`, inside the hooks of FSDP."""
        module.register_forward_pre_hook(lambda *_: self.place())
        module.register_forward_hook(lambda *_: self.restore(), prepend=True, always_call=True)

    def attach_method(self, module: nn.Module, name: str) -> None:
        """Around another method that runs the module."""
        method = getattr(module, name)

        @functools.wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self.in_place():
                return method(*args, **kwargs)

        setattr(module, name, wrapped)


def product_of_parts(
    attention: nn.MultiheadAttention, x: Tensor, first: int, count: int
) -> Tensor | None:
    """x times `count` blocks of `in_proj_weight`, beginning with block `first`, while
    `LocalWeights` are in place; None if the weight is one parameter.
    """
    parameters: Any = attention._parameters
    if part_name("in_proj_weight", first) not in parameters:
        return None
    parts = [parameters[part_name("in_proj_weight", first + i)] for i in range(count)]
    rows = slice(first * len(parts[0]), (first + count) * len(parts[0]))
    bias = parameters["in_proj_bias"]
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype is not torch.float64:
        x = x.to(torch.get_autocast_dtype(kind))
    joined = parameters["in_proj_weight"].detach()[rows]
    return _ProductOfParts.apply(x, joined, None if bias is None else bias[rows], *parts)  # type: ignore[no-any-return]


class _ProductOfParts(torch.autograd.Function):
    """x times the joined parts of a weight. The parts are saved, which FSDP frees and gathers
    again, and joined again in the backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, joined: Tensor, bias: Tensor | None, *parts: Tensor) -> Tensor:
        ctx.save_for_backward(x, *parts)
        return linear(x, joined, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *parts = ctx.saved_tensors
        for_x, _, for_bias, *for_parts = ctx.needs_input_grad
        rows = dy.flatten(0, -2)
        dx = dy @ torch.cat(parts).to(dy.dtype) if for_x else None
        dbias = rows.sum(0) if for_bias else None
        if not any(for_parts):
            return dx, None, dbias, *[None] * len(parts)
        return dx, None, dbias, *(rows.t() @ x.flatten(0, -2)).chunk(len(parts))


def parts_of(module: nn.Module) -> list[tuple[nn.Module, str, int]]:
    """The weights of which the module holds parts, as in `LocalWeights.joined`."""
    found = [match for name in module._parameters if (match := _PART.fullmatch(name))]
    return [(module, name, count) for name, count in Counter(m[1] for m in found).items()]


def divide(module: nn.Module, name: str, count: int) -> None:
    """Replaces a parameter by its `count` parts; their values are copies."""
    parameter: Any = module._parameters[name]
    for index, part in enumerate(parameter.detach().chunk(count)):
        copy = nn.Parameter(part.clone(), requires_grad=parameter.requires_grad)
        module.register_parameter(part_name(name, index), copy)
    module._parameters[name] = None


def shard(module: nn.Module, name: str, mesh: Any, dim: int | None) -> None:
    """Makes a parameter a DTensor on the mesh of "tensor": replicated, or a shard along `dim`."""
    parameter: Any = module._parameters[name]
    local = parameter.detach()
    if dim is not None:
        size = local.shape[dim] // mesh.size()
        local = local.narrow(dim, mesh.get_local_rank() * size, size).clone()
    placements = [Replicate() if dim is None else Shard(dim)]
    sharded = DTensor.from_local(local, mesh, placements, run_check=False)
    module._parameters[name] = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
