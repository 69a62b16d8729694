"""A closed vocabulary of words: what the text environments of this package are written in.

An observation always ends with `<act>` and an action with `<end>`, so that either can be found in a token stream. Two
vocabularies with the same words in the same order have the same fingerprint, on every machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import xxhash

from megatron_rl.errors import ConfigError, RolloutError

OBSERVE, ACT, END, BLANK = "<observation>", "<act>", "<end>", "<blank>"


STRUCTURE_WORDS = (OBSERVE, ACT, END, BLANK)


VOCABULARY_FILE = "vocabulary.json"
"""Beside the weights of a checkpoint whose vocabulary is not a tokenizer's."""


class Vocabulary:
    """A closed list of words; the id of a word is its place in the list.

    Args:
        words: distinct words without white space, in the order of their ids.
        multiple_of: reserved words are appended until the size divides by this (a vocabulary is sharded over ranks).

    Raises:
        ConfigError: a word is repeated, empty, or contains white space.
    """

    def __init__(self, words: Iterable[str], *, multiple_of: int = 1) -> None:
        listed = list(words)
        listed += [f"<reserved_{i}>" for i in range(-len(listed) % multiple_of)]
        for word in listed:
            if word.split() != [word]:
                raise ConfigError("not a single word", field="vocabulary", found=repr(word), expected="no white space")
        self.words: tuple[str, ...] = tuple(listed)
        self._ids = {word: i for i, word in enumerate(listed)}
        if len(self._ids) != len(listed):
            repeated = sorted({word for word in listed if listed.count(word) > 1})
            raise ConfigError("repeated words", field="vocabulary", found=repeated, expected="distinct words")

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, words: Iterable[str]) -> list[int]:
        """Ids of words. Raises RolloutError on a word outside the vocabulary."""
        try:
            return [self._ids[word] for word in words]
        except KeyError as missing:
            raise RolloutError(
                "word outside the vocabulary",
                field="words",
                found=missing.args[0],
                expected=f"one of {len(self)} words",
            ) from None

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Words of ids. Raises RolloutError on an id outside [0, len(self))."""
        out = []
        for token in ids:
            if not 0 <= token < len(self.words):
                raise RolloutError(
                    "id outside the vocabulary", field="tokens", found=token, expected=f"0..{len(self) - 1}"
                )
            out.append(self.words[token])
        return out

    @property
    def fingerprint(self) -> str:
        """xxh3-64 (16 hex digits) of the words in order: the `tokenizer_hash` of recorded rollouts."""
        return xxhash.xxh3_64_hexdigest("\n".join(self.words).encode())

    def save(self, path: str | Path) -> None:
        """Write the words as a JSON list."""
        Path(path).write_text(json.dumps(self.words, indent=0), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Vocabulary:
        """Read what `save` wrote."""
        return cls(json.loads(Path(path).read_text(encoding="utf-8")))
