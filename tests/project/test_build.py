"""setup.py: which libraries it builds, by which commands, and what it rebuilds."""

import importlib.machinery
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from native_build import build_script

from fastattn.ops import _verified


@pytest.fixture(scope="module")
def build() -> ModuleType:
    return build_script()


@pytest.fixture
def csrc(tmp_path: Path) -> Path:
    folder = tmp_path / "csrc"
    (folder / "norm").mkdir(parents=True)
    for name in ("norm_kernels_cpu.cpp", "binding_cpu.cpp", "norm.h", "module_autograd.cpp"):
        (folder / "norm" / name).touch()
    for name in ("norm_sm90.cu", "binding_sm90.cpp"):
        (folder / "norm" / name).touch()
    return folder


@pytest.fixture
def portable(csrc: Path) -> Path:
    """The same tree with sources of the library cuda."""
    (csrc / "norm" / "norm_fwd_instance_cuda.cu").touch()
    return csrc


def _tools(build: ModuleType, **changes: Any) -> Any:
    found = {"torch": Path("/torch"), "torch_version": "2.13.0+cpu", "cxx": "g++"}
    return build.Tools(**{**found, "cuda": Path("/cuda"), "has_hopper": True, **changes})


def test_requests(build: ModuleType) -> None:
    assert build.requested(None) is None and build.requested("") is None
    assert build.requested("0") == ()
    assert build.requested("cpu, sm90") == ("cpu", "sm90")
    with pytest.raises(SystemExit, match=r"must be 0 or a comma-separated list of cpu.*gpu'"):
        build.requested("cpu,gpu")


