"""Builds the optional native libraries; everything else about the package is in pyproject.toml.

Each row of LIBRARIES becomes `fastattn/_C_<name>.abi3.so`, loaded by torch.ops.load_library: the
sources are the files under csrc whose names contain `_<name>`. They use torch's stable ABI, so one
build serves every torch >= 2.11, and no Python symbol, so it serves every Python. The exception is
autograd, whose nodes have no stable ABI: `_C_autograd_<torch's version>.<Python's suffix>` serves
the torch and the Python it was built with. g++ compiles .cpp and nvcc .cu, in parallel (through
ninja where it is installed, which also rebuilds only what changed). Development installs add
`fastattn._host`, a pybind11 module for the tests.

FASTATTN_NATIVE unset: build what the tools at hand allow, and say what was left out and why.
FASTATTN_NATIVE=0: build nothing native.
FASTATTN_NATIVE=cpu or cpu,sm90: build exactly these, or fail.
FASTATTN_SANITIZE=address,undefined: g++'s sanitizers in the C++ code, for tests; their objects go
to --build-temp and the library needs libasan preloaded.
FASTATTN_TRIALS=ffn_loop,fwd_swizzle: what TRIALS has by these names instead of kernels that have
passed on a GPU; their objects go to --build-temp.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
OBJECTS = ROOT / "build" / "native"
OLDEST_TORCH = (2, 11)
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020b000000000000"  # OLDEST_TORCH for the C++ headers
OLDEST_PYTHON = "cp310"

CXX_FLAGS = (
    "-std=c++17 -O3 -g0 -fPIC -fvisibility=hidden -fvisibility-inlines-hidden "
    "-fno-math-errno -ffp-contract=off "  # fused multiply-add only where the source says so
    "-Wall -Wextra -Wno-maybe-uninitialized"  # GCC 12 warns about its own intrinsics
).split()
# torch's headers need C++20, Python's macros omit fields; -O2 halves the compile time, and the code
# has no loops.
EXTENSION_FLAGS = "-std=c++20 -O2 -Wno-missing-field-initializers".split()
NVCC_FLAGS = "-std=c++17 -O3 -Xcompiler -fPIC,-fvisibility=hidden,-Wall -Xptxas -v".split()
# Runs the command after the first argument and keeps its messages in that file. Lines about every
# kernel's registers and spills stay there; the others are printed as well.
LOGGED = (
    'log=$1; shift; "$@" > "$log" 2>&1; status=$?; '
    "grep -Ev '^ptxas info +: ([0-9]|Compil|Function |Used )|bytes stack frame,' "
    '"$log" >&2; exit $status'
)
# Writes its second argument to the file that the first one names, then as above. ninja would run a
# command again whose inputs are newer than its start.
GENERATED = 'printf %b "$2" > "$1"; touch -t 200001010000 "$1"; shift 2; ' + LOGGED
# The first error ends the process; frames and line numbers for its report. -O0: with -O1 compiling
# takes twice the time (172 and 87 CPU seconds), and tests run no faster.
SANITIZER_FLAGS = "-O0 -g1 -fno-omit-frame-pointer -fno-sanitize-recover=all".split()
# The CPU kernels (files *_kernels_cpu.cpp) are compiled once for each instruction set; which one
# runs is decided on the machine it runs on.
INSTRUCTION_SETS = {
    "portable": (),
    "avx2": ("-march=x86-64-v3",),
    "avx512": ("-march=x86-64-v4",),
    "avx512_bf16": ("-march=x86-64-v4", "-mavx512bf16"),
}


@dataclass(frozen=True)
class Library:
    """A native library. architectures: nvcc's -gencode values, none without CUDA code. extends:
    whether it is a Python extension, built with the headers of one torch and one Python.
    """

    name: str
    architectures: tuple[str, ...] = ()
    extends: bool = False
    gpu: str = ""  # the GPUs that it is for

    def has_gpu(self, tools: Tools) -> bool:
        return tools.has_hopper if self.name == "sm90" else tools.has_ampere

    def file_name(self, tools: Tools) -> str:
        """Without the extension, which is Python's."""
        if not self.extends:
            return f"_C_{self.name}"
        # As fastattn/ops/_native.py spells it.
        return f"_C_{self.name}_{re.sub(r'[^0-9A-Za-z]', '_', tools.full_torch_version())}"


