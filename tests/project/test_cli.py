"""The command line: what it prints, where, its exit codes, and its errors for wrong input."""

import dataclasses
import io
import json
import re
from types import SimpleNamespace

import pytest
import torch
from cli_runs import TINY, TINY_PRESET, call
from cpu_library import needs_library
from subprocesses import python_output

import fastattn
from fastattn import cli
from fastattn.ops import _env, _native, backend_table
from fastattn.ops._select import BackendStatus
from fastattn.seq2seq import catalogues, demo
from fastattn.seq2seq.model import ModelConfig
from fastattn.seq2seq.training import TrainingConfig


# -- help and wrong input --------------------------------------------------------------------------
def test_help_names_every_command_and_exit_code(capsys):
    code, out, _ = call(capsys, "--help")
    assert code == 0
    words = "demo", "train", "translate", "evaluate", "info", "check"
    for word in (*words, "exit codes", "130 interrupted"):
        assert word in out
    code, out, _ = call(capsys)
    assert code == 2 and "commands" in out


@pytest.mark.parametrize("command", ["demo", "train", "translate", "evaluate", "info", "check"])
def test_every_option_of_a_command_has_help(capsys, command):
    code, out, _ = call(capsys, command, "--help")
    assert code == 0 and "==SUPPRESS==" not in out
    options = re.findall(r"^  (--[\w-]+)(.*(?:\n {4,}.*)*)", out, flags=re.MULTILINE)
    assert options
    for name, rest in options:
        described = re.sub(r"^(,? ?-*[A-Z_\[\]{}.,a-z0-9-]+)?\s*", "", rest, count=1)
        assert re.search(r"[a-z]{2}", described), name


def test_demo_help_states_the_steps_of_its_presets(capsys):
    _, out, _ = call(capsys, "demo", "--help")
    steps = [p.training.steps for p in (demo.CPU_PRESET, demo.GPU_PRESET)]
    assert f"default: {steps[0]} on a CPU, {steps[1]} on a GPU" in " ".join(out.split())


def test_version(capsys):
    assert call(capsys, "--version") == (0, f"fastattn {fastattn.__version__}\n", "")


def test_help_imports_nothing_that_only_commands_need():
    heavy = ("tokenizers", "sacrebleu", "matplotlib", "rich", "triton", "fastattn.seq2seq",
             "fastattn.testing")  # fmt: skip
    code = (
        "import sys; from fastattn import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    assert python_output("-c", code).splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--out=x", "--steps=0"], "--steps: must be a positive integer, got '0'"),
        (["train", "--out=x", "--width=1.5"], "--width: must be a positive integer, got '1.5'"),
        (["train", "--out=x", "--dropout=1"], "--dropout: must be a number in [0, 1), got '1'"),
        (["train", "--out=x", "--learning-rate=-1"], "must be a positive number, got '-1'"),
        (["train", "--out=x", "--warmup-steps=-1"], "must be an integer of at least 0, got '-1'"),
        (["train", "--out=x", "--data=nowhere"], "--data: must be an existing file, got 'nowhere'"),
        (["train"], "the following arguments are required: --out"),
        (["translate", "ka"], "the following arguments are required: --run"),
        (["demo", "--steps=many"], "--steps: must be a positive integer, got 'many'"),
        (["info", "--device=abacus"], "--device: must be cpu, cuda or cuda:NUMBER, got 'abacus'"),
        (["check", "--device=gpu"], "--device: must be cpu, cuda or cuda:NUMBER, got 'gpu'"),
        (["info", "--device=meta"], "--device: must be a device that torch can use here, such as"),
        (["train", "--out=x", "--precision=fp8"], "argument --precision: invalid choice: 'fp8'"),
        (["train", "--out=x", "--norm=group"], "argument --norm: invalid choice: 'group'"),
        (["train", "--out=x", "--accumulate=0"], "--accumulate: must be a positive integer"),
        (["train", "--out=x", "--truth-floor=2"], "must be a number in [0, 1], got '2'"),
        (["train", "--out=x", "--guided-attention=-1"], "must be a number of at least 0, got '-1'"),
        (["translate", "--run=x", "--top-k=0"], "--top-k: must be a positive integer, got '0'"),
        (["translate", "--run=x", "--top-k=3"], "--top-k needs --sample, got 3"),
        (["translate", "--run=x", "--length-penalty=1"], "--length-penalty needs --beams"),
        (["translate", "--run=x", "--attention-of=cross"], "--attention-of needs --attention"),
        (["evaluate", "x", "--beams=2", "--sample"], "--sample must be given without --beams"),
        (["translate", "--run=x", "--sample", "--top-p=0"], "top_p must lie in (0, 1], got 0.0"),
        (["check", "--json="], "argument --json: must be a file, got ''"),
        (["train", "--out="], "--out: must be a folder, got ''"),
        (["paint"], "invalid choice: 'paint'"),
    ],
)
def test_wrong_arguments_are_named(capsys, arguments, message):
    code, out, err = call(capsys, *arguments)
    assert code == 2 and out == ""
    assert message in err
    # One line, and one that names --help where argparse has found the error.
    assert len(err.splitlines()) <= 2 and max(map(len, err.splitlines())) < 200


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--out=FILE/run"],
        ["train", "--resume", "--out=FILE"],
        ["train", "--out=/proc/run"],
        ["demo", "--out=FILE/run"],
        ["translate", "--run=x", "--attention=FILE/map.png", "ka"],
        ["translate", "--run=x", "--attention=nowhere/map.svg", "ka"],
        ["check", "--json=FILE/rows.json"],
    ],
)
def test_what_cannot_be_written_fails_first(capsys, tmp_path, arguments):
    (tmp_path / "file").touch()
    given = [word.replace("FILE", str(tmp_path / "file")) for word in arguments]
    code, out, err = call(capsys, *given)
    assert code == 2 and out == "" and len(err.splitlines()) == 2
    assert re.search(
        r"argument --\w+: must be a (folder|file) that can be written, got '.+' \(", err
    )


