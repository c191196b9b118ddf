"""What the CUDA compiler makes of the Hopper kernels: each is compiled and disassembled, no GPU.

A kernel that spills, or whose tensor-core products the compiler had to serialise, still computes
the right thing, only slowly; one whose roles ask for more registers than its launch has hangs.
"""

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parent.parent / "csrc"
INSTANCES = sorted((CSRC / "attention").glob("attention_fwd_sm90_*.cu"))
FLAGS = ["-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas", "-v", "-cubin"]
# Keys of a block, consumer warpgroups, and registers of (movers, consumers), by head dim.
BLOCKS = {64: 128, 96: 128, 128: 128, 192: 112, 256: 80}
GROUPS = {64: 3, 96: 2, 128: 2, 192: 2, 256: 2}
BUDGETS = {3: (32, 160), 2: (40, 232)}
STAGED = (64, 96, 128)  # head dims whose output leaves through shared memory
VARIANTS = ("full", "band", "dropout")


@dataclass(frozen=True)
class Compiled:
    head_dim: int
    variant: str
    log: str
    sass: list[str]

    def count(self, pattern: str) -> int:
        return sum(bool(re.search(pattern, line)) for line in self.sass)


def _nvcc() -> str | None:
    home = Path("/usr/local/cuda/bin/nvcc")
    return str(home) if home.is_file() else shutil.which("nvcc")


def _cuobjdump() -> str | None:
    """Triton's wheel has one; the toolkit may."""
    try:
        import triton
    except ImportError:
        return shutil.which("cuobjdump")
    bundled = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return str(bundled) if bundled.is_file() else shutil.which("cuobjdump")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compiled]:
    nvcc, cuobjdump = _nvcc(), _cuobjdump()
    if nvcc is None or cuobjdump is None:
        pytest.skip("needs nvcc and cuobjdump")
    folder = tmp_path_factory.mktemp("cubin")

    def build(source: Path) -> Compiled:
        cubin = folder / f"{source.stem}.cubin"
        command = [nvcc, *FLAGS, f"-I{CSRC}", "-o", str(cubin), str(source)]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr[:2000]
        text = subprocess.run([cuobjdump, "-sass", cubin], capture_output=True, text=True).stdout
        sass = re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(.*?);", text, re.M)
        head_dim = source.stem.split("_d")[1].split("_")[0]
        variant = source.stem.rpartition("_")[2]
        return Compiled(int(head_dim), variant, result.stderr, sass)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip((s.stem for s in INSTANCES), pool.map(build, INSTANCES), strict=True))


def test_every_instance_is_there() -> None:
    names = {s.stem.removeprefix("attention_fwd_sm90_") for s in INSTANCES}
    assert names == {
        f"{dtype}_d{d}_{variant}"
        for dtype in ("bf16", "fp16")
        for d in BLOCKS
        for variant in VARIANTS
    }


@pytest.mark.slow  # compiles everything: over a minute on two cores
@pytest.mark.parametrize("name", [s.stem for s in INSTANCES])
def test_instance(compiled: dict[str, Compiled], name: str) -> None:
    c = compiled[name]
    assert not re.findall(r"C75\d\d", c.log), c.log
    assert re.search(r"\b0 bytes spill stores, 0 bytes spill loads", c.log), c.log
    assert c.count(r"\b(STL|LDL)\b") == 0

    # Q K^T of the first block, both products in each copy of the loop, P V of the last block.
    scores, output = c.head_dim // 16, BLOCKS[c.head_dim] // 16
    loops = 1 if c.variant == "full" else 2
    assert c.count("HGMMA") == (1 + loops) * (scores + output)
    kind = r"\.F32 " if "fp16" in name else r"\.F32\.BF16 "
    transposed = rf"HGMMA\.64x{c.head_dim}x16{kind}.*tnspB"  # V lies with its columns contiguous
    assert c.count(transposed) == (1 + loops) * output

    # The two products of a step are in flight together: no wait between them.
    events = "".join(_events(c.sass))
    first, step, last = f"m{{{scores}}}0", f"m{{{scores + output}}}1e*0", f"m{{{output}}}0"
    assert re.fullmatch(f"{first}e*({step}e*){{{loops}}}{last}", events), events

    movers, consumers = BUDGETS[GROUPS[c.head_dim]]
    assert c.count(rf"USETMAXREG\.DEALLOC\S* {movers:#x}") == 1
    assert c.count(rf"USETMAXREG\.TRY_ALLOC\S* UP\d, {consumers:#x}") == 1
    staged = c.head_dim in STAGED
    assert c.count("UTMALDG.4D") == 3
    assert c.count("UBLKCP") == (c.variant == "dropout")  # the keys of a block's columns
    assert c.count("UTMASTG.4D") == staged
    assert c.count("STSM") == (c.head_dim // 16 if staged else 0)


def _events(sass: list[str]) -> list[str]:
    """m: a product, 0 and 1: a wait until that many groups are unfinished, e: an exponential."""
    events = []
    for line in sass:
        if "HGMMA" in line:
            events.append("m")
        elif wait := re.search(r"DEPBAR\.LE gsb0, 0x(\d)", line):
            events.append(wait[1])
        elif "MUFU.EX2" in line:
            events.append("e")
    return events
