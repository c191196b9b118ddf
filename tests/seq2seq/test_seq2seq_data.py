"""From a file of sentence pairs, or catalogues of messages, to batches:
reading, splitting, subwords, order, padding.
"""

import dataclasses
import random
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from seq2seq_samples import random_examples, toy_pairs

from fastattn.seq2seq import catalogues, runs
from fastattn.seq2seq.catalogues import CatalogueSource, TextUnavailable
from fastattn.seq2seq.data import (
    BEGIN,
    END,
    PAD,
    Example,
    Pair,
    PairFile,
    Position,
    SubwordTokenizer,
    collate,
    encode_pairs,
    plan_batches,
    read_pairs,
    sentence_key,
    split_pairs,
    training_batches,
)


def test_pair_files_report_each_malformed_line(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_bytes(
        b"\xef\xbb\xbfGo.\tVa !\tCC-BY 2.0 (France) Attribution\r\n"
        b"\n"
        b"no tab here\n"
        b"Hi.\t  \n"
        b"\tSalut.\n"
        b"bad \xff byte\tx\n"
        b"Caf\x65\xcc\x81  au\xc2\xa0lait\tUn\xe2\x80\xafcaf\xc3\xa9\n"
    )
    file = read_pairs(path)
    assert file.pairs == [Pair("Go.", "Va !"), Pair("Café au lait", "Un café")]
    assert file.problems == [
        f"{path}:3: must be source<TAB>target, got 'no tab here'",
        f"{path}:4: must be source<TAB>target, got an empty target",
        f"{path}:5: must be source<TAB>target, got an empty source",
        f"{path}:6: must be UTF-8, got byte 0xff",
    ]


# Separators of str.splitlines besides LF and CRLF.
SEPARATORS = ("\r", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029")


@pytest.mark.parametrize("separator", SEPARATORS, ids=ascii)
def test_other_separators_than_line_feeds_are_in_a_field(tmp_path, separator):
    path = tmp_path / "pairs.tsv"
    lines = [
        f"\ufeffgood{separator}morning\tbon{separator}{separator}jour\r",
        f"no{separator}tab",
        f"{separator}Go.\tVa !{separator}\tCC-BY{separator}2.0\r",
        "\ufeffa mark\tof a joined file",
        "nul\0\tx",
    ]
    path.write_bytes("\n".join(lines).encode())
    file = read_pairs(path)
    assert file.pairs == [
        Pair("good morning", "bon jour"), Pair("Go.", "Va !"), Pair("a mark", "of a joined file"),
    ]  # fmt: skip
    assert file.problems == [
        f"{path}:2: must be source<TAB>target, got 'no tab'",
        f"{path}:5: must be UTF-8 text, got byte 0x00, as in UTF-16",
    ]


def test_a_file_with_cr_alone_as_line_end_is_an_error(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_bytes(b"a\tb\rc\td\r")
    problem = f"{path}: must have lines that end with LF or CRLF, got only CR"
    assert read_pairs(path) == PairFile([], [problem])
    path.write_bytes(b"a\tb\r")
    assert read_pairs(path).pairs == [Pair("a", "b")]


@pytest.mark.parametrize("surrogate", [b"\xed\xa0\x80", b"\xed\xbf\xbf"])
def test_lone_surrogates_are_not_utf_8(tmp_path, surrogate):
    path = tmp_path / "pairs.tsv"
    path.write_bytes(b"a\rb\tc\n" + surrogate + b"\tx\n")
    file = read_pairs(path)
    assert file.pairs == [Pair("a b", "c")]
    assert file.problems == [f"{path}:2: must be UTF-8, got byte 0xed"]


def test_no_source_sentence_is_in_two_parts():
    pairs = toy_pairs(200)
    variants = [Pair(p.source.upper() + "!", p.target + " bis") for p in pairs]
    splits = split_pairs([*pairs, *variants, *pairs], held_out=20)
    keys = [{sentence_key(p.source) for p in part} for part in (splits.train, splits.valid)]
    keys.append({sentence_key(p.source) for p in splits.test})
    assert [len(k) for k in keys] == [160, 20, 20]
    assert len(keys[0] | keys[1] | keys[2]) == 200
    # Two different translations each stay in training, exact repetitions do not.
    assert len(splits.train) == 320
    # A held-out sentence keeps the first.
    assert len(splits.test) == 20 and all(not p.target.endswith("bis") for p in splits.test)


def test_sentences_without_words_differ():
    assert len({sentence_key(text) for text in ("!", "?", "...", "a", "A!")}) == 4


def test_split_depends_only_on_sentences_and_seed():
    pairs = toy_pairs(100)
    shuffled = random.Random(1).sample(pairs, len(pairs))
    first, second = split_pairs(pairs, held_out=10), split_pairs(shuffled, held_out=10)
    assert set(first.test) == set(second.test) and set(first.valid) == set(second.valid)
    assert set(first.test) != set(split_pairs(pairs, held_out=10, seed=1).test)
    # Ten more sentences push at most ten out of the held-out parts.
    grown = split_pairs(toy_pairs(110), held_out=10)
    held_out = {*first.test, *first.valid}
    assert len(held_out & {*grown.test, *grown.valid}) >= 10


def test_split_needs_enough_sentences():
    with pytest.raises(ValueError, match=r"held_out=10 .* at least 30 .* got 29"):
        split_pairs(toy_pairs(29), held_out=10)


def test_subwords_are_learnt_from_the_training_part_alone():
    pairs = toy_pairs(300)
    prepared = runs.prepare_text(pairs, held_out=30, max_length=40, vocabulary=320, show=False)
    texts = [text for pair in prepared.splits.train for text in pair]
    assert prepared.tokenizer.to_json() == SubwordTokenizer.train(texts, vocabulary=320).to_json()
    assert prepared.tokenizer.vocabulary == 320


def test_subwords_round_trip_any_text(tmp_path):
    tokenizer = SubwordTokenizer.train(["ka lo mi"] * 5, vocabulary=270)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    again = SubwordTokenizer.load(tmp_path / "tokenizer.json")
    for text in ("ka lo mi", "L'été, où ?", "日本語 🙂", "<end> <pad>"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert again.encode(text) == ids
        assert min(ids) > END
    assert tokenizer.decode([BEGIN, *tokenizer.encode("ka"), END, PAD]) == "ka"
    assert tokenizer.tokens([*tokenizer.encode("ka"), END]) == ["▁ka", "<end>"]
    with pytest.raises(ValueError, match=r"vocabulary must be at least 259 .* got 258"):
        SubwordTokenizer.train(["ka"], vocabulary=258)


def test_encoding_ends_both_sides_and_leaves_long_pairs_out():
    tokenizer = SubwordTokenizer.train(["ka lo"] * 9, vocabulary=265)
    ka, lo = tokenizer.encode("ka"), tokenizer.encode("lo")
    assert len(ka) == 1
    pairs = [Pair("ka", "lo"), Pair("ka ka ka", "lo")]
    assert encode_pairs(pairs, tokenizer, max_length=3) == [Example([*ka, END], [*lo, END])]
    assert len(encode_pairs(pairs, tokenizer)) == 2


def test_sentences_too_long_for_the_model_are_left_out():
    long = [Pair("ka lo " * n, "Lo Ka") for n in range(30, 130)]
    pairs = [*toy_pairs(100), *long, *(Pair(f"x{p.source}", p.source) for p in long)]
    prepared = runs.prepare_text(pairs, held_out=30, max_length=20, vocabulary=300, show=False)
    longest = max(len(prepared.tokenizer.encode(pair.source)) for pair in prepared.test)
    assert 0 < len(prepared.test) < 30 and longest < 20
    assert max(len(side) for example in prepared.valid for side in example) <= 20
    assert prepared.left_out == len(prepared.splits.train) - len(prepared.train) > 0
    # One with max_length tokens does not fit with END.
    encode = prepared.tokenizer.encode
    most = max(len(encode(pair.source)) for pair in prepared.splits.test)
    again = runs.prepare_text(
        pairs, held_out=30, max_length=most, vocabulary=prepared.tokenizer, show=False
    )
    assert all(len(encode(pair.source)) < most for pair in again.test)
    with pytest.raises(ValueError, match="must keep some training pairs, got 1, and all"):
        runs.prepare_text(pairs, held_out=30, max_length=1, vocabulary=300, show=False)


def test_default_held_out_is_five_percent_up_to_500():
    pairs = [Pair(f"sentence {i}", "x") for i in range(12_000)]
    assert [runs.default_held_out(pairs[:n]) for n in (3, 1000, 12_000)] == [1, 50, 500]
    repeated = [Pair(f"sentence {i % 50}", str(i)) for i in range(4000)]
    assert runs.default_held_out(repeated) == 16, "the sentences left must train something"


# -- batches ---------------------------------------------------------------------------------------
def test_batches_cover_the_epoch_within_the_budget():
    examples = random_examples(500)
    plan = plan_batches(examples, token_budget=100, seed=3, epoch=2)
    assert sorted(i for batch in plan for i in batch) == list(range(500))
    for indices in plan:
        batch = collate([examples[i] for i in indices])
        assert batch.source.numel() + batch.target_in.numel() <= 100
    assert plan == plan_batches(examples, token_budget=100, seed=3, epoch=2)
    assert plan != plan_batches(examples, token_budget=100, seed=3, epoch=3)
    assert plan != plan_batches(examples, token_budget=100, seed=4, epoch=2)
    # Length-sorted batches waste little: real tokens fill most of the padded size.
    batches = [collate([examples[i] for i in indices]) for indices in plan]
    padded = sum(batch.source.numel() + batch.target_in.numel() for batch in batches)
    assert sum(batch.tokens for batch in batches) > 0.75 * padded


def test_an_example_beyond_the_budget_is_a_batch_of_its_own():
    examples = [Example([5] * 30, [6] * 30), Example([5, END], [6, END])]
    assert sorted(plan_batches(examples, token_budget=20)) == [[0], [1]]


def test_collating_pads_on_the_right_and_shifts_the_target():
    batch = collate([Example([7, 8, END], [9, END]), Example([5, END], [6, 4, END])])
    assert batch.source.tolist() == [[7, 8, END], [5, END, PAD]]
    assert batch.source_padding.tolist() == [[False] * 3, [False, False, True]]
    assert batch.target_in.tolist() == [[BEGIN, 9, PAD], [BEGIN, 6, 4]]
    assert batch.target_out.tolist() == [[9, END, PAD], [6, 4, END]]
    assert batch.tokens == 10


def test_batches_move_with_all_they_hold(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # needs a GPU
    batch = collate([Example([5, 6, 7], [8]), Example([9], [10, 11])])
    moved = batch.to("meta")
    for field in dataclasses.fields(batch):
        here, there = getattr(batch, field.name), getattr(moved, field.name)
        if isinstance(here, torch.Tensor):
            assert there.is_meta and (there.shape, there.dtype) == (here.shape, here.dtype)
        else:
            assert there == here, field.name
    assert batch.to("cpu") is batch


def test_batches_continue_from_any_position():
    examples = random_examples(60)
    plan = plan_batches(examples, token_budget=120, seed=0)
    count = 2 * len(plan) + 3  # into the third epoch
    stream = training_batches(examples, token_budget=120, seed=0)
    whole = [next(stream) for _ in range(count)]
    assert whole[len(plan) - 1][1] == Position(1, 0)
    for stop in (1, len(plan), len(plan) + 2):
        rest = training_batches(examples, token_budget=120, seed=0, start=whole[stop - 1][1])
        for batch, position in whole[stop:]:
            again, again_position = next(rest)
            assert torch.equal(batch.source, again.source) and position == again_position


def test_no_examples_give_no_batches() -> None:
    with pytest.raises(ValueError, match="examples must hold at least one"):
        next(training_batches([], token_budget=100, seed=0))


def test_joining_characters_are_kept_and_line_breaks_removed():
    joined = "\U0001f468\u200d\U0001f469"
    texts = ["\u0645\u06cc\u200c\u062e\u0648\u0627\u0647", "co\u00adoperate", joined]
    tokenizer = SubwordTokenizer.train(texts, vocabulary=400)
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_all(texts)] == texts
    controls = tokenizer._backend.encode("a\x00b\x1bc\u2028d\x85e").ids
    assert tokenizer.decode(controls) == "a b c d e"


# -- catalogues ------------------------------------------------------------------------------------
def make_mo(entries: dict[str, str], order: str = "<") -> bytes:
    """A compiled catalogue, laid out as gettext documents it."""
    count = len(entries)
    texts = [[t.encode() for t in entries], [t.encode() for t in entries.values()]]
    offset = 28 + 16 * count
    tables, blob = b"", b""
    for column in texts:
        for text in column:
            tables += struct.pack(f"{order}2I", len(text), offset + len(blob))
            blob += text + b"\0"
    header = struct.pack(f"{order}7I", 0x950412DE, 0, count, 28, 28 + 8 * count, 0, 0)
    return header + tables + blob


@pytest.mark.parametrize("order", ["<", ">"])
def test_compiled_catalogues_are_read_in_both_byte_orders(order):
    entries = {"": "Language: fr\n", "Add": "Ajouter", "menu\x04Edit": "Éditer", "a\0b": "x\0y"}
    assert list(catalogues.read_mo(make_mo(entries, order))) == list(entries.items())[1:]


def test_other_files_are_not_catalogues():
    with pytest.raises(ValueError, match="magic number, got b'PK"):
        list(catalogues.read_mo(b"PK\x03\x04" + b"\0" * 30))


def test_default_wordings_are_read_from_comments():
    text = """\
msgid ""
msgstr "Language: fr"

#. Default: "Select a \\"file\\""
#: somewhere.py:3
msgid "label_select_file"
msgstr "Choisir"

#. Default: "A wording
#. on two lines"
msgid ""
"label_"
"long"
msgstr ""

#. Another comment
msgid "Add"
msgstr "Ajouter"
"""
    expected = {"label_select_file": 'Select a "file"', "label_long": "A wording on two lines"}
    assert catalogues.read_po_defaults(text.encode()) == expected
    dos = b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode()
    assert catalogues.read_po_defaults(dos) == expected


@pytest.mark.parametrize("separator", ["\r", "\f", "\x1c", "\x85", "\u2028"], ids=ascii)
def test_other_separators_than_line_feeds_are_in_a_message(separator):
    text = f'#. Default: "A{separator}wording"\nmsgid "label{separator}"\nmsgstr ""\n'
    assert catalogues.read_po_defaults(text.encode()) == {
        f"label{separator}": f"A{separator}wording"
    }


@pytest.mark.parametrize(("message", "translation", "expected"), [
    ("Add a person", "Ajouter un individu", Pair("Add a person", "Ajouter un individu")),
    ("_File name:", "N_om du fichier\u00a0:", Pair("File name:", "Nom du fichier :")),
    ("E_xit now", "_Quitter", Pair("Exit now", "Quitter")),
    ("&Open...", "&Ouvrir…", Pair("Open...", "Ouvrir...")),
    ("B&W outline", "Bordures noires", Pair("B&W outline", "Bordures noires")),
    ("menu\x04Edit", "Modifier", Pair("Edit", "Modifier")),
    ("label_save", "Enregistrer", Pair("Save it", "Enregistrer")),
    ("It&#39;s here", "C’est ici", Pair("It's here", "C'est ici")),
    ("one\ntwo", "un\n deux", Pair("one two", "un deux")),
    ("label_unknown", "Inconnu", "identifier"),
    ("Edit index_html", "Modifier index_html", "identifier"),
    ("%d person\0%d people", "%d individu\0%d individus", "plural forms"),
    ("%(name)s died", "%(name)s est mort", "placeholders"),
    ("Hello ${user}", "Bonjour ${user}", "placeholders"),
    ("<b>Bold</b>", "<b>Gras</b>", "markup"),
    ("Addition", "addition", "identical"),
    ("D.D4", "D.D5", "no words"),
    ("Add", "", "empty"),
    ("word " * 33, "mot", "longer than 32 words"),
])  # fmt: skip
def test_messages_become_sentences_or_a_reason(message, translation, expected):
    assert catalogues.clean_message(message, translation, {"label_save": "Save it"}) == expected


A_SOURCE = CatalogueSource(
    "toy", "1.0", "CC0-1.0", r"/fr/LC_MESSAGES/[^/]+$", "https://toy.example"
)


def fake_pip(tmp_path: Path, monkeypatch, script: str) -> Path:
    """Replace Python by a shell script that logs its arguments, one line per call."""
    log, program = tmp_path / "calls", tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho "$@" >> "{log}"\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setattr(catalogues.sys, "executable", str(program))
    return log


def offer(tmp_path: Path, monkeypatch, files: dict[str, bytes | str]) -> Path:
    """pip downloads a wheel of these files."""
    with zipfile.ZipFile(wheel := tmp_path / "toy-1.0-py3-none-any.whl", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    monkeypatch.setattr(catalogues, "SOURCES", (A_SOURCE,))
    script = f'while [ "$1" != "--dest" ]; do shift; done; cp "{wheel}" "$2"'
    return fake_pip(tmp_path, monkeypatch, script)


def test_catalogues_are_downloaded_once(tmp_path, monkeypatch, capsys):
    files = {
        "toy/fr/LC_MESSAGES/toy.mo": make_mo({"label_a": "Un", "Two": "Deux"}),
        "toy/fr/LC_MESSAGES/toy.po": '#. Default: "One"\nmsgid "label_a"\nmsgstr "Un"\n',
        "toy/de/LC_MESSAGES/toy.mo": make_mo({"Two": "Zwei"}),
        "toy/code.py": "raise SystemExit",
    }
    log = offer(tmp_path, monkeypatch, files)
    cache = tmp_path / "cache"
    for _ in range(2):
        text = catalogues.load_catalogue_pairs(cache=cache)
        assert text.pairs == [Pair("One", "Un"), Pair("Two", "Deux")]
    assert capsys.readouterr().err == "downloading toy==1.0 (CC0-1.0, https://toy.example)\n"
    (call,) = log.read_text().splitlines()
    assert call.startswith("-m pip download") and call.endswith("toy==1.0")
    assert "--no-deps" in call
    kept = sorted(p.relative_to(cache).as_posix() for p in cache.rglob("*") if p.is_file())
    assert kept == ["catalogues/toy-1.0/toy.mo", "catalogues/toy-1.0/toy.po"]


def test_a_damaged_cache_raises_or_is_filled_again(tmp_path, monkeypatch):
    offer(tmp_path, monkeypatch, {"toy/fr/LC_MESSAGES/toy.mo": make_mo({"Two": "Deux"})})
    folder = catalogues.fetch_catalogues(A_SOURCE, cache=tmp_path / "cache", show=False)
    whole = (folder / "toy.mo").read_bytes()
    for content in (b"", whole[:10], whole[:-3] + b"\xff\xff\xff", b"something else"):
        (folder / "toy.mo").write_bytes(content)
        with pytest.raises(TextUnavailable, match=r"toy\.mo is damaged .*: delete .*toy-1\.0"):
            catalogues.load_catalogue_pairs(cache=tmp_path / "cache", show=False)
    (folder / "toy.mo").rename(folder / "toy.po")
    text = catalogues.load_catalogue_pairs(cache=tmp_path / "cache", show=False)
    assert text.pairs == [Pair("Two", "Deux")]


def test_an_interrupted_extraction_leaves_nothing(tmp_path, monkeypatch):
    files = {f"toy/fr/LC_MESSAGES/{x}.mo": make_mo({f"One {x}": "Un"}) for x in "ab"}
    offer(tmp_path, monkeypatch, files)
    real = zipfile.ZipFile.read

    def crash_at_b(self, name, *arguments):
        if name.endswith("b.mo"):
            raise KeyboardInterrupt
        return real(self, name, *arguments)

    cache = tmp_path / "cache"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(zipfile.ZipFile, "read", crash_at_b)
        catalogues.fetch_catalogues(A_SOURCE, cache=cache, show=False)
    assert list((cache / "catalogues").iterdir()) == []
    folder = catalogues.fetch_catalogues(A_SOURCE, cache=cache, show=False)
    assert sorted(path.name for path in folder.iterdir()) == ["a.mo", "b.mo"]


def test_a_wheel_without_catalogues_is_named(tmp_path, monkeypatch):
    offer(tmp_path, monkeypatch, {"toy/code.py": ""})
    with pytest.raises(TextUnavailable, match=r"toy-1\.0-py3-none-any\.whl holds no French \.mo"):
        catalogues.fetch_catalogues(A_SOURCE, cache=tmp_path / "cache")


def test_the_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert catalogues.cache_folder() == tmp_path / "fastattn"
    monkeypatch.setenv("HOME", "/home/someone")
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert catalogues.cache_folder() == Path("/home/someone/.cache/fastattn")
