"""`check_implementation`: wrong kernels fail by the kind that names their fault and by no other,
right ones pass.
"""

import itertools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from subprocesses import python_output
from torch import Tensor

import fastattn
from fastattn import cli, ops
from fastattn.testing import KINDS, Report, all_specs, check_implementation, dense_mask

FP32 = torch.float32
# What a textbook kernel has on a CPU. NaN in padding needs more than a mask, and bits that do not
# depend on the batch more than PyTorch's matrix products.
HELD = tuple(k for k in KINDS if not k.startswith(("NaN", "precision", "batch bits")))


def textbook(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None,
    key_lengths: Tensor | None = None, causal: bool | str = False, scale: float | None = None,
    blocked: float = -torch.inf, empty: float = 0.0, compute: torch.dtype = FP32,
    softmax: Callable[[Tensor], Tensor] = lambda s: s.softmax(-1),
) -> Tensor:  # fmt: skip
    """blocked: the score of blocked pairs. empty: the results of rows without a key. compute: the
    dtype of scores and weights.
    """
    G = q.shape[1] // k.shape[1]
    keys, values = (x.to(compute).repeat_interleave(G, 1) for x in (k, v))
    s = q.to(compute) @ keys.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    allowed = dense_mask(q, k, mask=mask, key_lengths=key_lengths, causal=causal)
    if allowed is None:
        return (softmax(s) @ values).to(q.dtype)
    if allowed.dtype != torch.bool:
        allowed, bias = allowed > -torch.inf, allowed.to(compute)
        s = s + bias.masked_fill(~allowed, 0)
    dead = ~allowed.any(-1, keepdim=True)
    s = s.masked_fill(~allowed, blocked).masked_fill(dead, 0)
    return (softmax(s) @ values).masked_fill(dead, empty).to(q.dtype)


def judge(function: Any, *samples: str, require: Any = HELD, dtype: torch.dtype = FP32) -> Report:
    return check_implementation(
        function, "attention", device="cpu", dtypes=[dtype], samples=samples, require=require
    )


def failed(report: Report) -> set[str]:
    return {row.kind for row in report.rows if row.status == "FAIL"}


def test_a_right_kernel_passes() -> None:
    report = judge(textbook, "causal", "bool", "key_lengths", "gqa", "bias_dead", "scale")
    report.raise_if_failed()
    counts = {s: sum(r.status == s for r in report.rows) for s in ("ok", "refused", "raised")}
    assert counts["ok"] > 200 and counts["refused"] > 5 and not counts["raised"]
    assert {row.kind for row in report.rows if row.status == "ok"} >= {*HELD} - {"call"}
    refused = {row.message for row in report.rows if row.status == "refused"}
    assert all(message.startswith("takes no ") for message in refused)


# -- wrong kernels ---------------------------------------------------------------------------------
class _Changed(torch.autograd.Function):
    """The identity of a tensor, with another gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return ctx.change(dx), None


def of_first_head(x: Tensor, q: Tensor) -> Tensor:
    """Repeats key heads; only the first query head of a group has a gradient."""
    G = q.shape[1] // x.shape[1]
    first = (torch.arange(q.shape[1]) % G == 0)[:, None, None]
    return _Changed.apply(x.repeat_interleave(G, 1), lambda d: d * first)


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = textbook(q.clone(), k, v)
    q.data.mul_(q.shape[-1] ** -0.5)
    return out


def lengths_in_place(q: Tensor, k: Tensor, v: Tensor, key_lengths: Any = None) -> Tensor:
    out = textbook(q, k, v, key_lengths=None if key_lengths is None else key_lengths.clone())
    if key_lengths is not None:
        key_lengths.clamp_(min=1)
    return out


def writes_gradient(d: Tensor) -> Tensor:
    copy = d.clone()
    d.zero_()
    return copy


_BUFFERS: dict[Any, Tensor] = {}


def one_buffer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The results of all calls are in the same memory, with other bits."""
    out = textbook(q, k, v) * _LAST_BIT ** (next(_CALLS) % 5)
    out.data = _BUFFERS.setdefault(out.shape, torch.empty_like(out)).detach().copy_(out.detach())
    return out