LIBRARIES = {
    row.name: row
    for row in (
        Library("cpu"),
        Library("autograd", extends=True),
        # Portable CUDA C++ in one fat binary: one architecture of each generation, whose code the
        # others of the generation run too; the last entry is PTX for architectures to come.
        Library(
            "cuda",
            (
                *(f"arch=compute_{a},code=sm_{a}" for a in (80, 90, 100, 120)),
                "arch=compute_120,code=compute_120",
            ),
            gpu="Ampere or newer",
        ),
        # wgmma and setmaxnreg exist only in the "a" architecture: a plain sm_90 pass would fail.
        Library("sm90", ("arch=compute_90a,code=sm_90a",), gpu="Hopper"),
    )
}

_DTYPES = {"bf16": "kBFloat16", "fp16": "kFloat16"}
# Not 96, which takes the instance of 128: its P V would read one and a half swizzle atoms of V, and
# no GPU has shown yet that these address linearly (fastattn.testing.primitives tries it).
_HEAD_DIMS = (64, 128, 192, 256)
_VARIANTS = {
    "bounded": "kBounded",
    "dropout": "kDropout",
    "mask": "kMask",
    "bias": "kBias",
    "mask_dropout": "kMaskDropout",
    "bias_dropout": "kBiasDropout",
    "scores": "kScores",
    "scores_dense": "kScoresDense",
}
_FORWARD_VARIANTS = {
    "sinks": "kSinks",
    "scores_dropout": "kScoresDropout",
    "paged": "kPaged",
    "paged_scores": "kPagedScores",
}

# The matrix products of the feed-forward network.
_FFN_STEPS = {
    "up": "kUp",
    "up_gated": "kUpGated",
    "down": "kDown",
    "dhidden": "kDhidden",
    "dhidden_gated": "kDhiddenGated",
    "dx": "kDx",
    "dw": "kDw",
}


def _instances(kernel: str, variants: dict[str, str]) -> dict[str, tuple[str, ...]]:
    return {
        f"{kernel}_{dtype}_d{head_dim}_{variant}": (
            f"-DFASTATTN_DTYPE={dtype_constant}",
            f"-DFASTATTN_HEAD_DIM={head_dim}",
            f"-DFASTATTN_VARIANT={variant_constant}",
        )
        for dtype, dtype_constant in _DTYPES.items()
        for head_dim in _HEAD_DIMS
        for variant, variant_constant in variants.items()
    }


def _product_instances() -> dict[str, tuple[str, ...]]:
    return {
        f"ffn_product_sm90_{dtype}_{step}": (
            f"-DFASTATTN_DTYPE={dtype_constant}",
            f"-DFASTATTN_STEP={step_constant}",
        )
        for dtype, dtype_constant in _DTYPES.items()
        for step, step_constant in _FFN_STEPS.items()
    }


def _norm_instances(kernel: str) -> dict[str, tuple[str, ...]]:
    """Types of rows and of parameters, which are the same or fp32."""
    types = {**_DTYPES, "fp32": "kFloat32"}
    return {
        f"{kernel}_{rows}_{parameters}": (
            f"-DFASTATTN_DTYPE={types[rows]}",
            f"-DFASTATTN_PARAMETER_DTYPE={types[parameters]}",
        )
        for rows in types
        for parameters in dict.fromkeys((rows, "fp32"))
    }


# Sources that are compiled once for each instance of a kernel: the instance's name -> its macros.
INSTANCES = {
    "attention_fwd_instance_sm90.cu": _instances(
        "attention_fwd_sm90", {"full": "kFull", **_VARIANTS, **_FORWARD_VARIANTS}
    ),
    "attention_bwd_instance_sm90.cu": _instances("attention_bwd_sm90", _VARIANTS),
    "ffn_product_instance_sm90.cu": _product_instances(),
    "norm_fwd_instance_cuda.cu": _norm_instances("norm_fwd_cuda"),
    "norm_bwd_instance_cuda.cu": _norm_instances("norm_bwd_cuda"),
}


