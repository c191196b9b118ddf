"""Builds kernels for a simulator of Hopper on the host, and runs them.

The simulator is adversarial. Asynchronous operations complete as late as their waits allow, as
early as possible, or at random, as `order` says; threads are scheduled the same way. It checks
every access: kernels are compiled as for a thread sanitizer, whose callbacks are the simulator's.

It reports: deadlocks, and the barriers that are waited for; accesses to shared memory, and to
global memory that is written, that are not ordered by vector clocks of threads, copies and
products; reads of shared memory that has not been written; ordinary writes that an asynchronous
operation reads without fence.proxy.async by the writing thread; registers of a wgmma that are
accessed before its wait, or changed without wgmma.fence, or not pinned; phases of an mbarrier that
a waiter misses, too many arrivals or bytes; barriers that are not visible yet, have different
counts or the same thread twice; stores that are not waited for before their memory is written or
their block ends; setmaxnreg requests that can never be met; launches that access what the previous
one still writes.

It assumes: a wgmma that one warp has waited for is complete for the warpgroup, and so is whatever
its four warps read before they issued it; a write that changes nothing is harmless.

It cannot detect: performance; the code that ptxas generates; reads of global memory that is written
later, or past the end of a tensor that is not `guarded`; operands of a wgmma whose registers a
compiler reuses; what a block does to one that began sixteen blocks before. Two or three blocks run
at a time.
"""

import ctypes
import fcntl
import functools
import hashlib
import itertools
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[2] / "csrc"
CUDA = Path("/usr/local/cuda/include")
KEPT = HERE.parents[2] / "build" / "simulator"  # what was compiled, also by earlier runs
# Code that g++ does not accept, and its replacement.
REWRITTEN = {
    "kernel<<<blocks, Traits::kThreads, sizeof(Shared), stream>>>(args);": (
        "launch_on_host(kernel, blocks, Traits::kThreads, sizeof(Shared), args);"
    ),
    "extern __shared__ __align__(sm90::kTileAlignment) char shared_memory[];": (
        "char* shared_memory = on_host::shared;"
    ),
}
# When asynchronous operations complete. From 2 on at random, with this seed.
AT_ONCE, LATE, RANDOM = 0, 1, 2
# The faults that can be injected at any place of a kernel: engine/faults.h.
FAULTS = (
    "none", "no wgmma fence", "no wgmma commit", "no wgmma wait", "wgmma wait for one group less",
    "no pin", "no proxy fence", "no mbarrier wait", "other parity", "no arrival", "two arrivals",
    "fewer bytes", "more bytes", "no bar.sync", "no bar.arrive", "no syncwarp", "no bulk commit",
    "no bulk wait", "bulk wait for reads only", "no mbarrier init fence", "no grid wait",
    "no acquire", "no release", "more registers", "one more arrival expected", "mutation",
)  # fmt: skip
MUTATION = FAULTS.index("mutation")
_MOST_PLACES = 4096


def missing() -> str | None:
    """The tools that are missing, or None."""
    if shutil.which("g++") is None or not (CUDA / "cuda_bf16.h").is_file():
        return "needs g++ and CUDA's headers"
    return None


@dataclass(frozen=True)
class Place:
    """A place in a kernel where `fault`, an index of FAULTS, can be injected."""

    fault: int
    address: int
    times: int

    @property
    def key(self) -> tuple[int, int]:
        return self.fault, self.address


@dataclass(frozen=True)
class Mutation:
    """Source that a fault of its own can replace: an expression, or statements. `right` must be
    there once in `file`, a path under csrc. Its place is its number among those of a build.
    """

    file: str
    right: str
    wrong: str

    def source(self, number: int, otherwise: str) -> str:
        condition = f"on_host::mutated({number})"
        if self.right.endswith(";") or self.right.startswith("if "):
            return f"if ({condition}) {{ {self.wrong} }} else {{ {otherwise} }}"
        return f"({condition} ? ({self.wrong}) : ({otherwise}))"


