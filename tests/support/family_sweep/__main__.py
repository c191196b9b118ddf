"""Patches a tiny model of every family of `transformers` and compares it with itself unpatched.

It takes the base class and the first class with a head of each model type, forks a process for the
type, and writes a row for each class. The exit code is 1 if any result is wrong.
"""

import argparse
import datetime
import importlib
import importlib.metadata
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import torch
import transformers
from family_sweep import judge
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

ROOT = Path(__file__).resolve().parents[3]
RECORDED = ROOT / "benchmarks" / "results" / "sweep" / "transformers.jsonl"
# Families whose results were once wrong, or where transformers' own implementations disagree:
# always in the light form.
ALWAYS = (
    "nllb-moe", "bigbird_pegasus", "git", "informer", "bridgetower", "gemma4_audio", "t5gemma2",
    "aimv2", "paligemma", "colpali",
)  # fmt: skip
_HEADS = """CAUSAL_LM SEQ_TO_SEQ_CAUSAL_LM IMAGE_TEXT_TO_TEXT MULTIMODAL_LM SPEECH_SEQ_2_SEQ
MASKED_LM CTC OBJECT_DETECTION UNIVERSAL_SEGMENTATION SEMANTIC_SEGMENTATION DEPTH_ESTIMATION
IMAGE_CLASSIFICATION VIDEO_CLASSIFICATION AUDIO_CLASSIFICATION TEXT_TO_WAVEFORM TEXT_TO_SPECTROGRAM
TIME_SERIES_PREDICTION PRETRAINING TOKEN_CLASSIFICATION SEQUENCE_CLASSIFICATION
ZERO_SHOT_OBJECT_DETECTION MASK_GENERATION KEYPOINT_DETECTION KEYPOINT_MATCHING
ZERO_SHOT_IMAGE_CLASSIFICATION RETRIEVAL TABLE_QUESTION_ANSWERING QUESTION_ANSWERING""".split()
# Imported before processes are forked: what most families import.
_SHARED = ("llama", "bert", "t5", "clip", "detr")
Row = dict[str, Any]


def families() -> dict[str, list[str]]:
    """Model type -> names of classes."""
    tables = [modeling_auto.MODEL_MAPPING_NAMES]
    tables += [getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES", {}) for head in _HEADS]
    found = {}
    for family, config in CONFIG_MAPPING_NAMES.items():
        entries = [table[family] for table in tables if family in table]
        names = [x for e in entries for x in ([e] if isinstance(e, str) else e)]
        if family in ("informer", "time_series_transformer", "autoformer"):  # in no table
            names.append(config.replace("Config", "ForPrediction"))
        if names:
            found[family] = list(dict.fromkeys(names))[:2]
    return found


def cheapest(seconds: float) -> list[str]:
    """The families that are always taken, and the cheapest of those built, by recorded times."""
    times: Counter[str] = Counter()
    for row in map(json.loads, RECORDED.read_text().splitlines()[1:]):
        times[row["type"]] += row["seconds"] if row["status"] != judge.NOT_BUILT else 1000
    order = sorted(times, key=lambda family: (family not in ALWAYS, times[family], family))
    total, chosen = 0.0, []
    for family in order:
        total += times[family]
        if family in ALWAYS or total <= seconds:
            chosen.append(family)
    return chosen


def model_class(family: str, name: str) -> tuple[Any, Any]:
    config = CONFIG_MAPPING[family]
    if (kind := getattr(transformers, name, None)) is None:
        module = config.__module__.replace("configuration_", "modeling_")
        kind = getattr(importlib.import_module(module), name)
    return kind, config


def _child(family: str, names: Sequence[str], full: bool, limit_s: int, path: Path) -> None:
    """Writes rows of each class; the last one counts."""
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
    signal.alarm(20 * limit_s)
    sys.stdout = sys.stderr = open(os.devnull, "w")
    with path.open("w") as file:
        for name in names:
            row: Row = {"type": family, "class": name, "status": judge.NOT_BUILT}
            row |= {"reason": f"takes more than {limit_s} s of CPU time", "seconds": limit_s}
            print(json.dumps(row), file=file, flush=True)
            try:
                kind, config = model_class(family, name)
            except Exception as error:
                print(json.dumps(row | {"reason": judge.why(error), "seconds": 0}), file=file)
                continue
            for found in judge.check(kind, config, full=full):
                print(json.dumps(row | found), file=file, flush=True)


def sweep(
    todo: dict[str, list[str]], *, full: bool, jobs: int, limit_s: int, folder: Path
) -> Iterator[list[Row]]:
    """The rows of each family, as its process ends."""
    waiting, running = list(todo.items())[::-1], {}
    while waiting or running:
        while waiting and len(running) < jobs:
            family, names = waiting.pop()
            path = folder / f"{family}.jsonl"
            if (child := os.fork()) == 0:
                try:
                    _child(family, names, full, limit_s, path)
                finally:
                    os._exit(0)
            running[child] = path
        child, _ = os.wait()
        lines = running.pop(child).read_text().splitlines()
        yield list({row["class"]: row for row in map(json.loads, lines)}.values())


def _progress(results: Iterator[list[Row]], total: int) -> Iterator[list[Row]]:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    # No thread of its own: processes are forked meanwhile.
    with Progress(console=console, auto_refresh=False, disable=not console.is_terminal) as bar:
        task = bar.add_task("families", total=total)
        for rows in results:
            bar.update(task, advance=1, refresh=True, description=rows[0]["type"])
            yield rows


def _versions() -> dict[str, str]:
    """Versions that were compared; commit: the last one that changed the package."""
    git = ("git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", "fastattn")
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "torch")}
    return {"date": datetime.date.today().isoformat(), "commit": commit, **versions}


def main() -> int:
    parser = argparse.ArgumentParser(prog="family_sweep", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=ROOT / "build" / "sweep.jsonl")
    add("--types", nargs="+", default=None, help="only these model types")
    add("--light", type=float, metavar="SECONDS", help="compare less, and only the families whose "
        "recorded CPU times add up to this")  # fmt: skip
    add("--jobs", type=int, default=os.cpu_count())
    add("--limit", type=int, default=60, help="CPU seconds of a family")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    for family in _SHARED:
        importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    chosen = options.types or (cheapest(options.light) if options.light else families())
    todo = {family: names for family, names in families().items() if family in chosen}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, options.out.open("w") as file:
        print(json.dumps(_versions()), file=file, flush=True)
        results = sweep(todo, full=options.light is None, jobs=options.jobs,
                        limit_s=options.limit, folder=Path(folder))  # fmt: skip
        for rows in _progress(results, len(todo)):
            for row in rows:
                print(json.dumps(row), file=file, flush=True)
                counts[row["status"]] += 1
                if row["status"] in judge.WRONG:
                    print(f"{row['class']}: {row['status']}: {row['reason']}", file=sys.stderr)
    print(f"{options.out}: " + ", ".join(f"{n} {status}" for status, n in counts.most_common()))
    return int(any(counts[status] for status in judge.WRONG))


if __name__ == "__main__":
    sys.exit(main())