# Forms of GPU kernels and launches that have passed in the simulator only. A library is built with
# those that have passed on a GPU; FASTATTN_TRIALS names what takes their place, so that a GPU run
# can judge both (docs/pages/bring-up.md).
TRIALS = (
    *("ffn_loop", "ffn_dependent"),
    *("fwd_swizzle", "fwd_counter", "fwd_diagonal", "fwd_splits", "fwd_across_tiles"),
    *("fwd_plan", "fwd_skip", "fwd_one_warpgroup"),
    *("bwd_rows", "bwd_dq_once", "bwd_persistent", "bwd_rotation", "bwd_registers", "dq_limit"),
    "norm_rows",
)


# The source that GPU libraries have the digest of their sources from, as FASTATTN_DIGEST.
DIGEST_SOURCE = "digest_sm90_cuda.cu"
# Comments and white space, then tokens of C++ in a group: strings, characters, words and numbers,
# operators. Ends of lines are tokens, too: they end directives.
_TOKENS = re.compile(
    r"//(?:\\\n|[^\n])*|/\*.*?\*/|\\\n|[^\S\n]+"
    r"|(R\"(\w*)\(.*?\)\2\"|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\\n])+'|\d[\w.']*|\w+"
    r"|->|\+\+|--|<<|>>|&&|\|\||::|[-+*/%&|^=!<>]=|\S|\n)",
    re.DOTALL,
)

# Instances that differ in this macro alone are compiled together: for a single one, about half of
# the time goes to the headers. (CPU seconds of the 13 variants of attention_fwd_sm90_bf16_d128,
# CUDA 13.0 on an AMD EPYC: 17 together, 2.5 for each one alone.)
_TOGETHER = "-DFASTATTN_VARIANT="


class Impossible(Exception):
    """Why a library cannot be built here, phrased to follow "the native library x"."""


@dataclass(frozen=True)
class Tools:
    """What was found on this machine; None where it is missing."""

    torch: Path | None
    torch_version: str | None
    cxx: str | None
    cuda: Path | None
    has_hopper: bool = False  # a GPU of compute capability 9.0
    has_ampere: bool = False  # one of 8.0 or newer

    @staticmethod
    @functools.cache
    def found() -> Tools:
        spec = importlib.util.find_spec("torch")
        return Tools(
            torch=Path(spec.origin).parent if spec and spec.origin else None,
            torch_version=importlib.metadata.version("torch") if spec else None,
            cxx=os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++"),
            cuda=_cuda_home(),
            has_hopper=9.0 in _compute_capabilities(),
            has_ampere=any(capability >= 8.0 for capability in _compute_capabilities()),
        )

    def full_torch_version(self) -> str:
        """torch.__version__, which names the variant (+cpu) where the package's may not."""
        assert self.torch and self.torch_version
        version = self.torch / "version.py"
        text = version.read_text() if version.is_file() else ""
        found = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
        return found[1] if found else self.torch_version


def _cuda_home() -> Path | None:
    candidates = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    if nvcc := shutil.which("nvcc"):
        candidates.append(str(Path(nvcc).resolve().parent.parent))
    for home in candidates:
        if home and (Path(home) / "bin" / "nvcc").is_file():
            return Path(home)
    return None