class Machine:
    """Kernels that have been built. `order` holds for the calls to come. Only the one that was
    called last keeps memory for its next call: 0.1 to 0.3 GB.
    """

    _called: ClassVar["Machine | None"] = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self.order = RANDOM
        self.place: Place | None = None
        self.library = ctypes.CDLL(str(path))
        self.library.on_host_failure.restype = ctypes.c_char_p
        self.library.on_host_order.argtypes = [ctypes.c_uint64]
        self.library.on_host_fault.argtypes = [ctypes.c_int, ctypes.c_uint32]

    def call(self, function: str, *arguments: object) -> str | None:
        """Calls a function that returns a message or null; the message, or the machine's own, with
        lines of source if no fault explains it.
        """
        if Machine._called not in (None, self):
            Machine._called.library.on_host_release()
        Machine._called = self
        entry = self.library[function]
        entry.restype = ctypes.c_char_p
        self.library.on_host_order(self.order)
        message = entry(*arguments)
        failure = self.library.on_host_failure()
        if failure is not None:  # a fault may have written over its text
            text = failure.decode(errors="replace")
            return self.located(text) if self.place is None else text
        return None if message is None else message.decode()

    def inject(self, place: Place | None) -> None:
        """Later calls run with this fault, or with none."""
        self.place = place
        self.library.on_host_fault(*((place.fault, place.address) if place else (0, 0)))

    def record(self, on: bool) -> None:
        self.library.on_host_record(int(on))

    def places(self) -> list[Place]:
        """Where faults could have been injected since `record`."""
        numbers = (ctypes.c_uint32 * (3 * _MOST_PLACES))()
        count = self.library.on_host_sites(numbers, _MOST_PLACES)
        assert count <= _MOST_PLACES
        return [Place(*numbers[3 * i : 3 * i + 3]) for i in range(count)]

    def located(self, message: str) -> str:
        """The message with lines of source instead of addresses."""
        return re.sub(r"@0x([0-9a-f]+)", lambda m: self.source(int(m[1], 16)), message)

    @functools.cache  # noqa: B019 - libraries are never unloaded
    def source(self, address: int) -> str:
        if shutil.which("addr2line") is None:
            return hex(address)
        command = ["addr2line", "-i", "-e", str(self.path), hex(address - 1)]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        roots = "|".join(
            f"{re.escape(str(root))}/" for root in (self.path.parent / "csrc", HERE, CSRC)
        )
        lines = [re.sub(f"^(?:{roots}|/.*/)", "", line) for line in found]
        own = [line for line in lines if not line.startswith(("machine.h", "cuda_on_host.h", "("))]
        return " in ".join(own) or hex(address)


def made_once(
    name: str, inputs: Iterable[object], make: Callable[[Path], None], kept: Path = KEPT
) -> Path:
    """A folder of `kept` with what `make` puts there: made where no process did with these inputs,
    which are everything that it depends on. Processes wait for each other.
    """
    folder = kept / name
    folder.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256("\0".join(map(str, inputs)).encode()).hexdigest()
    stamp = folder / "inputs"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.is_file() or stamp.read_text() != key:
            stamp.unlink(missing_ok=True)
            make(folder)
            stamp.write_text(key)
    return folder


@functools.cache
def compiler() -> str:
    """Dependencies of results besides sources and options: versions and the processor's code."""
    found = [str(CUDA.resolve())]
    for query in (["--version"], ["-march=native", "-Q", "--help=target"]):
        done = subprocess.run(["g++", *query], capture_output=True, text=True, check=True)
        found.append(done.stdout)
    return "".join(found)


def included(source: Path, folders: Sequence[Path]) -> dict[Path, str]:
    """The texts of a source and of the files in `folders` that it includes by relative names."""
    found: dict[Path, str] = {}
    waiting = [source]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found[path] = text = path.read_text()
        for name in re.findall(r'^\s*#\s*include "([^"]+)"', text, re.MULTILINE):
            waiting += [f for folder in (path.parent, *folders) if (f := folder / name).is_file()]
    return found


