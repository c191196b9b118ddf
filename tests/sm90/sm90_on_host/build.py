"""Builds kernels for a simulator of Hopper on the host, and runs them.

The simulator is adversarial. Asynchronous operations complete as late as their waits allow, as
early as possible, or at random, as `order` says; threads are scheduled the same way. It checks
every access: kernels are compiled as for a thread sanitizer, whose callbacks are the simulator's.

What it reports: deadlocks, and the barriers that are waited for; accesses to shared memory, and to
global memory that is written, that are not ordered by vector clocks of threads, copies and
products; reads of shared memory that has not been written; ordinary writes that an asynchronous
operation reads without fence.proxy.async by the writing thread; registers of a wgmma that are
accessed before its wait, or changed without wgmma.fence, or not pinned; phases of an mbarrier that
a waiter misses, too many arrivals or bytes; barriers that are not visible yet, have different
counts or the same thread twice; stores that are not waited for before their memory is written or
their block ends; setmaxnreg requests that can never be met; launches that access what the previous
one still writes.

What it assumes: a wgmma that one warp has waited for is complete for the warpgroup, and so is
whatever its four warps read before they issued it; a write that changes nothing is harmless.

What it cannot detect: performance; what ptxas makes of the code; reads of global memory that is
written later, or past the end of a tensor that is not `guarded`; operands of a wgmma whose
registers a compiler reuses; what a block does to one that began sixteen blocks before. Two or
three blocks run at a time.
"""

import ctypes
import functools
import itertools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[2] / "csrc"
CUDA = Path("/usr/local/cuda/include")
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
    """What is not here, or None."""
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
    """Kernels that have been built. `order` holds for the calls to come."""

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
        entry = self.library[function]
        entry.restype = ctypes.c_char_p
        self.library.on_host_order(self.order)
        message = entry(*arguments)
        failure = self.library.on_host_failure()
        if failure is not None:
            return self.located(failure.decode()) if self.place is None else failure.decode()
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

    def source(self, address: int) -> str:
        if shutil.which("addr2line") is None:
            return hex(address)
        command = ["addr2line", "-i", "-e", str(self.path), hex(address - 1)]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        roots = "|".join(f"{re.escape(str(root))}/" for root in (self.path.parent, HERE, CSRC))
        lines = [re.sub(f"^(?:{roots}|/.*/)", "", line) for line in found]
        own = [line for line in lines if not line.startswith(("machine.h", "cuda_on_host.h", "("))]
        return " in ".join(own) or hex(address)


@functools.cache
def workshop() -> tempfile.TemporaryDirectory[str]:
    """For what this process makes once."""
    return tempfile.TemporaryDirectory()


@functools.cache
def _engine() -> Path:
    path = Path(workshop().name) / "engine.o"
    flags = ["-O3", "-march=native", "-fno-gnu-unique", "-fPIC", f"-I{HERE}", "-c"]
    compile_cxx(*flags, "-o", path, HERE / "engine.cpp")
    return path


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
    folder: Path,
    source: Path,
    defines: Sequence[str] = (),
    csrc: Path = CSRC,
    name: str = "kernels",
    mutations: Sequence[Mutation] = (),
) -> Machine:
    """`source` with the kernels of `csrc` that it includes. What is made lies in `folder`."""
    for path in csrc.rglob("*.cuh"):
        text = path.read_text()
        rewritten = _mutable(text, str(path.relative_to(csrc)), mutations)
        for cuda, host in REWRITTEN.items():
            rewritten = rewritten.replace(cuda, host)
        if rewritten != text:
            target = folder / path.relative_to(csrc)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(rewritten)
    library, made = folder / f"{name}.so", folder / f"{name}.o"
    includes = [f"-I{path}" for path in (folder, HERE, csrc)]
    # -Og: -O1 takes twice the time to compile and runs no faster.
    flags = ["-Og", "-g1", "-w", "-fPIC", "-fno-gnu-unique", "-fno-strict-aliasing"]
    flags += ["-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0"]
    flags += [f"-D{define}" for define in defines]
    compile_cxx(*flags, *includes, "-isystem", CUDA, "-c", "-o", made, source)
    # Linked without -fsanitize=thread: the machine has what the compiler calls.
    compile_cxx("-shared", "-fno-gnu-unique", "-o", library, made, _engine())
    return Machine(library)