def _compute_capabilities() -> list[float]:
    """Those of the GPUs that are here."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [float(word) for word in found.stdout.split() if re.fullmatch(r"\d+\.\d+", word)]


def _has_python_headers() -> bool:
    return (Path(sysconfig.get_path("include")) / "Python.h").is_file()


def sources(library: Library, csrc: Path = CSRC) -> list[Path]:
    """Files named *_<library>*."""
    found = csrc.rglob(f"*_{library.name}*")
    return sorted(p for p in found if p.suffix in (".cpp", ".cu"))


def instances(source: Path) -> dict[str, tuple[str, ...]]:
    """What a source is compiled to: the object's name -> flags of its own."""
    if not source.name.endswith("_kernels_cpu.cpp"):
        return INSTANCES.get(source.name, {source.name: ()})
    x86 = platform.machine() in ("x86_64", "AMD64")
    sets = INSTRUCTION_SETS if x86 else {"portable": ()}
    return {f"{source.stem}_{name}": flags for name, flags in sets.items()}


def objects_of(source: Path) -> dict[str, list[str]]:
    """The objects of a source: name -> its instances, of which all but the variant is the name."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name, flags in instances(source).items():
        shared = tuple(flag for flag in flags if not flag.startswith(_TOGETHER))
        found.setdefault(shared if shared != flags else (name,), []).append(name)
    return {
        re.sub(r"(_d\d+)_\w+$", r"\1", names[0]) if len(names) > 1 else names[0]: names
        for names in found.values()
    }


def tokens(source: str) -> list[str]:
    """The tokens of C++ code; ends of lines only where they end a directive."""
    found: list[str] = []
    in_directive = False
    for match in _TOKENS.finditer(source):
        if match[1] and (match[1] != "\n" or in_directive):
            found.append(match[1])
            in_directive = match[1] != "\n" and (in_directive or match[1] == "#")
    return found


def digest_of(library: Library, csrc: Path = CSRC, trials: Sequence[str] = ()) -> str:
    """A digest of the sources of a GPU library and the headers of csrc that they include, without
    comments and white space, and of nvcc's options. Records of verified kernels apply to it, those
    without a digest to no trial.
    """
    left = sources(library, csrc)
    code: dict[Path, list[str]] = {}
    options = [NVCC_FLAGS, library.architectures, trials, [instances(s) for s in sorted(left)]]
    while left:
        path = left.pop()
        if path not in code and path.is_file():
            code[path] = tokens(path.read_text())
            text = "\n".join(code[path])
            left += [csrc / name for name in re.findall(r'^#\ninclude\n"(.*)"$', text, re.M)]
    named = sorted((path.relative_to(csrc).as_posix(), found) for path, found in code.items())
    found = hashlib.sha256(json.dumps([options, named]).encode()).hexdigest()[:16]
    return f"trial_{found}" if trials else found


def check_possible(library: Library, tools: Tools, csrc: Path = CSRC) -> None:
    """Raises Impossible with the first thing that is missing."""
    if sys.platform != "linux":
        raise Impossible(f"is built on Linux only, got {sys.platform}")
    if not sources(library, csrc):
        raise Impossible("has no sources in this tree")
    if tools.torch is None or tools.torch_version is None:
        raise Impossible("needs torch, which the build does not see")
    if tuple(int(part) for part in tools.torch_version.split(".")[:2]) < OLDEST_TORCH:
        wanted = ".".join(map(str, OLDEST_TORCH))
        raise Impossible(f"needs torch >= {wanted}, got {tools.torch_version}")
    if library.extends and not _has_python_headers():
        raise Impossible("needs Python's headers (the package python3-dev, on many systems)")
    if tools.cxx is None:
        raise Impossible("needs a C++ compiler (g++, or the one that CXX names)")
    if library.architectures and tools.cuda is None:
        raise Impossible("needs nvcc (in CUDA_HOME, /usr/local/cuda or PATH)")


def requested(value: str | None) -> tuple[str, ...] | None:
    """The libraries that FASTATTN_NATIVE asks for: None for "whatever is possible"."""
    if not value:
        return None
    if value == "0":
        return ()
    names = tuple(dict.fromkeys(word.strip() for word in value.split(",")))
    for name in names:
        if name not in LIBRARIES:
            known = ", ".join(LIBRARIES)
            raise SystemExit(
                f"FASTATTN_NATIVE must be 0 or a comma-separated list of {known}, got {value!r}"
            )
    return names


def choose(value: str | None, tools: Tools, csrc: Path = CSRC) -> list[Library]:
    """The libraries to build. One that was asked for by name and is impossible ends the build."""
    names = requested(value)
    chosen = []
    for library in LIBRARIES.values():
        if names is not None and library.name not in names:
            continue
        try:
            check_possible(library, tools, csrc)
            if names is None and library.architectures and not library.has_gpu(tools):
                raise Impossible(
                    f"takes minutes to compile and finds no {library.gpu} GPU on this machine "
                    f"(FASTATTN_NATIVE=cpu,autograd,{library.name} builds it all the same)"
                )
        except Impossible as why:
            if names is not None:
                raise SystemExit(
                    f"FASTATTN_NATIVE={value}: the native library {library.name} {why}"
                ) from None
            if sources(library, csrc):
                left_out(library.name, str(why))
        else:
            chosen.append(library)
    return chosen


def left_out(name: str, why: str) -> None:
    # pip runs this file three times; the first two only ask about the package.
    if not {"egg_info", "dist_info"} & set(sys.argv):
        print(
            f"fastattn: installing without the native library {name}, which {why}. Everything "
            "works without it, slower; to get it, install torch and a compiler, then "
            "`pip install --no-build-isolation .`",
            file=sys.stderr,
        )


def sanitizers(value: str | None) -> list[str]:
    """Flags for the compiler and the linker that FASTATTN_SANITIZE asks for."""
    return [*SANITIZER_FLAGS, f"-fsanitize={value}"] if value else []


def trial_flags(value: str | None) -> list[str]:
    """Macros of GPU libraries that FASTATTN_TRIALS, a comma-separated list, asks for."""
    names = value.split(",") if value else []
    if unknown := [name for name in names if name not in TRIALS]:
        raise SystemExit(f"FASTATTN_TRIALS must name some of {', '.join(TRIALS)}, got {unknown}")
    return [f"-DFASTATTN_TRIAL_{name.upper()}" for name in names]


# -- commands -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Step:
    """One compiler call. Compilations write a dependency file beside their output; nvcc's
    messages are kept there as well.
    """

    output: Path
    inputs: tuple[Path, ...]
    command: tuple[str, ...]


def library_steps(
    library: Library,
    tools: Tools,
    csrc: Path = CSRC,
    objects: Path = OBJECTS,
    sanitize: Sequence[str] = (),
    trials: Sequence[str] = (),
) -> list[Step]:
    """Compile every source, or the instances of it, then link (the last step). sanitize: further
    flags for C++. trials: macros of GPU libraries.
    """
    assert tools.torch and tools.cxx
    cuda = tools.cuda or Path()  # read only where the library has architectures
    headers = [f"-I{csrc}"] if library.extends else [f"-I{csrc}", STABLE_ABI]
    for folder in ("include", "include/torch/csrc/api/include"):
        headers += ["-isystem", str(tools.torch / folder)]
    if library.extends:
        headers += ["-isystem", sysconfig.get_path("include"), *EXTENSION_FLAGS]
    # -MMD omits torch's headers: a library built for one torch has a folder for each torch.
    place = objects / (library.file_name(tools) if library.extends else library.name)
    digest = digest_of(library, csrc, trials) if library.architectures else ""
    steps = []
    for source in sources(library, csrc):
        beside = place / source.parent.relative_to(csrc)
        flags_of = instances(source)
        for name, members in objects_of(source).items():
            output, compiled, flags = beside / f"{name}.o", source, flags_of[members[0]]
            if source.suffix == ".cu":
                compiler = ["sh", "-c", LOGGED, "sh"]
                if len(members) > 1:
                    compiled = beside / f"{name}.cu"
                    text = _together(source, [flags_of[member] for member in members])
                    compiler = ["sh", "-c", GENERATED, "sh", str(compiled), text]
                    flags = tuple(flag for flag in flags if not flag.startswith(_TOGETHER))
                compiler.append(str(log_of(output)))
                compiler += [str(cuda / "bin" / "nvcc"), "-ccbin", tools.cxx, *NVCC_FLAGS]
                compiler += [f"-gencode={a}" for a in library.architectures]
                compiler += ["-MD", *flags, *trials]
                compiler += [f"-DFASTATTN_DIGEST={digest}"] * (source.name == DIGEST_SOURCE)
            else:
                # Messages show paths relative to csrc or torch, without this machine's folders.
                prefixes = [f"-ffile-prefix-map={root}/=" for root in (csrc, tools.torch)]
                compiler = [tools.cxx, *CXX_FLAGS, *flags, *prefixes, *sanitize, "-MMD"]
                if library.architectures:
                    compiler += ["-isystem", str(cuda / "include"), *trials]
            steps.append(_compile_step(compiler + headers, source, output, compiled))
    links = [*sanitize, f"-L{tools.torch / 'lib'}", "-ltorch_cpu", "-lc10"]
    if library.architectures:
        # The static runtime: the library loads without an installed CUDA.
        links += [f"-L{cuda / 'lib64'}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    suffix = ".abi3.so"
    if library.extends:
        links.append("-ltorch_python")
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
    target = objects / f"{library.file_name(tools)}{suffix}"
    steps.append(_link_step(tools.cxx, steps, target, links))
    return steps


def _together(source: Path, flags: Sequence[tuple[str, ...]]) -> str:
    """A source, as printf's %b takes it, with each of these instances."""
    lines = []
    for of_instance in flags:
        [macro] = (flag for flag in of_instance if flag.startswith(_TOGETHER))
        name, value = macro.removeprefix("-D").split("=")
        lines += [f"#define {name} {value}", f'#include "{source}"', f"#undef {name}"]
    return "\\n".join([*lines, ""])


