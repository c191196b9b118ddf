"""Whether faults in the feed-forward network for Hopper are detected on the simulator.

As test_sm90_faults.py for attention: every fault that the simulator supports, at every place of a
product's kernel, one at a time. Also mutations of the source: descriptors, barriers, indices of the
epilogues, positions of dropout. These may also be detected by wrong results.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import test_sm90_ffn as ffn
import torch
from sm90_on_host import ffn_bindings
from sm90_on_host.build import Machine, Mutation, missing
from sm90_on_host.fault_injector import FaultInjector, Harmless
from sm90_on_host.ffn_bindings import Instance
from sm90_on_host.guarded import guarded
from torch import Tensor

from fastattn.ops._dropout import SECOND_STREAM, keep_scale, row_keep
from fastattn.ops._op import Op
from fastattn.ops.ffn import sm90
from fastattn.ops.ffn.calls import BackwardCall
from fastattn.ops.ffn.spec import make_inputs
from fastattn.testing.spec import Inputs, Sample

pytestmark = [pytest.mark.slow, pytest.mark.long]

# kDown has an fp32 residual and result, kDown16 those of the operands' type.
PING_PONG = ("kUp", "kUpGated", "kDown", "kDown16", "kDhidden", "kDhiddenGated")
STEPS = (*PING_PONG, "kDw")
TRANSPOSED_B = ("kDhidden", "kDhiddenGated", "kDw")
DROPPING = ("kUp", "kUpGated", "kDown", "kDown16", "kDhiddenGated")
LOADING = ("kDown", "kDown16", "kDhidden", "kDhiddenGated")
SUMMING = ("kDhidden", "kDhiddenGated")
SEVERAL_COLUMNS = ("kUp", *LOADING, "kDw")  # of boxes
BIASED = ("kUp", "kUpGated", "kDown", "kDown16")


def _mutations(epilogue: str) -> list[tuple[Mutation, tuple[str, ...]]]:
    """And the steps in which they are tried."""
    loops = epilogue == "loop"
    files = {f"{name}.cuh": f"{name}_loop.cuh" for name in ("epilogue", "box_dropout")}
    found: list[tuple[Mutation, tuple[str, ...]]] = []

    def of(file: str, right: str, wrong: str, only: tuple[str, ...] = STEPS) -> None:
        file = files.get(file, file) if loops else file
        found.append((Mutation(f"ffn/sm90/{file}", right, wrong), only))

    # Descriptors and boxes. A's tile for a warpgroup is one chunk: it has no next one.
    of("operand.cuh", "sm90::descriptor_n_major(address(), kChunkBytes)",
       "sm90::descriptor_n_major(address(), kChunkBytes / 2)", only=TRANSPOSED_B)  # fmt: skip
    of("operand.cuh", "sm90::n_major_step(step)", "sm90::k_major_step(step, kExtent)",
       only=TRANSPOSED_B)  # fmt: skip
    of("operand.cuh", "first + i * kDepth", "first", only=TRANSPOSED_B)
    of("operand.cuh", "first + i * apart", "first + i * (apart + 8)", only=("kUpGated",))
    of("operand.cuh", "address() + i * (kBytes / count)", "address()",
       only=("kUpGated", *TRANSPOSED_B))  # fmt: skip
    # Barriers and the ring
    of("storage.cuh", "shared.empty[slot].init(Traits::kPingPong ? 1 : kGroups);",
       "shared.empty[slot].init(1);", only=("kDw",))  # fmt: skip
    of("producer.cuh", "group ^= Traits::kPingPong ? 1 : 0;", "", only=PING_PONG)
    of("producer.cuh", "at.phase() ^ 1", "at.phase()")
    of("producer.cuh", "place.row_tile * kTileRows", "0")
    of("producer.cuh", "place.column_tile * Traits::kOutColumns", "0")
    of("consumer.cuh", "parities ^= 1u << slot;", "parities ^= 1u;")
    of("consumer.cuh", "at = {static_cast<uint32_t>(n) * args.steps};",
       "at = {static_cast<uint32_t>(n)};", only=PING_PONG)  # fmt: skip
    of("consumer.cuh", "release(at.passed - 2);", "release(at.passed - 1);")
    of("consumer.cuh", "tile_number(n + 1) < tile_count(args)", "false", only=PING_PONG)
    of("consumer.cuh", "k > 0 || accumulate", "k > 0")
    of("consumer.cuh", "group * Shared::TileA::kBlockBytes", "0", only=("kDw",))
    of("consumer.cuh", "block * Shared::TileA::kBlockBytes", "0", only=PING_PONG)
    of("consumer.cuh", "Traits::kPingPong ? n / kGroups : n", "n", only=("kDhidden",))
    # Boxes: places
    of("epilogue.cuh", "(Traits::kPingPong ? 0 : group * kMmaRows)", "0", only=("kDw",))
    of("epilogue.cuh", "warp * sm90::kWarpRows", "0")
    of("epilogue.cuh", "box % kBlocks * kMmaRows", "0", only=PING_PONG)
    of("epilogue.cuh", "box / kBlocks * BoxOf<Out>::kColumns", "box / kBlocks * kGroupColumns",
       only=SEVERAL_COLUMNS)  # fmt: skip
    store = (
        "ptx::cp_async_bulk_tensor_store(&args.out, result_box(box, pair), place.column, place.row,"
        f"\n{' ' * 40}pair, part);"
    )
    of("epilogue.cuh", store, store.replace("pair, part", "0, part"),
       only=("kUpGated", "kDhiddenGated"))  # fmt: skip
    load = (
        "ptx::cp_async_bulk_tensor_load(result_box(box, pair), &args.loaded, full.address(),"
        f"\n{' ' * 37}place.column, place.row, pair, 0, ptx::kEvictFirst);"
    )
    of("epilogue.cuh", load, load.replace("row, pair", "row, 0"), only=("kDhiddenGated",))
    of("ffn_product_sm90.cuh", "Traits::kDhidden ? stride : e.residual_stride", "stride",
       only=("kDown",))  # fmt: skip
    # Boxes: memory and waits
    of("epilogue.cuh", "shared.results[group][warp][box % Traits::kSlots][pair].address()",
       "shared.results[group][warp][0][pair].address()")  # fmt: skip
    of("epilogue.cuh", "shared.activated.of[group][warp][box % Traits::kActivatedSlots].address()",
       "shared.activated.of[group][warp][0].address()", only=("kUp", "kUpGated"))  # fmt: skip
    of("epilogue.cuh", "use % 2", "0", only=LOADING)
    of("epilogue.cuh", "box >= kLag && later < kBoxes<Out>", "later < kBoxes<Out>",
       only=("kDown", "kDhiddenGated"))  # fmt: skip
    of("epilogue.cuh", "kDhidden && epilogue.activated", "false", only=("kDhiddenGated",))
    wait = "ptx::cp_async_bulk_wait_group_read<kLag - 1>();"
    of("epilogue.cuh", wait, wait.replace(" - 1", ""), only=("kDown",))
    wait = "ptx::cp_async_bulk_wait_group_read<Traits::kSlots - 1>();"
    of("epilogue.cuh", wait, wait.replace(" - 1", ""), only=("kUp", "kUpGated", "kDw"))
    columns = "kMatrixGroups * matrix" if loops else "kPartGroups * part"
    of("epilogue.cuh", f"{columns} + lane / sm90::kWarpRows", columns,
       only=("kUpGated", *SUMMING))  # fmt: skip
    of("epilogue.cuh", "lane % sm90::kWarpRows", "lane % 8", only=("kUpGated", *SUMMING))
    # Biases and values
    of("epilogue.cuh", "column + i * kGroupColumns", "column", only=BIASED)
    of("epilogue.cuh", "at + pair * args.columns", "at", only=("kUpGated",))
    of("epilogue.cuh", "elements && at < args.columns", "elements != nullptr",
       only=BIASED)  # fmt: skip
    value = "slice * kValues + i" if loops else "part_of_tile * kValues + i"
    of("epilogue.cuh", f"pair * Traits::kOutColumns / 2 + {value}", value, only=("kUpGated",))
    bias = f"{'slice * kSliceGroups' if loops else 'part_of_tile * kPartGroups'} + i / 4"
    of("epilogue.cuh", f"pair * kTileGroups + {bias}", bias, only=("kUpGated",))
    if loops:
        of("epilogue.cuh", "i / kBoxValues * Traits::kOutColumns / 2 + i % kBoxValues",
           "i % kBoxValues", only=("kUpGated",))  # fmt: skip
        of("epilogue.cuh", "(to + 1) / kBlocks * kBoxValues + at", "to / kBlocks * kBoxValues + at",
           only=SEVERAL_COLUMNS)  # fmt: skip
        of("epilogue.cuh", "move_up<Out>(rSums, box);", "move_up<Out>(rSums, 0);",
           only=("kUp", "kDown"))  # fmt: skip
        of("epilogue.cuh", "bias[i + kBoxGroups]", "bias[i]", only=("kUp", "kDown", "kDown16"))
    else:
        of("epilogue.cuh", "box / kBlocks * kParts + part_of_box", "part_of_box",
           only=SEVERAL_COLUMNS)  # fmt: skip
    of("epilogue.cuh", "i / 2 % 2 * sm90::kRowStep", "0", only=("kDown",))
    of("epilogue.cuh", "column % kPieceColumns * sizeof(float)", "0", only=("kDown",))
    # Dropout
    of("box_dropout.cuh", "own + (is_odd() ? sm90::kRowStep : 0)", "own", only=DROPPING)
    of("box_dropout.cuh", "column / kUnit + lane_ % kUnits", "column / kUnit + lane_ % 8",
       only=("kUpGated", "kDhiddenGated"))  # fmt: skip
    unit = f"({'kColumnGroups * slice' if loops else '2 * part'} + group) * 2"
    of("box_dropout.cuh", f"{unit} + lane_ % 4 / 2", unit, only=DROPPING)
    of("box_dropout.cuh", "is_odd() == (row == 1)", "row == 1", only=DROPPING)
    of("box_dropout.cuh", "is_odd() ? word : word << 16", "word", only=DROPPING)
    of("box_dropout.cuh", "(i % 2 ? word : word << 8)", "word", only=DROPPING)
    of("box_dropout.cuh", "static_cast<uint32_t>(dropout_.threshold)",
       "static_cast<uint32_t>(dropout_.threshold + 1)", only=DROPPING)  # fmt: skip
    # Derivatives and sums
    of("epilogue.cuh", "hidden[0][i] > 0.0f", "hidden[0][i] >= 0.0f", only=("kDhidden",))
    of("epilogue.cuh", "da * act.slope", "da * act.value", only=("kDhiddenGated",))
    if loops:
        of("epilogue.cuh", "sums[pair][i] = 0.0f;", "", only=SUMMING)
    else:
        of("epilogue.cuh", "is_first && is_upper", "is_upper", only=SUMMING)
    of("epilogue.cuh", "lanes < kWarp", "lanes < kWarp / 2", only=SUMMING)
    of("epilogue.cuh", "other < kWarpsPerGroup", "other < 3", only=SUMMING)
    of("epilogue.cuh", "ptx::bar_sync(kSumsBarrier + group, kWarpgroup);", "", only=SUMMING)
    of("epilogue.cuh", "sum += shared.sums.of[group][other][i];",
       "sum += shared.sums.of[0][other][i];", only=SUMMING)  # fmt: skip
    return found


SUM_MUTATIONS = [
    Mutation("ffn/sm90/column_sums.cuh", right, wrong)
    for right, wrong in (
        ("row_block * kTileRows + i", "i"),
        ("first_column + thread * kPieceColumns", "thread * kPieceColumns"),
        ("row >= args.rows || column >= args.columns", "column >= args.columns"),
        ("dropout::flat_row_key(row_state, row)", "dropout::flat_row_key(row_state, i)"),
        ("dropout.column_keys(column)", "dropout.column_keys(thread * kPieceColumns)"),
        ("sums[j] += v[j];", "sums[j] = v[j];"),
        ("sum += shared.sums[i][threadIdx.x];", "sum = shared.sums[i][threadIdx.x];"),
        ("first_column + static_cast<int>(threadIdx.x) < args.columns", "true"),
        ("i < args.rows", "i < kRowThreads"),
        ("static_cast<int64_t>(i) * args.columns + column", "column"),
        ("static_cast<int64_t>(part) * args.columns + column", "column"),
        ("sums[j] += piece.data[j];", "sums[j] = piece.data[j];"),
        ("total += shared.sums[i][thread];", "total = shared.sums[i][thread];"),
        ("row_thread == 0 && column < args.columns", "row_thread == 0"),
        ("unit + 1", "unit"),
        ("24 - 8 * (j % 4)", "24 - 8 * (j / 4)"),
        ("static_cast<uint32_t>(dropout.threshold)",
         "static_cast<uint32_t>(dropout.threshold + 1)"),
    )
]  # fmt: skip

# All of these stay in the kernel: they are harmless on this simulator.
HARMLESS = (
    Harmless("no pin", "pin_sums(); < wait_ping_pong();", "only products write the sums"),
    Harmless("no pin", "ptx::pin(bias);", "only saves registers"),
    # Instructions that all lanes must execute together follow; on the simulator they always do.
    Harmless("no syncwarp", "converges for the barrier that follows", "lanes are together"),
    Harmless("no syncwarp", "converges, and lane 0 has waited", "without activations"),
    Harmless("no syncwarp", "ptx::bar_sync(kSumsBarrier + group, kWarpgroup);", "as above"),
)


class Launched(FaultInjector):
    """Examines launches. Before every run, what it writes is poisoned; all runs must write what
    the first did.
    """

    def examine_launch(self, op: str, problem: int) -> str | None:
        addresses, sizes = (ctypes.c_void_p * 3)(), (ctypes.c_int64 * 3)()
        results = getattr(self.machine.library, f"{op}_results")
        results.restype = None
        results(ctypes.c_void_p(problem), addresses, sizes)
        written = [(a, n) for a, n in zip(addresses, sizes, strict=True) if n]
        expected: list[bytes] = []

        def run() -> str | None:
            for address, size in written:
                ctypes.memset(address, 0xFF, size)
            message = self.machine.call(op, ctypes.c_void_p(problem))
            if not expected:
                expected.extend(ctypes.string_at(*x) for x in written)
            return message

        return self.examine(run, lambda: expected == [ctypes.string_at(*x) for x in written])


def _inputs(step: str) -> dict[str, Any]:
    """Ragged tiles, more than two for each of the two multiprocessors."""
    options: dict[str, Any] = {"rows": (140,), "D": 136, "hidden": 136, "out": 264}
    if step in PING_PONG:
        options |= {"rows": (270,), "hidden": 144, "out": 136}
    if step == "kUp":
        return options | {"activation": "gelu", "dropout_p": 0.3}
    if step == "kDhidden":
        return options | {"activation": "relu", "dropout_p": 0.3}
    if step == "kDw":
        return options | {"rows": (270,), "out": 136, "hidden": 264}
    if step in ("kDown", "kDown16"):
        special = {"residual": "fp32" if step == "kDown" else "same"}
    else:
        special = {"activation": "swiglu"}
    return options | special | {"dropout_p": 0.3, "output_dropout_p": 0.3}


# The epilogue as a loop, a trial, with bias, loads, products of activations.
_EXAMINED = [(step, "unrolled") for step in STEPS]
_EXAMINED += [(step, "loop") for step in ("kUp", "kDown", "kDhiddenGated")]


@pytest.mark.parametrize("step, epilogue", _EXAMINED)
def test_faults(step: str, epilogue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := missing():
        pytest.skip(reason)
    mutations = [mutation for mutation, only in _mutations(epilogue) if step in only]
    sample, step = _sample(step), step.removesuffix("16")
    machines: dict[Instance, Machine] = {}
    injectors: list[Launched] = []

    def machine(instance: Instance) -> Machine:
        if instance not in machines:
            examined = instance.step == step
            made = ffn.build_product(epilogue, instance, mutations if examined else ())
            machines[instance] = made
            if examined:
                injectors.append(Launched(made, mutations, ignored=HARMLESS))
        return machines[instance]

    def launch(op: str, problem: int, instance: Instance) -> str | None:
        of = machine(instance)
        if instance.step == step and len(injectors) == 1 and not injectors[0].detected:
            return injectors[0].examine_launch(op, problem)
        return of.call(op, ctypes.c_void_p(problem))

    ffn_bindings.use(monkeypatch, launch)
    ffn.compare(_replacing(monkeypatch), sample, torch.bfloat16)
    (injector,) = injectors
    assert len(injector.detected) > 40
    assert not injector.unreached()
    assert not injector.undetected()


def test_faults_of_the_sums_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks of columns; sums of more tiles of rows than threads share, and of few."""
    if reason := missing():
        pytest.skip(reason)
    machine = ffn.build_product("unrolled", Instance("kBFloat16", ""), SUM_MUTATIONS)
    injector = Launched(machine, SUM_MUTATIONS)
    ffn_bindings.use(monkeypatch, lambda op, problem, _: injector.examine_launch(op, problem))
    E = 264
    for rows in (1100, 270):
        x, w1, w2, hidden = (
            torch.randn(m, n).bfloat16() for m, n in ((rows, 8), (8, 8), (E, 8), (rows, 8))
        )
        dy, none, db2 = torch.randn(rows, E), torch.empty(0).bfloat16(), torch.empty(E).bfloat16()
        call = BackwardCall(
            guarded(dy), x, w1, None, w2, None, hidden, "gelu", 0.0, 0.3, torch.tensor([7]), 0,
            [False, False, False, False, True],
        )  # fmt: skip
        sm90.ffn_bwd(call, none, none, none, none, own := guarded(db2))
        kept = row_keep(torch.tensor([7]), SECOND_STREAM, 0.3, rows, E) * keep_scale(0.3)
        torch.testing.assert_close(own, (dy * kept).sum(0).bfloat16(), atol=0.1, rtol=1e-2)
    assert len(injector.detected) >= len(SUM_MUTATIONS) + 2  # and both barriers
    assert not injector.unreached()
    assert not injector.undetected()


def _sample(step: str) -> Sample:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
        inputs = make_inputs(generator, dtype, **_inputs(step))
        if (residual := inputs.get("residual")) is not None:  # rows of a larger tensor
            inputs["residual"] = torch.cat([residual, residual], 1)[:, : residual.shape[1]]
        return inputs

    return Sample(step, "has faults", make, ffn.GRADIENTS)


def _replacing(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    return partial(ffn.replace_reference, patch, _launch)


def _launch(op: Op, args: Sequence[Any]) -> Sequence[Tensor]:
    """With inaccessible memory on both sides of all tensors."""
    results = op.allocate(args)
    own = [guarded(x) for x in results]
    ffn.run_simulated(op, tuple(guarded(x) if isinstance(x, Tensor) else x for x in args), own)
    for result, x in zip(results, own, strict=True):
        result.copy_(x)
    return results
