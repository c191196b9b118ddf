"""Whether faults in the CUDA norms are detected without a GPU.

Every barrier of the kernels is left out, one at a time: the simulator must detect it. So must it
mutations of the source, such as a missing bound, or another column, or results must be wrong.
"""

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import Any

import norms_on_host as on_host
import pytest
import torch
from sm90_on_host.build import RANDOM, Mutation, missing
from sm90_on_host.fault_injector import OpInjector
from sm90_on_host.host_library import HostLibrary
from torch import Tensor

from fastattn.ops._op import OPS, Op
from fastattn.ops.layer_norm import cuda, spec
from fastattn.testing.oracle import run_op
from fastattn.testing.spec import Sample

pytestmark = [pytest.mark.slow, pytest.mark.long]
SPECS = {each.name: each for each in spec.SPECS}


def _mutations(file: str, *pairs: tuple[str, str]) -> list[Mutation]:
    return [Mutation(f"layer_norm/{file}", right, wrong) for right, wrong in pairs]


MUTATIONS = [
    *_mutations(
        "row_tile.cuh",
        ("static_cast<int>(threadIdx.x) * tiling.rows / kShortThreads", "0"),
        ("first + vector * step", "first + vector"),
        ("is_there ? first : kMaxColumns", "first"),
        ("of(vector) < end", "true"),
        ("vectors[v].words[i] = {};", ""),
        ("lane / lanes * lanes * kValues", "0"),
        ("T(absent)", "T(0.0f)"),
        ("first + v * columns.step", "first"),
        ("i % 2 ? pair & 0xffff0000u : pair << 16", "pair << 16"),
        ("add_lanes(sums, threads_);", "add_lanes(sums, kWarp);"),
        ("shared[buffer_][threadIdx.x / kWarp][i]", "shared[buffer_][0][i]"),
        ("threadIdx.x & (warps - 1)", "0"),
        ("add_lanes(sums, warps);", ""),
        ("(column + i) / kColumnsOfWord", "i / kColumnsOfWord"),
        ("kWidth == 1 ? column % kColumnsOfWord : i % kColumnsOfWord", "i % kColumnsOfWord"),
        ("is_kept ? values[i] * scale_ : 0.0f", "is_kept ? values[i] : 0.0f"),
        (
            "dropout::flat_row_state(seed, dropout.stream, row)",
            "dropout::flat_row_state(seed, 0, row)",
        ),
    ),
    *_mutations(
        "norm_fwd.cuh",
        ("values[i] += z[v * kWidth + i];", ""),
        ("kParts && begin + part < p.columns ? part : p.columns - begin", "part"),
        ("columns.has(i / kWidth) ? part_mean : 0.0f", "part_mean"),
        ("mean = part_mean + correction;", "mean = correction;"),
        ("shift = -correction;", "shift = part_mean;"),
        ("part_mean + correction - mean", "correction - mean"),
        ("shift = part_mean - mean;", ""),
        ("mean += delta * share;", "mean += delta;"),
        ("delta * delta * before * share", "0.0f"),
        ("own.lane == 0 && row < p.rows", "own.lane == 0"),
        ("kParts && begin > 0", "false"),
        ("kAdd ? p.z : p.x", "p.x"),
        ("row < p.rows ? p.columns : 0", "p.columns"),
    ),
    *_mutations(
        "norm_bwd.cuh",
        ("p.centred ? p.mean[row] : 0.0f", "0.0f"),
        ("columns_.of_row(row < p_.rows, columns)", "columns_.of_row(true, columns)"),
        ("stage_ == 0 ? last : stage_ - 1", "0"),
        ("stage_ == last ? 0 : stage_ + 1", "0"),
        ("cuda::cp_async_wait_group<kMaxStages - 1>()", "cuda::cp_async_wait_group<kMaxStages>()"),
        ("row + ahead * p.step", "row"),
        ("warp * p.stages * p.stage_bytes", "0"),
        ("lane * kBytes", "0"),
        ("lane * (kBytes - kStatisticBytes)", "0"),
        ("statistics + kWarp * kStatisticBytes", "statistics"),
        ("copied[kWarp]", "copied[0]"),
        ("tensor * kTensorBytes", "0"),
        ("columns.of(i / kWidth) + i % kWidth", "columns.of(0) + i"),
        ("columns.has(i / kWidth)", "true"),
        ("row < p.tiling.rows", "row < 1"),
        ("p.strips == 1", "true"),
        ("p.centred ? share * sums[0] : 0.0f", "share * sums[0]"),
        ("share * (of_row.rstd * sums[1])", "of_row.rstd * sums[1]"),
        (
            "store(p.dsum, row, columns.of(v), rounded)",
            "store(p.dsum, row, columns.of(0), rounded)",
        ),
        ("--pass, row += p.step", "--pass"),
        ("strip < p.strips", "strip < 1"),
        ("p.row_sums[2 * row + 1] = sums[1];", "p.row_sums[2 * row + 1] = sums[0];"),
    ),
    *_mutations(
        "sum_partials.cuh",
        ("line < p.lines", "line + 1 < p.lines"),
        ("other < kSumLines", "other < 1"),
    ),
]


