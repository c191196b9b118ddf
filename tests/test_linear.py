"""The linear layer beyond the samples that tests/test_ops.py runs: every instruction set, bits that
depend neither on the threads nor, where asked for, on the batch, and which calls take it.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import fastattn
from fastattn import functional
from fastattn.ops import _env, _native
from fastattn.ops._op import explaining
from fastattn.ops.linear.op import LINEAR
from fastattn.ops.linear.spec import make_inputs
from fastattn.testing.check import Oracle, check_sample
from fastattn.testing.spec import Sample, all_specs

SPEC = all_specs()["linear"]
NO_LIBRARY = _native.unavailable("cpu")
needs_library = pytest.mark.skipif(NO_LIBRARY is not None, reason=f"fastattn {NO_LIBRARY}")
ISAS = () if NO_LIBRARY else _native.usable_cpu_isas()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    _native.use_cpu_isa(request.param)
    yield request.param
    _native.use_cpu_isa(ISAS[-1])


def _sample(name: str, **options: Any) -> Sample:
    def make(generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
        return make_inputs(generator, dtype, **options)

    return Sample(name, "", make, ("x", "weight", "bias"))


# Rows: tiles of 4, 2 and 1, a weight that is read as it lies (up to 8 or 32 rows), blocks of 96.
# Columns: half panels of 4, 8 or 16. Depth: vectors, pieces of 512 or 1024; 1024 is copied.
EDGES = (
    *[_sample(f"rows_{rows}", rows=(rows,), D=33, out=35) for rows in (2, 7, 9, 33)],
    _sample("aliased", rows=(27,), D=1024, out=21),
    _sample("columns", rows=(5,), D=19, out=531),
    _sample("long", rows=(205,), D=130, out=70),
)


@needs_library
@pytest.mark.parametrize("isa", ISAS, indirect=True)
@pytest.mark.parametrize(
    "dtype, invariant", [*[(dtype, False) for dtype in DTYPES], (torch.float32, True)]
)
@pytest.mark.parametrize("sample", EDGES, ids=lambda sample: sample.name)
def test_edges(isa: str, invariant: bool, sample: Sample, dtype: torch.dtype) -> None:
    with functional.batch_invariant() if invariant else contextlib.nullcontext():
        rows = check_sample(Oracle(SPEC, sample, dtype), "cpu", torch.device("cpu"))
    assert rows and not [row for row in rows if row.status != "ok"], rows


# -- bits -----------------------------------------------------------------------------------------
@needs_library
@pytest.mark.parametrize("isa", ISAS, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [1, 13, 96])
@pytest.mark.parametrize("D, out", [(75, 201), (201, 75), (523, 90)])
def test_a_weights_gradient_has_the_bits_of_more_rows(
    isa: str, dtype: torch.dtype, transposed: bool, rows: int, D: int, out: int
) -> None:
    """Of few rows sums are stored from registers; rows of zeros change only that."""
    x, weight, dy = torch.randn(128, D), torch.randn(out, D), torch.randn(128, out)
    x[rows:] = 0
    x, weight, dy = x.to(dtype), weight.to(dtype), dy.to(dtype)
    weight = weight.t().contiguous().t() if transposed else weight
    few, many = (
        torch.ops.fastattn_cpu.linear_plain_bwd(dy[:n], x[:n], weight, False, True, False)[1]
        for n in (rows, 128)
    )
    assert few.stride() == weight.stride()
    assert torch.equal(few, many)


def _everything(rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = make_inputs(generator, torch.float32, rows=(rows,), D=300, out=1000)
    leaves = [x.requires_grad_() for x in inputs.values()]
    y = functional.linear(**inputs, backend="cpu")
    dy = torch.randn(y.shape, generator=generator)
    return [y, *torch.autograd.grad(y, leaves, dy)]


@needs_library
@pytest.mark.parametrize("rows", [1, 20, 205])
def test_threads_change_no_bit(rows: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = _everything(rows)
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            for one, many in zip(alone, _everything(rows), strict=True):
                assert torch.equal(one, many), threads
    finally:
        torch.set_num_threads(before)


@needs_library
@pytest.mark.parametrize("isa", ISAS, indirect=True)
def test_batch_invariant(isa: str) -> None:
    """The same bits for a row alone and among others, inside the block alone."""
    inputs = make_inputs(torch.Generator().manual_seed(0), torch.float32, rows=(140,), D=700)
    x = inputs.pop("x")

    def differ() -> list[int]:
        together = functional.linear(x, **inputs, backend="cpu")
        counts = (1, 2, 3, 5, 8, 30, 60, 97)
        alone = (functional.linear(x[3 : 3 + n], **inputs, backend="cpu") for n in counts)
        return [n for n, y in zip(counts, alone, strict=True) if not y.equal(together[3 : 3 + n])]

    with functional.batch_invariant():
        with functional.batch_invariant():
            pass
        assert differ() == []
    assert 1 in differ() and 97 not in differ()


# -- calls that are left to torch -----------------------------------------------------------------
@pytest.mark.parametrize(
    "change, error",
    [
        ({"weight": torch.zeros(4)}, r"weight must be \[E, 4\]"),
        ({"weight": torch.zeros(8, 5)}, r"weight must be \[E, 4\]"),
        ({"weight": None}, "weight must be a tensor"),
        ({"bias": torch.zeros(1)}, r"bias must be \[8\]"),
        ({"bias": torch.zeros(1, 8)}, r"bias must be \[8\]"),
        ({"bias": torch.zeros(8, dtype=torch.float64)}, "bias must have x's dtype"),
        ({"x": torch.zeros(())}, "at least one dimension"),
    ],
)
@pytest.mark.parametrize("left", [False, True])
def test_checks_come_first(
    left: bool, change: dict[str, Any], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the native op or torch would take or word otherwise."""
    monkeypatch.setattr(_env, "has_quick_products", lambda dtype: left)
    given = {"x": torch.zeros(3, 4), "weight": torch.zeros(8, 4), "bias": None} | change
    halves = {
        name: t.bfloat16() if isinstance(t, Tensor) and t.dtype == torch.float32 else t
        for name, t in given.items()
    }
    with pytest.raises((TypeError, ValueError), match=error):
        functional.linear(**halves)


