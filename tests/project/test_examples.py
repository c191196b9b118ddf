"""Each example beats its stated baseline within a fixed number of steps."""

from pathlib import Path

import pytest
from subprocesses import python_output

from examples import (
    linear_attention,
    positions,
    rnn_translation,
    sequence_classification,
    sequence_labelling,
    set_prediction,
    text_classifier,
)
from fastattn.seq2seq.catalogues import TextUnavailable

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def pictures(folder: Path) -> list[str]:
    """The figures of a folder; each is complete and more than a frame."""
    found = sorted(folder.iterdir())
    assert all(path.stat().st_size > 5000 for path in found)
    return [path.name for path in found]


def test_text_classifier(tmp_path: Path) -> None:
    result = text_classifier.main(["--steps", "200", "--out", str(tmp_path)])
    assert result["accuracy"] > result["baseline"] + 0.15
    assert pictures(tmp_path) == ["text_classifier.png"]


def test_sequence_labelling(tmp_path: Path) -> None:
    result = sequence_labelling.main(["--steps", "100", "--out", str(tmp_path)])
    assert result["accuracy"] > result["baseline"] + 0.2
    assert pictures(tmp_path) == ["sequence_labelling.png"]


@pytest.mark.parametrize(
    ("kind", "steps", "margin"), [("pixels", 200, 0.4), ("signal", 60, 0.1), ("graph", 150, 0.2)]
)
def test_sequence_classification(kind: str, steps: int, margin: float, tmp_path: Path) -> None:
    result = sequence_classification.main(
        ["--input", kind, "--steps", str(steps), "--out", str(tmp_path)]
    )
    assert result["accuracy"] > result["baseline"] + margin
    assert pictures(tmp_path) == [f"sequence_classification_{kind}.png"]


def test_linear_attention(tmp_path: Path) -> None:
    arguments = ["--steps", "60", "--longest", "512", "--out", str(tmp_path)]
    result = linear_attention.main(arguments)
    assert max(result["softmax"], result["linear"]) < result["baseline"] - 0.3
    assert pictures(tmp_path) == ["linear_attention.png"]


def test_set_prediction(tmp_path: Path) -> None:
    result = set_prediction.main(["--steps", "250", "--out", str(tmp_path)])
    assert result["f1"] > result["baseline"] + 0.05
    assert pictures(tmp_path) == ["set_prediction.png"]


@pytest.mark.parametrize("name", ["attention", "plain"])
def test_rnn_translation(name: str, tmp_path: Path) -> None:
    try:
        result = rnn_translation.main(["--steps", "60", "--models", name, "--out", str(tmp_path)])
    except TextUnavailable as error:
        pytest.skip(str(error))
    assert result[name]["loss"] < result["token frequencies"]["loss"] - 0.2


def test_positions(tmp_path: Path) -> None:
    kinds = ["alibi", "rotary"]
    try:
        result = positions.main(["--steps", "60", "--kinds", *kinds, "--out", str(tmp_path)])
    except TextUnavailable as error:
        pytest.skip(str(error))
    for kind in kinds:
        assert result[kind]["short"] < result["token frequencies"]["short"] - 0.2
    assert pictures(tmp_path) == ["positions.png"]


def test_ring_attention() -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    shown = python_output(*launcher, "-m", "examples.ring_attention", cwd=ROOT)
    difference = shown.rpartition("one process: ")[2]
    assert float(difference) < 1e-4