def test_a_default_folder_that_cannot_be_written_fails_first(capsys, tmp_path, monkeypatch):
    (tmp_path / "runs").touch()
    monkeypatch.chdir(tmp_path)
    code, _, err = call(capsys, "demo", "--device=cpu")
    assert code == 2 and "--out must be a folder that can be written, got runs/demo-" in err


def test_one_of_something_has_no_plural(capsys, tmp_path):
    data = tmp_path / "pairs.tsv"
    data.write_text("ka\tKA\nlo\tLO\nmi\tMI\n")
    arguments = ["--data", str(data), "--out", str(tmp_path / "run"), "--steps=1", *TINY]
    code, _, err = call(capsys, "train", *arguments, "--held-out=1")
    assert code == 0 and "\n1 training pair (0 too long and skipped), 1 for validation" in err
    data.write_text("ka")
    code, _, err = call(capsys, "train", *arguments[:2], "--out", str(tmp_path / "none"))
    assert code == 2 and "got 1 line without them" in err


def test_wrong_choices_are_named_before_anything_is_written(capsys, pairs_file, tmp_path):
    cases = {
        ("--heads=3",): "heads must divide width 16, got 3",
        ("--vocabulary=100",): "vocabulary must be at least 259",
        ("--held-out=40",): "needs at least 120 different source sentences, got 60",
        ("--max-length=1",): "max_length must keep some training pairs, got 1",
        ("--decoder=non-autoregressive", "--scheduled-sampling=parallel"): (
            "scheduled_sampling must be 'none' for a non-autoregressive decoder"
        ),
    }
    command = ["train", "--data", str(pairs_file), "--out", str(tmp_path / "run"), *TINY]
    for extra, message in cases.items():
        code, out, err = call(capsys, *command, *extra)
        assert (code, out) == (2, "") and message in err, extra
        assert not (tmp_path / "run").exists()


def test_a_file_without_pairs_is_named(capsys, tmp_path):
    path = tmp_path / "prose.txt"
    path.write_text("one\ntwo\nthree\n")
    code, _, err = call(capsys, "train", "--data", str(path), "--out", str(tmp_path / "run"))
    assert code == 2
    assert f"skipped: {path}:2: must be source<TAB>target, got 'two'" in err
    assert "--data must hold lines of source<TAB>target, got 3 lines without them" in err


