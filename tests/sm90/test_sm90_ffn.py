"""The feed-forward network for Hopper, computed without a GPU and judged like any backend.

The unchanged kernels run on the simulator in sm90_on_host, forward and backward: launcher,
bindings, workspace, tensor maps, descriptors and layouts are those of a GPU.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sm90_on_host import ffn_bindings
from sm90_on_host.build import Machine, Mutation, build, missing
from sm90_on_host.ffn_bindings import Instance
from sm90_plans.shim import compiled
from torch import Tensor

from fastattn.ops._op import OPS, Op
from fastattn.ops.ffn import sm90
from fastattn.ops.ffn.spec import make_inputs
from fastattn.testing.oracle import Oracle, run_op
from fastattn.testing.poison import poisoned_results
from fastattn.testing.spec import Sample, all_specs

TESTS = Path(__file__).resolve().parent
SPEC = all_specs()["ffn"]
Launch = Callable[[Op, Sequence[Any]], Sequence[Tensor]]
GRADIENTS = ("x", "w1", "b1", "w2", "b2", "residual")


def _sample(name: str, **options: object) -> Sample:
    return Sample(name, "more than one tile", partial(make_inputs, **options), GRADIENTS)


_WITHOUT_W2 = tuple(name for name in GRADIENTS if name not in ("w2", "residual"))
# Several tiles with ragged ends in every dimension of every product, and more tiles than blocks.
_SIZES = {"rows": (300,), "D": 200, "hidden": 272, "out": 328}
_DROPOUT = {"dropout_p": 0.2, "output_dropout_p": 0.3}
OWN = (
    _sample("tiles_relu", **_SIZES, **_DROPOUT, residual="same"),
    _sample("tiles_gelu", **_SIZES, **_DROPOUT, activation="gelu"),
    _sample("tiles_geglu", **_SIZES, **_DROPOUT, activation="geglu", residual="fp32"),
    _sample("tiles_swiglu", **_SIZES, activation="swiglu", bias=False),
    _sample("one_tile", rows=(64,), D=64, hidden=128, out=64, activation="silu"),
    *(
        # w2 is frozen: the backward does not compute the activation.
        replace(_sample(f"frozen_{name}", **_SIZES, activation=name), gradients=_WITHOUT_W2)
        for name in ("gelu", "geglu")
    ),
)
_REFUSED = ("odd_sizes", "sizes_257", "blocks", "one_feature", "one_hidden", "weights_transposed")
CASES = {s.name: s for s in (*SPEC.samples, *OWN) if s.name not in _REFUSED}


# The epilogues of a default build, and those of FASTATTN_TRIALS=ffn_loop.
EPILOGUES: dict[str, list[str]] = {"unrolled": [], "loop": ["FASTATTN_TRIAL_FFN_LOOP"]}


def build_product(epilogue: str, instance: Instance, mutations: Sequence[Mutation] = ()) -> Machine:
    """The machine with a product, and with the sums of columns."""
    defines = [f"ONLY_DTYPE={instance.dtype}", f"ONLY_STEP={instance.step or 'kDw'}"]
    return build(TESTS / "sm90_ffn.cpp", defines + EPILOGUES[epilogue], mutations=mutations)


@pytest.fixture(scope="session", params=["unrolled", pytest.param("loop", marks=pytest.mark.slow)])
def machine(request: pytest.FixtureRequest) -> Callable[[Instance], Machine]:
    if reason := missing():
        pytest.skip(reason)
    return functools.cache(partial(build_product, request.param))


@pytest.fixture
def simulate(
    machine: Callable[[Instance], Machine], monkeypatch: pytest.MonkeyPatch
) -> Callable[[], None]:
    """From then on the reference is the simulated backend."""
    ffn_bindings.use(
        monkeypatch,
        lambda op, problem, instance: machine(instance).call(op, ctypes.c_void_p(problem)),
    )
    return partial(replace_reference, monkeypatch, _launch)


def replace_reference(patch: pytest.MonkeyPatch, launch: Launch) -> None:
    for name in ("ffn_fwd", "ffn_bwd"):
        patch.setitem(OPS[name]._launchers, "reference", partial(launch, OPS[name]))


def _launch(op: Op, args: Sequence[Any]) -> Sequence[Tensor]:
    results = op.allocate(args)
    run_simulated(op, args, results)
    return results


def run_simulated(op: Op, args: Sequence[Any], results: Sequence[Tensor]) -> None:
    (call,) = op.backend_args(args)
    assert getattr(sm90, f"{op.name}_unsupported")(call) is None
    getattr(sm90, op.name)(call, *results)


@pytest.mark.parametrize(
    ("name", "sections"),
    [("tiles_geglu", 5), ("tiles_relu", 4), ("many_rows", 5)],
    ids=["geglu", "relu", "parts"],
)
@pytest.mark.slow
def test_a_short_section_is_detected(
    simulate: Callable[[], None], name: str, sections: int
) -> None:
    """Each section of the backward's workspace is accessed up to its end, and accesses behind it
    fault. (relu saves the activation.)
    """
    simulate()
    for section in range(sections):
        ffn_bindings.HOST.native.on_host_short_section(section)
        try:
            with pytest.raises(RuntimeError, match="there is no memory"):
                run_op(SPEC, CASES[name], CASES[name].inputs("cpu", torch.bfloat16), "reference")
        finally:
            ffn_bindings.HOST.native.on_host_short_section(-1)


def test_every_tile_once(tmp_path: Path) -> None:
    """The order of tiles is a bijection, again for each part; a wave of tiles has few rows of
    tiles.
    """
    source = """#include "ffn/sm90/tile_order.h"
