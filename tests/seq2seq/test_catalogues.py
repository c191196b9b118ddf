"""The default text: message catalogues, read, cleaned, downloaded once."""

import struct
import zipfile
from pathlib import Path

import pytest

from fastattn.seq2seq import catalogues
from fastattn.seq2seq.catalogues import CatalogueSource, TextUnavailable
from fastattn.seq2seq.data import (
    Pair,
)


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
    expected = {
        "label_select_file": 'Select a "file"',
        "label_long": "A wording on two lines",
    }
    assert catalogues.read_po_defaults(text.encode()) == expected
    dos = b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode()
    assert catalogues.read_po_defaults(dos) == expected


@pytest.mark.parametrize("separator", ["\r", "\f", "\x1c", "\x85", "\u2028"], ids=ascii)
def test_other_separators_than_line_feeds_are_in_a_message(separator):
    text = f'#. Default: "A{separator}wording"\nmsgid "label{separator}"\nmsgstr ""\n'
    assert catalogues.read_po_defaults(text.encode()) == {
        f"label{separator}": f"A{separator}wording"
    }


@pytest.mark.parametrize(
    ("message", "translation", "expected"),
    [
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
    ],
)
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


COPY_WHEEL = 'while [ "$1" != "--dest" ]; do shift; done; cp "{wheel}" "$2"'


def test_catalogues_are_downloaded_once(tmp_path, monkeypatch, capsys):
    wheel = tmp_path / "toy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("toy/fr/LC_MESSAGES/toy.mo", make_mo({"label_a": "Un", "Two": "Deux"}))
        archive.writestr(
            "toy/fr/LC_MESSAGES/toy.po", '#. Default: "One"\nmsgid "label_a"\nmsgstr "Un"\n'
        )
        archive.writestr("toy/de/LC_MESSAGES/toy.mo", make_mo({"Two": "Zwei"}))
        archive.writestr("toy/code.py", "raise SystemExit")
    log = fake_pip(tmp_path, monkeypatch, COPY_WHEEL.format(wheel=wheel))
    monkeypatch.setattr(catalogues, "SOURCES", (A_SOURCE,))
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
    wheel = tmp_path / "toy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("toy/fr/LC_MESSAGES/toy.mo", make_mo({"Two": "Deux"}))
    fake_pip(tmp_path, monkeypatch, COPY_WHEEL.format(wheel=wheel))
    monkeypatch.setattr(catalogues, "SOURCES", (A_SOURCE,))
    folder = catalogues.fetch_catalogues(A_SOURCE, cache=tmp_path / "cache", show=False)
    whole = (folder / "toy.mo").read_bytes()
    for content in (b"", whole[:10], whole[:-3] + b"\xff\xff\xff", b"something else"):
        (folder / "toy.mo").write_bytes(content)
        with pytest.raises(TextUnavailable, match=r"toy\.mo is damaged .*: delete .*toy-1\.0"):
            catalogues.load_catalogue_pairs(cache=tmp_path / "cache", show=False)
    (folder / "toy.mo").rename(folder / "toy.po")
    text = catalogues.load_catalogue_pairs(cache=tmp_path / "cache", show=False)
    assert text.pairs == [Pair("Two", "Deux")]


def test_offline_error_names_the_wheel(tmp_path, monkeypatch):
    fake_pip(tmp_path, monkeypatch, 'echo "ERROR: No matching distribution found" >&2; exit 1')
    with pytest.raises(TextUnavailable) as caught:
        catalogues.fetch_catalogues(A_SOURCE, cache=tmp_path / "cache")
    message = str(caught.value)
    assert "wheel of toy==1.0" in message
    assert "ERROR: No matching distribution found" in message
    assert "--data FILE.tsv" in message and "separated by a tab" in message
    assert list((tmp_path / "cache" / "catalogues").iterdir()) == []


def test_an_interrupted_extraction_leaves_nothing(tmp_path, monkeypatch):
    wheel = tmp_path / "toy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("a", "b"):
            archive.writestr(f"toy/fr/LC_MESSAGES/{name}.mo", make_mo({f"One {name}": "Un"}))
    fake_pip(tmp_path, monkeypatch, COPY_WHEEL.format(wheel=wheel))
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
    wheel = tmp_path / "toy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("toy/code.py", "")
    fake_pip(tmp_path, monkeypatch, COPY_WHEEL.format(wheel=wheel))
    with pytest.raises(TextUnavailable, match=r"toy-1\.0-py3-none-any\.whl holds no French \.mo"):
        catalogues.fetch_catalogues(A_SOURCE, cache=tmp_path / "cache")


def test_the_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert catalogues.cache_folder() == tmp_path / "fastattn"
    monkeypatch.setenv("HOME", "/home/someone")
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert catalogues.cache_folder() == Path("/home/someone/.cache/fastattn")
