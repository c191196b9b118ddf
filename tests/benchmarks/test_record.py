"""The stage `record` of `make gpu`: cells and their order, shares of the time, peers from wheels,
other builds in turns, and a rehearsal on a CPU.
"""

import argparse
import json
import lzma
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from subprocesses import environment, python_output

from benchmarks import cases, op_benchmark, record, rows
from benchmarks.cases import Group
from benchmarks.implementations import Implementation, can_import
from benchmarks.model import kernel_times
from benchmarks.op_benchmark import OpBenchmark
from fastattn.ops import _env, _verified
from fastattn.ops.attention import spec_workloads
from fastattn.ops.attention.spec_workloads import padded_workload
from fastattn.testing import lines
from fastattn.testing.spec import Workload

CPU = torch.device("cpu")
PEERS = rows.ROOT / "tests/support/failing_peers.py"
PADDED = ("b16_h16_s1024_d64", "b16_h16_s2048_d128", "b8_h16_s4096_d64")
STEPS = ("d512_h8_b64_s512", "d1024_h16_b16_s2048_padded")
CELLS = (  # part, op, workload, some of the candidates
    *[("kinds", "attention", f"{w}_padded_both", "sdpa-cudnn sdpa-efficient flex") for w in PADDED],
    *[("kinds", "attention", f"{w}_padded_keys", "sdpa-cudnn sdpa-efficient") for w in PADDED],
    *[("kinds", "attention_varlen", f"{w}_packed", "fastattn-sm90 fa3") for w in PADDED],
    ("kinds", "attention", "b4_h16_s4096_d128_dropout", "fastattn-sm90 sdpa-efficient"),
    ("kinds", "attention", "b1_h16_s16384_d128_causal_alibi", "sdpa-efficient flex"),
    ("kinds", "attention", "b1_h16_s4096_d128_bias_gradient", "sdpa-efficient flex"),
    ("rows", "layer_norm", "32768x1024", "fastattn-cuda fastattn-triton eager compile"),
    ("rows", "ffn", "16384x1024_gelu", "fastattn-sm90 eager compile compile-max-autotune"),
    *[("models", "transformer", w, "torch-eager torch-compile fastattn fastattn-compile")
      for w in STEPS],
    ("models", "transformer", STEPS[1], "fastattn-packed"),
    ("models", "generation", "d512_h8_b32_s64_new128", "fastattn"),
    ("models", "generation", "d512_h8_b32_s64_new128_beams4", "fastattn"),
)  # fmt: skip
LIBRARY = rows.ROOT / "fastattn" / "_C_cpu.abi3.so"


def test_cells_and_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (library := tmp_path / "_C.so").touch()
    monkeypatch.setenv("FASTATTN_FA3_LIBRARY", str(library))
    monkeypatch.setattr(record, "measured_backwards", lambda: {"b32_h32_s512_d64"})
    options = argparse.Namespace(
        device="cuda", op=None, match="", dtype=None, quick=False, peer=None, implementation=[]
    )
    found = record.groups_of(options, [record.Build("other", "sm90", library)])
    grid = found[:36]
    sizes = product((512, 1024, 2048, 4096, 8192, 16384), (64, 128, 256), ("", "_causal"))
    assert {group.workload for group in grid} == {
        f"b{16384 // S}_h{2048 // D}_s{S}_d{D}{causal}" for S, D, causal in sizes
    }
    wanted = {"fastattn-sm90", "fastattn-sm90@other", "sdpa-cudnn", "fa3"}
    for group in grid:
        assert {(name, d) for name in wanted for d in ("fwd", "bwd")} <= set(group.wanted)
    assert grid[-1].workload == "b32_h32_s512_d64"
    for part, op, workload, names in CELLS:
        of_part = [g for g in found if (g.part, g.op, g.workload) == (part, op, workload)]
        assert set(names.split()) <= {name for group in of_part for name, _ in group.wanted}
    assert len({g.workload for g in found if g.part == "kinds" and "_decode" in g.workload}) == 4
    assert [g.workload for g in found if g.part == "order"] == [
        f"b8_h{2048 // D}_s2048_d{D}_causal_ordered" for D in (64, 128, 256)
    ]
    everything = {case for group in cases.groups("cuda") for case in group.cases}
    assert everything <= {case for group in found for case in group.cases}
    monkeypatch.undo()
    assert "b8_h16_s2048_d128" in record.measured_backwards()