def reads_new_memory(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = textbook(q, k, v)
    memory = torch.empty(1 << 25)[: out.numel()]  # so large that the system fills it with 0
    return out + torch.where(memory.isnan(), torch.nan, 0.0).view_as(out)


def off_by_one(q: Tensor, k: Tensor, v: Tensor, causal: Any = False) -> Tensor:
    if causal is not True:
        return textbook(q, k, v, causal=causal)
    return textbook(q, k, v, mask=q.new_ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(1))


def other_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.shape[1] != k.shape[1]:
        raise RuntimeError("expected as many heads")
    return textbook(q, k, v)


_CALLS = itertools.count()
_CORNERS = {"top_left": "bottom_right", "bottom_right": "top_left"}
_LAST_BIT = 1 + 2.0**-23
WRONG: dict[str, tuple[Callable[..., Tensor], tuple[str, ...], set[str]]] = {
    "zeros": (lambda q, k, v, scale=None: torch.zeros_like(q), ("gqa", "scale_l"), {"value"}),
    "other corner": (
        lambda q, k, v, causal=False: textbook(q, k, v, causal=_CORNERS.get(causal, causal)),
        ("two_by_nine",),
        {"value", "gradient"},
    ),
    "off by one": (off_by_one, ("two_by_two", "plain"), {"value", "gradient"}),
    "no scale": (
        lambda q, k, v: textbook(q, k, v, scale=1.0), ("odd_sizes",), {"value", "gradient"},
    ),
    "no maximum": (
        lambda q, k, v, scale=None: textbook(
            q, k, v, scale=scale, softmax=lambda s: s.exp() / s.exp().sum(-1, True)
        ),
        ("huge_logits", "plain"),
        {"value", "gradient"},
    ),
    "in place": (in_place, ("plain",), {"inputs"}),
    "lengths in place": (lengths_in_place, ("key_lengths_zero",), {"inputs"}),
    "gradient in place": (
        lambda q, k, v: _Changed.apply(textbook(q, k, v), writes_gradient), ("plain",), {"inputs"},
    ),
    "other dtype": (lambda q, k, v: textbook(q, k, v).bfloat16(), ("plain",), {"value"}),
    "dense gradient": (
        lambda q, k, v: _Changed.apply(textbook(q, k, v), lambda d: d * (d.stride(-1) == 1)),
        ("odd_sizes",),
        {"expanded gradient"},
    ),
    "training alone": (
        lambda q, k, v: textbook(q, k, v) * (1 if q.requires_grad else 2),
        ("odd_sizes",),
        {"inference"},
    ),
    "grad mode alone": (
        lambda q, k, v: textbook(q, k, v) * (1 if torch.is_grad_enabled() else 2),
        ("odd_sizes",),
        {"inference"},
    ),
    "one buffer": (one_buffer, ("plain",), {"rerun"}),
    "detached": (lambda q, k, v: textbook(q, k, v.detach()), ("plain",), {"gradient"}),
    "backward without scale": (
        lambda q, k, v: textbook(_Changed.apply(q, lambda d: d * q.shape[-1] ** 0.5), k, v),
        ("plain",),
        {"gradient"},
    ),
    "heads not summed": (
        lambda q, k, v: textbook(q, of_first_head(k, q), of_first_head(v, q)),
        ("gqa", "plain"),
        {"gradient"},
    ),
    "new memory": (reads_new_memory, ("plain",), {"fresh memory"}),
    "other bits": (
        lambda q, k, v: textbook(q, k, v) * _LAST_BIT ** (next(_CALLS) % 5), ("plain",), {"rerun"},
    ),
    "split by batch": (
        lambda q, k, v: textbook(q, k, v) * _LAST_BIT ** (q.shape[0] == 1),
        ("plain",),
        {"batch bits"},
    ),
    "wrong alone": (
        lambda q, k, v: textbook(q, k, v) * (1.01 if q.shape[0] == 1 else 1.0),
        ("plain",),
        {"batch", "batch bits"},
    ),
    "reads padding": (
        lambda q, k, v, key_lengths=None: textbook(q, k, v, key_lengths=key_lengths, blocked=-20.0),
        ("key_lengths",),
        {"finite padding"},
    ),
    "NaN rows": (
        lambda q, k, v, mask=None: textbook(q, k, v, mask=mask, empty=torch.nan),
        ("bool_mask_dead", "bool_mask_rows"),
        {"empty rows"},
    ),
    "too short": (lambda q, k, v: textbook(q, k, v)[:, :, :-1], ("plain",), {"value", "call"}),
    "other heads": (other_heads, ("gqa",), {"call"}),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_fail(name: str) -> None:
    function, samples, kinds = WRONG[name]
    report = judge(function, *samples, require=(*HELD, "batch bits"))
    assert failed(report) == kinds, report.table()
    with pytest.raises(AssertionError, match="attention by "):
        report.raise_if_failed()


def test_results_that_round_weights_are_imprecise() -> None:
    """Where only a kernel that computes in the dtype is less exact than the budget."""

    def in_the_dtype(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        return textbook(q, k, v, scale=scale, compute=q.dtype)

    half: dict[str, Any] = {"dtype": torch.bfloat16}
    report = judge(in_the_dtype, "scale_negative", **half)
    report.raise_if_failed()
    assert {r.kind for r in report.rows if r.status == "imprecise"} == {"value", "gradient"}
    assert not failed(judge(textbook, "scale_negative", **half, require=(*HELD, "precision")))
    strict = judge(in_the_dtype, "scale_negative", **half, require=(*HELD, "precision"))
    assert failed(strict) and not any(row.status == "imprecise" for row in strict.rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [0.0, 1.5])
def test_wrong_gradients_in_half_precision_are_not_imprecise(factor, dtype):
    """Although roundings of the weights' gradients, at 2 eps mag, would explain them."""

    def wrong_dk(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return textbook(q, _Changed.apply(k, lambda d: factor * d), v, mask=mask)

    samples = ("two_by_two", "plain", "odd_sizes", "bias_low")
    rows = judge(wrong_dk, *samples, dtype=dtype, require=()).rows
    dks = [r for r in rows if r.result == "dk" and r.kind == "gradient"]
    assert len(dks) > 3 and {r.status for r in dks} == {"FAIL"}


def test_what_is_not_required_does_not_fail() -> None:
    report = judge(WRONG["NaN rows"][0], "bool_mask_rows", require=())
    report.raise_if_failed()
    [out, *_] = [row for row in report.rows if row.status == "differs"]
    assert (out.kind, out.result, out.message) == ("empty rows", "out", "nan, expected 0")


def test_required_kinds() -> None:
    """Given kinds, or their names in a string, are required besides the others."""
    for require in ("rerun,batch bits", ("rerun", "batch bits")):
        report = judge(WRONG["split by batch"][0], "plain", require=require)
        assert {*report.require} > {"value", "gradient", "inputs", "rerun", "batch bits"}
        assert failed(report) == {"batch bits"}


def test_a_backward_that_always_raises_fails() -> None:
    """One that raises for some samples is reported: it may lack support for them."""

    def raises(d: Tensor) -> Tensor:
        raise RuntimeError("out of registers")

    def always(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Changed.apply(textbook(q, k, v), raises)

    def sometimes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return textbook(q, k, v) if q.shape[2] == 1 else always(q, k, v)

    report = judge(always, "odd_sizes", "one_by_one", require=())
    assert failed(report) == {"gradient"}
    message = "RuntimeError: out of registers (holds for no sample)"
    assert {r.message for r in report.rows if r.status == "FAIL"} == {message}
    rows = judge(sometimes, "odd_sizes", "one_by_one", require=()).rows
    assert {r.status for r in rows if r.result == "gradients"} == {"raised"}
    assert not any(r.status == "FAIL" for r in rows)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("op", ["attention", "attention_varlen", "add_layer_norm", "ffn", "linear"])
def test_backends_pass(op: str, backend: str) -> None:
    """With all that is required of them, also in their own samples, of which few are left out."""

    def function(**arguments: Any) -> Any:
        returned = {"attention": "return_lse", "add_layer_norm": "return_sum"}
        extra = {returned[name]: True for name in returned if op.startswith(name)}
        return getattr(fastattn, op)(**arguments, **extra, backend=backend)

    spec = all_specs()[op]
    samples = [s.name for s in spec.samples if "interpreter" in s.tags][3:90:15]
    # Products choose their kernels by the number of rows, except in `batch_invariant`.
    has_batch_bits = backend == "cpu" and op not in ("linear", "ffn")
    require = [k for k in KINDS if k != "batch bits" or has_batch_bits]
    dtypes = (FP32, torch.bfloat16)
    report = check_implementation(
        function, op, device="cpu", dtypes=dtypes, samples=samples, require=require
    )
    if backend == "cpu" and ops.library_unavailable("cpu"):
        pytest.skip("the native library is not built")
    report.raise_if_failed()
    others = {row.kind for row in report.rows if row.status in ("imprecise", "differs", "raised")}
    assert others <= {"batch bits"}
    assert {row.result for row in report.rows} >= {*spec.results}


# -- calls -----------------------------------------------------------------------------------------
class Attention(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return textbook(q, k, v)


def test_modules_and_their_signatures() -> None:
    report = judge(Attention(), "plain", "causal")
    assert {row.backend for row in report.rows} == {"Attention"} and not failed(report)
    assert "takes no causal" in {row.message for row in report.rows}
    for wrong in (Attention, F.scaled_dot_product_attention):
        with pytest.raises(ValueError, match="must be a function, or a module, with a signature"):
            judge(wrong, "plain")
    for function, named in {
        lambda query, key, value: query: "positional or keyword query",
        lambda q, k, v, /: q: "positional-only q",
        lambda q, k, v, unknown: q: "positional or keyword unknown",
        lambda *args: args[0]: r"\(\*args\)",
    }.items():
        with pytest.raises(ValueError, match=rf"parameters of fastattn.attention.*got {named}$"):
            judge(function, "plain")
    with pytest.raises(ValueError, match=r"dtypes must be of .*bfloat16.*got torch.float64"):
        judge(textbook, "plain", dtype=torch.float64)
    with pytest.raises(ValueError, match=r"require must be of value, .* padding, got 'speed'"):
        judge(textbook, "plain", require=("speed",))


def test_reasons_are_counted() -> None:
    """Each argument that a signature lacks, and a message once, whatever it contains."""

    def refuses(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError("needs a GPU; needs a driver")

    table = judge(refuses, "plain", "combined_4").table()
    assert "refused: 1 x needs a GPU; needs a driver" in table
    assert "refused: 1 x takes no causal" in table and "refused: 1 x takes no window" in table


def test_a_forward_alone_is_checked_without_gradients() -> None:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return textbook(q, k, v).detach()

    rows = judge(forward, "plain").rows
    assert [r.message for r in rows if r.kind == "gradient"] == ["returns results without a graph"]
    assert {r.status for r in rows if r.kind != "gradient"} == {"ok"}


@pytest.mark.parametrize("restrictions", [
    {"causal": True},
    {"causal": "bottom_right", "window": (3, 0)},
    {"key_lengths": torch.tensor([3, 7]), "query_lengths": torch.tensor([5, 2])},
    {"mask": torch.rand(5, 7) > 0.4, "causal": "bottom_right_lengths"},
    {"mask": torch.randn(2, 1, 5, 7), "key_lengths": torch.tensor([3, 7])},
])  # fmt: skip
def test_dense_mask(restrictions: dict[str, Any]) -> None:
    N = 5 if restrictions.get("causal") is True else 7
    q, k = torch.randn(2, 2, 5, 8), torch.randn(2, 2, N, 8)
    mask = dense_mask(q, k, **restrictions)
    assert dense_mask(q, k) is None and mask is not None
    weights = fastattn.attention_weights(q, k, **restrictions)
    torch.testing.assert_close(fastattn.attention_weights(q, k, mask=mask), weights)
    assert mask.dtype == getattr(restrictions.get("mask"), "dtype", torch.bool)


# -- processes of its own --------------------------------------------------------------------------
KERNELS = """
import os, time
import torch.nn.functional as F

def right(q, k, v, *, scale=None):
    return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)

def aborts(q, k, v):
    os.abort() if q.shape[2] == 1 else None
    return right(q, k, v)

def hangs(q, k, v):
    time.sleep(1000) if q.shape[2] == 1 else None
    return right(q, k, v)
"""
COMMAND = ("check", "--op=attention", "--device=cpu", "--dtype=fp32", "--jobs=1")


@pytest.fixture
def my_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_kernels.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_command(my_kernels: Path) -> None:
    """In the folder of the kernels, with a table, rows and exit codes."""
    command = ["-m", "fastattn", *COMMAND, "--implementation=my_kernels:right", "--sample=plain"]
    env = os.environ | {"PYTHONPATH": str(Path(fastattn.__file__).parents[1])}
    shown = python_output(*command, "--require=rerun,padding", "--json=rows.json", env=env)
    assert "attention by my_kernels:right on " in shown
    rows = json.loads((my_kernels / "rows.json").read_text())
    assert {"value", "gradient", "inputs", "rerun"} <= {row["kind"] for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, limit, message",
    [("aborts", 90, "its process died: SIGABRT"), ("hangs", 15, "was still running after 15 s")],
)
def test_a_crash_or_a_hang_costs_one_row(name, limit, message, my_kernels, capsys):
    options = ("--sample=one_by_one", "--sample=plain", f"--limit={limit}", "--json=rows.json")
    assert cli.main([*COMMAND, f"--implementation=my_kernels:{name}", *options]) == 1
    rows = json.loads((my_kernels / "rows.json").read_text())
    [lost] = [row for row in rows if row["status"] == "FAIL"]
    assert (lost["sample"], lost["kind"], lost["message"]) == ("one_by_one", "process", message)
    assert {r["status"] for r in rows if r["sample"] == "plain" and r["kind"] == "value"} == {"ok"}
    assert f"one_by_one all process: {message}" in capsys.readouterr().out


@pytest.mark.slow
def test_the_kernel_of_the_documentation(my_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter; without the line that the page says, it fails."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    page = (Path(__file__).parents[2] / "docs/pages/test-your-kernel.md").read_text()
    [source] = re.findall(r'^```py title="my_kernels.py"\n(.*?)^```', page, re.M | re.S)
    (my_kernels / "page_kernels.py").write_text(source)
    [line] = [line for line in source.splitlines() if "# the last block" in line]
    (my_kernels / "broken_kernels.py").write_text(source.replace(line, ""))
    for module, kinds in (("page_kernels", set()), ("broken_kernels", {"value"})):
        report = judge(f"{module}:my_attention", "one_key", "causal", "d128", require=HELD)
        assert failed(report) == kinds, report.table()
        assert {row.sample for row in report.rows if row.status == "ok"} >= {"causal", "d128"}


@pytest.mark.parametrize("options, named", [
    (["--implementation=my_kernels"], "must be named module:attribute"),
    (["--implementation=my_kernels:absent"], "has no attribute 'absent'"),
    (["--implementation=absent_kernels:right"], "No module named 'absent_kernels'"),
    (["--implementation=my_kernels:right", "--backend=cpu"], "without --backend"),
    (["--implementation=my_kernels:right", "--require=speed"], "got 'speed'"),
])  # fmt: skip
def test_wrong_options_are_named(options, named, my_kernels, capsys):
    assert cli.main([*COMMAND, *options]) == 2
    assert named in capsys.readouterr().err
