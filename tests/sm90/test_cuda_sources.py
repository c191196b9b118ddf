"""Compiler output for the Hopper kernels: each is disassembled, no GPU. Objects of the native
library that are up to date are read as they are; kernels without one are compiled here.

A kernel that spills, or whose tensor-core products the compiler had to serialise, still computes
the right thing, only slowly; one whose roles ask for more registers than its launch has hangs.
"""

import functools
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from native_build import build_script

from fastattn.testing import record

CSRC = Path(__file__).resolve().parents[2] / "csrc"
FFN = "ffn_product_instance_sm90.cu"
FORWARD, BACKWARD = "attention_fwd_instance_sm90.cu", "attention_bwd_instance_sm90.cu"
INSTANCES, TRIAL_FLAGS = build_script().INSTANCES, build_script().trial_flags
FLAGS = ["-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas", "-v", "-cubin"]
# Keys of a block, consumer warpgroups, and registers of (producers, consumers), by head dim.
BLOCKS = {64: 128, 128: 128, 192: 112, 256: 80}
GROUPS = {64: 3, 128: 2, 192: 2, 256: 2}  # an additive mask leaves memory for two
BUDGETS = {3: (32, 160), 2: (40, 232)}
STAGED = (64, 128)  # head dims whose output leaves through shared memory
BACKWARD_VARIANTS = (
    "bounded", "dropout", "mask", "bias", "mask_dropout", "bias_dropout", "scores", "scores_dense",
)  # fmt: skip
VARIANTS = ("full", "sinks", "scores_dropout", "paged", "paged_scores", *BACKWARD_VARIANTS)
SMALL_BLOCK = 64  # above head dim 128, with an additive mask or score modifications


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


@functools.cache
def _objects(library_name: str = "sm90") -> dict[str, Path]:
    """By instance, else by source: what a new build of the native library would leave as it is."""
    build = build_script()
    library, tools = build.LIBRARIES[library_name], build.Tools.found()
    try:
        build.check_possible(library, tools)
    except build.Impossible:
        return {}
    *steps, _ = build.library_steps(library, tools)
    stale = build.outdated(steps)
    kept = {
        step.output.stem: step.output
        for step in steps
        if step.output not in stale and build.log_of(step.output).is_file()
    }
    return {
        instance: kept[name]
        for source in build.sources(library)
        for name, members in build.objects_of(source).items()
        for instance in members
        if name in kept
    }