def test_each_part_has_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(record.time, "monotonic", lambda: now)
    groups = [Group("ffn", p + n, "fp32", "cpu", (), p) for n, p in product("012", "ab")]

    def order(seconds: float | None) -> Iterator[str]:
        nonlocal now
        for group in record.in_shares(groups, seconds, {"a": 0.5, "b": 0.5}):
            yield group.workload
            now += 10.0

    assert list(order(None)) == ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert list(order(40.0)) == ["a0", "a1", "b0", "b1", "a2", "b2"]


# -- peers -----------------------------------------------------------------------------------------
def _wheel(folder: Path, name: str) -> Path:
    wheel = folder / f"{name}-1.5-py3-none-any.whl"
    about = f"{name}-1.5.dist-info"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(f"{name}/norms.py", "")
        file.writestr(f"{name}/lib/libcudart.so.12", "")
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")
    return wheel


def test_peers_come_as_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "wheels").mkdir()
    (target := tmp_path / "target").mkdir()
    _wheel(folder, "plain_kernels")
    packed = _wheel(folder, "compressed_kernels")
    Path(f"{packed}.xz").write_bytes(lzma.compress(packed.read_bytes()))
    packed.unlink()
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "before")
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    assert not can_import("compressed_kernels.norms")
    record.install(folder, target)
    assert can_import("plain_kernels.norms") and can_import("compressed_kernels.norms")
    assert os.environ["PYTHONPATH"] == f"{target}{os.pathsep}before"
    assert len(os.environ["LD_LIBRARY_PATH"].split(os.pathsep)) == 2
    with pytest.raises(ValueError, match="--peers must be a folder of wheels, got"):
        record.install(tmp_path / "nothing", target)


# -- other builds ----------------------------------------------------------------------------------
def test_builds_are_named_by_their_file(tmp_path: Path) -> None:
    (file := tmp_path / "_C_sm90.abi3.so").write_text("one")
    first = record.build_of(f"swizzle={file}")
    assert first.backend == "sm90" and first.label.startswith("swizzle.")
    file.write_text("another")
    assert record.build_of(f"swizzle={file}").label != first.label
    (wrong := tmp_path / "kernels.so").touch()
    for text in (str(file), f"={file}", f"a={tmp_path}/none/_C_sm90.abi3.so", f"a={wrong}"):
        with pytest.raises(ValueError, match="--build must be NAME=FOLDER/_C_<library>"):
            record.build_of(text)


class _Runner:
    """Two rounds of each direction, then its rows; the first one's peer takes 3 ms."""

    def __init__(self, name: str, ms: float, log: list[str]):
        self.name, self.ms, self.log, self.ceilings = name, ms, log, dict[str, Any]()

    def run(self, group: Group, until: float | None) -> Iterator[list[rows.Row]]:
        for direction in ("fwd", "bwd"):
            for _ in range(2):
                yield []
                self.log.append(f"{self.name} {direction}")
            timed = [
                {"op": "ffn", "workload": "w", "dtype": "fp32", "impl": name, "flops": 1.0,
                 "direction": direction, "status": "ok", "bytes": 1.0,
                 "ms_median": self.ms if name.startswith("fastattn") else 3.0}
                for name, d in group.wanted if d == direction
            ]  # fmt: skip
            yield rows.complete(timed, {"cpu": "a CPU"}, None)


