"""Ops on DTensors, and whole models under DDP and FSDP2: results equal those of one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import gradients, in_processes, needs_distributed
from torch import Tensor, nn

import fastattn
from fastattn import nn as fnn
from fastattn.ops.attention.calls import ForwardCall

if dist.is_available():
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

PROCESSES = 2
pytestmark = needs_distributed


def _mesh(*sizes: int) -> "DeviceMesh":
    """For which the ops have sharding rules; registering them again changes nothing."""
    from fastattn.distributed import register_sharding_rules

    register_sharding_rules()
    return init_device_mesh("cpu", sizes)


def dtensors_stay_sharded() -> None:
    mesh = _mesh(PROCESSES)
    q, k, v = (torch.randn(4, H, 6, 8) for H in (4, 2, 2))
    bias = torch.randn(1, 4, 6, 6)
    lengths = [torch.tensor([6, 3, 0, 5]), torch.tensor([2, 6, 4, 0])]
    weights = torch.randn(4, 4, 6, 8)
    plain = [x.clone().requires_grad_() for x in (q, k, v, bias)]

    for causal, dim in ((False, 0), (False, 1), ("bottom_right_lengths", 0)):

        def attend(
            q: Any, k: Any, v: Any, mask: Any, keys: Any, queries: Any, causal: Any = causal
        ) -> Any:
            return fastattn.attention(
                q, k, v, mask=mask, key_lengths=keys, query_lengths=queries, causal=causal
            )

        expected = attend(*plain, *lengths)
        expected_gradients = gradients([expected], [weights], plain)
        place = [Shard(dim)]
        sharded = [distribute_tensor(x, mesh, place).requires_grad_() for x in (q, k, v)]
        sharded.append(
            distribute_tensor(bias, mesh, place if dim else [Replicate()]).requires_grad_()
        )
        lengths_ = [distribute_tensor(x, mesh, [Replicate()] if dim else place) for x in lengths]
        out = attend(*sharded, *lengths_)
        assert out.placements == (Shard(dim),)
        torch.testing.assert_close(out.full_tensor(), expected)
        weights_ = distribute_tensor(weights, mesh, place)
        for x, y in zip(gradients([out], [weights_], sharded), expected_gradients, strict=True):
            torch.testing.assert_close(x.full_tensor(), y)  # type: ignore[attr-defined]


def score_changes_stay_sharded() -> None:
    """The op itself: ALiBi and tables become distance_bias by operators of plain tensors."""
    mesh = _mesh(PROCESSES)
    attend = torch.ops.fastattn.attention_fwd

    def call_of(tensors: Any, lengths: Any) -> ForwardCall:
        names = ("q", "k", "v", "distance_bias", "sinks")
        given = dict(zip(names, tensors, strict=True))
        return ForwardCall(**given, key_lengths=lengths, softcap=2.0, scale=0.3)

    q, k, v = (torch.randn(4, H, 6, 8) for H in (4, 2, 2))
    key_lengths = torch.tensor([6, 3, 0, 5])  # one entry has no key: its lse is the sink
    weights = torch.randn(4, 4, 6, 8), torch.randn(4, 4, 6)
    for batches, dim in ((1, 0), (1, 1), (4, 0), (4, 1)):
        plain = [q, k, v, torch.randn(batches, 4, 11), torch.randn(4)]
        plain = [x.clone().requires_grad_() for x in plain]
        expected = attend(*call_of(plain, key_lengths))
        expected_gradients = gradients(expected, weights, plain)

        bias = Replicate() if dim == 0 and batches == 1 else Shard(dim)
        places = [Shard(dim)] * 3 + [bias, Shard(0) if dim else Replicate()]
        sharded = [
            distribute_tensor(x.detach(), mesh, [place]).requires_grad_()
            for x, place in zip(plain, places, strict=True)
        ]
        lengths = distribute_tensor(key_lengths, mesh, [Replicate() if dim else Shard(0)])
        results = attend(*call_of(sharded, lengths))
        shares = [distribute_tensor(x, mesh, [Shard(dim)]) for x in weights]
        for x, y in zip(results, expected, strict=True):
            assert x.placements == (Shard(dim),)
            torch.testing.assert_close(x.full_tensor(), y)
        found: Any = gradients(results, shares, sharded)
        for x, y in zip(found, expected_gradients, strict=True):
            torch.testing.assert_close(x.full_tensor(), y)

    # Packed sequences and pages are replicated: the first dimension of their tensors is no batch.
    offsets = torch.tensor([0, 3, 8], dtype=torch.int32)
    tokens, pool = torch.randn(8, 4, 8), torch.randn(6, 4, 16, 8)
    packing = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    packed = ForwardCall(tokens, tokens, tokens, **packing, max_seqlen_q=5, max_seqlen_k=5)
    table = torch.tensor([[0, 3], [1, 5], [2, 4], [3, 0]], dtype=torch.int32)
    for call in (packed, ForwardCall(q, pool, pool, block_table=table)):
        sharded_call = ForwardCall._make(
            distribute_tensor(x, mesh, [Shard(0) if x.shape[0] % PROCESSES == 0 else Replicate()])
            if isinstance(x, torch.Tensor)
            else x
            for x in call
        )
        for x, y in zip(attend(*sharded_call), attend(*call), strict=True):
            assert x.placements == (Replicate(),)
            torch.testing.assert_close(x.full_tensor(), y)


def heads_on_two_mesh_dimensions() -> None:
    """Groups of heads are not divided: six key heads on 2 x 2 processes would be 2, 1, 2, 1."""
    cases: list[tuple[tuple[int, int], int, tuple[Placement, ...], bool]] = [
        ((2, 2), 6, (Shard(1), Shard(1)), False),
        ((2, 2), 4, (Shard(1), Shard(1)), True),
        ((2, 2), 2, (Shard(0), Shard(1)), True),
        ((4, 1), 1, (Shard(0), Shard(1)), True),
        ((2, 2), 6, (Shard(1), Replicate()), True),
    ]
    for sizes, K, placements, stays in cases:
        mesh = _mesh(*sizes)
        q, k, v = (torch.randn(4, heads, 6, 8) for heads in (4 * K, K, K))
        sharded = [distribute_tensor(x, mesh, placements) for x in (q, k, v)]
        out: Any = fastattn.attention(*sharded)
        assert (out.placements == placements) is stays
        torch.testing.assert_close(out.full_tensor(), fastattn.attention(q, k, v))


def dtensor_rows() -> None:
    mesh = _mesh(PROCESSES)
    x, residual, weight, bias = (torch.randn(*s) for s in ((4, 3, 8), (4, 3, 8), (8,), (8,)))
    w1, b1, w2, b2 = (torch.randn(*s) for s in ((16, 8), (16,), (8, 16), (8,)))

    def run(x: Any, r: Any, w: Any, b: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
        y = fastattn.add_layer_norm(fastattn.layer_norm(x, w, b), r, w, b)
        y = fastattn.linear(fastattn.linear(y, w1, b1), w2, b2)
        y = fastattn.ffn(y, w1, b1, w2, b2, residual=r)
        return fastattn.rms_norm(y, w, backend="reference")

    plain = [t.clone().requires_grad_() for t in (x, residual, weight, bias, w1, b1, w2, b2)]
    expected = run(*plain)
    weights = torch.randn_like(x)
    expected_gradients = gradients([expected], [weights], plain)
    for dim in (0, 1):
        sharded = [
            distribute_tensor(t.detach(), mesh, [Shard(dim) if i < 2 else Replicate()])
            .requires_grad_()
            for i, t in enumerate(plain)
        ]  # fmt: skip
        out = run(*sharded)
        assert out.placements == (Shard(dim),)
        torch.testing.assert_close(out.full_tensor(), expected)
        weights_ = distribute_tensor(weights, mesh, [Shard(dim)])
        for g, y in zip(gradients([out], [weights_], sharded), expected_gradients, strict=True):
            torch.testing.assert_close(g.full_tensor(), y, atol=1e-5, rtol=1e-5)  # type: ignore[attr-defined]


def gradients_of_sums_only() -> None:
    mesh = _mesh(PROCESSES)
    x, residual, cotangent = torch.randn(3, 4, 8)
    inputs = [distribute_tensor(t, mesh, [Shard(0)]).requires_grad_() for t in (x, residual)]
    _, z = fastattn.add_layer_norm(*inputs, return_sum=True)
    for g in gradients([z], [distribute_tensor(cotangent, mesh, [Shard(0)])], inputs):
        assert g.placements == (Shard(0),)  # type: ignore[attr-defined]
        torch.testing.assert_close(g.full_tensor(), cotangent)  # type: ignore[attr-defined]


def gradients_of_parameters_that_were_frozen() -> None:
    """The same sizes with other required gradients must not reuse cached placements."""
    mesh = _mesh(PROCESSES)
    x, weight, cotangent = torch.randn(4, 8), torch.randn(8), torch.randn(4, 8)
    for norm in (lambda x, w: fastattn.layer_norm(x, w, None), fastattn.rms_norm):
        for wanted in (["x"], ["x", "weight"], ["weight"]):
            plain = {
                name: t.clone().requires_grad_(name in wanted)
                for name, t in (("x", x), ("weight", weight))
            }
            placements = {"x": [Shard(0)], "weight": [Replicate()]}
            sharded = {
                name: distribute_tensor(t.detach(), mesh, placements[name]).requires_grad_(
                    name in wanted
                )
                for name, t in plain.items()
            }
            out, expected = norm(*sharded.values()), norm(*plain.values())  # type: ignore[no-untyped-call]
            got = gradients([out], [distribute_tensor(cotangent, mesh, [Shard(0)])],
                            [sharded[name] for name in wanted])  # fmt: skip
            true = gradients([expected], [cotangent], [plain[name] for name in wanted])
            for g, y in zip(got, true, strict=True):
                torch.testing.assert_close(g.full_tensor(), y)  # type: ignore[attr-defined]


def dropout_bits_do_not_depend_on_sharding() -> None:
    mesh = _mesh(PROCESSES)
    q = torch.randn(2, 4, 6, 8)
    seed = torch.tensor([7])
    sharded = distribute_tensor(q, mesh, [Shard(1)])
    seed_ = distribute_tensor(seed, mesh, [Replicate()])
    out = fastattn.attention(sharded, sharded, sharded, dropout_p=0.5, dropout_seed=seed_)
    expected = fastattn.attention(q, q, q, dropout_p=0.5, dropout_seed=seed)
    torch.testing.assert_close(out.full_tensor(), expected)  # type: ignore[union-attr]
    w = torch.randn(8, 8)
    whole = [Replicate()]
    for name in ("dropout_p", "output_dropout_p"):
        options: dict[str, Any] = {name: 0.5}
        sharded_out = fastattn.ffn(
            distribute_tensor(q, mesh, [Shard(0)]), distribute_tensor(w, mesh, whole), None,
            distribute_tensor(w, mesh, whole), None, dropout_seed=seed_, **options,
        )  # fmt: skip
        expected = fastattn.ffn(q, w, None, w, None, dropout_seed=seed, **options)
        torch.testing.assert_close(sharded_out.full_tensor(), expected)  # type: ignore[attr-defined]


# -- whole models ----------------------------------------------------------------------------------
def _model() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = fnn.Transformer(16, 2, 1, 1, 32, 0.0, batch_first=True)
    return model, torch.randn(4, 6, 16), torch.randn(4, 5, 16)


def _half(x: Tensor) -> Tensor:
    return x.chunk(PROCESSES)[dist.get_rank()]


def data_parallel_training() -> None:
    model, src, tgt = _model()
    model(src, tgt).square().mean().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}  # type: ignore[union-attr]
    model, src, tgt = _model()
    parallel = nn.parallel.DistributedDataParallel(model)
    parallel(_half(src), _half(tgt)).square().mean().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], atol=1e-6, rtol=1e-4)


def fully_sharded_training() -> None:
    from torch.distributed.fsdp import fully_shard

    model, src, tgt = _model()
    model(src, tgt).square().mean().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}  # type: ignore[union-attr]
    model, src, tgt = _model()
    mesh = _mesh(PROCESSES)
    for layer in (*model.encoder.layers, *model.decoder.layers):  # type: ignore[union-attr, misc]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(_half(src), _half(tgt)).square().mean().backward()
    for name, p in model.named_parameters():
        gradient = p.grad.full_tensor()  # type: ignore[union-attr]
        torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-4)


def test_dtensors() -> None:
    """In one test: starting the processes takes most of the time."""
    in_processes(
        dtensors_stay_sharded, score_changes_stay_sharded, dtensor_rows, gradients_of_sums_only,
        gradients_of_parameters_that_were_frozen, dropout_bits_do_not_depend_on_sharding,
        size=PROCESSES,
    )  # fmt: skip


@pytest.mark.slow
def test_dtensor_on_two_mesh_dimensions() -> None:
    in_processes(heads_on_two_mesh_dimensions, size=4)


@pytest.mark.slow
def test_training() -> None:
    in_processes(data_parallel_training, fully_sharded_training, size=PROCESSES)
