"""`python -m benchmarks.record`, the stage `record` of `make gpu`: the figures of record of a GPU,
those that decide most first, beside the best peers.

It measures as `benchmarks.run` does and continues its rows. Peers may come as a folder of wheels,
and other builds of a native library are timed in turns with the package's own.
"""

import argparse
import contextlib
import hashlib
import importlib
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks import cases, rows, run
from benchmarks.cases import Group
from benchmarks.rows import Row
from benchmarks.runner import Runner
from fastattn.ops import _env, _native

# Seconds after which a stage that compiles nothing counts as hung: a run lasts a few minutes.
_HUNG_SECONDS = 30.0
_ATTENTION = r"attention-(fwd|bwd)-\w+"
# The last one is a CPU's.
_GRID = r"(_h32_s\d+_d64|_h16_s\d+_d128|_h8_s\d+_d256|(?<=b2)_h8_s128_d64)(_causal)?-\w+-"
_NORMS = r"(add_layer|layer|rms)_norm-(fwd|bwd)-\w+-\w+-"
_STEP = r"transformer-step-d(512_h8_b64_s512|1024_h16_b16_s2048|128_h4_b4_s64)"
_BACKENDS = r"fastattn-(?!reference)\w+"


@dataclass(frozen=True)
class Part:
    """What a run measures. share: of the time, after which the next part begins. steps: patterns of
    case names in the order in which they are measured, with {own} for fastattn's backends. A peer
    that its pattern names is measured on every workload.
    """

    share: float
    steps: tuple[str, ...]


PARTS = {
    "grid": Part(0.4, (
        r"attention-(fwd|bwd)-b\d+" + _GRID + "({own}|sdpa-cudnn|sdpa|fa3)$",
        r"attention-(fwd|bwd)-b(2|8|32)" + _GRID + "({own}|sdpa-cudnn|fa3|fa4)$",
        r"attention-(fwd|bwd)-b2_\w+_s8192_d(64|128)(_causal)?-\w+-({own}|sdpa-cudnn|flex)$",
    )),
    "kinds": Part(0.2, (
        _ATTENTION + r"_padded_(keys|both)-\w+-({own}|sdpa-cudnn|sdpa-efficient|sdpa)$",
        r"attention_varlen-(fwd|bwd)-\w+_packed-\w+-({own}|fa2|fa3|fa4|sdpa-loop)$",
        r"attention-fwd-\w+_decode-\w+-({own}|sdpa-cudnn|sdpa-flash|sdpa|fa2|fa3)$",
        _ATTENTION + r"_(dropout|alibi|bias_gradient)-\w+-"
        "({own}|sdpa-cudnn|sdpa-flash|sdpa-efficient|sdpa|fa2)$",
        _ATTENTION + r"_(padded_both|alibi|bias_gradient)-\w+-({own}|sdpa-cudnn|flex)$",
    )),
    "rows": Part(0.15, (
        _NORMS + f"({_BACKENDS}|eager|liger|quack)$",
        r"ffn-(fwd|bwd)-\w+-\w+-({own}|eager|compile)$",
        _NORMS + f"({_BACKENDS}|eager|liger|quack|compile)$",
        r"ffn-(fwd|bwd)-16384x1024_(relu|gelu)-\w+-({own}|compile-max-autotune)$",
    )),
    "models": Part(0.2, (
        _STEP + r"-\w+-(fastattn|torch-eager)$",
        r"generation-decode-d512_h8_b(32|8|16)_\w+-\w+-(fastattn|marian)$",
        _STEP + r"_padded-\w+-(fastattn|fastattn-packed|torch-eager)$",
        _STEP + r"(_padded)?-\w+-"
        "(fastattn|fastattn-packed|fastattn-compile|torch-eager|torch-compile)$",
    )),
    "order": Part(0.05, (r"attention-bwd-\w+_ordered-\w+-({own})$",)),
    "rest": Part(0.0, ("",)),
}  # fmt: skip


@dataclass(frozen=True)
class Build:
    """Another build of a native library: NAME=FOLDER/_C_<library>.abi3.so. Its rows have the label
    behind "@", which differs for another file of the same name.
    """

    label: str
    backend: str
    file: Path


def build_of(text: str) -> Build:
    name, _, path = text.partition("=")
    file = Path(path).resolve()
    library = re.fullmatch(r"_C_(\w+)\.abi3\.so", file.name)
    if not re.fullmatch(r"\w+", name) or library is None or not file.is_file():
        raise ValueError(f"--build must be NAME=FOLDER/_C_<library>.abi3.so, a file, got {text!r}")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:8]
    return Build(f"{name}.{digest}", library[1], file)


def install(folder: Path, target: Path) -> None:
    """Installs the wheels of a folder, also those under xz, into `target`, for this process and
    those that it starts.
    """
    if not folder.is_dir():
        raise ValueError(f"--peers must be a folder of wheels, got {folder}")
    wheels = sorted(folder.glob("*.whl"))
    for packed in sorted(folder.glob("*.whl.xz")):
        wheels.append(target / "wheels" / packed.stem)
        wheels[-1].parent.mkdir(exist_ok=True)
        with lzma.open(packed) as source, wheels[-1].open("wb") as wheel:
            shutil.copyfileobj(source, wheel)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(target), *map(str, wheels)], check=True)
    sys.path.insert(0, str(target))
    importlib.invalidate_caches()
    paths = {"PYTHONPATH": [target]}
    # Libraries of CUDA 12, which a torch for CUDA 13 does not include.
    paths["LD_LIBRARY_PATH"] = sorted({file.parent for file in target.rglob("libcudart.so.*")})
    for variable, found in paths.items():
        before = [os.environ[variable]] if os.environ.get(variable) else []
        os.environ[variable] = os.pathsep.join([*map(str, found), *before])
    if third := next(target.glob("*/flash_attn_3/_C*.so"), None):
        os.environ.setdefault("FASTATTN_FA3_LIBRARY", str(third))


