"""From sentence pairs to batches: reading, splitting, subwords, batches of similar length.

A pair file is tab-separated text, one pair per line, like Tatoeba's `fra.txt`: source, target, and
any further columns, which are ignored. Lines end with LF or CRLF; other line separators are
whitespace within a sentence. The split depends only on the sentences and the seed, and
no source sentence (ignoring case and punctuation) is in two parts. Subwords are byte-level BPE over
both languages, trained on the training part only. Batches hold about the same number of tokens, and
their order is a pure function of seed and epoch, so that training can continue from any position.
"""

from __future__ import annotations

import hashlib
import random
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    import tokenizers

PAD, BEGIN, END = 0, 1, 2
NEVER_CHOSEN = slice(END)  # the tokens that no search chooses: PAD and BEGIN
SPECIAL_TOKENS = ("<pad>", "<begin>", "<end>")
BYTES = 256
MINIMUM_VOCABULARY = len(SPECIAL_TOKENS) + BYTES
MAXIMUM_VOCABULARY = 1 << 24  # the trainer allocates for all of them


_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # includes all line ends


class Pair(NamedTuple):
    source: str
    target: str


class Example(NamedTuple):
    """A pair as token ids; both sides end with END, BEGIN is added when batches are made."""

    source: list[int]
    target: list[int]


# Reading


@dataclass(frozen=True)
class PairFile:
    """The pairs of a file, and an error message for each line that holds none."""

    pairs: list[Pair]
    problems: list[str]


def read_pairs(path: Path | str) -> PairFile:
    """Read tab-separated sentence pairs; a line without two non-empty columns is a problem."""
    path = Path(path)
    pairs, problems = [], []
    data = path.read_bytes()
    if b"\r" in data.rstrip(b"\r") and b"\n" not in data:
        return PairFile([], [f"{path}: must have lines that end with LF or CRLF, got only CR"])
    for number, line in enumerate(split_lines(data), start=1):
        if not line.strip():
            continue
        try:
            columns = [tidy(column) for column in line.decode("utf-8-sig").split("\t")]
        except UnicodeDecodeError as error:
            problems.append(f"{path}:{number}: must be UTF-8, got byte {line[error.start]:#04x}")
            continue
        if b"\0" in line:
            problems.append(f"{path}:{number}: must be UTF-8 text, got byte 0x00, as in UTF-16")
        elif len(columns) < 2:
            got = _shorten(columns[0])
            problems.append(f"{path}:{number}: must be source<TAB>target, got {got}")
        elif not columns[0] or not columns[1]:
            side = "target" if columns[0] else "source"
            problems.append(f"{path}:{number}: must be source<TAB>target, got an empty {side}")
        else:
            pairs.append(Pair(columns[0], columns[1]))
    return PairFile(pairs, problems)


def split_lines(data: bytes) -> list[bytes]:
    """Return the lines of a file without their ends, LF or CRLF.

    `str.splitlines` also splits at a lone CR, a form feed, U+2028 and others.
    """
    return [line.removesuffix(b"\r") for line in data.split(b"\n")]