def log_of(output: Path) -> Path:
    """nvcc's messages for this output."""
    return output.with_name(f"{output.name}.log")


def host_steps(tools: Tools, objects: Path = OBJECTS) -> list[Step]:
    """The pybind11 module over the pure functions that the kernels share."""
    import pybind11

    assert tools.cxx
    headers = [f"-I{CSRC}", "-isystem", pybind11.get_include()]
    headers += ["-isystem", sysconfig.get_path("include")]
    compiler = [tools.cxx, *CXX_FLAGS, "-MMD", *headers]
    source = CSRC / "host" / "host_logic.cpp"
    compiled = _compile_step(compiler, source, objects / "host" / "host_logic.cpp.o")
    name = f"_host{sysconfig.get_config_var('EXT_SUFFIX')}"
    return [compiled, _link_step(tools.cxx, [compiled], objects / name, [])]


def _compile_step(
    compiler: list[str], source: Path, output: Path, compiled: Path | None = None
) -> Step:
    """compiled: the file to compile, where the command writes one that includes the source."""
    command = (*compiler, "-MF", f"{output}.d", "-c", str(compiled or source), "-o", str(output))
    return Step(output, (source,), command)


def _link_step(cxx: str, compiled: list[Step], output: Path, links: list[str]) -> Step:
    inputs = tuple(step.output for step in compiled)
    command = (cxx, "-shared", *map(str, inputs), *links, "-o", str(output))
    return Step(output, inputs, command)