def groups_of(options: argparse.Namespace, builds: Sequence[Build]) -> list[Group]:
    """The groups of all parts in their order, each case once, with those of other builds."""
    hopper = options.device == "cuda" and not (
        _env.why_not_on("sm90", _env.default_device()) or _native.unavailable("sm90")
    )
    own = "fastattn-sm90" if hopper else _BACKENDS
    found, seen, known = [], set[str](), measured_backwards()
    for name, part in PARTS.items():
        for step in part.steps:
            pattern = step.replace("{own}", own)
            selected = cases.groups(
                options.device,
                only_ops=options.op or (),
                match=rf"^(?=.*(?:{options.match})){pattern}",
                dtypes=options.dtype or (),
                quick=options.quick,
                peer_files=run.files_of(options),
            )
            if step == PARTS["grid"].steps[0]:
                selected.sort(key=lambda group: group.workload in known)
            elif name == "rest":
                selected = cases.spread(selected)
            new = [group for group in selected if not seen.issuperset(group.cases)]
            seen.update(case for group in new for case in group.cases)
            found += [replace(with_builds(group, builds), part=name) for group in new]
    return found


def measured_backwards() -> set[str]:
    """Workloads of which there is a figure of record for the backward on Hopper."""
    files = (rows.ROOT / "benchmarks" / "results").glob("gpu-*.jsonl")
    found = [r for file in files for r in rows.read_all(file) if r["status"] == "ok"]
    wanted = ("attention", "bwd", "fastattn-sm90")
    return {r["workload"] for r in found if (r["op"], r["direction"], r["impl"]) == wanted}


def with_builds(group: Group, builds: Sequence[Build]) -> Group:
    others = [
        (f"{name}@{build.label}", direction)
        for build in builds
        for name, direction in group.wanted
        if name == f"fastattn-{build.backend}"
    ]
    return replace(group, wanted=(*group.wanted, *others))


def in_shares(
    groups: Sequence[Group], seconds: float | None, shares: Mapping[str, float]
) -> Iterator[Group]:
    """The groups of each part until its share of the time is over, then what is left of all."""
    left: list[Group] = []
    for part, share in shares.items():
        until = time.monotonic() + share * (seconds or 0.0)
        for group in (g for g in groups if g.part == part):
            if seconds is not None and time.monotonic() >= until:
                left.append(group)
            else:
                yield group
    yield from left


def in_turns(
    others: Mapping[str, Runner], runner: Runner, group: Group, until: float | None
) -> Iterator[list[Row]]:
    """The rows of a group as `Runner.run`; rounds of the package's library and of other builds
    alternate, and their times are compared with the same peers.
    """
    open_: dict[str, Iterator[list[Row]]] = {}
    for label, each in {"": runner, **others}.items():
        pairs = [(name.partition("@"), direction) for name, direction in group.wanted]
        wanted = tuple((name, d) for (name, _, build), d in pairs if build == label)
        if wanted:
            each.ceilings = runner.ceilings
            open_[label] = each.run(replace(group, wanted=wanted), until)
    together: dict[str, list[Row]] = {}
    alone = len(open_) == 1
    while open_:
        for label, batches in list(open_.items()):
            if (batch := next(batches, None)) is None:
                del open_[label]
                continue
            for row in batch:
                row["impl"] += f"@{label}" if label else ""
                if not alone and row["status"] == "ok":
                    together.setdefault(row["direction"], []).append(row)
            if written := [row for row in batch if alone or row["status"] != "ok"]:
                yield written
    for timed in together.values():
        yield rows.complete(timed, {}, None)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.record", description=__doc__)
    run.add_arguments(parser)
    parser.add_argument("--peers", type=Path, metavar="DIR", help="folder of wheels of peers")
    parser.add_argument(
        "--build", action="append", default=[], metavar="NAME=FILE",
        help="another build of a native library, timed in turns with the package's",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    with contextlib.ExitStack() as stack:
        try:
            builds = [build_of(text) for text in options.build]
            if options.peers is not None:
                target = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                install(options.peers, target)
            groups = groups_of(options, builds)
        except (ValueError, subprocess.CalledProcessError) as error:
            parser.error(str(error))
        settings = replace(
            run.settings_of(options), short_stage_seconds=_HUNG_SECONDS, turns=bool(builds)
        )
        others = {}
        for build in builds:
            variables = ((_env.LIBRARY_VARIABLE, str(build.file)),)
            log = options.out / f"worker-{build.label}.log"
            runner = Runner(replace(settings, variables=variables), log)
            others[build.label] = stack.enter_context(runner)
        shares = {name: part.share for name, part in PARTS.items()}
        return run.measure(
            options,
            groups,
            settings,
            order=partial(in_shares, seconds=options.seconds, shares=shares),
            batches=partial(in_turns, others),
        )


if __name__ == "__main__":
    sys.exit(main())
