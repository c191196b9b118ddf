"""The sweep over the model families of transformers: a part of it, and that it finds faults."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers")

from family_sweep import __main__ as program
from family_sweep import inputs, judge
from subprocesses import environment, python_output
from transformers import Gemma4Config, Gemma4Model, LlamaConfig, LlamaModel

import fastattn
from fastattn.integrations import huggingface

SDPA = "equal to transformers' sdpa"
EXPECTED = {"gemma4_audio": judge.KEPT, "aimv2": SDPA, "paligemma": SDPA, "colpali": SDPA}


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


@pytest.mark.slow
@pytest.mark.long
def test_families_are_equal(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    paths = f"{program.ROOT / 'tests' / 'support'}:{program.ROOT}"
    # The limit is of recorded CPU seconds; less is compared than was recorded.
    command = ["-m", "family_sweep", "--light", "85", "--jobs", "1", "--out", out]
    python_output(*command, env=environment(PYTHONPATH=paths), timeout=None)
    rows = rows_of(out)
    assert [row for row in rows if row["status"] in judge.WRONG] == []
    built = {row["type"] for row in rows if row["status"] != judge.NOT_BUILT}
    assert built >= {*program.ALWAYS} and len(built) > 150


def test_recorded_families_are_equal() -> None:
    rows = rows_of(program.RECORDED)
    assert len({row["type"] for row in rows}) > 600
    assert [row for row in rows if row["status"] in judge.WRONG] == []


@pytest.mark.parametrize("family", program.ALWAYS[::2])
def test_family_is_equal(family: str) -> None:
    for name in program.families()[family]:
        *_, row = judge.check(*program.model_class(family, name))
        assert row["status"] == EXPECTED.get(family, judge.EQUAL), row


def test_gemma4_audio_features_are_equal() -> None:
    model, _ = judge.build(Gemma4Model, Gemma4Config)
    features = inputs.normal(2, 80, 64)
    mask = torch.ones(2, 80, dtype=torch.bool)
    mask[1, 40:] = False

    def encode() -> torch.Tensor:
        with torch.no_grad():
            return model.get_audio_features(features, mask).pooler_output

    before = encode()
    fastattn.patch(model, quiet=True)
    torch.testing.assert_close(encode(), before)


@pytest.mark.parametrize(
    ("fault", "found"),
    [("causality", "other last of input_ids: changes other results"), ("gradients", "gradient of")],
)
def test_faults_are_found(fault: str, found: str) -> None:
    forward = huggingface.attention_forward

    def faulty(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if fault == "causality":
            return forward(module, query, *args, **kwargs | {"is_causal": False})
        return forward(module, query.detach(), *args, **kwargs)

    with mock.patch.object(huggingface, "attention_forward", faulty):
        *_, row = judge.check(LlamaModel, LlamaConfig)
    huggingface.register()
    assert row["status"] == judge.DIFFERENT and found in row["reason"]
