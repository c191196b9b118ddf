"""The linear layer: every instruction set, bits that do not depend on the threads nor, inside
`batch_invariant`, on the batch, and the choice between PyTorch's and fastattn's products.
"""

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cpu_library import assert_threads_change_no_bit, every_isa, needs_library
from products import DTYPES, SetFaster, different_rows
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fastattn
from fastattn import functional
from fastattn.nn import fusion
from fastattn.ops import _env, _select
from fastattn.ops._op import Op
from fastattn.ops.linear.spec import make_inputs
from fastattn.testing.check import check_sample
from fastattn.testing.oracle import Oracle
from fastattn.testing.spec import Sample, all_specs

SPEC = all_specs()["linear"]


def _sample(name: str, **options: Any) -> Sample:
    def make(generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
        return make_inputs(generator, dtype, **options)

    return Sample(name, "", make, ("x", "weight", "bias"))


# Rows: tiles of 4, 2 and 1, an unpacked weight (up to 8, 16, 32 or 192 rows), blocks of 96.
# Columns: half panels of 4, 8 or 16. Depth: vectors, chunks of 512 or 1024; 1024 is copied.
EDGES = (
    *[_sample(f"rows_{rows}", rows=(rows,), D=33, out=35) for rows in (2, 7, 9, 33)],
    _sample("aliased", rows=(27,), D=1024, out=21),
    _sample("columns", rows=(5,), D=19, out=531),
    _sample("long", rows=(205,), D=130, out=70),
)


@needs_library
@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("sample", EDGES, ids=lambda sample: sample.name)
def test_edges(isa: str, invariant: bool, sample: Sample, dtype: torch.dtype) -> None:
    with functional.batch_invariant() if invariant else contextlib.nullcontext():
        rows = check_sample(Oracle(SPEC, sample, dtype), "cpu", torch.device("cpu"))
    assert rows and not [row for row in rows if row.status != "ok"], rows


# -- bits -----------------------------------------------------------------------------------------
@needs_library
@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [1, 13, 96])
@pytest.mark.parametrize("D, out", [(75, 201), (201, 75), (523, 90)])
def test_a_weights_gradient_has_the_bits_of_more_rows(isa, dtype, transposed, rows, D, out):
    """For few rows, sums are stored from registers; additional rows of zeros change only that."""
    x, dy = torch.randn(128, D), torch.randn(128, out)
    x[rows:] = 0
    x, dy, none = x.to(dtype), dy.to(dtype), torch.empty(0, dtype=dtype)

    def gradient(n: int) -> Tensor:
        dw = (
            torch.empty(D, out, dtype=dtype).t() if transposed else torch.empty(out, D, dtype=dtype)
        )
        needs = [False, True, False]
        torch.ops.fastattn.linear_bwd.out(
            dy[:n], x[:n], None, needs, dx=none, dw=dw, db=none.clone()
        )
        return dw

    assert torch.equal(gradient(rows), gradient(128))