# -- which calls take it --------------------------------------------------------------------------
@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Counts the calls that the op has served, on a machine where torch's products are slow."""
    calls: list[str] = []

    def counted(serve: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            served = serve(*args, **kwargs)
            if served is not None and not explaining():
                calls.append("linear")
            return served

        return call

    monkeypatch.setattr(_env, "has_slow_blas", lambda: True)
    monkeypatch.setattr(_env, "has_quick_products", lambda dtype: False)
    monkeypatch.setattr(functional, "_linear", counted(functional._linear))
    monkeypatch.setattr(LINEAR, "short_road", counted(LINEAR.short_road))
    return calls


def _layer() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 24, 256), (128, 256), (128,))
    x, weight, bias = (torch.randn(s, generator=generator) / 8 for s in shapes)
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


@needs_library
def test_plain_calls_take_it(taken: list[str]) -> None:
    x, weight, bias = _layer()
    ours = functional.quickest_linear(x, weight, bias)
    torchs = F.linear(x, weight, bias)
    torch.testing.assert_close(ours, torchs)
    dy = torch.randn_like(ours)
    torch.testing.assert_close(
        torch.autograd.grad(ours, (weight, bias), dy),
        torch.autograd.grad(torchs, (weight, bias), dy),
        rtol=1e-5,
        atol=1e-4,
    )
    assert taken == ["linear"]
    with torch.inference_mode():
        functional.quickest_linear(x, weight[:128], None)
    assert taken == ["linear"] * 2


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
def test_automatic_choice_is_ours(dtype: torch.dtype, taken: list[str]) -> None:
    given = [t.to(dtype) for t in _layer()]
    y = functional.linear(*given)
    assert y.equal(functional.linear(*given, backend="cpu")) and y.dtype == dtype
    assert taken == ["linear"] * 2
    assert functional.explain("linear", *given).chosen == "cpu"


@needs_library
def test_quick_products_in_half_precision_are_left_to_torch(
    taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_env, "has_quick_products", lambda dtype: dtype == torch.bfloat16)
    halves = [t.bfloat16() for t in _layer()]
    for linear in (functional.linear, functional.quickest_linear):
        assert linear(*halves).equal(F.linear(*halves))
    assert taken == []
    explanation = functional.explain("linear", *halves)
    assert explanation.chosen == "reference"
    assert "products in half precision" in explanation.refusals["cpu"]
    functional.linear(*halves, backend="cpu")
    functional.linear(*_layer())
    monkeypatch.setenv(_env.BACKEND_VARIABLE, "linear=cpu")
    functional.linear(*halves)
    assert taken == ["linear"] * 3