@functools.lru_cache(maxsize=1)  # neighbours read the same object
def _instructions(binary: Path, cuobjdump: str) -> dict[str, list[str]]:
    """Instructions by the mangled name of a kernel."""
    command = [cuobjdump, "-sass", str(binary)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    _, *functions = re.split(r"Function : (\S+)", text)
    instructions = (
        re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(.*?);", body, re.M) for body in functions[1::2]
    )
    return dict(zip(functions[::2], instructions, strict=True))


def _of_variant(macros: tuple[str, ...]) -> str:
    """Text in the mangled names of the kernels of an attention instance, and of no other in the
    same object.
    """
    [variant] = re.findall(r"-DFASTATTN_VARIANT=(\w+)", " ".join(macros))
    header = (CSRC / "attention" / "attention.h").read_text()
    [body] = re.findall(r"enum class Variant \{(.*?)\}", header, re.DOTALL)
    names = re.findall(r"^  (k\w+),", body, re.MULTILINE)
    return f"7VariantE{names.index(variant)}E"


def _compile(
    source: str, folder: Path, instance: str | None = None, trials: str | None = None
) -> tuple[str, dict[str, list[str]]]:
    """The compiler's remarks and the instructions of each kernel by its mangled name. trials: as
    FASTATTN_TRIALS.
    """
    nvcc, cuobjdump = _nvcc(), record.cuobjdump()
    if nvcc is None or cuobjdump is None:
        pytest.skip("needs nvcc and cuobjdump")
    binary = None if trials else _objects().get(instance or source)
    if binary is not None:
        log = build_script().log_of(binary).read_text()
    else:
        macros = [*(INSTANCES[source][instance] if instance else ()), *TRIAL_FLAGS(trials)]
        binary = folder / f"{instance or source}.cubin"
        (path,) = CSRC.rglob(source)
        command = [nvcc, *FLAGS, *macros, f"-I{CSRC}", "-o", str(binary), str(path)]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr[:2000]
        log = result.stderr
    kernels = _instructions(binary, cuobjdump)
    if instance and source in (FORWARD, BACKWARD):  # beside others of an object
        own = _of_variant(INSTANCES[source][instance])
        kernels = {name: sass for name, sass in kernels.items() if own in name}
        first, *parts = re.split(r"(?=ptxas info +: Compiling entry function)", log)
        kept = [part for part in parts if own in part.partition(" for ")[0]]
        log = "".join([first, *kept, *re.findall(r".*C75\d\d.*", log)])
    return log, kernels


@pytest.mark.slow  # where nothing is built, ten seconds
@pytest.mark.parametrize(
    "name",
    [
        "combine_splits_sm90",
        "mask_classes_sm90",
        "dropout_sm90",
        "order_sequences_sm90",
        "primitives_sm90",
        "mask_classes_bwd_sm90",
        "column_sums_sm90",
    ],
)
def test_small_kernels(name: str, tmp_path: Path) -> None:
    """They wait for memory: nothing may spill."""
    log, kernels = _compile(f"{name}.cu", tmp_path)
    assert kernels
    assert len(re.findall(r"\b0 bytes spill stores, 0 bytes spill loads", log)) == len(kernels), log


@pytest.mark.slow
def test_loads_of_splits_are_in_flight_together(tmp_path: Path) -> None:
    """Eight splits of a row are in flight at a time, with two loads each."""
    _, kernels = _compile("combine_splits_sm90.cu", tmp_path)
    for sass in kernels.values():
        order = "".join(re.findall(r"LDG\.E\.128|FFMA", "\n".join(sass)))
        assert "LDG.E.128" * 16 in order


def test_every_instance_is_there() -> None:
    names = {name.removeprefix("attention_fwd_sm90_") for name in INSTANCES[FORWARD]}
    assert names == {
        f"{dtype}_d{d}_{variant}"
        for dtype in ("bf16", "fp16")
        for d in BLOCKS
        for variant in VARIANTS
    }


@pytest.mark.slow  # where nothing is built, over a minute on two cores
@pytest.mark.parametrize("name", INSTANCES[FORWARD])
def test_instance(name: str, tmp_path: Path) -> None:
    log, kernels = _compile(FORWARD, tmp_path, name)
    head_dim, variant = name.split("_d", 1)[1].split("_", 1)
    c = Compiled(int(head_dim), variant, log, [i for k in kernels.values() for i in k])
    assert not re.findall(r"C75\d\d", c.log), c.log
    assert re.search(r"\b0 bytes spill stores, 0 bytes spill loads", c.log), c.log
    assert c.count(r"\b(STL|LDL)\b") == 0

    # Q K^T of the first block, both products in each copy of the loop, P V of the last block.
    biased = "bias" in c.variant or c.variant == "scores_dense"
    changed = "scores" in c.variant
    block = SMALL_BLOCK if (biased or changed) and c.head_dim > 128 else BLOCKS[c.head_dim]
    if c.head_dim == 256 and c.variant == "scores_dropout":
        block = 32
    scores, output = c.head_dim // 16, block // 16
    loops = 1 if c.variant == "full" else 2
    assert c.count("HGMMA") == (1 + loops) * (scores + output)
    kind = r"\.F32 " if "fp16" in name else r"\.F32\.BF16 "
    transposed = rf"HGMMA\.64x{c.head_dim}x16{kind}.*tnspB"  # V lies with its columns contiguous
    assert c.count(transposed) == (1 + loops) * output

    # The two products of a step are in flight together: no wait between them.
    events = "".join(_events(c.sass))
    # At head dim 64 the exponentials of a block run beside P V, with those that rescale two rows.
    # With score modifications there are the soft cap's exponentials, too.
    most = "," if changed else ""
    beside = f"e{{{block // 2 + 2}{most}}}" if c.head_dim == 64 else "e*"
    # The ends of rows with sinks have some, of tiles with and without keys.
    end = "e*" if changed or c.variant in ("sinks", "paged") else ""
    first, last = f"{end}m{{{scores}}}0", f"m{{{output}}}{end}0"
    step = f"m{{{scores + output}}}1{beside}0"
    assert re.fullmatch(f"{first}e*({step}e*){{{loops}}}{last}", events), events

    if c.variant in ("dropout", "mask", "mask_dropout", "scores_dropout"):
        # Between the products of a step and its softmax there is no wait for anything that arrives
        # later than the operands, such as the block's own values: the warpgroups would run in
        # lockstep and leave the tensor cores idle.
        waits = "".join(_events(c.sass, waits=True))
        passed = "w" if c.head_dim == 64 and "dropout" not in variant else ""  # see await_weights
        step = f"m{{{scores}}}wm{{{output}}}1e*{passed}0"
        assert len(re.findall(step, waits)) == loops, waits

    if "paged" in c.variant:
        # K, V, and Q between them if it has one buffer.
        assert re.search("wcp(wc)?wcp", "".join(_copies(c.sass))), "a copy waits for the next page"

    producers, consumers = BUDGETS[2 if biased or changed else GROUPS[c.head_dim]]
    assert c.count(rf"USETMAXREG\.DEALLOC\S* {producers:#x}") == 1
    assert c.count(rf"USETMAXREG\.TRY_ALLOC\S* UP\d, {consumers:#x}") == 1
    staged = c.head_dim in STAGED and not biased
    assert c.count("UTMALDG.4D") == 3 + biased
    drops = "dropout" in c.variant or c.variant == "scores_dense"
    assert c.count("UBLKCP") == drops  # the keys of a block's columns
    assert c.count("UTMASTG.4D") == staged
    assert c.count("STSM") == (c.head_dim // 16 if staged else 0)


def _events(sass: list[str], waits: bool = False) -> list[str]:
    """m: a product, 0 and 1: a wait until that many groups are unfinished, e: an exponential; with
    waits w: one at an mbarrier.
    """
    events = []
    for line in sass:
        if "HGMMA" in line:
            events.append("m")
        elif wait := re.search(r"DEPBAR\.LE gsb0, 0x(\d)", line):
            events.append(wait[1])
        elif "MUFU.EX2" in line:
            events.append("e")
        elif waits and "SYNCS.PHASECHK" in line:
            events.append("w")
    return events


def _copies(sass: list[str]) -> Iterator[str]:
    """w: a wait at an mbarrier, c: a copy by TMA, p: a wait for a value from global memory."""
    loaded = None
    for line in sass:
        if "SYNCS.PHASECHK" in line:
            yield "w"
        elif "UTMALDG" in line:
            yield "c"
        elif load := re.search(r"LDG\.E (R\d+),", line):
            loaded = load[1]
        elif (use := re.search(r"R2UR UR\d+, (R\d+)", line)) and use[1] == loaded:
            yield "p"


# -- backward -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Backward:
    """A row of backward_config."""

    groups: int
    rows: int
    keys: int
    budget: tuple[int, int]  # registers of producers and consumers
    splits_keys: bool = True
    transposes_dq: bool = True
    dq_stores: int = 0  # to shared memory as matrices: in the trial bwd_dq_once


BACKWARD_CONFIGS = {
    64: Backward(2, 128, 128, (24, 240), transposes_dq=False),
    128: Backward(2, 80, 128, (24, 240)),
    192: Backward(3, 96, 64, (32, 160), splits_keys=False),
    256: Backward(2, 64, 64, (40, 232), splits_keys=False),
}


def test_every_backward_instance_is_there() -> None:
    names = {name.removeprefix("attention_bwd_sm90_") for name in INSTANCES[BACKWARD]}
    assert names == {
        f"{dtype}_d{d}_{variant}"
        for dtype in ("bf16", "fp16")
        for d in BACKWARD_CONFIGS
        for variant in BACKWARD_VARIANTS
    }


@pytest.mark.slow  # where nothing is built, a minute on two cores
@pytest.mark.parametrize("name", INSTANCES[BACKWARD])
def test_backward_instance(name: str, tmp_path: Path) -> None:
    head_dim, variant = name.split("_d", 1)[1].split("_", 1)
    head_dim = int(head_dim)
    b, changed = BACKWARD_CONFIGS[head_dim], "scores" in variant
    if changed and head_dim == 128:
        b = replace(b, rows=64)
    log, kernels = _compile(BACKWARD, tmp_path, name)
    assert not re.findall(r"C75\d\d", log), log
    assert len(re.findall(r"\b0 bytes spill stores, 0 bytes spill loads", log)) == len(kernels), log
    biased = "bias" in variant or variant == "scores_dense"
    assert len(kernels) == 4 + 2 * biased + 2 * changed
    (sass,) = (code for kernel, code in kernels.items() if "attention_bwd_kernel" in kernel)

    def count(pattern: str) -> int:
        return sum(bool(re.search(pattern, line)) for line in sass)

    # K Q^T and V dO^T, dV, dQ and dK. Transposed operands in shared memory are "tnsp".
    products, gradients = head_dim // 16, b.rows // 16
    columns = -(-head_dim // 64) * 64 // b.groups  # of dQ, where columns are shared out
    parts = 1 if b.splits_keys else columns // 64
    dq = parts * b.keys // 16
    assert count("HGMMA") == 2 * products + 2 * gradients + dq
    assert count(r"HGMMA.*tnspA") == (dq if b.transposes_dq else 0) + (
        0 if b.splits_keys else 2 * gradients
    )
    assert count(r"HGMMA.*tnspB") == 2 * gradients + (0 if b.transposes_dq else dq)
    kind = r"\.F32 " if "fp16" in name else r"\.F32\.BF16 "
    score_rows = b.rows if b.splits_keys else b.rows // b.groups
    assert count(rf"HGMMA\.64x{score_rows}x16{kind}") >= 2 * products

    # The exponentials run while dP is computed, and those of a soft cap; dV, dQ and dK overlap.
    most = "," if changed else ""
    events = "".join(_events(sass))
    # Where columns are shared out, dQ leaves in two pieces, unless P and dS hold a mask.
    pieces = 1 if b.splits_keys or biased else 2
    waits = f"{parts}m{{{gradients}}}" + ("10" if pieces == 1 else f"{parts}10")
    order = f"m{{{2 * products}}}1e{{{score_rows // 2}{most}}}0m{{{gradients + dq}}}{waits}"
    assert re.fullmatch(order, events), events

    producers, consumers = b.budget
    assert count(rf"USETMAXREG\.DEALLOC\S* {producers:#x}") == 1
    assert count(rf"USETMAXREG\.TRY_ALLOC\S* UP\d, {consumers:#x}") == 1
    assert count("UTMALDG.4D") == 4 + biased  # K, V, Q, dO and an additive mask
    assert count("LDSM.16.MT88.4") == (2 * score_rows // 16 if biased else 0)  # of either type
    # lse, delta, the first of a sum of dQ, the keys of dropout's rows
    assert count("UBLKCP") == 2 + pieces + ("dropout" in variant or changed)
    assert count("UBLKRED") == pieces  # the others of a sum
    assert count(r"MEMBAR\.\w+\.GPU") == 1  # the next block of keys waits for it
    assert count("STSM") == score_rows // 16 * (1 if b.splits_keys else 2) + b.dq_stores
    if biased:
        (dmask,) = (
            code for kernel, code in kernels.items() if "attention_bwd_dmask_kernel" in kernel
        )
        assert sum("HGMMA" in line for line in dmask) == 2 * products
        assert sum("UTMALDG.4D" in line for line in dmask) == 5
        assert not any("STL" in line or "LDL" in line for line in dmask)
    if changed:
        (distance,) = (code for kernel, code in kernels.items() if "distance_kernel" in kernel)
        assert sum("HGMMA" in line for line in distance) == 2 * products
        assert sum("UTMALDG.4D" in line for line in distance) == 4


# -- feed-forward network -------------------------------------------------------------------------
@dataclass(frozen=True)
class Ffn:
    """A step's product. blocks: of 64 rows for each warpgroup. transposed: which operands' tiles
    are. epilogues: copies for an activation, or a dtype of the result; in the trial ffn_loop, with
    and without dropout. results, loaded: of a box.
    """

    columns: int
    blocks: int
    transposed: str
    epilogues: int
    epilogues_of_loop: int
    results: int = 1
    loaded: int = 0


INSTRUCTION_BYTES = 16
FFN_STEPS = {
    "up": Ffn(128, 2, "", 4, 8, results=2),
    "up_gated": Ffn(128, 2, "", 3, 6, results=3),
    "down": Ffn(128, 2, "", 1, 2, loaded=1),
    "dhidden": Ffn(128, 2, ".tnspB", 4, 7, results=2, loaded=1),
    "dhidden_gated": Ffn(128, 2, ".tnspB", 3, 6, results=3, loaded=2),
    "dx": Ffn(256, 1, ".tnspB", 1, 1),
    "dw": Ffn(256, 1, ".tnspA.tnspB", 1, 1),
}


def test_every_ffn_instance_is_there() -> None:
    names = {name.removeprefix("ffn_product_sm90_") for name in INSTANCES[FFN]}
    assert names == {f"{dtype}_{step}" for dtype in ("bf16", "fp16") for step in FFN_STEPS}


@pytest.mark.slow  # where nothing is built, a minute
@pytest.mark.parametrize(
    "name, trials",
    # No object has the trial: in one dtype.
    [(n, t) for n in INSTANCES[FFN] for t in (None, "ffn_loop") if t is None or "bf16" in n],
)
def test_ffn_instance(name: str, trials: str | None, tmp_path: Path) -> None:
    dtype, step = name.removeprefix("ffn_product_sm90_").split("_", 1)
    f = FFN_STEPS[step]
    log, kernels = _compile(FFN, tmp_path, name, trials)
    assert not re.findall(r"C75\d\d", log), log
    assert re.search(r"\b0 bytes spill stores, 0 bytes spill loads", log), log
    (sass,) = kernels.values()

    def count(pattern: str) -> int:
        return sum(bool(re.search(pattern, line)) for line in sass)

    assert count(r"\b(STL|LDL)\b") == 0
    # One copy of the main loop: 64 of the summed dimension, 16 at a time. The first product of a
    # tile does not add (its predicate), and one step is always in flight beside the next.
    kind = r"\.F32" if dtype == "fp16" else r"\.F32\.BF16"
    products = 4 * f.blocks
    operands = rf"gdesc\[UR\d+\]{re.escape(f.transposed)}, R\d+"
    assert count(rf"HGMMA\.64x{f.columns}x16{kind} R\d+, {operands}") == products
    assert count("HGMMA") == products
    assert count(r"HGMMA.*, UP\d") == f.blocks
    events = "".join(_events(sass)).replace("e", "")
    assert events == "m" * products + "10", events

    assert count(r"USETMAXREG\.DEALLOC\S* 0x18") == 1
    assert count(r"USETMAXREG\.TRY_ALLOC\S* UP\d, 0xf0") == 1
    # Boxes of 64 columns of 16 rows pass between TMA and registers as four matrices of 16 x 16
    # elements. Their code is a loop, or is there for each. What else is accessed are biases, the
    # seed, sums of columns.
    boxes, copies = f.blocks * f.columns // 64 // (2 if step == "up_gated" else 1), f.epilogues
    floats = 2 * boxes if step in ("down", "dw") else 0  # of fp32, half as wide
    unwritten = 1 if step == "dhidden" else 0  # relu has saved the activation
    if trials:
        boxes, copies = 1, f.epilogues_of_loop
        floats = copies if floats else 0
        # relu has, or has saved, the activation alone: with and without dropout, or without.
        unwritten = {"up": 2, "dhidden": 1}.get(step, 0)
        # The loop of a box fits in the L1 instruction cache, taken to have 32 KB.
        assert max(_loops(sass)) * INSTRUCTION_BYTES <= 32 << 10
    assert count(r"\bSTSM\b.*\.M88\.4") == 4 * boxes * (copies * f.results - unwritten)
    assert count(r"\bLDSM\b.*\.M88\.4") == 4 * boxes * copies * f.loaded
    assert count(r"UTMASTG\.4D") == boxes * copies * f.results + floats
    assert count(r"UTMALDG\.4D") >= 2 + (1 if trials else copies) * f.loaded
    assert count(r"STG\.E") <= (7 if step.startswith("dhidden") else 0)
    biases = f.columns // 8 if step in ("up", "up_gated", "down") else 0
    assert count(r"LDG\.E\b") - count(r"LDG\.E\.64") == biases
    assert count(r"LDG\.E\.64") <= (8 if trials else 4)  # the seed


def _loops(sass: list[str]) -> Iterator[int]:
    """The instructions of each loop that stores to shared memory and has no other such loop."""
    ends = {}
    for end, line in enumerate(sass):
        target = re.search(r"\bBRA\b.* 0x([0-9a-f]+)", line)
        if target and (start := int(target[1], 16) // INSTRUCTION_BYTES) <= end:
            ends[start] = end
    stores = {
        start: end
        for start, end in ends.items()
        if any(re.search(r"\bSTSM\b|\bSTS\.64\b", line) for line in sass[start:end])
    }
    for start, end in stores.items():
        if not any(start < s and e < end for s, e in stores.items()):
            yield end - start + 1