def test_what_is_built(build: ModuleType, csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def names(value: str | None, **changes: Any) -> list[str]:
        return [row.name for row in build.choose(value, _tools(build, **changes), csrc)]

    assert names(None) == ["cpu", "autograd", "sm90"]
    assert names("cpu") == ["cpu"]
    assert names("0") == []
    assert names(None, cuda=None) == ["cpu", "autograd"]
    assert names(None, has_hopper=False) == ["cpu", "autograd"]
    assert names("sm90", has_hopper=False) == ["sm90"]
    assert names(None, torch_version="2.11.0") == ["cpu", "autograd", "sm90"]
    with pytest.raises(SystemExit, match=r"autograd needs torch >= 2\.11, got 2\.10\.1"):
        names("autograd", torch_version="2.10.1")
    monkeypatch.setattr(build.sysconfig, "get_path", lambda name: "/nowhere")
    assert names(None) == ["cpu", "sm90"]
    with pytest.raises(SystemExit, match="autograd needs Python's headers"):
        names("autograd")


def test_the_portable_cuda_library(build: ModuleType, portable: Path, tmp_path: Path) -> None:
    """Built on request, or where there is a GPU that it is for; in one fat binary."""

    def names(value: str | None, **changes: Any) -> list[str]:
        return [row.name for row in build.choose(value, _tools(build, **changes), portable)]

    assert names(None) == ["cpu", "autograd", "sm90"]
    assert names(None, has_hopper=False, has_ampere=True) == ["cpu", "autograd", "cuda"]
    assert names(None, has_ampere=True) == ["cpu", "autograd", "cuda", "sm90"]
    assert names("cuda") == ["cuda"]
    assert names(None, cuda=None, has_ampere=True) == ["cpu", "autograd"]
    steps = build.library_steps(build.LIBRARIES["cuda"], _tools(build), portable, tmp_path)
    commands = {step.output.name: " ".join(step.command) for step in steps}
    assert len(commands) == 6 and "_C_cuda.abi3.so" in commands
    mixed = commands["norm_fwd_cuda_bf16_fp32.o"]
    assert "-DFASTATTN_DTYPE=kBFloat16 -DFASTATTN_PARAMETER_DTYPE=kFloat32" in mixed
    for capability in (80, 90, 100, 120):
        assert f"-gencode=arch=compute_{capability},code=sm_{capability} " in mixed
    assert "code=compute_120" in mixed


@pytest.mark.parametrize(
    "query, hopper, ampere",
    [("9.0\n", True, True), ("8.6\n7.5\n", False, True), ("7.5\n", False, False),
     ("12.0\n", False, True), ("No devices were found\n", False, False)],
)  # fmt: skip
def test_which_gpus_are_here(build, query, hopper, ampere, monkeypatch):
    done = subprocess.CompletedProcess([], 0, stdout=query)
    monkeypatch.setattr(build.subprocess, "run", lambda *_, **__: done)
    tools = build.Tools.found.__wrapped__()
    assert (tools.has_hopper, tools.has_ampere) == (hopper, ampere)


@pytest.mark.parametrize("changes, reason", [
    ({"torch": None, "torch_version": None}, "needs torch, which the build does not see"),
    ({"torch_version": "2.10.1"}, "needs torch >= 2.11, got 2.10.1"),
    ({"cxx": None}, r"needs a C\+\+ compiler"),
])  # fmt: skip
def test_impossible_is_an_error_only_when_asked_for(build, csrc, capsys, changes, reason):
    tools = _tools(build, **changes)
    assert build.choose(None, tools, csrc) == []
    capsys.readouterr()
    build.choose(None, tools, csrc)
    printed = capsys.readouterr().err
    assert "without the native library cpu" in printed and "pip install" in printed
    with pytest.raises(SystemExit, match=f"FASTATTN_NATIVE=cpu: the native library cpu {reason}"):
        build.choose("cpu", tools, csrc)
    with pytest.raises(SystemExit, match="cuda has no sources in this tree"):
        build.choose("cuda", _tools(build), csrc)


def test_kernels_for_different_processors_share_no_symbol(build: ModuleType) -> None:
    """If several objects define a function, the linker keeps one of them for every processor."""
    tools = build.Tools.found()
    try:
        build.check_possible(build.LIBRARIES["cpu"], tools)
    except build.Impossible as why:
        pytest.skip(str(why))
    objects = {
        step.output: sets[1]
        for step in build.library_steps(build.LIBRARIES["cpu"], tools)
        if (sets := re.search(r"_kernels_cpu_(\w+)", step.output.name)) and step.output.is_file()
    }
    if not objects or shutil.which("nm") is None:
        pytest.skip("needs the objects of a build in this folder, and nm")
    for path, isa in objects.items():
        symbols = subprocess.run(["nm", "-C", path], capture_output=True, text=True, check=True)
        weak = re.findall(r"^\w+ [WVu] (.*fastattn::.*)$", symbols.stdout, re.MULTILINE)
        assert not [name for name in weak if f"::{isa}::" not in name], path


def test_trials(build: ModuleType, csrc: Path, tmp_path: Path) -> None:
    """Kernels that have not passed on a GPU are built on request only."""
    assert build.trial_flags(None) == build.trial_flags("") == []
    flags = build.trial_flags("ffn_loop")
    steps = build.library_steps(
        build.LIBRARIES["sm90"], _tools(build), csrc, tmp_path, trials=flags
    )
    commands = {step.output.name: step.command for step in steps}
    for kernel_or_binding in ("norm_sm90.cu.o", "binding_sm90.cpp.o"):
        assert "-DFASTATTN_TRIAL_FFN_LOOP" in commands[kernel_or_binding]
    with pytest.raises(SystemExit, match=r"must name some of ffn_loop, .*, got"):
        build.trial_flags("ffn_loop,another")


def test_commands(build: ModuleType, csrc: Path, tmp_path: Path) -> None:
    def commands(name: str) -> dict[str, str]:
        steps = build.library_steps(build.LIBRARIES[name], _tools(build), csrc, tmp_path)
        return {step.output.name: " ".join(step.command) for step in steps}

    cpu_commands = commands("cpu")
    assert "_C_cpu.abi3.so" in cpu_commands and len(cpu_commands) == 6
    assert "-ltorch_cpu" in cpu_commands["_C_cpu.abi3.so"]
    assert "-mavx512bf16" in cpu_commands["norm_kernels_cpu_avx512_bf16.o"]
    assert "-mavx512bf16" not in cpu_commands["norm_kernels_cpu_avx512.o"]
    assert "-march=x86-64-v3" in cpu_commands["norm_kernels_cpu_avx2.o"]
    assert "-march" not in cpu_commands["norm_kernels_cpu_portable.o"]
    assert all("TORCH_TARGET_VERSION" in c for n, c in cpu_commands.items() if n.endswith(".o"))
    sm90 = commands("sm90")
    assert " /cuda/bin/nvcc -ccbin g++" in sm90["norm_sm90.cu.o"]
    assert "-gencode=arch=compute_90a,code=sm_90a" in sm90["norm_sm90.cu.o"]
    assert sm90["binding_sm90.cpp.o"].startswith("g++")
    assert "-lcudart_static" in sm90["_C_sm90.abi3.so"]
    assert "_TRIAL_" not in " ".join(sm90.values())
    compiled, linked = commands("autograd")
    assert linked == f"_C_autograd_2_13_0_cpu{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    assert "TORCH_TARGET_VERSION" not in commands("autograd")[compiled]
    assert "-ltorch_python" in commands("autograd")[linked]


@pytest.mark.parametrize("before, after, changes", [
    ("  // one\n", "\n", False),
    ("/* two\nlines */", "", False),
    ("return a + b;", "return\n    a+b ;", False),
    ("#define N 1\n", "#define N  \\\n  1\n\n", False),
    ('"a // b"', '"a // c"', True),
    ('"a // b"', '"a  // b"', True),
    ("'/'", "'*'", True),
    ("a + b", "a - b", True),
    ("a + +b", "a ++b", True),
    ("int a", "inta", True),
    ("#define N 1\n", "#define N\n1\n", True),
    ("10'000", "10'001", True),
])  # fmt: skip
def test_the_digest_ignores_comments_and_white_space(build, csrc, before, after, changes):
    source = (
        "#define N 1\nint f(int a, int b) {  // one\n  return a + b; /* two\nlines */ }\n"
        'int g(int a, int b) { return a + +b; }\nconst char* h = "a // b";\n'
        "char i = '/'; int j = 10'000;\n"
    )
    library, (first, second) = build.LIBRARIES["sm90"], csrc.glob("norm/*sm90*")
    header = csrc / "norm" / "norm.h"
    assert before in source
    digests = []
    for text in (source, source.replace(before, after)):
        first.write_text(text)
        digests.append(build.digest_of(library, csrc))
    assert (digests[0] != digests[1]) == changes
    second.write_text('#include "norm/norm.h"\n')
    digests = []
    for text in (source, source.replace(before, after)):
        header.write_text(text)
        digests.append(build.digest_of(library, csrc))
    assert (digests[0] != digests[1]) == changes


def test_the_digest_is_of_the_library_and_its_options(build, portable, tmp_path, monkeypatch):
    """It is in the command of one source, so that nothing else is compiled again for it."""
    library = build.LIBRARIES["sm90"]
    first = build.digest_of(library, portable)
    for other in ("norm_kernels_cpu.cpp", "norm.h", "norm_fwd_instance_cuda.cu"):
        (portable / "norm" / other).write_text("int x;")
    assert build.digest_of(library, portable) == first
    assert build.digest_of(build.LIBRARIES["cuda"], portable) != first
    assert build.digest_of(library, portable, build.trial_flags("ffn_loop")).startswith("trial_")
    (portable / build.DIGEST_SOURCE).touch()
    steps = build.library_steps(library, _tools(build), portable, tmp_path)
    flag = f"-DFASTATTN_DIGEST={build.digest_of(library, portable)}"
    assert [step.output.name for step in steps if flag in step.command] == ["digest_sm90_cuda.cu.o"]
    monkeypatch.setattr(build, "NVCC_FLAGS", [*build.NVCC_FLAGS, "-O2"])
    assert build.digest_of(library, portable) not in (first, flag.partition("=")[2])


@pytest.mark.slow  # nvcc
@pytest.mark.parametrize("name", ["sm90", "cuda"])
def test_the_digest_is_in_the_library(build, tmp_path, name, monkeypatch):
    tools = build.Tools.found()
    try:
        build.check_possible(build.LIBRARIES[name], tools)
    except build.Impossible as why:
        pytest.skip(str(why))
    steps = build.library_steps(build.LIBRARIES[name], tools, objects=tmp_path)
    [step] = [step for step in steps if step.output.name == "digest_sm90_cuda.cu.o"]
    library = tmp_path / f"_C_{name}.abi3.so"
    build.execute([step], tmp_path)
    subprocess.run([tools.cxx, "-shared", step.output, "-o", library], check=True)
    monkeypatch.setattr(_verified, "_PACKAGE", tmp_path)
    digest, compiler = _verified.built(name) or ("", "")
    assert digest == build.digest_of(build.LIBRARIES[name])
    nvcc = [tools.cuda / "bin" / "nvcc", "--version"]
    assert f"V{compiler}\n" in subprocess.run(nvcc, capture_output=True, text=True).stdout


def test_commands_of_instances(build: ModuleType, csrc: Path, tmp_path: Path) -> None:
    """A source with instances is compiled for each of them and not for itself; those that differ
    by the variant of attention share an object.
    """
    source = csrc / "norm" / "attention_fwd_instance_sm90.cu"
    source.touch()
    steps = build.library_steps(build.LIBRARIES["sm90"], _tools(build), csrc, tmp_path)
    commands = {step.output.name: step.command for step in steps}
    assert "attention_fwd_instance_sm90.cu.o" not in commands
    command = commands["attention_fwd_sm90_fp16_d192.o"]
    assert "-DFASTATTN_HEAD_DIM=192" in command and not re.search(r"-D\w+VARIANT", str(command))
    assert len([name for name in commands if name.startswith("attention_fwd_sm90_")]) == 8
    found = [name for members in build.objects_of(source).values() for name in members]
    assert sorted(found) == sorted(build.INSTANCES[source.name]) and len(found) == 104
    # The command writes what it compiles.
    whole = [*command[:3], "sh", str(tmp_path / "whole.cu"), command[5], "/dev/null", "true"]
    subprocess.run(whole, check=True)
    text = (tmp_path / "whole.cu").read_text()
    values = [flags[-1].removeprefix("-DFASTATTN_VARIANT=") for flags in
              (build.INSTANCES[source.name][f"attention_fwd_sm90_fp16_d192_{name}"]
               for name in ("full", "bias", "paged_scores"))]  # fmt: skip
    for value in values:
        define = f'#define FASTATTN_VARIANT {value}\n#include "{source}"\n#undef FASTATTN_VARIANT\n'
        assert text.count(define) == 1
    assert text.count("#include") == 13


def test_instances_that_are_compiled_together_stay_up_to_date(build, csrc, tmp_path):
    """Although their commands write what they compile."""
    if build._ninja() is None:
        pytest.skip("needs ninja")
    source = csrc / "norm" / "attention_bwd_instance_sm90.cu"
    source.touch()
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(
        "#!/bin/sh\n"
        'while [ "$1" != -MF ]; do shift; done\n'  # -MF file.d -c file.cu -o file.o
        f'echo "$6: $4 {source}" > "$2"; touch "$6"\n'
    )
    nvcc.chmod(0o755)
    tools, objects = _tools(build, cuda=tmp_path / "cuda"), tmp_path / "objects"
    objects.mkdir()
    steps = build.library_steps(build.LIBRARIES["sm90"], tools, csrc, objects)
    steps = [step for step in steps if step.output.name.startswith("attention_bwd_sm90_")]
    build.execute(steps, objects)
    assert len(steps) == 8 and all(step.output.is_file() for step in steps)
    assert build.outdated(steps, objects) == set()


def test_what_is_out_of_date(build: ModuleType, tmp_path: Path) -> None:
    if build._ninja() is None or shutil.which("g++") is None:
        pytest.skip("needs ninja and g++")
    header, names = tmp_path / "shared.h", ("one", "two")
    header.write_text("inline int shared() { return 1; }")
    (tmp_path / "one.cpp").write_text('#include "shared.h"\nint one() { return shared(); }')
    (tmp_path / "two.cpp").write_text("int two() { return 2; }")

    def steps(*flags: str) -> list[Any]:
        paths = [(tmp_path / f"{name}.cpp", tmp_path / f"{name}.o") for name in names]
        return [build._compile_step(["g++", "-MMD", *flags], *path) for path in paths]

    one, two = (step.output for step in steps())
    assert build.outdated(steps(), tmp_path / "absent") == {one, two}
    assert build.outdated(steps(), tmp_path) == {one, two}
    build.execute(steps(), tmp_path)
    assert build.outdated(steps(), tmp_path) == set()
    header.write_text("inline int shared() { return 3; }")
    assert build.outdated(steps(), tmp_path) == {one}
    assert build.outdated(steps("-O1"), tmp_path) == {one, two}
    build.execute(steps(), tmp_path)
    two.unlink()
    assert build.outdated(steps(), tmp_path) == {two}


def test_the_output_of_nvcc_is_kept(build, csrc, tmp_path, capfd):
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    output = (
        "ptxas info    : Used 40 registers\n    0 bytes stack frame, 0 bytes spill stores\n",
        "ptxas info    : (C7510) Potential Performance Loss\n",
    )
    nvcc.write_text(f"#!/bin/sh\nprintf '{output[0]}{output[1]}' >&2\nexit 3\n")
    nvcc.chmod(0o755)
    tools = _tools(build, cuda=tmp_path / "cuda")
    steps = build.library_steps(build.LIBRARIES["sm90"], tools, csrc, tmp_path)
    [step] = [step for step in steps if step.output.name == "norm_sm90.cu.o"]
    step.output.parent.mkdir(parents=True)
    assert subprocess.run(step.command).returncode == 3
    assert build.log_of(step.output).read_text() == "".join(output)
    assert capfd.readouterr().err == output[1]


def test_the_variant_of_torch_is_part_of_the_name(build: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text("debug = False\n__version__ = '2.13.0+cu130'\n")
    tools = _tools(build, torch=tmp_path, torch_version="2.13.0")
    assert build.LIBRARIES["autograd"].file_name(tools) == "_C_autograd_2_13_0_cu130"
    assert build.LIBRARIES["cpu"].file_name(tools) == "_C_cpu"


def test_objects_of_an_extension_serve_one_torch(build, csrc, tmp_path):
    """Another torch changes neither the compiler's command nor a file that ninja tracks: the output
    folder must differ.
    """

    def outputs(name: str, version: str) -> set[Path]:
        tools = _tools(build, torch_version=version)
        steps = build.library_steps(build.LIBRARIES[name], tools, csrc, tmp_path)
        return {step.output for step in steps}

    assert not outputs("autograd", "2.12.1") & outputs("autograd", "2.13.0")
    assert outputs("cpu", "2.12.1") == outputs("cpu", "2.13.0")


def test_other_cpus_get_the_portable_kernels(build, csrc, tmp_path, monkeypatch):
    monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
    steps = build.library_steps(build.LIBRARIES["cpu"], _tools(build), csrc, tmp_path)
    names = [step.output.name for step in steps]
    assert names == ["binding_cpu.cpp.o", "norm_kernels_cpu_portable.o", "_C_cpu.abi3.so"]


@pytest.mark.parametrize("ninja", [True, False], ids=["ninja", "threads"])
def test_execute(build, monkeypatch, tmp_path, ninja):
    tools = build.Tools.found()
    if tools.cxx is None or (ninja and build._ninja() is None):
        pytest.skip("needs a compiler and ninja")
    if not ninja:
        monkeypatch.setattr(build, "_ninja", lambda: None)
    folder = tmp_path / "with space"
    folder.mkdir()
    (folder / "a.cpp").write_text("int a() { return 1; }\n")
    (folder / "b.cpp").write_text("int b() { return 2; }\n")
    compiled = [
        build._compile_step([tools.cxx, "-fPIC", "-MMD"], folder / f"{n}.cpp", folder / f"{n}.o")
        for n in "ab"
    ]
    link = build._link_step(tools.cxx, compiled, folder / "both.so", [])
    build.execute([*compiled, link], folder)
    assert (folder / "both.so").is_file()
    (folder / "a.cpp").write_text("int a() { return\n")
    with pytest.raises(subprocess.CalledProcessError):
        build.execute([*compiled, link], folder)
