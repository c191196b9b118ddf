"""Tokenizers of Hugging Face `transformers` with the interface `Tokenizer`.

A tokenizer of the package `tokenizers` is kept as such, so that a run which saved it needs no
transformers. Others, such as those of Marian and M2M100, which read SentencePiece files, are used
through transformers, and a run refers to their folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from .data import SubwordTokenizer, Tokenizer, one_line, require_unicode, tidy

# A word of most vocabularies, to see where special tokens are put.
_PROBE = "a"


@dataclass(frozen=True)
class Frame:
    """The special tokens around a sentence: those of the source and of the target; END is in
    `source_after`, and ends the target.

    forced: the tokens that searches begin with, unscored: those in `target_before` for a model that
    is told the target language, or forced by its generation configuration. skipped: tokens that
    are not part of the text.
    """

    source_before: tuple[int, ...]
    source_after: tuple[int, ...]
    target_before: tuple[int, ...]
    forced: tuple[int, ...]
    skipped: tuple[int, ...]
    end: int


class Backend(Protocol):
    """A tokenizer without special tokens."""

    @property
    def vocabulary(self) -> int: ...

    def encode(self, texts: Sequence[str], *, target: bool) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token(self, number: int) -> str: ...

    def to_json(self) -> dict[str, str]:
        """The arguments of `_load_backend`."""


class _Fast:
    """A `tokenizers.Tokenizer`."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._backend.no_padding()
        self._backend.no_truncation()
        # "</s>" in a sentence is text, not a special token.
        self._backend.encode_special_tokens = True

    @property
    def vocabulary(self) -> int:
        return self._backend.get_vocab_size()

    def encode(self, texts: Sequence[str], *, target: bool) -> list[list[int]]:
        encoded = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def token(self, number: int) -> str:
        return self._backend.id_to_token(number) or f"<{number}>"

    def to_json(self) -> dict[str, str]:
        return {"tokenizers": self._backend.to_str()}


