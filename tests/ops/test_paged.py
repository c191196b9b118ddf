"""Attention over keys and values in pages. Samples `paged_*` of its specification check values."""

from typing import Any

import pytest
import torch
from call_recorder import CallRecorder
from op_examples import DEVICE, SPECS, assert_same_bits
from torch import Tensor

import fastattn
from fastattn.ops.attention import reference
from fastattn.ops.attention.calls import ForwardCall
from fastattn.ops.attention.spec_paged import in_pages

_SAMPLES = {s.name: s for s in SPECS["attention"].samples if not s.gradients}


def _call(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The arguments of the public function."""
    inputs = _SAMPLES[name].inputs(DEVICE, dtype)
    return in_pages(inputs, inputs.pop("page"), inputs.pop("shared_pages"))


def _small(B: int = 2, T: int = 3, page: int = 16) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(*s, generator=generator) for s in ((B, 4, 2, 8), *[(20, 2, page, 8)] * 2)
    )
    table = torch.randperm(20, generator=generator)[: B * T].view(B, T).int()
    return {"q": q, "k": k, "v": v, "block_table": table}


def _contiguous(x: Tensor, table: Tensor) -> Tensor:
    """[B, K, T * page, D], page by page."""
    return torch.stack([torch.cat([x[page] for page in row], 1) for row in table.tolist()])


# -- values ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", [None, "torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_contiguous_keys(backend: str | None, dtype: torch.dtype) -> None:
    """Also the dimension order of the result."""
    call = {n: x.to(dtype) if x.is_floating_point() else x for n, x in _small().items()}
    table = call.pop("block_table")
    whole = call | {n: _contiguous(call[n], table) for n in "kv"}
    lengths = torch.tensor([37, 48])
    options: dict[str, Any] = {"key_lengths": lengths, "causal": "bottom_right_lengths"}
    options |= {"return_lse": True, "backend": backend}
    expected = fastattn.attention(**whole, **options)
    assert_same_bits(fastattn.attention(**call, block_table=table, **options), expected)


@pytest.mark.parametrize("backend", [None, "torch", "reference"])
def test_pages_beyond_the_length_are_not_read(backend: str | None) -> None:
    """For any entries of the table; NaN in such pages and after the last key changes nothing."""
    call = _small()
    expected = fastattn.attention(**call, key_lengths=[20, 16], backend=backend)
    table, used = call["block_table"].clone(), call["block_table"][[0, 0, 1], [0, 1, 0]].long()
    table[0, 2], table[1, 1:] = -(2**31), torch.tensor([2**31 - 1, 20], dtype=torch.int32)
    poisoned = {n: torch.full_like(call[n], torch.nan) for n in "kv"}
    for name, pages in poisoned.items():
        pages[used] = call[name][used]
        pages[used[1], :, 4:] = torch.nan
    found = fastattn.attention(
        call["q"], **poisoned, block_table=table, key_lengths=[20, 16], backend=backend
    )
    assert_same_bits(found, expected)


def test_no_pages_at_all() -> None:
    """A pool without pages, and sequences without keys."""
    call = _small()
    call |= {n: call[n][:0] for n in "kv"}
    out, lse = fastattn.attention(**call, key_lengths=[0, -3], return_lse=True)
    assert not out.any() and bool(lse.isneginf().all())
    with pytest.raises(ValueError, match=r"block_table must hold pages from 0 to -1"):
        fastattn.attention(**call, key_lengths=[0, 1])


def test_no_queries() -> None:
    """Then no entry of the block table is used, also with key lengths of each query."""
    call = _small()
    call |= {"q": call["q"][:, :, :0], "block_table": torch.full((2, 3), -1).int()}
    lengths = torch.full((2, 3), 48)[:, :0]
    for given in (lengths, torch.tensor([48, 20]), None):
        assert fastattn.attention(**call, key_lengths=given).shape == (2, 4, 0, 8)
    # As in compiled programs, without the public function's check of the entries.
    out, lse = torch.ops.fastattn.attention_fwd(*ForwardCall(**call, key_lengths=lengths))
    assert out.shape == (2, 4, 0, 8) and lse.shape == (2, 4, 0)


def test_pages_with_keys_before_heads_are_recognised() -> None:
    """The storage order of most caches."""
    q, table = torch.ones(1, 4, 1, 8), torch.zeros(1, 1).int()
    pages = torch.ones(3, 16, 3, 8)
    with pytest.raises(ValueError, match=r"multiple of k's 16 heads, got 4$"):
        fastattn.attention(q, pages, pages, block_table=table)
    pages = torch.ones(3, 16, 2, 8)
    with pytest.raises(ValueError, match=r"pass k.transpose\(1, 2\) and v.transpose\(1, 2\)"):
        fastattn.attention(q, pages, pages, block_table=table)


# -- the dispatcher --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name", ["paged_all_scores", "paged_chunk_page256", "paged_no_batch", "paged_one_query_mask"]
)
def test_opcheck(name: str) -> None:
    call = _call(name)
    with CallRecorder() as recorder:
        fastattn.attention(**call)
        fastattn.attention(**call, backend="reference")
    assert recorder.names == ["attention_fwd"] * 2
    for op, args, _ in recorder.calls:
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


def test_compile_and_export() -> None:
    """One graph for tables of every length and batch."""

    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, n: Tensor) -> Tensor:
            return fastattn.attention(
                q, k, v, block_table=table, key_lengths=n, causal="bottom_right_lengths"
            )

    def args(B: int, T: int) -> tuple[Tensor, ...]:
        return *_small(B, T).values(), torch.arange(B) * 16 + 3

    module = Module()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        compiled(*args(5, 3))
        with torch.compiler.set_stance("fail_on_recompile"):
            for B, T in ((6, 3), (7, 2)):
                assert_same_bits(compiled(*args(B, T)), module(*args(B, T)))
        program = torch.export.export(module, args(2, 3)).run_decompositions({})
        assert_same_bits(program.module()(*args(2, 3)), module(*args(2, 3)))
        plain = program.run_decompositions(fastattn.decompositions())
        assert not [n for n in plain.graph.nodes if "fastattn" in str(n.target)]
        torch.testing.assert_close(plain.module()(*args(2, 3)), module(*args(2, 3)))
    torch._dynamo.reset()


def test_vmap() -> None:
    """Over sequences with one pool of pages, and over pools."""
    call = _small(B=6)
    call["q"], call["block_table"] = (
        call["q"].view(3, 2, 4, 2, 8),
        call["block_table"].view(3, 2, 3),
    )
    lengths = torch.tensor([[5, 48], [17, 32], [1, 0]])

    def function(q: Tensor, k: Tensor, v: Tensor, table: Tensor, n: Tensor) -> Tensor:
        return fastattn.attention(q, k, v, block_table=table, key_lengths=n)

    q, k, v, table = call.values()
    mapped = torch.vmap(function, in_dims=(0, None, None, 0, 0))(q, k, v, table, lengths)
    each = [function(q[i], k, v, table[i], lengths[i]) for i in range(3)]
    assert_same_bits(mapped, torch.stack(each))
    pools = torch.stack([k, k * 2, k * 3])
    mapped = torch.vmap(function, in_dims=(0, 0, None, 0, 0))(q, pools, v, table, lengths)
    each = [function(q[i], pools[i], v, table[i], lengths[i]) for i in range(3)]
    assert_same_bits(mapped, torch.stack(each))


def test_vmap_over_queries_alone() -> None:
    """The pool of pages has another first dimension than the batch: it cannot be folded."""
    call = _small()
    q = torch.stack([call.pop("q"), torch.randn(2, 4, 2, 8)])
    mapped = torch.vmap(lambda x: fastattn.attention(x, **call))(q)
    assert_same_bits(mapped, torch.stack([fastattn.attention(x, **call) for x in q]))


def test_the_choice_of_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public function's names of backends, FASTATTN_BACKEND and `explain`."""
    call = _small()
    assert fastattn.explain("attention", **call).op == "attention_fwd"
    monkeypatch.setenv("FASTATTN_BACKEND", "attention=reference")
    assert fastattn.explain("attention", **call).chosen == "reference"
    with pytest.raises(ValueError, match="backend must be one of sm90, triton, cpu"):
        fastattn.attention(**call, backend="cuda")


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_dropout_is_refused(backend: str) -> None:
    """By the op too, whose kernels number the columns of one page."""
    seed = torch.tensor([3])
    call = ForwardCall(**_small(), dropout_p=0.5, dropout_seed=seed)
    with pytest.raises(NotImplementedError, match="takes no dropout with block_table"):
        torch.ops.fastattn.attention_fwd.backend(*call, backend)


# -- gradients -------------------------------------------------------------------------------------
def test_the_reference_alone_has_gradients() -> None:
    """The public function has none; the op's sum what the sequences that share a page add."""
    call = _small()
    call["block_table"][1, 0] = call["block_table"][0, 0]
    op_call = ForwardCall(**call, key_lengths=torch.tensor([48, 20]), scale=0.3)
    pools = [op_call.k.double().requires_grad_(), op_call.v.double().requires_grad_()]
    op = torch.ops.fastattn.attention_fwd.backend
    given = op_call._replace(q=op_call.q.double(), k=pools[0], v=pools[1])
    out, _ = op(*given, "reference")
    found = torch.autograd.grad(out.sin().sum(), pools)
    assert torch.autograd.gradcheck(
        lambda k, v: op(*given._replace(k=k, v=v), "reference"), pools, fast_mode=True
    )
    gathered = [reference.keys_of_pages(x, op_call.block_table) for x in pools]
    plain = given._replace(k=gathered[0], v=gathered[1], block_table=None)
    expected = torch.autograd.grad(op(*plain, "reference")[0].sin().sum(), pools)
    torch.testing.assert_close(found, expected)
    narrow = op_call._replace(k=op_call.k.clone().requires_grad_())
    found = [
        torch.autograd.grad(call(*narrow, *name)[0].sin().sum(), narrow.k)[0]
        for call, name in ((torch.ops.fastattn.attention_fwd, ()), (op, ("reference",)))
    ]
    torch.testing.assert_close(*found)
    for backend in ("cpu", "torch"):
        out, _ = op(*narrow, backend)
        with pytest.raises(NotImplementedError, match="has no gradients with block_table"):
            out.sum().backward()


@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "alibi_slopes", "sinks", "relative_bias"])
def test_gradients_are_refused_by_name(name: str) -> None:
    call = _small() | {"mask": torch.zeros(2, 48), "alibi_slopes": torch.ones(4)}
    call |= {"sinks": torch.ones(4), "relative_bias": torch.ones(4, 8), "relative_buckets": "t5"}
    message = f"{name} must not require a gradient with block_table.*pass {name}.detach"

    def loss(x: Tensor) -> Tensor:
        return fastattn.attention(**call | {name: x}).sum()

    leaf = call[name].clone().requires_grad_()
    with pytest.raises(ValueError, match=message):
        loss(leaf)
    with pytest.raises(ValueError, match=message):
        torch.func.grad(loss)(call[name])
    with pytest.raises(ValueError, match=message):
        torch.func.jvp(loss, (call[name],), (call[name],))
    assert torch.equal(loss(leaf.detach()), loss(call[name]))
    _, tangent = torch.func.jvp(lambda x: loss(x.detach()), (call[name],), (call[name],))
    assert not tangent.any()
    with torch.no_grad():
        assert torch.equal(loss(leaf), loss(call[name]))


def test_nested_tensors_take_no_block_table() -> None:
    q = torch.nested.nested_tensor([torch.ones(3, 2, 4)], layout=torch.jagged).transpose(1, 2)
    with pytest.raises(ValueError, match="block_table must be None for nested q, k and v"):
        fastattn.attention(q, q, q, block_table=torch.zeros(1, 1).int())