def test_rounds_of_builds_alternate() -> None:
    log: list[str] = []
    pairs = [(name, d) for name in ("fastattn-cpu", "eager") for d in ("fwd", "bwd")]
    pairs += [("fastattn-cpu@new", d) for d in ("fwd", "bwd")]
    group = Group("ffn", "w", "fp32", "cpu", tuple(pairs))
    runner, other = _Runner("own", 2.0, log), _Runner("new", 1.5, log)
    batches: Sequence[list[rows.Row]] = list(record.in_turns({"new": other}, runner, group, None))  # type: ignore[dict-item,arg-type]
    assert log == ["own fwd", "new fwd"] * 2 + ["own bwd", "new bwd"] * 2
    found = {(row["impl"], row["direction"]): row for batch in batches for row in batch}
    assert found.keys() == set(pairs) and sum(map(len, batches)) == 6
    for direction in ("fwd", "bwd"):
        assert found["fastattn-cpu", direction]["ratio_best"] == 1.5
        assert found["fastattn-cpu@new", direction]["ratio_best"] == 2.0
        assert found["fastattn-cpu@new", direction]["best_peer"] == "eager"
    alone = record.in_turns({}, runner, Group("ffn", "w", "fp32", "cpu", tuple(pairs[:4])), None)  # type: ignore[arg-type]
    assert [len(batch) for batch in alone if batch] == [2, 2]
    assert [rows.is_backend(row) for row in found.values()] == [
        "@" not in name and name != "eager" for name, _ in found
    ]


def test_another_library_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the package's of the same name; what has passed with that is not verified."""
    monkeypatch.setenv(_env.LIBRARY_VARIABLE, str(other := tmp_path / "_C_sm90.abi3.so"))
    for wrong in (other, tmp_path / "_C_sm90.so"):
        monkeypatch.setenv(_env.LIBRARY_VARIABLE, str(wrong))
        with pytest.raises(ValueError, match=f"FASTATTN_LIBRARY must name .*, got {wrong}"):
            _env.library_file("_C_cpu.abi3.so", tmp_path)
        (tmp_path / "_C_sm90.so").touch()
    other.touch()
    monkeypatch.setenv(_env.LIBRARY_VARIABLE, str(other))
    assert _env.library_file("_C_cpu.abi3.so", tmp_path / "package").parent.name == "package"
    assert lines.kernels.__wrapped__("sm90") != lines.kernels.__wrapped__("cuda")
    assert not _verified.identified("sm90")
    digests = set()
    for build in (b"one, nvcc 13.0", b"two, nvcc 13.0", b"two, nvcc 12.8"):
        other.write_bytes(b"fastattn sources %b\0" % build)
        digests.add(_verified.digest.__wrapped__("sm90"))
    assert len(digests) == 3
    if not LIBRARY.is_file():
        pytest.skip("the CPU library is not built")
    shutil.copyfile(LIBRARY, other := tmp_path / LIBRARY.name)
    script = "from fastattn.ops import _native; assert _native.unavailable('cpu') is None"
    env = environment(**{_env.LIBRARY_VARIABLE: str(other)})
    script += "; print(open('/proc/self/maps').read())"
    maps = python_output("-c", script, env=env, cwd=rows.ROOT)
    assert str(other) in maps and str(LIBRARY) not in maps


