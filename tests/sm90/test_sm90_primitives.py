"""The kernels that try each hardware primitive on a GPU, on the simulator of Hopper."""

import ctypes
import json
from pathlib import Path

import pytest
import torch
from sm90_on_host.build import AT_ONCE, LATE, Machine, build, missing

from fastattn.testing import isolation, primitives
from fastattn.testing.primitives import PRIMITIVES, Row, difference

SOURCE = Path(__file__).resolve().parent / "sm90_primitives.cpp"


@pytest.fixture(scope="module")
def machine() -> Machine:
    if reason := missing():
        pytest.skip(reason)
    return build(SOURCE)


def test_names(machine: Machine) -> None:
    """The table of kernels and that of inputs have the same names."""
    name = machine.library.primitive_name
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.c_int64]
    found = iter(lambda: name(next(numbers)), None)
    numbers = iter(range(1000))
    assert {each.decode() for each in found} == set(PRIMITIVES)


@pytest.mark.parametrize("order", [AT_ONCE, LATE])
@pytest.mark.parametrize("name", PRIMITIVES)
def test_primitive(machine: Machine, name: str, order: int) -> None:
    primitive = PRIMITIVES[name]()
    out, state = primitive.out.clone(), torch.zeros(2, dtype=torch.int32)
    tensors = (primitive.a, primitive.b, state, out)
    machine.order = order
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in tensors]
    assert machine.call("primitive", name.encode(), *pointers) is None
    assert not difference(primitive, out)


def test_difference_says_where() -> None:
    primitive = PRIMITIVES["wgmma Registers N n96 bf16"]()
    out = primitive.expected.clone()
    assert difference(primitive, out) == ""
    out[:, 64:] += 1
    message = difference(primitive, out)
    assert message.startswith("2048 of 6144 values differ, indices 0 to 63 x 64 to 95; at [0, 64] ")
    out[3, 70] = torch.nan
    assert "2048 of 6144" in difference(primitive, out)
    exponentials = PRIMITIVES["ex2 lg2 rcp"]()
    out = exponentials.expected.clone()
    out[0, 5] *= 1 + 1e-7
    assert difference(exponentials, out) == ""
    out[1, 0] = -126.0  # log2(0)
    assert "1 of 384 values differ, indices 1 to 1 x 0 to 0" in difference(exponentials, out)
    out[0, 0] = torch.nan  # 2^-inf
    assert "at [0, 0] expected 0.0, got nan" in difference(exponentials, out)


def test_command_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert primitives.main([]) == 3
    assert "primitives were not run: there is no CUDA GPU" in capsys.readouterr().err


def test_command_reports_failures_and_hangs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of a rehearsed run, one of whose primitives hangs, in two parts."""
    ran: list[str] = []

    def isolated(
        function: object, names: list[str], *, jobs: int, seconds: float | None, limit_s: float
    ) -> object:
        for index, name in enumerate(names):
            ran.append(name)
            if name == "TMA load":
                yield index, isolation.Lost(True, "was still running after 20 s")
            elif seconds and index > 10:
                yield index, isolation.Lost(False, "was not reached in 9 s")
            else:
                yield index, Row(name, "FAIL" if name == "stmatrix" else "ok", "")

    monkeypatch.setattr(primitives, "unavailable", lambda: None)
    monkeypatch.setattr(primitives._env, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(primitives._env, "architecture", lambda *device: "sm_90")
    monkeypatch.setattr(primitives, "run_isolated", isolated)
    file = tmp_path / "rows.jsonl"
    options = ["--json", str(file), "--resume"]
    assert primitives.main([*options, "--seconds", "9"]) == 1
    assert f"9 passed, 2 failed, {len(PRIMITIVES) - 11} were not reached" in capsys.readouterr().out
    ran.clear()
    assert primitives.main(options) == 1
    assert ran == list(PRIMITIVES)[11:]
    printed = capsys.readouterr().out
    assert f"{len(PRIMITIVES) - 2} passed, 2 failed" in printed
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["primitive"] for row in rows if row["status"] != "skipped"] == list(PRIMITIVES)
    assert {row["primitive"]: row["message"] for row in rows if row["status"] == "FAIL"} == {
        "TMA load": "was still running after 20 s",
        "stmatrix": "",
    }


def test_what_was_not_reached_has_not_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = next(iter(PRIMITIVES))

    def isolated(function: object, names: list[str], **options: object) -> object:
        for index, name in enumerate(names):
            late = isolation.Lost(False, "was not reached in 9 s")
            yield index, Row(name, "ok") if name == first else late

    monkeypatch.setattr(primitives, "unavailable", lambda: None)
    monkeypatch.setattr(primitives._env, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(primitives._env, "architecture", lambda *device: "sm_90")
    monkeypatch.setattr(primitives, "run_isolated", isolated)
    assert primitives.main(["--seconds", "9"]) == 0
    assert f"1 passed, 0 failed, {len(PRIMITIVES) - 1} were not" in capsys.readouterr().out
    (file := tmp_path / "other.jsonl").write_text('{"instance": "a", "status": "ok"}\n')
    with pytest.raises(SystemExit) as ended:
        primitives.main(["--resume", "--json", str(file)])
    assert ended.value.code == 2
    assert "must have rows of the same command" in capsys.readouterr().err