@pytest.mark.parametrize(
    "flag, dtype", [("amx_bf16", torch.bfloat16), ("avx512_fp16", torch.float16)]
)
def test_quick_products_are_flags_of_the_processor(
    flag: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\nvmx flags\t: none\nflags\t\t: fpu {flag} sse\n")
    opened = open
    monkeypatch.setattr("builtins.open", lambda path, *rest: opened(file, *rest))
    monkeypatch.setattr(_env.platform, "machine", lambda: "x86_64")
    quick = [d for d in (*DTYPES, torch.float64) if _env.has_quick_products.__wrapped__(d)]
    assert quick == [dtype]
    monkeypatch.setattr(_env.platform, "machine", lambda: "aarch64")
    assert _env.has_quick_products.__wrapped__(dtype)


@needs_library
def test_explanations_know_what_gradients_are_wanted(taken: list[str]) -> None:
    for wanted in ("weight", "bias"):
        given = dict(zip(("x", "weight", "bias"), (t.detach() for t in _layer()), strict=True))
        given[wanted].requires_grad_()
        functional.linear(**given)
        explanation = functional.explain("linear", **given)
        assert explanation.chosen == "reference"
        assert "do not read both" in explanation.refusals["cpu"]
        with torch.no_grad():
            assert functional.explain("linear", **given).chosen == "cpu"
    assert taken == []


@needs_library
def test_little_work_is_torchs_but_where_its_order_matters(taken: list[str]) -> None:
    x, weight, bias = _layer()
    few = x[:1, :4]  # rows whose gradients cost more than they gain
    functional.quickest_linear(few, weight, bias)
    functional.quickest_linear(few[:, :1].detach(), weight[:64].detach())
    assert taken == []
    with functional.batch_invariant():
        functional.quickest_linear(few, weight, bias)
    assert taken == ["linear"]


@needs_library
def test_few_rows_without_gradients(taken: list[str]) -> None:
    x, weight, bias = (t.detach() for t in _layer())
    functional.quickest_linear(x[:1, :4], weight, bias)
    assert taken == ["linear"] * (_native.extension() is not None)


class _Subclass(Tensor):
    pass


def _in_autocast(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return functional.quickest_linear(x, weight, bias)


def _counted(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    with FlopCounterMode(display=False) as counter:
        y = functional.quickest_linear(x, weight, bias)
    assert counter.get_total_flops() == 2 * x.numel() * len(weight)
    return y


def _compiled(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    layer = torch.compile(functional.quickest_linear, backend="eager", fullgraph=True)
    return layer(x, weight, bias)


def _traced(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    function = torch.jit.trace(functional.quickest_linear, (x, weight, bias), check_trace=False)
    return function(x, weight, bias)


TORCHS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "small": lambda x, w, b: functional.quickest_linear(x, w[:100], b[:100]),
    "fp64": lambda x, w, b: functional.quickest_linear(x.double(), w.double(), b.double()),
    "meta": lambda x, w, b: functional.quickest_linear(x.to("meta"), w.to("meta"), b.to("meta")),
    "subclass": lambda x, w, b: functional.quickest_linear(x.as_subclass(_Subclass), w, b),
    "autocast": _in_autocast,
    "flop counter": _counted,
    "compiled": _compiled,
    "traced": _traced,
    "vmap": lambda x, w, b: torch.vmap(lambda y: functional.quickest_linear(y, w, b))(x),
    "jvp": lambda x, w, b: torch.func.jvp(
        lambda y: functional.quickest_linear(y, w, b), (x,), (x,)
    )[0],
}


@needs_library
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", TORCHS)
def test_other_calls_are_torchs(how: str, taken: list[str]) -> None:
    x, weight, bias = _layer()
    y = TORCHS[how](x, weight, bias)
    assert y.shape[:-1] == x.shape[:-1]
    assert taken == []


@needs_library
@pytest.mark.parametrize(
    "request_, calls", [("reference", 0), ("triton", 0), ("ffn=reference", 1), ("linear=cpu", 1)]
)
def test_requested_backends(
    request_: str, calls: int, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(_env.BACKEND_VARIABLE, request_)
    functional.quickest_linear(*_layer())
    assert len(taken) == calls


def test_a_quick_library_is_left_alone(monkeypatch: pytest.MonkeyPatch, taken: list[str]) -> None:
    monkeypatch.setattr(_env, "has_slow_blas", lambda: False)
    functional.quickest_linear(*_layer())
    assert taken == []


@pytest.mark.parametrize("vendor, slow", [("AuthenticAMD", True), ("GenuineIntel", False)])
def test_slow_is_intels_library_on_other_processors(
    vendor: str, slow: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nmodel name\t: some\n")
    opened = open
    monkeypatch.setattr("builtins.open", lambda path, *rest: opened(file, *rest))
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert _env.has_slow_blas.__wrapped__() is slow
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert not _env.has_slow_blas.__wrapped__()


def test_twice_differentiable() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = make_inputs(generator, torch.float64, rows=(3,), D=4, out=5)
    leaves = tuple(x.requires_grad_() for x in inputs.values())
    assert torch.autograd.gradgradcheck(fastattn.linear, leaves)


@needs_library
@pytest.mark.parametrize("trained", ["x", "weight", "bias", "x bias", "weight bias"])
def test_what_torch_does_not_keep_may_change(trained: str, taken: list[str]) -> None:
    x, weight, bias = (t.detach() for t in _layer())
    names = {"x": x, "weight": weight, "bias": bias}
    for name in trained.split():
        names[name].requires_grad_()
    for linear in (functional.quickest_linear, functional.linear):
        linear(x, weight, bias)
    assert taken == []


@needs_library
def test_bias_may_change(taken: list[str]) -> None:
    x, weight, bias = _layer()
    y = functional.quickest_linear(x, weight, bias)
    assert taken == ["linear"]
    with torch.no_grad():
        bias.add_(1)
    y.sum().backward()


@needs_library
def test_torch_answers_for_what_does_not_fit(taken: list[str]) -> None:
    x, weight, bias = (t.detach() for t in _layer())
    E = len(weight)
    for other in (bias[:1], bias.expand(x.shape[-2], E)):
        expected = F.linear(x, weight, other)
        torch.testing.assert_close(functional.quickest_linear(x, weight, other), expected)
    torch.testing.assert_close(
        functional.quickest_linear(x, weight.to_sparse(), None), F.linear(x, weight), rtol=1e-5,
        atol=1e-4,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        functional.quickest_linear(x, weight[:, 1:], None)
    with pytest.raises(RuntimeError, match="at least 1D"):
        functional.quickest_linear(x, weight[0, 0], None)
    assert taken == []


@pytest.mark.parametrize("backend", ["reference", None])
@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (0, 0)])
def test_no_columns(sizes: tuple[int, int], backend: str | None) -> None:
    x = torch.randn(3, sizes[0], requires_grad=True)
    weight, bias = torch.randn(*sizes[::-1], requires_grad=True), torch.randn(sizes[1])
    inputs = x, weight, bias.requires_grad_()
    y, expected = functional.linear(*inputs, backend=backend), F.linear(*inputs)
    assert y.equal(expected)
    for ours, torchs in zip(
        torch.autograd.grad(y.sum(), inputs),
        torch.autograd.grad(expected.sum(), inputs),
        strict=True,
    ):
        assert ours.equal(torchs)


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
def test_long_sums_keep_their_digits() -> None:
    """Positive numbers, where one chain of additions over the rows would lose three digits."""
    x, dy = torch.rand(1 << 16, 64), torch.rand(1 << 16, 64)
    weight = torch.randn(64, 64, requires_grad=True)
    (dw,) = torch.autograd.grad(fastattn.linear(x, weight), weight, dy)
    torch.testing.assert_close(dw, (dy.double().t() @ x.double()).float(), rtol=3e-6, atol=0.0)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [50, 130])
def test_columns_before_rows(rows: int, dtype: torch.dtype) -> None:
    """Of x and weight both; whatever product is computed, the bias is added."""
    x, w = (torch.randn(40, n).to(dtype).t() for n in (rows, 300))
    for bias in (torch.randn(300).to(dtype), None):
        expected = F.linear(x.double(), w.double(), bias if bias is None else bias.double())
        for linear in (fastattn.linear, functional.quickest_linear):
            y = linear(x, w, bias)
            torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=1e-1)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiles_in_one_graph(dtype: torch.dtype) -> None:
    given = [t.detach().to(dtype) for t in _layer()]
    compiled = torch.compile(fastattn.linear, backend="eager", fullgraph=True)
    assert compiled(*given).equal(fastattn.linear(*given, backend="cpu"))


@needs_library
def test_quick_products_are_asked_for_after_casting(
    taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_env, "has_quick_products", lambda dtype: dtype == torch.bfloat16)
    given = [t.detach() for t in _layer()]
    with torch.autocast("cpu", torch.bfloat16):
        assert functional.explain("linear", *given).chosen == "reference"
        assert functional.linear(*given).equal(F.linear(*given))
    with torch.autocast("cpu", torch.float16):
        halves = [t.bfloat16() for t in given]
        assert functional.explain("linear", *halves).chosen == "cpu"