class _Slow:
    """A tokenizer of transformers that is not one of the package `tokenizers`."""

    def __init__(self, tokenizer: Any, folder: Path, languages: dict[str, str]) -> None:
        self._tokenizer, self._folder, self._languages = tokenizer, folder, languages

    @property
    def vocabulary(self) -> int:
        return len(self._tokenizer)

    def encode(self, texts: Sequence[str], *, target: bool) -> list[list[int]]:
        if not texts:
            return []
        texts = list(texts)
        sides: dict[str, Any] = {"text_target": texts} if target else {"text": texts}
        return self._tokenizer(**sides, add_special_tokens=False)["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def token(self, number: int) -> str:
        return self._tokenizer.convert_ids_to_tokens(number)

    def to_json(self) -> dict[str, str]:
        return {"folder": str(self._folder.resolve()), **self._languages}


class PretrainedTokenizer:
    """A tokenizer of transformers, with the special tokens that its model reads."""

    def __init__(self, backend: Backend, frame: Frame) -> None:
        self._texts, self.frame = backend, frame

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> PretrainedTokenizer:
        frame = values.pop("frame")
        end = frame.pop("end")
        return cls(_load_backend(values), Frame(**{k: tuple(v) for k, v in frame.items()}, end=end))

    def to_json(self) -> str:
        return json.dumps({"frame": asdict(self.frame), **self._texts.to_json()})

    @property
    def vocabulary(self) -> int:
        return self._texts.vocabulary

    @property
    def forced(self) -> list[int]:
        return list(self.frame.forced)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of target texts, without special tokens."""
        require_unicode(texts)
        return self._texts.encode([tidy(text) for text in texts], target=True)

    def encode_sources(self, texts: Sequence[str]) -> list[list[int]]:
        require_unicode(texts)
        before, after = self.frame.source_before, self.frame.source_after
        encoded = self._texts.encode([tidy(text) for text in texts], target=False)
        return [[*before, *ids, *after] for ids in encoded]

    def encode_targets(self, texts: Sequence[str]) -> list[list[int]]:
        return [[*self.frame.target_before, *ids, self.frame.end] for ids in self.encode_all(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        skipped = {*self.frame.skipped, self.frame.end}
        return one_line(self._texts.decode([i for i in ids if i not in skipped]))

    def tokens(self, ids: Sequence[int]) -> list[str]:
        return [self._texts.token(i) for i in ids]


def load_tokenizer(path: Path) -> Tokenizer:
    """Load what `to_json` of a tokenizer returned."""
    values = json.loads(path.read_text(encoding="utf-8"))
    if "frame" in values:
        return PretrainedTokenizer.from_json(values)
    return SubwordTokenizer.load(path)


def _load_backend(values: dict[str, str]) -> Backend:
    if "tokenizers" in values:
        import tokenizers

        return _Fast(tokenizers.Tokenizer.from_str(values["tokenizers"]))
    folder = Path(values.pop("folder"))
    return _Slow(_auto_tokenizer(folder, values), folder, values)


def require_transformers(name: str) -> None:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"{name} needs the package transformers (pip install transformers): {error}"
        ) from None


def _auto_tokenizer(folder: Path, languages: dict[str, str]) -> Any:
    require_transformers("the tokenizer of a folder of transformers")
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(folder, **languages)
    except ImportError as error:
        raise ImportError(
            f"the tokenizer of {folder} needs another package, usually sentencepiece "
            f"(pip install sentencepiece): {error}"
        ) from error


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer and the decoder's first token that it prescribes, if any."""

    tokenizer: PretrainedTokenizer
    begin: int | None


def load_pretrained_tokenizer(
    folder: Path,
    *,
    source_language: str | None,
    target_language: str | None,
    forced: int | None,
    end: int,
) -> LoadedTokenizer:
    """Load the tokenizer of a folder of transformers.

    forced: the first token of every result according to the model; end: the last one.
    """
    given = {"src_lang": source_language, "tgt_lang": target_language}
    languages = {key: code for key, code in given.items() if code is not None}
    theirs = _auto_tokenizer(folder, languages)
    for key, name in (("src_lang", "source_language"), ("tgt_lang", "target_language")):
        if key in languages:
            _check_language(theirs, key, name, languages[key])
        elif hasattr(theirs, "tgt_lang") and getattr(theirs, key, None) is None:
            raise ValueError(f"{name} must be a language that the tokenizer knows, got None")
    source_before, source_after = _around(theirs, "text")
    target_before, target_after = _around(theirs, "text_target")
    for name, after in (("source", source_after), ("target", target_after)):
        if end not in after:
            raise ValueError(
                f"the tokenizer must end a {name} with eos_token_id {end}, got {list(after)}"
            )
    # mBART puts the language after END; it is the first input of the decoder.
    language_after = target_after[target_after.index(end) + 1 :]
    begin = language_after[-1] if language_after else None
    first: tuple[int, ...] = () if forced is None else (forced,)
    if getattr(theirs, "tgt_lang", None) is not None:
        first = target_before  # the language
    backend = getattr(theirs, "backend_tokenizer", None)
    unknown = {theirs.unk_token_id}
    added = (*source_before, *source_after, *target_before, *target_after)
    frame = Frame(
        source_before,
        source_after,
        target_before,
        first,
        tuple(sorted({*theirs.all_special_ids, *added} - unknown)),
        end,
    )
    texts = _Slow(theirs, folder, languages) if backend is None else _Fast(backend)
    return LoadedTokenizer(PretrainedTokenizer(texts, frame), begin)


def _check_language(tokenizer: Any, key: str, name: str, code: str) -> None:
    if not hasattr(tokenizer, key):
        raise ValueError(
            f"{name} must be None for a {type(tokenizer).__name__}, which has no languages, "
            f"got {code!r}"
        )
    known = getattr(tokenizer, "lang_code_to_id", None) or getattr(
        tokenizer, "lang_code_to_token", None
    )
    number = tokenizer.convert_tokens_to_ids(code)
    if (known is not None and code not in known) or (
        known is None and number in (None, tokenizer.unk_token_id)
    ):
        raise ValueError(f"{name} must be a language that the tokenizer knows, got {code!r}")


def _around(tokenizer: Any, side: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The special tokens that the tokenizer puts before and after a text."""
    whole = tokenizer(**{side: _PROBE})["input_ids"]
    bare = tokenizer(**{side: _PROBE}, add_special_tokens=False)["input_ids"]
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return tuple(whole[:start]), tuple(whole[start + len(bare) :])
    raise ValueError(f"the tokenizer must only add tokens at both ends, got {whole} for {bare}")