def _run_norm(op: Op, args: Sequence[Any], results: Sequence[Tensor]) -> None:
    (call,) = op.backend_args(args)
    getattr(cuda, op.name)(call, *results)


def _sample(
    op: str, shape: tuple[int, ...], name: str = "faulty", **options: Any
) -> tuple[str, Sample]:
    make = partial(spec.make_inputs, op=op, shape=shape, **options)
    leaves = ("x", "residual", "weight", "bias", "x_bias")
    return op, Sample(name, "has faults", make, leaves)


# Between them they need everything that the kernels have.
CASES = [
    _sample("layer_norm", (70, 40)),
    _sample("rms_norm", (33, 24), offset=1.0),
    _sample("layer_norm", (3, 2104), offset=100.0),
    _sample("layer_norm", (7, 257)),
    _sample("layer_norm", (40, 7)),
    _sample("add_layer_norm", (9, 72), dropout_p=0.3, x_bias=True),
    _sample("add_layer_norm", (9, 33), dropout_p=0.3, x_bias=True),
    _sample("add_layer_norm", (9, 72), weight=False, bias=False),
    _sample("add_layer_norm", (5, 72), "sum alone"),
    _sample("layer_norm", (3, 8200)),  # 32 columns of a thread, a row for each stage
    _sample("add_layer_norm", (2, 8200), offset=3.0, x_bias=True),  # two strips
    # Parts of a row, and three strips: of columns that are accessed one by one, half as many do.
    _sample("add_layer_norm", (2, 8193), offset=3.0, x_bias=True),
    _sample("rms_norm", (2, 8193)),
]


def _gradient_of_the_sum_alone() -> None:
    dz, z = torch.randn(5, 72).bfloat16(), torch.full((5, 72), torch.nan).bfloat16()
    row = torch.full((5,), torch.nan)
    torch.ops.fastattn.add_layer_norm_bwd(
        None, dz, z, None, None, None, row, row, 1e-5, torch.float32, 0.0, None, 0,
        [True, True, False, False, False], backend="reference",
    )  # fmt: skip


def examine(
    patch: pytest.MonkeyPatch, cases: Sequence[tuple[str, Sample]], mutations: Sequence[Mutation],
    defines: Sequence[str] = (), host: HostLibrary = on_host.HOST,
) -> OpInjector:  # fmt: skip
    """Injects every fault into the launches of these calls: all must be detected."""
    if reason := missing():
        pytest.skip(reason)
    machine = on_host.machine("kBFloat16", defines, mutations=mutations)
    injector = OpInjector(host, _run_norm, machine, mutations, later=(RANDOM,))

    def launch(op: str, problem: int, *types: str) -> str | None:
        return injector.call(op, ctypes.c_void_p(problem), *map(on_host.index_of, types))

    for op, sample in cases:
        with patch.context() as context:
            on_host.use(context, launch, host=host)
            for name in on_host.NORMS:
                launcher = partial(injector.launch, OPS[name])
                context.setitem(OPS[name]._launchers, "reference", launcher)
            if sample.name == "sum alone":
                _gradient_of_the_sum_alone()
            else:
                run_op(SPECS[op], sample, sample.inputs("cpu", torch.bfloat16), "reference")
    assert injector.detected and not injector.unreached() and not injector.undetected()
    return injector


def test_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(examine(monkeypatch, CASES, MUTATIONS).detected) > 40