def _outputs_and_gradients(rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = make_inputs(generator, torch.float32, rows=(rows,), D=300, out=1000)
    leaves = [x.requires_grad_() for x in inputs.values()]
    y = functional.linear(**inputs, backend="cpu")
    dy = torch.randn(y.shape, generator=generator)
    return [y, *torch.autograd.grad(y, leaves, dy)]


@needs_library
def test_a_gradient_without_its_operand_is_refused() -> None:
    dy, needs = torch.zeros(2, 3), [False, False, False]
    none, result = torch.empty(0), torch.empty(3, 3)
    for results in ((result, none), (none, result)):
        with pytest.raises(RuntimeError, match="dx needs w, and dw needs x"):
            torch.ops.fastattn.linear_bwd.out(
                dy, None, None, needs, dx=results[0], dw=results[1], db=none
            )


@needs_library
@pytest.mark.parametrize("rows", [1, 20, 205])
def test_threads_change_no_bit(rows: int) -> None:
    assert_threads_change_no_bit(lambda: _outputs_and_gradients(rows))


@needs_library
@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_invariant(isa: str, dtype: torch.dtype) -> None:
    """Inside, a row has the same bits alone and in a batch; outside, it may not."""
    # Some of many results are rounded to another number if their sums differ.
    inputs = make_inputs(torch.Generator().manual_seed(0), dtype, rows=(240,), D=700, out=3000)
    x = inputs.pop("x")
    compute = partial(functional.linear, **inputs, backend="cpu")

    with functional.batch_invariant():
        with functional.batch_invariant():
            pass
        assert different_rows(compute, x) == []
        assert different_rows(compute, x.t().contiguous().t()) == []
    assert 2 in (different := different_rows(compute, x)) and 200 not in different


@needs_library
def test_compiled_code_leaves_batch_invariance() -> None:
    x, w = torch.randn(240, 700), torch.randn(300, 700)

    def multiply() -> Tensor:
        return functional.linear(x, w, backend="cpu")

    def compute() -> Tensor:
        with functional.batch_invariant():
            return multiply()

    outside = multiply()
    assert torch.compile(compute, backend="eager")().equal(compute())
    assert multiply().equal(outside) and not outside.equal(compute())


@needs_library
def test_traced_graphs_have_no_calls_about_batch_invariance(torch_is_faster: SetFaster) -> None:
    torch_is_faster(torch.float32, rows=6)

    def compute(x: Tensor, w: Tensor) -> Tensor:
        with functional.batch_invariant():
            return fusion.linear(x, w)

    graph = make_fx(compute)(torch.randn(7, 5), torch.randn(3, 5)).graph
    called = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert called == ["fastattn.linear_fwd.default"]


@needs_library
@every_isa
@pytest.mark.parametrize(("D", "out"), [(4096, 21), (4103, 81), (9000, 150), (7, 600)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_row_has_the_bits_of_several(isa: str, dtype: torch.dtype, D: int, out: int) -> None:
    """A row alone reads the weight in another order: four rows at a time that are far apart."""
    generator = torch.Generator().manual_seed(0)
    inputs = make_inputs(generator, dtype, rows=(3,), D=D, out=out)
    x = inputs.pop("x")
    with functional.batch_invariant():
        together = functional.linear(x, **inputs, backend="cpu")
        alone = [functional.linear(x[i : i + 1], **inputs, backend="cpu") for i in range(3)]
    assert torch.cat(alone).equal(together)


# -- the choice of products -----------------------------------------------------------------------
def _layer() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 24, 256), (128, 256), (128,))
    x, weight, bias = (torch.randn(s, generator=generator) / 8 for s in shapes)
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


@pytest.fixture
def selected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The backends that Python selects; the C++ kernel itself runs without a selection."""
    chosen: list[str] = []
    select = _select.select

    def recording(op: Op, args: Any, backend: str | None) -> str:
        chosen.append(select(op, args, backend))
        return chosen[-1]

    monkeypatch.setattr(_select, "select", recording)
    return chosen


def _results(given: Sequence[Tensor], **options: Any) -> list[Tensor]:
    y = functional.linear(*given, **options)
    return [y, *torch.autograd.grad(y.float().sin().sum(), given)]


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("faster", [False, True])
def test_the_faster_products_are_chosen(faster, dtype, selected, torch_is_faster):
    """Forward and backward. A requested backend runs even if another one is faster."""
    torch_is_faster(*[dtype][:faster], *{torch.float32, torch.bfloat16} - {dtype})
    given = [t.detach().to(dtype).requires_grad_() for t in _layer()]
    expected = "torch" if faster else "cpu"
    automatic = _results(given)
    assert selected == ["torch"] * 2 * faster
    explanation = functional.explain("linear", *given)
    assert explanation.chosen == expected
    assert explanation.refusals == ({"cpu": "is slower in this test"} if faster else {})
    selected.clear()
    found = {name: _results(given, backend=name) for name in ("cpu", "torch")}
    assert selected == ["cpu"] * 2 + ["torch"] * 2
    assert all(map(torch.equal, automatic, found[expected]))
    assert found["torch"][0].equal(F.linear(*given))


@needs_library
@pytest.mark.parametrize(
    "request_, chosen",
    [("reference", "cpu"), ("ffn=reference", "cpu"), ("linear=reference", "reference")],
)
def test_requested_backends(request_, chosen, torch_is_faster, selected, monkeypatch):
    """A request for all ops does not apply to linear. Modules obey it for any number of rows."""
    monkeypatch.setenv(_env.BACKEND_VARIABLE, request_)
    assert functional.explain("linear", *_layer()).chosen == chosen
    torch_is_faster(torch.float32, rows=6)
    for rows in (6, 7):
        x, w = torch.randn(rows, 8), torch.randn(4, 8)
        selected.clear()
        fusion.linear(x, w)
        in_torch = rows == 7 and chosen == "cpu"
        assert selected == ([] if chosen == "cpu" else [chosen])
        assert functional.linear_runs_torch(x) is in_torch


@needs_library
def test_products_are_chosen_after_casting(torch_is_faster: SetFaster) -> None:
    torch_is_faster(torch.bfloat16)
    given = [t.detach() for t in _layer()]
    with torch.autocast("cpu", torch.bfloat16):
        assert functional.explain("linear", *given).chosen == "torch"
        assert functional.linear(*given).equal(F.linear(*given))
    with torch.autocast("cpu", torch.float16):
        halves = [t.bfloat16() for t in given]
        assert functional.explain("linear", *halves).chosen == "cpu"


@pytest.mark.parametrize("flag, dtype", [("amx_bf16", torch.bfloat16), ("amx_fp16", torch.float16)])
def test_products_are_slower_without_the_processors_matrix_instructions(
    flag: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\nvmx flags\t: none\nflags\t\t: fpu {flag} sse\n")
    opened = open
    monkeypatch.setattr("builtins.open", lambda path, *rest: opened(file, *rest))
    monkeypatch.setattr(_env.platform, "machine", lambda: "x86_64")
    limits = {d: _env.product_limit.__wrapped__(d) for d in DTYPES}
    assert [d for d, (rows, _) in limits.items() if rows == 0] == [dtype]
    assert flag in limits[dtype][1]
    monkeypatch.setattr(_env.platform, "machine", lambda: "aarch64")
    assert all(_env.product_limit.__wrapped__(d)[0] == 0 for d in DTYPES)


def test_mkl_multiplies_many_rows_faster_but_with_avx512_of_another_vendor(monkeypatch):
    monkeypatch.setattr(_env.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    for vendor, flags, rows in (
        ("GenuineIntel", "avx2 avx512f", 32),
        ("AuthenticAMD", "avx2 avx512f", 2**62),
        ("AuthenticAMD", "avx2", 32),
        ("", "", 32),
    ):
        cpuinfo = {"vendor_id": vendor, "flags": flags}
        monkeypatch.setattr(_env, "_cpuinfo", lambda name, found=cpuinfo: found.get(name, ""))
        assert _env.product_limit.__wrapped__(torch.float32)[0] == rows
        assert _env.product_limit.__wrapped__(torch.bfloat16)[0] == 2**62
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert _env.product_limit.__wrapped__(torch.float32)[0] == 32


@needs_library
def test_the_number_of_rows_decides(selected: list[str], torch_is_faster: SetFaster) -> None:
    """The library, `explain` and modules agree; batch-invariant products of any number of rows are
    those of the library.
    """
    torch_is_faster(torch.float32, rows=6)
    _, w, b = (t.detach() for t in _layer())

    def chosen(rows: int) -> str:
        x = torch.ones(rows, w.shape[1])
        selected.clear()
        functional.linear(x, w, b)
        run = selected[0] if selected else "cpu"
        assert functional.explain("linear", x, w, b).chosen == run
        assert functional.linear_runs_torch(x) is (run == "torch")
        return run

    assert [chosen(6), chosen(7)] == ["cpu", "torch"]
    with functional.batch_invariant():
        assert chosen(7) == "cpu"
    assert chosen(7) == "torch"


@pytest.mark.parametrize("backend", ["reference", None])
@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (0, 0)])
def test_no_columns(sizes: tuple[int, int], backend: str | None) -> None:
    x = torch.randn(3, sizes[0], requires_grad=True)
    weight, bias = torch.randn(*sizes[::-1], requires_grad=True), torch.randn(sizes[1])
    inputs = x, weight, bias.requires_grad_()
    y, expected = functional.linear(*inputs, backend=backend), F.linear(*inputs)
    assert y.equal(expected)
    for actual, wanted in zip(
        torch.autograd.grad(y.sum(), inputs),
        torch.autograd.grad(expected.sum(), inputs),
        strict=True,
    ):
        assert actual.equal(wanted)


def test_second_derivatives_are_traced_for_any_number_of_rows() -> None:
    def second(x: Tensor, weight: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(
            functional.linear(x, weight).sin().sum(), weight, create_graph=True
        )
        return torch.autograd.grad(first.square().sum(), x)[0]

    weight = torch.randn(6, 4, requires_grad=True)
    inputs = [torch.randn(rows, 4, requires_grad=True) for rows in (3, 5)]
    traced = make_fx(second, tracing_mode="symbolic")(inputs[0], weight)
    for x in inputs:
        torch.testing.assert_close(traced(x, weight), second(x, weight))


@needs_library
def test_long_sums_are_accurate() -> None:
    """For positive numbers, a single chain of additions over the rows would lose three digits."""
    x, dy = torch.rand(1 << 16, 64), torch.rand(1 << 16, 64)
    weight = torch.randn(64, 64, requires_grad=True)
    (dw,) = torch.autograd.grad(fastattn.linear(x, weight, backend="cpu"), weight, dy)
    torch.testing.assert_close(dw, (dy.double().t() @ x.double()).float(), rtol=3e-6, atol=0.0)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [50, 130])
def test_columns_before_rows(rows: int, dtype: torch.dtype, torch_is_faster: SetFaster) -> None:
    x, w = (torch.randn(40, n).to(dtype).t() for n in (rows, 300))
    for bias in (torch.randn(300).to(dtype), None):
        expected = F.linear(x.double(), w.double(), bias if bias is None else bias.double())
        y = fastattn.linear(x, w, bias)
        torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=1e-1)