@pytest.mark.slow
def test_rehearsal_on_a_cpu(tmp_path, capsys, monkeypatch):
    """A build beside the package's, a peer that hangs and an absent one; then again, continued."""
    if not LIBRARY.is_file():
        pytest.skip("the CPU library is not built")
    monkeypatch.setattr(record, "_HUNG_SECONDS", 8.0)
    shutil.copyfile(LIBRARY, other := tmp_path / LIBRARY.name)
    out = tmp_path / "out"
    command = ["--device=cpu", "--quick", "--op=layer_norm", "--dtype=fp32", "--threads=1",
               "--match=-fwd-.*(fastattn-cpu|right|hangs)$", f"--peer={PEERS}", f"--out={out}",
               f"--build=copy={other}", "--resume", "--seconds=300"]  # fmt: skip
    assert record.main(command) == 0
    found = {row["impl"]: row for row in rows.read_all(out / "results.jsonl")}
    build = record.build_of(f"copy={other}").label
    assert found.keys() == {"fastattn-cpu", f"fastattn-cpu@{build}", "right", "hangs"} | {
        row for row in found if found[row]["status"] == "absent"
    }
    assert "absent" in found and found["hangs"]["status"] == "FAIL"
    assert "no event for 8 s" in found["hangs"]["message"]
    for name in ("fastattn-cpu", f"fastattn-cpu@{build}"):
        assert found[name]["status"] == "ok" and found[name]["best_peer"] == "right"
        ratio = found["right"]["ms_median"] / found[name]["ms_median"]
        assert found[name]["ratio_best"] == pytest.approx(ratio, rel=1e-3)
    written = (out / "results.jsonl").read_text()
    capsys.readouterr()
    assert record.main(command) == 0
    assert "0 of 2 groups remain" in capsys.readouterr().out
    assert (out / "results.jsonl").read_text() == written
    assert all(set(json.loads(line)) == set(rows.FIELDS) for line in written.splitlines())


# -- cells of the record ---------------------------------------------------------------------------
def _verdict(workload: Workload, function: Any) -> Any:
    benchmark = OpBenchmark(cases.specs()["attention"], workload, CPU, torch.float32)
    candidate = Implementation("c", ("attention",), lambda task: function, is_fastattn=True)
    benchmark.build(candidate)
    benchmark.prepare_oracle(candidate)
    return benchmark.check(candidate, "bwd")


def _reference(inputs: Any) -> Any:
    return cases.specs()["attention"].function(**inputs, backend="reference")


def test_calls_in_a_fixed_order_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(op_benchmark._ORDERED_CALLS, "cpu", 3)
    calls = 0

    class Differs(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dx: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            assert torch.are_deterministic_algorithms_enabled() == (calls > 1)
            return dx * (1 + 1e-7 * (calls > 3))

    workload = spec_workloads._ordered(padded_workload("tiny", 1, 2, 33, 16, ("cpu",)))
    assert workload.name == "tiny_ordered"
    good = _verdict(workload, _reference)
    assert good.ok and good.message == "3 calls in a fixed order have the same bits"
    bad = _verdict(workload, lambda inputs: _reference(inputs | {"v": Differs.apply(inputs["v"])}))
    assert not bad.ok and bad.message == "dv: call 3 in a fixed order has other bits"
    benchmark = OpBenchmark(cases.specs()["attention"], workload, CPU, torch.float32)
    [peer] = [c for c in cases.implementations_of("attention", "cpu") if c.name == "sdpa"]
    assert benchmark.why_unsupported(peer) == "is not asked for a fixed order"


@pytest.mark.parametrize("whole", [2**20, 1])
def test_the_gradient_of_a_bias_is_checked(whole: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_benchmark, "_WHOLE", whole)

    def half(inputs: Any) -> Any:
        mask = inputs["mask"]
        return _reference(inputs | {"mask": 0.5 * mask + 0.5 * mask.detach()})

    options: dict[str, Any] = {"mask": "float HMN", "learned_mask": True}
    workload = padded_workload("tiny", 1, 2, 33, 16, ("cpu",), **options)
    assert _verdict(workload, _reference).ok
    found = _verdict(workload, half)
    assert not found.ok and found.message.startswith("dmask")


def test_kernel_times_by_kind() -> None:
    x = torch.randn(256, 256)

    def call() -> None:
        torch.layer_norm(x @ x, (256,)).exp()

    found = kernel_times(call, CPU)
    assert found is not None and {"products", "norms", "others"} <= found.keys()
    assert all(spent > 0 for spent in found.values()) and found["products"] < 1e4
