"""The CPU feed-forward network beyond the samples that test_ops.py runs: every instruction
set, sizes around the edges of blocks, layouts, bits that do not depend on the threads, and the
order of its steps under ThreadSanitizer.
"""

import functools
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from cpu_library import assert_threads_change_no_bit, every_isa, needs_library
from products import DTYPES, different_rows
from torch import Tensor

import fastattn
from fastattn import functional
from fastattn.ops.ffn.op import ACTIVATIONS, GATED_ACTIVATIONS
from fastattn.ops.ffn.spec import make_inputs
from fastattn.testing.check import check_sample
from fastattn.testing.oracle import Oracle
from fastattn.testing.spec import Sample, all_specs

SPEC = all_specs()["ffn"]
pytestmark = needs_library
GRADIENTS = ("x", "w1", "b1", "w2", "b2", "residual")
ROOT = Path(__file__).resolve().parents[2]
CXX = os.environ.get("CXX") or shutil.which("g++")


def _sample(name: str, **options: object) -> Sample:
    def make(generator: torch.Generator, dtype: torch.dtype) -> dict[str, object]:
        return make_inputs(generator, dtype, **options)  # type: ignore[arg-type]

    return Sample(name, "", make, GRADIENTS)


# Rows: one block is 96, a strip 12 or 6. Columns: a panel is 8, 16 or 32. Depth: a block is 128 or
# (bf16) 256.
EDGES = (
    _sample("strips", rows=(97,), D=31, hidden=33, residual="same", activation="gelu"),
    _sample("blocks", rows=(193,), D=130, hidden=260, dropout_p=0.3, output_dropout_p=0.2,
            residual="same"),
    _sample("gates", rows=(109,), D=17, hidden=143, out=35, dropout_p=0.3, output_dropout_p=0.2,
            activation="swiglu"),
    _sample("deep", rows=(13,), D=523, hidden=7, out=3, activation="silu"),
    _sample("one_row_deep", rows=(1,), D=300, hidden=517, activation="geglu", dropout_p=0.3),
    _sample("two_rows", rows=(2,), D=129, hidden=35, residual="same"),
    _sample("many_rows", rows=(700,), D=9, hidden=12, out=5, activation="geglu"),
)  # fmt: skip


def _check(sample: Sample, dtype: torch.dtype) -> None:
    rows = check_sample(Oracle(SPEC, sample, dtype), "cpu", torch.device("cpu"))
    assert rows and not [row for row in rows if row.status != "ok"], rows


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sample", EDGES, ids=lambda sample: sample.name)
def test_edges(isa: str, sample: Sample, dtype: torch.dtype) -> None:
    _check(sample, dtype)


# -- bits -----------------------------------------------------------------------------------------
def _outputs_and_gradients(activation: str, dtype: torch.dtype) -> list[Tensor]:
    """The output and all gradients of a call large enough for several threads."""
    generator = torch.Generator().manual_seed(0)
    inputs = make_inputs(
        generator, dtype, rows=(2, 205), D=72, hidden=300, activation=activation, residual="same",
        dropout_p=0.1, output_dropout_p=0.1,
    )  # fmt: skip
    for name in GRADIENTS:
        inputs[name].requires_grad_()
    y = fastattn.ffn(**inputs, backend="cpu")
    dy = torch.randn(y.shape, generator=generator).to(dtype)
    return [y, *torch.autograd.grad(y, [inputs[name] for name in GRADIENTS], dy)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_threads_change_no_bit(activation: str, dtype: torch.dtype) -> None:
    assert_threads_change_no_bit(lambda: _outputs_and_gradients(activation, dtype))


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_invariant(isa: str, dtype: torch.dtype) -> None:
    """Inside, a row has the same bits alone and in a batch; outside, it may not."""
    inputs = make_inputs(
        torch.Generator().manual_seed(0), dtype, rows=(240,), D=700, hidden=1090, out=1000
    )
    x = inputs.pop("x")
    compute = functools.partial(fastattn.ffn, **inputs, backend="cpu")
    with functional.batch_invariant():
        assert different_rows(compute, x) == []
        assert different_rows(compute, x.t().contiguous().t()) == []
    assert 2 in different_rows(compute, x)


# -- steps ----------------------------------------------------------------------------------------
TSAN = (
    CXX
    and subprocess.run(
        [CXX, "-print-file-name=libtsan.so"], capture_output=True, text=True
    ).stdout.strip()
)


def _steps_program(folder: Path, *flags: str) -> str:
    """Compiles ffn_steps.cpp, runs it and returns what it prints."""
    program = str(folder / "ffn_steps")
    usual = "-std=c++17 -Wall -Wextra -Werror -O1 -g1 -pthread".split()
    source = str(Path(__file__).with_name("ffn_steps.cpp"))
    command = [CXX, *usual, *flags, f"-I{ROOT / 'csrc'}", source, "-o", program]
    subprocess.run(command, check=True)
    environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
    result = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=120)
    return result.stdout + result.stderr[-5000:]


@pytest.mark.skipif(not TSAN or not Path(TSAN).is_file(), reason="the compiler has no libtsan")
def test_steps_wait_for_their_inputs(tmp_path: Path) -> None:
    assert _steps_program(tmp_path, "-fsanitize=thread").startswith("340 of 340 agreed, ")


@pytest.mark.skipif(not CXX, reason="no compiler")
def test_workers_sleep_while_a_task_takes_long(tmp_path: Path) -> None:
    # ThreadSanitizer's own threads sleep, so this is a build without it.
    assert _steps_program(tmp_path).endswith(", waiting workers sleep\n")


