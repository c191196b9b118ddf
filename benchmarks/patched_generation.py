"""`generate` of transformers' encoder-decoders on the CPU before and after `fastattn.patch`.

    python -m benchmarks.patched_generation [--models marian bart t5] [--batches 1 8 32]
                                            [--threads 1] [--json FILE]

Process CPU time with one thread, else the time on the clock; fp32, random weights: d512, 6 + 6
layers, vocabulary 32000, 32 source tokens, 32 new tokens (END's logit is 0), greedy and 4 beams.
Both models are called alternately; the time is the median, after one call that records the step.
The tokens must be equal. Peak memory is that of PyTorch's allocator in a later call.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastattn
from benchmarks.rows import measured_on
from fastattn.ops import _env
from fastattn.testing.lines import write_json
from fastattn.testing.timing import Plan, peak_memory, time_side_by_side

CPU = torch.device("cpu")
VOCABULARY = 32000
PAD, BEGIN, END = 0, 1, 2
SOURCE = NEW = 32
BEAMS = (1, 4)


def _marian() -> Any:
    from transformers import MarianConfig, MarianMTModel

    return MarianMTModel(MarianConfig(scale_embedding=True, **_sizes()))


def _bart() -> Any:
    from transformers import BartConfig, BartForConditionalGeneration

    return BartForConditionalGeneration(BartConfig(**_sizes()))


def _t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8, **_tokens())
    )


MODELS: dict[str, Callable[[], Any]] = {"marian": _marian, "bart": _bart, "t5": _t5}


def _tokens() -> dict[str, Any]:
    ids = {"pad_token_id": PAD, "bos_token_id": BEGIN, "eos_token_id": END}
    return {"vocab_size": VOCABULARY, "decoder_start_token_id": BEGIN, **ids}


def _sizes() -> dict[str, Any]:
    sizes: dict[str, Any] = {"d_model": 512, "max_position_embeddings": 512}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 6, f"{part}_attention_heads": 8, f"{part}_ffn_dim": 2048}
    return sizes | _tokens() | {"forced_eos_token_id": None}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the rows")
    given = parser.parse_args(arguments)
    import transformers

    torch.set_num_threads(given.threads)
    where = _env.device_name(CPU)
    print(f"{where}, {given.threads} threads, torch {_env.torch_version()}, "
          f"transformers {transformers.__version__}")  # fmt: skip
    print(f"{'':24} before ms   after ms  ratio  before MB  after MB")
    rows: list[dict[str, Any]] = []
    for name in given.models:
        torch.manual_seed(0)
        before = MODELS[name]().eval()
        with torch.no_grad():  # the largest logits are above 0: END is never chosen
            before.get_output_embeddings().weight[END] = 0
        after = copy.deepcopy(before)
        fastattn.patch(after, quiet=True)
        for batch in given.batches:
            for beams in BEAMS:
                rows.append(_measure(name, before, after, batch, beams, given.rounds))
    if given.json:
        versions = _env.versions() | {"transformers": transformers.__version__}
        report = measured_on(where, versions) | {"threads": given.threads, "rows": rows}
        write_json(given.json, report)


def _measure(
    name: str, before: Any, after: Any, batch: int, beams: int, rounds: int
) -> dict[str, Any]:
    """Prints a row and returns it: times in ms, memory in MiB."""
    source = torch.randint(END + 1, VOCABULARY, (batch, SOURCE))

    def generate(model: Any) -> Tensor:
        return model.generate(  # type: ignore[no-any-return]
            source,
            attention_mask=torch.ones_like(source),
            max_new_tokens=NEW,
            num_beams=beams,
            do_sample=False,
        )

    if not torch.equal(generate(before), generate(after)):
        raise AssertionError(f"{name}, batch {batch}, {beams} beams: the tokens differ")
    calls = {when: partial(generate, m) for when, m in (("before", before), ("after", after))}
    plan = Plan(rounds=rounds, min_rounds=rounds)
    timings = time_side_by_side({when: [call] for when, call in calls.items()}, CPU, plan)
    old, new = (1e3 * timing.quantile(0.5) for timing in timings.values())
    memory = [peak_memory(call, CPU) / 2**20 for call in calls.values()]
    case = f"{name}, batch {batch}, " + (f"{beams} beams" if beams > 1 else "greedy")
    print(
        f"{case:24} {old:9.0f} {new:10.0f} {old / new:6.2f} {memory[0]:10.1f} {memory[1]:9.1f}",
        flush=True,
    )
    figures = {"ms": (old, new), "mib": memory}
    return {"model": name, "batch": batch, "beams": beams} | {
        f"{what}_{when}": round(value, 3)
        for what, values in figures.items()
        for when, value in zip(calls, values, strict=True)
    }


if __name__ == "__main__":
    main()
