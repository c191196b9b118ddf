"""The experiments of `examples.ablations`: what holds exactly, and that each runs."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import ablations
from examples.experiments import blocks, length, norms, order, recurrence, scale, window
from examples.experiments.experiment import Settings
from fastattn import nn as fnn
from fastattn.seq2seq.catalogues import TextUnavailable

ROOT = Path(__file__).resolve().parents[2]
QUICK = Settings(quick=True)
DOUBLE = torch.float64


def verdicts(module, values) -> list[bool]:
    return [check.holds for check in module.check(values)]


def test_order_without_training():
    """Five updates teach nothing; the two exact checks hold and can fail."""
    values = order.measure(QUICK)
    assert verdicts(order, values)[:2] == [True, True]
    none, sinusoidal, _ = order.ORDER_KINDS
    values["errors"][none], values["errors"][sinusoidal] = (
        values["errors"][sinusoidal],
        values["errors"][none],
    )
    assert verdicts(order, values)[:2] == [False, False]


def test_sequences_of_both_orders_are_the_same_bags():
    tokens, labels = order.order_sequences(50)
    first, second = tokens.chunk(2)
    assert (first.sort(dim=1).values == second.sort(dim=1).values).all()
    assert not torch.equal(first, second)
    before = (tokens == 0).int().argmax(dim=1) < (tokens == 1).int().argmax(dim=1)
    assert ((tokens == 0).sum(dim=1) == 1).all() and ((tokens == 1).sum(dim=1) == 1).all()
    # A random half of the first sequences has 0 before 1; `labels` says which.
    assert torch.equal(before.long(), labels)


def test_variance_of_scores():
    values = scale.measure(QUICK)
    of_variance, of_tie, of_median, _ = verdicts(scale, values)
    assert of_variance
    assert not of_tie and not of_median  # at d = 16 neither limit is reached
    # Two standard normal numbers differ by N(0, 2), whose density at 0 doubles for the gap's sign.
    assert scale.gap_density(2) == pytest.approx(2.0 / (4.0 * torch.pi) ** 0.5, rel=1e-6)


def test_gradients_of_scores():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 3, 8), torch.randn(2, 1, scale.KEYS, 8)
    torch.manual_seed(1)
    mean, median = scale.score_gradients(q, k, 0.5)
    scores = (q @ k.mT * 0.5).requires_grad_()
    weights = scores.softmax(-1)
    torch.manual_seed(1)
    (gradient,) = torch.autograd.grad(weights, scores, torch.randn_like(weights))
    norms = gradient.square().sum(-1)
    assert mean == pytest.approx(norms.mean().item(), rel=1e-4)
    assert median == pytest.approx(norms.median().item(), rel=1e-4)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_ablated_layers_with_all_their_parts_are_the_layers():
    sizes = {"dim_feedforward": 32, "dropout": 0.0, "batch_first": True, "norm_first": True}
    model = fnn.Transformer(16, 2, 2, 2, **sizes).double()
    source, target = torch.randn(2, 5, 16, dtype=DOUBLE), torch.randn(2, 4, 16, dtype=DOUBLE)
    masks = {
        "tgt_mask": torch.ones(4, 4, dtype=torch.bool).triu(1),
        "src_key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2]),
    }
    expected = model(source, target, **masks)
    blocks.ablate(model, True, True)
    assert type(model.decoder.layers[1]) is blocks.AblatedDecoderLayer
    torch.testing.assert_close(model(source, target, **masks), expected)
    blocks.ablate(model, True, False)
    model(source, target, **masks).sum().backward()
    unused = {name.rpartition(".")[0] for name, p in model.named_parameters() if p.grad is None}
    parts = {"encoder": ("linear1", "linear2", "norm2"), "decoder": ("linear1", "linear2", "norm3")}
    assert unused == {
        f"{stack}.layers.{i}.{name}" for stack, names in parts.items() for i in (0, 1)
        for name in names
    }  # fmt: skip


def test_attention_alone_is_attention_alone():
    layer = fnn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=True)
    blocks.ablate(layer, False, False)
    x = torch.randn(2, 5, 16)
    y = layer.norm1(x)
    torch.testing.assert_close(layer(x), layer.self_attn(y, y, y, need_weights=False)[0])


def test_window_attention_and_convolution():
    values = window.measure(QUICK)
    assert verdicts(window, values) == [True] * 4
    values["reached"]["attention"][2] += 1
    values["difference"] = values["shifted"]["attention"] = 1e-3
    values["added"]["convolution"] = 1e-3
    assert verdicts(window, values) == [False] * 4


def test_state_of_constant_size():
    """The third check is about time."""
    values = recurrence.measure(QUICK)
    assert verdicts(recurrence, values)[:2] == [True, True]
    values["bytes"][-1] += 4
    values["error"]["steps"] = 1e-3
    assert verdicts(recurrence, values)[:2] == [False, False]


def test_results_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = ablations.main(["window", "--quick", "--json", "--out", str(tmp_path)])
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"window": record["experiments"]["window"]["checks"]}
    assert json.loads((tmp_path / "ablations.json").read_text()) == record
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ablation-window.png",
                                                                "ablations.json"]  # fmt: skip
    with pytest.raises(SystemExit):
        ablations.main(["windows", "--out", str(tmp_path)])
    assert "NAME must be one of order, scale," in capsys.readouterr().err
    file = tmp_path / "ablations.json"
    with pytest.raises(SystemExit):
        ablations.main(["window", "--out", str(file)])
    assert "--out must be a folder: " in capsys.readouterr().err


def test_the_record_is_that_of_these_experiments() -> None:
    """Expectations, results and verdicts in the documentation follow from the recorded numbers."""
    record = json.loads((ROOT / "benchmarks" / "results" / "ablations.json").read_text())
    assert record["experiments"].keys() == ablations.EXPERIMENTS.keys() and not record["quick"]
    for name, part in record["experiments"].items():
        checks = ablations.EXPERIMENTS[name].check(part["values"])
        assert [asdict(check) for check in checks] == part["checks"]


def recorded(name: str) -> dict[str, Any]:
    record = json.loads((ROOT / "benchmarks" / "results" / "ablations.json").read_text())
    return record["experiments"][name]["values"]


def test_models_that_diverge_with_and_without_warm_up_show_nothing():
    values = recorded("norms")
    low, high = norms.NORM_RATES
    for place in norms.NORM_PLACES:
        for name in ("warm-up", "no warm-up"):
            values["curves"][f"{place}, {name}, {low:g}"] = [(1, 2.0 + (name != "warm-up"))]
            values["curves"][f"{place}, {name}, {high:g}"] = None
    assert not verdicts(norms, values)[1]
    for place in norms.NORM_PLACES:
        values["curves"][f"{place}, no warm-up, {low:g}"] = [(1, 2.0)]
    assert not verdicts(norms, values)[2]


def test_models_that_translate_nothing_show_nothing():
    values = recorded("length")
    values["bleu"] = {kind: [0.0] * len(length.BINS) for kind in length.LENGTH_KINDS}
    assert verdicts(length, values) == [False, False]


@pytest.mark.slow
def test_every_experiment_runs(tmp_path: Path) -> None:
    try:
        record = ablations.main(["--quick", "--out", str(tmp_path)])
    except TextUnavailable as error:
        pytest.skip(str(error))
    assert list(record["experiments"]) == list(ablations.EXPERIMENTS)
    written = json.loads((tmp_path / "ablations.json").read_text())["experiments"]
    for name, part in record["experiments"].items():
        assert (tmp_path / f"ablation-{name}.png").stat().st_size > 5000
        checks = ablations.EXPERIMENTS[name].check(written[name]["values"])
        assert [asdict(check) for check in checks] == part["checks"]