# -- layouts --------------------------------------------------------------------------------------
LAYOUTS = {
    "leading dimensions swapped": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "columns apart": lambda x: x.mT.contiguous().mT,
    "expanded": lambda x: x[:1].expand(x.shape),
    "every second row": lambda x: torch.stack([x, x], 1).flatten(0, 1)[::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_x(layout: str) -> None:
    """The same bits as from contiguous memory, and gradients laid out like the inputs."""
    generator = torch.Generator().manual_seed(0)
    inputs = make_inputs(generator, torch.float32, rows=(4, 7), residual="same", activation="silu")
    x, residual = LAYOUTS[layout](inputs.pop("x")), LAYOUTS[layout](inputs.pop("residual"))
    dy = torch.randn(x.shape, generator=generator)

    def results(*tensors: Tensor) -> list[Tensor]:
        x, residual, dy = tensors
        leaves = [x.detach().requires_grad_(), residual.detach().requires_grad_()]
        y = fastattn.ffn(leaves[0], residual=leaves[1], **inputs, backend="cpu")
        return [y, *torch.autograd.grad(y, leaves, dy)]

    expected = results(x.contiguous(), residual.contiguous(), dy)
    found = results(x, residual, LAYOUTS[layout](dy) if layout != "expanded" else dy)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


_linear = functools.partial(fastattn.linear, backend="cpu")
OF_THREE_MATRICES = {
    "ffn": lambda x, w1, w2: fastattn.ffn(x, w1, None, w2, None, "gelu", backend="cpu"),
    "linear": lambda x, w1, w2: _linear(_linear(x, w1), w2),
}


@pytest.mark.parametrize("spread", range(3), ids=["x", "w1", "w2"])
@pytest.mark.parametrize("op", OF_THREE_MATRICES)
def test_matrices_without_a_contiguous_dimension(op: str, spread: int) -> None:
    matrices = [torch.randn(shape) for shape in ((7, 24), (40, 24), (16, 40))]
    dy = torch.randn(7, 16)

    def results() -> list[Tensor]:
        leaves = [matrix.detach().requires_grad_() for matrix in matrices]
        y = OF_THREE_MATRICES[op](*leaves)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    expected = results()
    twice = matrices[spread].repeat_interleave(2, 0).repeat_interleave(2, 1)
    matrices[spread] = twice[::2, ::2]
    for one, other in zip(expected, results(), strict=True):
        assert torch.equal(one, other)


# -- values ---------------------------------------------------------------------------------------
@every_isa
@pytest.mark.parametrize("activation", [a for a in ACTIVATIONS if a not in GATED_ACTIVATIONS])
def test_activation_over_its_range(isa: str, activation: str) -> None:
    """One input, one unit: the activation itself against fp64, from its flat to its linear part."""
    x = torch.cat([torch.linspace(-200, 200, 4001), torch.linspace(-6, 6, 4001)])[:, None]
    one = torch.ones(1, 1)

    def value_and_slope(x: Tensor, one: Tensor, backend: str) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        y = fastattn.ffn(x, one, None, one, None, activation, backend=backend)
        return y, torch.autograd.grad(y.sum(), x)[0]

    actual = value_and_slope(x, one, "cpu")
    exact = value_and_slope(x.double(), one.double(), "reference")
    eps = torch.finfo(torch.float32).eps
    # Cancellation aside, a few units in the last place of x and of 1.
    assert ((actual[0] - exact[0]).abs() <= 3 * eps * (x.abs() + 1)).all()
    assert ((actual[1] - exact[1]).abs() <= 8 * eps).all()


def test_nan_stays_in_its_row() -> None:
    inputs = make_inputs(torch.Generator().manual_seed(0), torch.float32, rows=(30,))
    inputs["x"][7, 3] = float("nan")
    y = fastattn.ffn(**inputs, backend="cpu")
    assert y.isnan().all(1).tolist() == [row == 7 for row in range(30)]


@pytest.mark.parametrize("backend", ["reference", None])
@pytest.mark.parametrize("D, width, E", [(4, 0, 5), (0, 3, 5), (4, 3, 0)])
def test_no_columns(D: int, width: int, E: int, backend: str | None) -> None:
    shapes = ((3, D), (width, D), (width,), (E, width), (E,))
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    x, w1, b1, w2, b2 = inputs
    y = fastattn.ffn(*inputs, backend=backend)
    expected = torch.relu(x @ w1.t() + b1) @ w2.t() + b2
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(
        torch.autograd.grad(y.square().sum(), inputs),
        torch.autograd.grad(expected.square().sum(), inputs),
    )


def test_reference_drops_a_half_residuals_gradient_in_full_precision() -> None:
    """The budget is twice the reference's error, so the reference must not round more than x."""
    generator = torch.Generator().manual_seed(0)
    inputs = make_inputs(generator, torch.float32, output_dropout_p=0.3)
    leaves = [inputs["x"].requires_grad_(), inputs["w2"].requires_grad_()]
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        y = fastattn.ffn(
            **inputs, residual=torch.zeros_like(inputs["x"], dtype=dtype), backend="reference"
        )
        dy = torch.linspace(-1, 1, y.numel()).view(y.shape).bfloat16().to(y.dtype)
        gradients.append(torch.autograd.grad(y, leaves, dy))
    for exact, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-6)