def execute(steps: list[Step], objects: Path = OBJECTS) -> None:
    """Runs the steps in parallel; raises CalledProcessError after the compiler's own message."""
    for step in steps:
        step.output.parent.mkdir(parents=True, exist_ok=True)
    if ninja := _ninja():
        (objects / "build.ninja").write_text(_ninja_file(steps))
        subprocess.run([ninja, "-C", str(objects), "--quiet"], check=True)
        return
    links = [step for step in steps if "-shared" in step.command]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for stage in ([step for step in steps if step not in links], links):
            list(pool.map(lambda step: subprocess.run(step.command, check=True), stage))


def outdated(steps: list[Step], objects: Path = OBJECTS) -> set[Path]:
    """What `execute` would rebuild; everything if there is no ninja."""
    ninja = _ninja()
    if ninja is None or not objects.is_dir():
        return {step.output for step in steps}
    with tempfile.TemporaryDirectory() as folder:
        # Reads copies: ninja repairs a log, and another process may be writing this one.
        for log in objects.glob(".ninja_*"):
            shutil.copy(log, folder)
        (Path(folder) / "build.ninja").write_text(_ninja_file(steps))
        command = [ninja, "-C", folder, "-n", "-v"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    commands = {line.partition("] ")[2] for line in said.splitlines()}
    return {step.output for step in steps if shlex.join(step.command) in commands}


def _ninja() -> str | None:
    beside = Path(sys.executable).with_name("ninja")
    return str(beside) if beside.is_file() else shutil.which("ninja")


def _ninja_file(steps: list[Step]) -> str:
    def escaped(path: Path) -> str:
        return str(path).replace("$", "$$").replace(":", "$:").replace(" ", "$ ")

    lines = [
        "rule compile",
        "  command = $command",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        "  command = $command",
    ]
    for step in steps:
        rule = "link" if "-shared" in step.command else "compile"
        inputs = " ".join(map(escaped, step.inputs))
        lines.append(f"build {escaped(step.output)}: {rule} {inputs}")
        lines.append(f"  command = {shlex.join(step.command).replace('$', '$$')}")
    return "\n".join(lines) + "\n"


# -- setuptools -----------------------------------------------------------------------------------
class BuildNative(build_ext):
    """Runs our own steps and hands the libraries to setuptools."""

    def finalize_options(self) -> None:
        modules = self.distribution.ext_modules
        if (self.inplace or self.editable_mode) and modules and self._host_possible():
            modules.append(Extension("fastattn._host", sources=[], optional=True))
        super().finalize_options()

    @staticmethod
    def _host_possible() -> bool:
        return _has_python_headers() and importlib.util.find_spec("pybind11") is not None

    def build_extensions(self) -> None:
        tools = Tools.found()
        sanitize = sanitizers(os.environ.get("FASTATTN_SANITIZE"))
        trials = trial_flags(os.environ.get("FASTATTN_TRIALS"))
        objects = Path(self.build_temp).resolve() if sanitize or trials else OBJECTS
        for extension in self.extensions:
            found = re.fullmatch(r"fastattn\._C_([a-z0-9]+)\w*", extension.name)
            name = found[1] if found else "host"
            if name == "host":
                steps = host_steps(tools, objects)
            else:
                library = LIBRARIES[name]
                steps = library_steps(library, tools, CSRC, objects, sanitize, trials)
            try:
                execute(steps, objects)
            except subprocess.CalledProcessError:
                if not extension.optional:
                    raise SystemExit(f"the native library {name} failed to compile") from None
                left_out(name, "failed to compile (the messages are above)")
            else:
                target = self.get_ext_fullpath(extension.name)
                self.mkpath(os.path.dirname(target))
                self.copy_file(str(steps[-1].output), target)


class SourceDistribution(sdist):
    """Includes every native source, whatever this machine can build."""

    def make_distribution(self) -> None:
        native = (path for path in CSRC.rglob("*") if path.is_file())
        self.filelist.extend([str(path.relative_to(ROOT)) for path in native])
        self.filelist.sort()
        self.filelist.remove_duplicates()
        super().make_distribution()


def extensions() -> list[Extension]:
    wish, tools = os.environ.get("FASTATTN_NATIVE"), Tools.found()
    return [
        Extension(
            f"fastattn.{library.file_name(tools)}",
            sources=[str(path.relative_to(ROOT)) for path in sources(library)],
            depends=[str(path.relative_to(ROOT)) for path in CSRC.rglob("*.h")],
            py_limited_api=not library.extends,
            optional=not wish,
        )
        for library in choose(wish, tools)
    ]


if __name__ == "__main__":
    modules = extensions()
    setup(
        ext_modules=modules,
        cmdclass={"build_ext": BuildNative, "sdist": SourceDistribution},
        options={"bdist_wheel": {"py_limited_api": OLDEST_PYTHON}} if modules else {},
    )