def test_the_default_text_without_a_network_has_its_own_exit_code(capsys, tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "ERROR: No matching distribution" >&2\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setattr(catalogues.sys, "executable", str(program))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for command in ("demo", "train"):
        code, out, err = call(capsys, command, "--out", str(tmp_path / "run"), "--device=cpu")
        assert (code, out) == (3, "")
        assert "gramps==6.0.8" in err and "--data FILE.tsv" in err and "No matching" in err
        assert not (tmp_path / "run").exists()


# train and translate


def test_training_reports_as_json(capsys, pairs_file, tmp_path):
    run = tmp_path / "run"
    code, out, err = call(
        capsys, "train", "--data", str(pairs_file), "--out", str(run), "--steps=4", "--json", *TINY
    )
    assert code == 0
    outcome = json.loads(out)
    assert outcome["run"] == str(run) and outcome["updates"] == 4
    assert outcome["tokens_per_second"] > 0
    assert 0.0 <= outcome["bleu"] <= 100.0
    assert f"skipped: {pairs_file}:61: must be source<TAB>target, got 'a line without a tab'" in err
    assert "50 training pairs (0 too long and skipped), 5 for validation, 5 for the test" in err
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4]


def test_a_run_is_not_overwritten_and_continues_with_its_own_text(
    capsys, pairs_file, run_folder, tmp_path
):
    before = (run_folder / "metrics.jsonl").read_text()
    base = ["train", "--out", str(run_folder), "--device=cpu"]
    code, _, err = call(capsys, *base, "--data", str(pairs_file))
    assert code == 2 and "--out: the run folder must be new or empty, got" in err
    assert "continue it with --resume" in err
    code, _, err = call(capsys, *base, "--resume", "--data", str(pairs_file), "--width=9")
    assert code == 2 and "--width cannot be given with --resume" in err and "got 9" in err
    code, _, err = call(capsys, *base, "--resume", "--data", str(pairs_file), "--steps=5")
    assert code == 2 and "steps must be at least the run's 6, got 5" in err
    other = tmp_path / "other.tsv"
    other.write_text(pairs_file.read_text().replace("karin", "karun"))
    code, _, err = call(capsys, *base, "--resume", "--data", str(other))
    assert code == 2 and "--data must be the text that" in err
    assert (run_folder / "metrics.jsonl").read_text() == before
    # Resuming a finished run repeats nothing.
    code, out, _ = call(capsys, *base, "--resume", "--data", str(pairs_file))
    assert code == 0 and "test BLEU" in out
    assert (run_folder / "metrics.jsonl").read_text() == before


def test_translating_arguments_and_standard_input(capsys, run_folder, monkeypatch, tmp_path):
    base = ["translate", "--run", str(run_folder), "--device=cpu"]
    code, out, err = call(capsys, *base, "karin six", "lotal one")
    assert code == 0 and err == ""
    lines = out.splitlines()
    assert len(lines) == 2
    monkeypatch.setattr("sys.stdin", io.StringIO("karin six\nlotal one\n"))
    assert call(capsys, *base) == (0, out, "")
    code, out, _ = call(capsys, *base, "--json", "karin six")
    ((score, translation),) = [(row["score"], row["translation"]) for row in json.loads(out)]
    assert translation == lines[0] and score < 0
    code, out, _ = call(capsys, *base, "--scores", "karin six", "lotal one")
    assert out.splitlines()[0] == f"{score:.4f}\t{lines[0]}" and len(out.splitlines()) == 2
    picture = tmp_path / "attention.png"
    code, _, _ = call(capsys, *base, "--attention", str(picture), "karin six")
    assert code == 0 and picture.read_bytes().startswith(b"\x89PNG")
    cross = picture.read_bytes()
    code, _, _ = call(
        capsys, *base, "--attention", str(picture), "--attention-of=encoder", "karin six"
    )
    assert code == 0 and picture.read_bytes() != cross


