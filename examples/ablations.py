"""What the parts of a Transformer are for: eight experiments, each against a stated expectation.

    order        attention without positions treats its input as a bag of words
    scale        scores without 1/sqrt(d): their variance, and the gradients that pass the softmax
    blocks       layers without residuals, and without the feed-forward network
    norms        norms before or after the blocks, with a warm-up of the learning rate or without
    length       BLEU by sentence length: an RNN, an RNN with attention, a Transformer
    window       attention within a window and a convolution
    recurrence   linear attention decoded as an RNN, beside a key/value cache
    views        decoder layers that read two encoder layers

Each is a module of `examples/experiments`, with three functions: `measure` returns numbers, `check`
compares them with what theory or a paper leads to expect, `draw` draws them. Each expectation is
printed with the result and whether it holds; the numbers are also written to `ablations.json`, and
each figure to `ablation-NAME.png`.

Data: random tensors, and for translation the English-French message catalogues inside two published
packages, as for `fastattn demo` (downloaded once).

    python -m examples.ablations
    python -m examples.ablations scale window --json
"""

import json
import time
from dataclasses import asdict
from typing import Any

import torch

from examples import common
from examples.experiments import (
    blocks,
    length,
    norms,
    order,
    recurrence,
    scale,
    views,
    window,
)
from examples.experiments.experiment import Settings
from fastattn.ops import device_name, versions
from fastattn.seq2seq.checkpoint import write_atomically

EXPERIMENTS = {
    "order": order.EXPERIMENT,
    "scale": scale.EXPERIMENT,
    "blocks": blocks.EXPERIMENT,
    "norms": norms.EXPERIMENT,
    "length": length.EXPERIMENT,
    "window": window.EXPERIMENT,
    "recurrence": recurrence.EXPERIMENT,
    "views": views.EXPERIMENT,
}


def rounded(values: Any) -> Any:
    """With 5 significant digits, so that checks and figures of a written record are the same."""
    if isinstance(values, float):
        return float(f"{values:.5g}")
    if isinstance(values, dict):
        return {key: rounded(value) for key, value in values.items()}
    return [rounded(value) for value in values] if isinstance(values, list | tuple) else values


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = common.options(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(EXPERIMENTS)}")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in EXPERIMENTS]:
        parser.error(f"NAME must be one of {', '.join(EXPERIMENTS)}, got {', '.join(unknown)}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out must be a folder: {error}")
    settings = Settings(options.seed, options.quick)
    record: dict[str, Any] = {
        **asdict(settings),
        "device": device_name(torch.device("cpu")),
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "experiments": {},
    }
    for name in options.names or EXPERIMENTS:
        experiment = EXPERIMENTS[name]
        wall, processor = time.perf_counter(), time.process_time()
        values = rounded(experiment.measure(settings))
        checks = experiment.check(values)
        record["experiments"][name] = {
            "seconds": round(time.perf_counter() - wall, 1),
            "processor_seconds": round(time.process_time() - processor, 1),
            "checks": [asdict(check) for check in checks],
            "values": values,
        }
        if not options.json:
            print(f"\n{experiment.title}")
            for check in checks:
                verdict = "holds" if check.holds else "DOES NOT HOLD"
                print(f"  {check.expected} ({check.source})\n    {check.found}: {verdict}")
        common.save(
            experiment.draw(values), options.out, f"ablation-{name}.png", show=not options.json
        )
        write_atomically(options.out / "ablations.json", json.dumps(record) + "\n")
    if options.json:
        checks = {name: part["checks"] for name, part in record["experiments"].items()}
        print(json.dumps(checks, indent=2))
    return record


if __name__ == "__main__":
    main()