extern "C" void place(int row_tiles, int column_tiles, int number, int* result) {
  const auto p = fastattn::ffn::tile_place(row_tiles, column_tiles, number);
  result[0] = p.row_tile;
  result[1] = p.column_tile;
  result[2] = p.part;
}"""
    place, result = compiled(tmp_path, source).place, (ctypes.c_int * 3)()
    for rows, columns in ((1, 1), (3, 5), (8, 7), (9, 1), (27, 4), (1, 40)):
        for part in range(3):
            found = []
            for number in range(rows * columns):
                place(rows, columns, part * rows * columns + number, result)
                found.append((result[0], result[1]))
                assert result[2] == part
            assert sorted(found) == [(r, c) for r in range(rows) for c in range(columns)]
            assert len({row for row, _ in found[: 8 * columns]}) == min(rows, 8)


def test_parts_of_weight_gradients(tmp_path: Path) -> None:
    """Products with few tiles and long sums are computed in parts, which fill the GPU."""
    source = """#include "ffn/sm90/ffn_sm90.h"
extern "C" int parts(int rows, int columns, int depth) {
  return fastattn::ffn::parts_of_dw({rows, columns, depth});
}"""
    parts = compiled(tmp_path, source).parts
    assert parts(2048, 512, 32768) == 4  # 32 tiles
    assert parts(4096, 1024, 16384) == 1  # 128 tiles
    assert parts(256, 64, 32768) == 8  # 2 tiles
    assert parts(2048, 512, 1024) == 1  # 16 steps
    assert parts(16384, 4096, 8192) == 1  # 2,048 tiles
    assert parts(6400, 1024, 8192) == parts(7680, 1024, 16384) == 1  # 200 and 240 tiles


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_sample(simulate: Callable[[], None], name: str) -> None:
    dtype = torch.float16 if list(CASES).index(name) % 3 == 2 else torch.bfloat16
    compare(simulate, CASES[name], dtype)


def compare(simulate: Callable[[], None], sample: Sample, dtype: torch.dtype) -> None:
    oracle = Oracle(SPEC, sample, dtype)
    simulate()
    with poisoned_results():
        results = run_op(SPEC, sample, sample.inputs("cpu", dtype), "reference")
    for name, result in results.items():
        comparison = oracle.judge(name, result)
        assert comparison.ok, f"{name}: {comparison.message}"