def test_translating_by_beams_by_samples_and_from_a_prefix(capsys, run_folder):
    base = ["translate", "--run", str(run_folder), "--device=cpu", "--scores"]
    texts = ["karin six", "lotal one", "mivek two"]

    def search(*options: str) -> list[tuple[float, str]]:
        code, out, err = call(capsys, *base, *options, *texts)
        assert code == 0, err
        rows = [line.split("\t") for line in out.splitlines()]
        return [(float(score), text) for score, text in rows]

    greedy = search()
    assert search("--sample", "--top-k=1") == greedy
    assert search("--beams=1", "--length-penalty=0") == greedy
    beams = search("--beams=4", "--length-penalty=0")
    assert sum(score for score, _ in beams) > sum(score for score, _ in greedy)
    assert search("--beams=4", "--length-penalty=0", "--early-stopping") != greedy
    drawn = search("--sample", "--seed=3", "--temperature=1.5", "--top-p=0.99")
    assert drawn == search("--sample", "--seed=3", "--temperature=1.5", "--top-p=0.99") != greedy
    assert all(text.startswith("LOTAL") for _, text in search("--prefix=LOTAL"))


def test_every_choice_of_training_reaches_the_run_and_runs_are_compared(
    capsys, pairs_file, tmp_path
):
    model = {
        "norm": "power", "scoring": "cosine", "memory_layers": "same", "copy": True,
        "decoder": "autoregressive", "length": "end",
    }  # fmt: skip
    training = {
        "accumulate": 2, "patience": 7, "scheduled_sampling": "parallel",
        "sampling_decay": "exponential", "truth_floor": 0.25, "guided_attention": 0.5,
        "guided_width": 0.3, "sequence_steps": 1, "sequence_weight": 0.75,
    }  # fmt: skip
    flags = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in (model | training).items()
    ]
    base = ["train", "--data", str(pairs_file), "--steps=3", "--valid-every=1", *TINY]
    first, second = tmp_path / "first", tmp_path / "second"
    code, _, err = call(capsys, *base, "--out", str(first), "--bleu-sentences=3", *flags)
    assert code == 0, err
    rows = [json.loads(line) for line in (first / "metrics.jsonl").read_text().splitlines()]
    scores = [row["valid_bleu"] for row in rows if "valid_loss" in row]
    assert len(scores) == 3 and all(0.0 <= score <= 100.0 for score in scores)
    assert (first / "curves.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((first / "model.json").read_text())
    assert {name: written[name] for name in model} == model
    assert written["norm_first"] and written["tied"]
    written = json.loads((first / "training.json").read_text())
    assert {name: written[name] for name in training} == training
    code, out, err = call(
        capsys, *base, "--out", str(second), "--decoder=non-autoregressive", "--post-norm",
        "--untied", "--json",
    )  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["stopped_early"] is False
    written = json.loads((second / "model.json").read_text())
    assert not written["norm_first"] and not written["tied"]

    compare = ["evaluate", str(first), str(second), "--data", str(pairs_file), "--device=cpu"]
    code, out, err = call(capsys, *compare, "--beams=2", "--json")
    assert code == 0, err
    rows = json.loads(out)
    assert [row["search"] for row in rows] == ["2 beams", "parallel"]
    assert all(row["sentences"] == 5 and row["sentences_per_second"] > 0 for row in rows)
    code, out, _ = call(capsys, *compare)
    header, *lines = out.splitlines()
    assert code == 0 and len(lines) == 2 and header.split() == [
        "run", "decoder", "search", "sentences", "BLEU", "source", "sentences/s"
    ]  # fmt: skip
    assert f"{second}  non-autoregressive (predictor)  parallel" in lines[1]
    for flag in ("--beams=2", "--sample", "--prefix=ka"):
        code, out, err = call(
            capsys, "translate", "--run", str(second), "--device=cpu", flag, "karin"
        )
        assert code == 2 and not out
        assert f"{flag.partition('=')[0]} cannot be given for a run whose decoder writes all" in err


def test_translating_needs_a_run_and_short_texts(capsys, run_folder, tmp_path):
    for command in (("translate", "ka", "--run"), ("train", "--resume", "--out")):
        code, _, err = call(capsys, *command, str(tmp_path))
        assert code == 2 and f"got {tmp_path}, which has no model.json" in err
    code, _, err = call(
        capsys, "translate", "--run", str(run_folder), "--device=cpu", "karin " * 30
    )
    assert code == 2 and "text 1 must have at most 23 tokens, got" in err


def test_diverged_training_is_an_error(capsys, pairs_file, tmp_path, monkeypatch):
    from fastattn.seq2seq import training

    def not_a_number(*_):
        return torch.tensor(float("nan")), torch.tensor(1.0)

    monkeypatch.setattr(training, "update", not_a_number)
    code, out, err = call(
        capsys, "train", "--data", str(pairs_file), "--out", str(tmp_path / "run"), *TINY
    )
    assert (code, out) == (1, "")
    assert "the loss must stay finite, got nan at update 1: lower the learning rate" in err
    assert not (tmp_path / "run" / "checkpoints").exists()


# info and check


@pytest.mark.parametrize("family, model, name", [
    (26, "AMD EPYC", "AMD EPYC, family 26"),
    (26, "AMD EPYC 9654 96-Core", "AMD EPYC 9654 96-Core"),
    (6, "Intel(R) Xeon(R) Processor", "Intel(R) Xeon(R) Processor, family 6, model 17"),
])  # fmt: skip
def test_cpus_with_a_generic_name_show_their_family(family, model, name, monkeypatch, tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text(f"cpu family\t: {family}\nmodel\t\t: 17\nmodel name\t: {model}\n")
    opened = open
    monkeypatch.setattr("builtins.open", lambda path, *rest: opened(file, *rest))
    assert _env.device_name(torch.device("cpu")) == name


def test_info_reports_the_backend_table(capsys):
    code, out, _ = call(capsys, "info", "--json", "--device=cpu")
    assert code == 0
    report = json.loads(out)
    cpu = torch.device("cpu")
    assert report["fastattn"] == fastattn.__version__
    assert report["versions"] == _env.versions()
    assert report["device_name"] == _env.device_name(cpu)
    rows = [dataclasses.asdict(row) for row in backend_table(cpu)]
    assert report["backends"] == json.loads(json.dumps(rows))
    code, out, _ = call(capsys, "info", "--device=cpu", "--verbose")
    assert code == 0
    for row in backend_table(cpu):
        cells = rf"^{row.op} +{row.backend} +{'yes' if row.available else 'no'} "
        line = re.search(cells + ".*$", out, flags=re.MULTILINE)
        assert line is not None and row.reason in line[0]


def test_info_has_a_line_for_each_op(capsys, monkeypatch):
    def row(backend, available, reason, automatic, automatic_for=()):
        return BackendStatus("attention", backend, available, reason, automatic, automatic_for)

    rows = [
        row("sm90", False, "needs a GPU", False),
        row("triton", True, "", False, ("bf16", "fp16")),
        row("cuda", False, "needs a GPU", False),
        row("cpu", True, "", False),
        row("torch", True, "", True),
        dataclasses.replace(row("cpu", True, "", False), op="ffn"),
    ]
    monkeypatch.setattr(fastattn.ops, "backend_table", lambda device: rows)
    _, out, _ = call(capsys, "info", "--device=cpu")
    assert (
        "\nattention: triton (bf16, fp16), then torch; on request cpu; "
        "unavailable sm90, cuda (needs a GPU)\nffn: none is chosen; on request cpu\n"
    ) in out
    monkeypatch.undo()
    _, out, _ = call(capsys, "info", "--device=cpu")
    ops = [
        line.partition(":")[0] for line in out.split("tried:\n\n")[1].split("\n\n")[0].split("\n")
    ]
    assert ops == list(dict.fromkeys(row.op for row in backend_table(torch.device("cpu"))))


@needs_library
def test_info_shows_the_instruction_set_in_use(capsys):
    used = _native.usable_cpu_isas()[-1]
    assert json.loads(call(capsys, "info", "--json", "--device=cpu")[1])["instruction_set"] == used
    _native.use_cpu_isa("portable")
    try:
        _, out, _ = call(capsys, "info", "--device=cpu")
    finally:
        _native.use_cpu_isa(used)
    assert "\nThe CPU kernels use the instruction set portable\n" in out


def test_info_shows_what_runs_without_the_cpu_library(capsys, monkeypatch):
    monkeypatch.setattr(_native, "unavailable", lambda library: "needs a compiler")
    _, out, _ = call(capsys, "info", "--device=cpu")
    assert "\nOps on the CPU run PyTorch's operators: backend cpu needs a compiler\n" in out


def test_check_passes_its_options_and_returns_its_exit_code(capsys, monkeypatch):
    from fastattn.testing import check

    seen = []

    def run(options):
        seen.append((options.op, options.quick))
        return 1

    monkeypatch.setattr(check, "run", run)
    assert call(capsys, "check", "--op=ffn", "--quick")[0] == 1
    assert seen == [(["ffn"], True)]


# demo


def test_demo_prints_its_results(capsys, pairs_file, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "CPU_PRESET", TINY_PRESET)
    base = ["demo", "--data", str(pairs_file), "--steps=2", "--device=cpu"]
    code, out, err = call(capsys, *base, "--out", str(tmp_path / "a"))
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert code == 0 and summary["passed"]
    assert f"Held-out BLEU: {summary['bleu']:.1f}" in out
    assert f"BLEU of the untranslated source: {summary['bleu_of_source']:.1f} (not judged" in out
    for name, run in summary["runs"].items():
        assert re.search(rf"{re.escape(name)} .* {run['tokens_per_second']:,}", out)
    for sample in (summary["best_samples"][0], summary["samples"][0]):
        assert sample["source"] in out
    assert "Held-out sentences, closest to their references" in out and "drawn at random" in out
    assert f"Try it: fastattn translate --run {tmp_path / 'a'}" in out
    assert "54 training pairs" in err

    monkeypatch.setattr(demo, "FIRST_UPDATES_LIMIT", -1.0)
    code, out, _ = call(capsys, *base, "--json", "--out", str(tmp_path / "b"))
    assert code == 1 and json.loads(out)["passed"] is False
    code, _, err = call(capsys, *base, "--out", str(tmp_path / "b"))
    assert code == 2 and "must be new or empty" in err


def test_every_option_of_train_is_a_field_or_has_another_name():
    choices = cli.make_parser(["train"]).parse_args(["train", "--out=x"]).fixed_options
    fields = {
        field.name for kind in (ModelConfig, TrainingConfig) for field in dataclasses.fields(kind)
    }
    translated = {"layers", "post_norm", "untied", "held_out"}
    assert set(choices) - fields == translated


# -- the demo on a GPU -----------------------------------------------------------------------------
@pytest.mark.parametrize("broken", [None, "torch", "triton", "unreached"])
def test_the_demo_says_which_kernels_train(broken, monkeypatch, capsys, tmp_path):
    """After the quick form of the check; it trains no model by kernels that fail."""
    from fastattn.cli import demo as command
    from fastattn.testing import check

    def check_samples(options, device):
        assert options.quick and options.seconds and not options.record
        assert options.dtype == ["fp32", "bf16"] and "reference" not in options.backend
        statuses = {name: "FAIL" if name == broken else "ok" for name in ("torch", "triton")}
        if broken == "unreached":  # there was no time
            statuses["torch"] = "skipped"
        return [
            check.Row(op, name, "cuda", "bf16", "plain", "out", status)
            for op in options.op
            for name, status in statuses.items()
        ]

    cpu, ran = torch.device("cpu"), []
    monkeypatch.setattr(check, "check_samples", check_samples)
    monkeypatch.setattr(command, "chosen_device", lambda options: torch.device("cuda"))
    monkeypatch.setattr(command, "_calls", lambda device, calls=command._calls: calls(cpu))
    monkeypatch.setattr(
        "fastattn.explain", lambda op, *call: SimpleNamespace(chosen="torch" if call else None)
    )
    monkeypatch.setattr("fastattn.ops.backend_table", lambda device: backend_table(cpu))
    monkeypatch.setattr(
        "fastattn.seq2seq.demo.run_demo", lambda *_, **__: ran.append(1) or SimpleNamespace(
            summary=dict, passed=True
        )
    )  # fmt: skip
    code, out, err = call(capsys, "demo", "--json", "--out", str(tmp_path / "run"))
    assert out in ("", "{}\n")
    assert (code, len(ran)) == ((1, 0) if broken == "torch" else (0, 1))
    assert ("ffn: trained by backend torch, which FAILED" in err) == (broken == "torch")
    assert ("ffn: trained by backend torch, which was not" in err) == (broken == "unreached")
    assert ("FASTATTN_BACKEND=torch trains" in err) == (broken == "torch")
    assert ("wrong here: triton" in err) == (broken == "triton")
    assert ("right in these samples: triton" in err) == (broken != "triton")