@functools.cache
def _engine() -> Path:
    flags = ["-O3", "-march=native", "-fno-gnu-unique", "-fPIC", f"-I{HERE}", "-c"]
    source = HERE / "engine.cpp"

    def make(folder: Path) -> None:
        compile_cxx(*flags, "-o", folder / "engine.o", source)

    inputs = [compiler(), flags, *included(source, [HERE]).values()]
    return made_once("engine", inputs, make) / "engine.o"


def compile_cxx(*arguments: str | Path) -> None:
    done = subprocess.run(["g++", "-std=c++17", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[:4000])


def _mutable(text: str, file: str, mutations: Sequence[Mutation]) -> str:
    """The text of a file with a choice wherever a mutation has something else."""
    choices: dict[str, str] = {}
    for number, mutation in enumerate(mutations):
        if mutation.file == file:
            right = mutation.right
            if text.count(right) != 1:
                raise ValueError(f"{file} must have once, has {text.count(right)} times: {right}")
            choices[right] = mutation.source(number, choices.get(right, right))
    if not choices:
        return text
    found = sorted(choices, key=text.index)
    for first, second in itertools.pairwise(found):
        if text.index(first) + len(first) > text.index(second):
            raise ValueError(f"{file}: mutations overlap: {first} and {second}")
    pieces = re.split("(" + "|".join(map(re.escape, found)) + ")", text)
    return "".join(choices.get(piece, piece) for piece in pieces)


def changed_sources(folder: Path, file: str, right: str, wrong: str) -> Path:
    """A copy of csrc in which a file has another text."""
    csrc = shutil.copytree(CSRC, folder / "csrc")
    text = (csrc / file).read_text()
    if text.count(right) != 1:
        raise ValueError(f"{file} must have once, has {text.count(right)} times: {right}")
    (csrc / file).write_text(text.replace(right, wrong))
    return csrc


def build(
    source: Path, defines: Sequence[str] = (), csrc: Path = CSRC, mutations: Sequence[Mutation] = ()
) -> Machine:
    """`source` with the kernels of `csrc` that it includes."""
    rewritten: dict[Path, str] = {}
    for path in sorted(csrc.rglob("*.cuh")):
        name = path.relative_to(csrc)
        text = path.read_text()
        changed = _mutable(text, str(name), mutations)
        for cuda, host in REWRITTEN.items():
            changed = changed.replace(cuda, host)
        if changed != text:
            rewritten[name] = changed
    # -Og: -O1 takes twice the time to compile and runs no faster.
    flags = ["-Og", "-g1", "-w", "-fPIC", "-fno-gnu-unique", "-fno-strict-aliasing"]
    flags += ["-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0"]
    flags += [f"-D{define}" for define in defines]
    engine = _engine()

    def make(folder: Path) -> None:
        shutil.rmtree(folder / "csrc", ignore_errors=True)
        for name, text in rewritten.items():
            target = folder / "csrc" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        includes = [f"-I{path}" for path in (folder / "csrc", HERE, csrc)]
        made = folder / "kernels.o"
        compile_cxx(*flags, *includes, "-isystem", CUDA, "-c", "-o", made, source)
        # Linked without -fsanitize=thread: the machine has what the compiler calls.
        library = folder / "kernels.so"
        compile_cxx("-shared", "-fno-gnu-unique", "-o", library, made, engine)
        made.unlink()

    texts = included(source, [HERE, csrc])
    inputs = [compiler(), flags, engine.stat().st_mtime_ns]
    for path, text in sorted(texts.items()):
        here = path.is_relative_to(csrc)
        inputs += [path, rewritten.get(path.relative_to(csrc), text) if here else text]
    parts = [source.stem, *(re.sub(r"\W", "_", define) for define in defines)]
    if mutations:
        parts.append(hashlib.sha256(repr([*mutations]).encode()).hexdigest()[:8])
    kept = KEPT if csrc == CSRC else csrc.parent / "simulator"
    return Machine(made_once("_".join(parts), inputs, make, kept) / "kernels.so")
