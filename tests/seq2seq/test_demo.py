"""The demo, its plots and its progress output."""

import dataclasses
import io
import json
from pathlib import Path

import pytest
import torch
from seq2seq_samples import CPU, SMALL, toy_pairs

from fastattn.seq2seq import demo, generation, plots, runs, training
from fastattn.seq2seq.data import END, Pair, SubwordTokenizer
from fastattn.seq2seq.generation import bleu
from fastattn.seq2seq.model import ModelConfig, Seq2SeqTransformer
from fastattn.seq2seq.progress import Progress, waiting
from fastattn.seq2seq.training import TrainingConfig

TOY_PRESET = demo.Preset(
    ModelConfig(
        vocabulary=320, width=32, heads=2, encoder_layers=1, decoder_layers=2, ffn_width=64,
        dropout=0.0, max_length=32,
    ),
    TrainingConfig(
        steps=30, batch_tokens=600, learning_rate=5e-3, warmup_steps=5, valid_every=10,
        checkpoint_every=10, log_every=5,
    ),
)  # fmt: skip


def write_pairs(path: Path, pairs: list[Pair]) -> Path:
    path.write_text("".join(f"{p.source}\t{p.target}\n" for p in pairs))
    return path


def test_demo_compares_translates_and_writes_its_folder(tmp_path):
    data = write_pairs(tmp_path / "pairs.tsv", toy_pairs(400))
    out, notes = tmp_path / "run", []
    report = demo.run_demo(
        out, data=data, device=CPU, preset=TOY_PRESET, notify=notes.append, show=False
    )
    summary = json.loads((out / "summary.json").read_text())
    assert [check["passed"] for check in summary["checks"][:3]] == [True] * 3
    assert [len(run["losses"]) for run in summary["runs"].values()] == [30, 30]
    actual, expected = (run["losses"] for run in summary["runs"].values())
    assert max(plots.relative_differences(actual[:20], expected[:20])) <= 1e-4
    assert summary["text"]["test"] == 20 and summary["text"]["pairs"] == 400
    assert f"text: {data}; 400 pairs, 0 malformed lines" in notes

    header, *rows = (out / "samples.tsv").read_text().splitlines()
    assert header == "source\treference\ttranslation\tchrF"
    columns = list(zip(*(row.split("\t") for row in rows), strict=True))
    assert len(columns[0]) == 20
    assert summary["bleu"] == pytest.approx(bleu(columns[2], columns[1]).score)
    assert summary["bleu_of_source"] == pytest.approx(bleu(columns[0], columns[1]).score)
    assert report.passed == (report.bleu > report.bleu_of_source)
    # The folder is a run: its translator gives the translations that the report shows.
    sample = report.best_samples[0]
    translator = runs.load_translator(out)
    assert translator.translate([sample.source]) == [sample.translation]
    for name in ("curves", "attention-cross", "attention-encoder", "attention-decoder"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_samples_are_the_best_ones_and_a_draw_of_the_others():
    texts = [f"one two three {number}" for number in range(20)]
    samples = [
        demo.Sample(text, text, text, float(chrf)) for chrf, text in enumerate([*texts, "short"])
    ]
    best, drawn = demo._choose_samples(samples)
    assert [sample.chrf for sample in best] == [19.0, 18.0, 17.0, 16.0, 15.0]
    assert len(drawn) == 5 and not set(drawn) & {*best, samples[20]}
    equal = [demo.Sample(text, text, text, 100.0) for text in ("a b c d", "aa bb cc dd")]
    assert demo._choose_samples(equal) == ([equal[1]], [equal[0]])
    assert generation.chrf("ka lo", "ka lo") == pytest.approx(100.0)
    assert generation.chrf("ka lo", "mi mi") == 0.0


def test_attention_of_each_kind_is_drawn_with_its_tokens(monkeypatch, tmp_path):
    tokenizer = SubwordTokenizer.train(["the sheep on"], vocabulary=270)
    model = Seq2SeqTransformer(dataclasses.replace(SMALL, vocabulary=270, decoder_layers=3)).eval()
    translator = generation.Translator(model, tokenizer)
    source, target = (
        tokenizer.tokens([*tokenizer.encode(text), END]) for text in ("the sheep", "on")
    )
    maps = []
    monkeypatch.setattr(demo, "save_heat_maps", lambda *drawn: maps.append(drawn[1:]))
    for kind, tokens, layers in (
        ("cross", (target, source), 3), ("encoder", (source, source), 2),
        ("decoder", (target, ["<begin>", *target[:-1]]), 3),
    ):  # fmt: skip
        demo.draw_attention(tmp_path / "map.png", translator, "the sheep", "on", kind)
        weights, *drawn, _ = maps[-1]
        assert tuple(drawn) == tokens and len(weights) == layers
        assert [w.shape for w in weights] == [(2, len(tokens[0]), len(tokens[1]))] * layers
        for layer in weights:
            torch.testing.assert_close(layer.sum(-1), torch.ones_like(layer[..., 0]))
            assert kind != "decoder" or layer.triu(1).abs().max() == 0


def test_curves_label_their_limits_and_the_learning_rate(monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, *_, **__: figures.append(figure)
    )
    curves = {
        name: plots.Curve([2.0, 1.0 + 0.1 * index], [(2, 1.5)], learning_rates=[0.0, 0.5])
        for index, name in enumerate(("one", "other"))
    }
    plots.save_curves(tmp_path / "a.png", curves, limits=[plots.Limit(1, 2, 0.01, "limit of two")])
    loss, difference, rate = figures[0].axes
    assert loss.get_title() == "loss" and len(loss.get_legend().get_texts()) == 4
    labels = [text.get_text() for text in difference.get_legend().get_texts()]
    assert labels == ["one update", "limit of two: 0.01"]
    ((left, right),) = (path.vertices for path in difference.collections[0].get_paths())
    assert (list(left), list(right)) == ([0.5, 0.01], [2.5, 0.01])
    assert rate.get_title() == "learning rate" and list(rate.lines[0].get_ydata()) == [0.0, 0.5]


@pytest.mark.slow
def test_the_comparison_may_have_another_configuration(tmp_path):
    data = write_pairs(tmp_path / "pairs.tsv", toy_pairs(200))
    preset = dataclasses.replace(
        TOY_PRESET,
        model=dataclasses.replace(TOY_PRESET.model, dropout=0.3),
        training=dataclasses.replace(TOY_PRESET.training, steps=6, precision="bf16"),
        compared_updates=4,
    )
    report = demo.run_demo(tmp_path / "run", data=data, device=CPU, preset=preset, show=False)
    compared, main = (
        [result.losses for result in results.values()] for results in (report.compared, report.runs)
    )
    # fp32 without dropout agrees; bf16 with dropout, drawn differently, does not.
    assert [len(losses) for losses in compared] == [4, 4]
    assert compared[0] == pytest.approx(compared[1], rel=1e-4)
    assert [len(losses) for losses in main] == [6, 6]
    assert main[0] != pytest.approx(main[1], rel=1e-4)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["compared"]["torch.nn"]["losses"] == compared[1]
    assert summary["checks"][0]["name"] == "losses of the first 4 updates equal torch's"
    assert runs.open_run(tmp_path / "run").model.dropout == 0.3


def test_demo_with_other_steps_scales_its_schedule():
    shorter = demo._with_steps(demo.CPU_PRESET, demo.CPU_PRESET.training.steps // 10)
    full = demo.CPU_PRESET.training
    assert shorter.training.warmup_steps == full.warmup_steps // 10
    assert shorter.training.valid_every == full.valid_every // 10
    assert demo._with_steps(demo.GPU_PRESET, 7).compared_updates == 7


def test_demo_fails_where_the_transformers_disagree():
    def result(losses, valid):
        return training.TrainingResult(1, losses, [(len(losses), valid)], 1, 1.0, 1.0)

    same = [4.0 - 0.01 * i for i in range(40)]
    early = [*same[:10], same[10] * 1.001, *same[11:]]
    late = [*same[:20], *(1.05 * loss for loss in same[20:])]
    verdicts = {
        "same": (result(same, 3.0), [True, True, True]),
        "one early loss": (result(early, 3.0), [False, True, True]),
        "final losses": (result(late, 3.1), [True, False, False]),
    }
    for name, (torch_result, expected) in verdicts.items():
        checks = demo._compare({"fastattn.nn": result(same, 3.0), "torch.nn": torch_result})
        assert [check.passed for check in checks] == expected, name


def test_curves_are_smoothed_and_compared_by_value():
    assert plots.moving_average([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]
    assert plots.relative_differences([1.0, 2.2], [1.0, 2.0, 9.0]) == pytest.approx([0.0, 0.1])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def count_to_five(show: bool = True) -> None:
    with Progress("counting", 5, show=show, unit="sheep") as progress:
        for number in range(1, 6):
            progress.update(number, f"loss {1 / number:.2f}")
    with waiting("pondering", show=show):
        pass


def test_progress_is_live_on_a_terminal_and_sparse_elsewhere(monkeypatch, capsys):
    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr("sys.stderr", terminal)
        patch.setenv("COLUMNS", "90")
        count_to_five()
    written = terminal.getvalue()
    assert "counting" in written and "5/5" in written and "loss 0.20" in written
    assert "pondering" in written

    count_to_five()
    printed = capsys.readouterr()
    assert printed.err == "counting: 5/5 sheep  loss 0.20\npondering\n" and printed.out == ""
    monkeypatch.setattr("fastattn.seq2seq.progress.SECONDS_BETWEEN_LINES", 0.0)
    count_to_five()
    assert capsys.readouterr().err.count("sheep") == 5
    count_to_five(show=False)
    assert capsys.readouterr().err == ""