def tidy(text: str) -> str:
    """Return `text` in Unicode NFC with every run of whitespace as one space."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def _shorten(text: str, width: int = 40) -> str:
    return repr(text if len(text) <= width else text[: width - 3] + "...")


# Splitting


@dataclass(frozen=True)
class Splits:
    train: list[Pair]
    valid: list[Pair]
    test: list[Pair]


def split_pairs(pairs: Iterable[Pair], *, held_out: int, seed: int = 0) -> Splits:
    """Split into training, validation and test pairs, the last two of `held_out` sentences each.

    Sources that differ only in case, punctuation or spaces count as one sentence and stay
    together. A held-out sentence keeps only its first translation, a training sentence all distinct
    ones. The hash of a sentence with the seed decides its part, so adding pairs to a file moves few
    of the existing ones.
    """
    groups: dict[str, dict[Pair, None]] = {}
    for pair in pairs:
        groups.setdefault(sentence_key(pair.source), {})[pair] = None
    if held_out < 1:
        raise ValueError(f"held_out must be at least 1, got {held_out}")
    if len(groups) < 3 * held_out:
        raise ValueError(
            f"held_out={held_out} for validation and test needs at least {3 * held_out} "
            f"different source sentences, got {len(groups)}"
        )
    keys = sorted(groups, key=lambda key: hashlib.sha256(f"{seed}\n{key}".encode()).digest())
    test, valid = keys[:held_out], keys[held_out : 2 * held_out]
    return Splits(
        train=[pair for key in keys[2 * held_out :] for pair in groups[key]],
        valid=[next(iter(groups[key])) for key in valid],
        test=[next(iter(groups[key])) for key in test],
    )


def sentence_key(text: str) -> str:
    """Return the same key for sentences that differ only in case, punctuation or spaces."""
    words = re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(words) or text


# Subwords


class SubwordTokenizer:
    """Byte-level BPE of both languages, so that no text is out of vocabulary."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        # "<end>" in a sentence is text, not a special token.
        self._backend.encode_special_tokens = True

    @classmethod
    def train(cls, texts: Iterable[str], *, vocabulary: int) -> SubwordTokenizer:
        """Learn at most `vocabulary` subwords, special tokens and single bytes included."""
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

        if not MINIMUM_VOCABULARY <= vocabulary <= MAXIMUM_VOCABULARY:
            raise ValueError(
                f"vocabulary must be at least {MINIMUM_VOCABULARY} (the bytes and the special "
                f"tokens) and at most {MAXIMUM_VOCABULARY:,}, got {vocabulary}"
            )
        backend = Tokenizer(models.BPE())
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer=trainer)
        return cls(backend)

    @classmethod
    def load(cls, path: Path | str) -> SubwordTokenizer:
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_file(str(path)))

    def to_json(self) -> str:
        return self._backend.to_str()

    @property
    def vocabulary(self) -> int:
        return self._backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without BEGIN or END."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        require_unicode(texts)
        encoded = self._backend.encode_batch([tidy(t) for t in texts], add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def encode_sentences(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of `texts` with END."""
        return [[*ids, END] for ids in self.encode_all(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return token ids as one line of text, without special tokens or control characters."""
        return one_line(self._backend.decode(list(ids), skip_special_tokens=True))

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the readable form of each token, a leading space shown as `▁`."""
        return [SPECIAL_TOKENS[i] if i < len(SPECIAL_TOKENS) else self._readable(i) for i in ids]

    def _readable(self, token: int) -> str:
        text = self._backend.decode([token], skip_special_tokens=False)
        return "▁" + text[1:] if text.startswith(" ") else text


def require_unicode(texts: Sequence[str]) -> None:
    for number, text in enumerate(texts, start=1):
        try:
            text.encode()
        except UnicodeEncodeError:  # a surrogate, which Python decodes invalid bytes to
            raise ValueError(f"text {number} must be UTF-8, got {text[:60]!a}") from None
        if "\0" in text:
            raise ValueError(f"text {number} must be UTF-8 text, got byte 0x00, as in UTF-16")


def one_line(text: str) -> str:
    """Return `text` without control characters and with single spaces."""
    return " ".join(_CONTROLS.sub(" ", text).split())


def encode_pairs(
    pairs: Sequence[Pair], tokenizer: SubwordTokenizer, *, max_length: int | None = None
) -> list[Example]:
    """Encode pairs, END included; pairs with a side longer than `max_length` are skipped."""
    sources = tokenizer.encode_sentences([pair.source for pair in pairs])
    targets = tokenizer.encode_sentences([pair.target for pair in pairs])
    examples = [Example(source, target) for source, target in zip(sources, targets, strict=True)]
    if max_length is None:
        return examples
    return [e for e in examples if max(len(e.source), len(e.target)) <= max_length]


# Batches


@dataclass(frozen=True)
class Batch:
    """Padded token ids: the decoder reads `target_in` (BEGIN first), the loss `target_out`."""

    source: Tensor  # [B, S] int64
    source_padding: Tensor  # [B, S] bool, True = padding, as torch.nn's key_padding_mask
    target_in: Tensor  # [B, T] int64
    target_out: Tensor  # [B, T] int64
    tokens: int  # real tokens of source and target_out
    source_lengths: tuple[int, ...] = ()  # real tokens of each row, for packed execution
    target_lengths: tuple[int, ...] = ()

    def to(self, device: torch.device | str) -> Batch:
        if torch.device(device).type == "cpu":
            return self

        def move(tensor: Tensor) -> Tensor:
            return tensor.pin_memory().to(device, non_blocking=True)

        return replace(
            self,
            source=move(self.source),
            source_padding=move(self.source_padding),
            target_in=move(self.target_in),
            target_out=move(self.target_out),
        )


def collate(examples: Sequence[Example]) -> Batch:
    source = pad([e.source for e in examples])
    return Batch(
        source=source,
        source_padding=source == PAD,
        target_in=pad([[BEGIN, *e.target[:-1]] for e in examples]),
        target_out=pad([e.target for e in examples]),
        tokens=sum(len(e.source) + len(e.target) for e in examples),
        source_lengths=tuple(len(e.source) for e in examples),
        target_lengths=tuple(len(e.target) for e in examples),
    )


def pad(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return the rows as one int64 tensor, padded with PAD on the right."""
    width = max(map(len, rows))
    filled = [[*row, *[PAD] * (width - len(row))] for row in rows]
    return torch.tensor(filled, dtype=torch.long, device="cpu")


def plan_batches(
    examples: Sequence[Example], *, token_budget: int, seed: int | None = None, epoch: int = 0
) -> list[list[int]]:
    """Return the batches of one epoch as lists of indices into `examples`.

    Examples of similar length share a batch; its padded size, source and target together, stays
    within `token_budget` unless a single example exceeds it. With a seed, examples of equal length
    and the batches are shuffled, differently in each epoch; without, the order is by length.
    """
    order = list(range(len(examples)))
    shuffler = None if seed is None else random.Random(f"{seed} {epoch}")
    if shuffler is not None:
        shuffler.shuffle(order)
    order.sort(key=lambda i: (len(examples[i].target), len(examples[i].source)))
    batches: list[list[int]] = []
    source_width = target_width = 0
    for index in order:
        source_length, target_length = map(len, examples[index])
        wider = (max(source_width, source_length), max(target_width, target_length))
        if not batches or (len(batches[-1]) + 1) * sum(wider) > token_budget:
            batches.append([])
            wider = (source_length, target_length)
        batches[-1].append(index)
        source_width, target_width = wider
    if shuffler is not None:
        shuffler.shuffle(batches)
    return batches


class Position(NamedTuple):
    """The position of training in the data: the next batch is number `batch` of `epoch`."""

    epoch: int = 0
    batch: int = 0


def training_batches(
    examples: Sequence[Example],
    *,
    token_budget: int,
    seed: int,
    start: Position | None = None,
) -> Iterator[tuple[Batch, Position]]:
    """Yield batches without end from `start`, each with the position of the next batch."""
    if not examples:
        raise ValueError("examples must hold at least one sentence pair, got none")
    epoch, first = start or Position()
    while True:
        plan = plan_batches(examples, token_budget=token_budget, seed=seed, epoch=epoch)
        for number, indices in enumerate(plan[first:], start=first + 1):
            following = Position(epoch, number) if number < len(plan) else Position(epoch + 1)
            yield collate([examples[i] for i in indices]), following
        epoch, first = epoch + 1, 0
