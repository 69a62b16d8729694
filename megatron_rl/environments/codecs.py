"""Text to token ids and back, with the tokenizer that lies beside a model's weights.

A closed vocabulary of single characters (`vocabulary.json`, as tiny checkpoints have it) or a `transformers` tokenizer.
Prompts are encoded once; what was generated is never encoded again, only decoded for grading.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from megatron_rl.environments.base import END
from megatron_rl.environments.vocabulary import STRUCTURE_WORDS, VOCABULARY_FILE, Vocabulary
from megatron_rl.errors import ConfigError, RolloutError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Sequence[Mapping[str, str]]
"""Plain text, or a conversation: `role` and `content` of each message."""


class Codec(Protocol):
    """What single-turn tasks need of a tokenizer."""

    stop_tokens: list[int]
    """Any of them ends a response."""

    @property
    def vocabulary(self) -> Vocabulary | TokenizerVocabulary:
        """Size and fingerprint of the ids."""
        ...

    def encode(self, prompt: Prompt) -> list[int]:
        """Ids of a prompt. Raises RolloutError where the vocabulary lacks a word of it."""
        ...

    def answer(self, text: str) -> list[int]:
        """Ids of a response, its stop token included."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of a response, without special tokens."""
        ...


def character_vocabulary(characters: str) -> Vocabulary:
    """Structure words and one word for each character, padded to a multiple of 32 ids."""
    return Vocabulary([*STRUCTURE_WORDS, *characters], multiple_of=32)


class CharacterCodec:
    """One id a character; `<end>` ends a response.

    Args:
        vocabulary: must hold `<end>`. White space has no word and cannot be encoded.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.stop_tokens = vocabulary.encode([END])

    def encode(self, prompt: Prompt) -> list[int]:
        """See `Codec.encode`; conversations are refused."""
        if not isinstance(prompt, str):
            raise RolloutError("a vocabulary of characters has no chat template", expected="plain text")
        return self.vocabulary.encode(prompt)

    def answer(self, text: str) -> list[int]:
        """See `Codec.answer`."""
        return [*self.vocabulary.encode(text), *self.stop_tokens]

    def decode(self, tokens: Iterable[int]) -> str:
        """See `Codec.decode`: words of more than one character are special."""
        return "".join(word for word in self.vocabulary.decode(tokens) if len(word) == 1)


class TokenizerVocabulary:
    """Size and fingerprint of a `transformers` tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self._tokenizer)

    @property
    def fingerprint(self) -> str:
        """xxh3-64 (16 hex digits) of all tokens in the order of their ids, added ones included."""
        ordered = sorted(self._tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
        return xxhash.xxh3_64_hexdigest("\n".join(f"{i} {token}" for token, i in ordered).encode())


class TokenizerCodec:
    """A `transformers` tokenizer.

    Args:
        tokenizer: must have an end-of-sequence token.
        chat_template: render plain prompts as the user's message and open the assistant's turn.
        system: the system's message of such a conversation; "" for none.

    Raises:
        ConfigError: no end-of-sequence token, or `chat_template` without a template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, chat_template: bool = False, system: str = "") -> None:
        if tokenizer.eos_token_id is None:
            raise ConfigError("the tokenizer has no end-of-sequence token", file=tokenizer.name_or_path)
        if chat_template and not tokenizer.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template", file=tokenizer.name_or_path, setting="chat_template=false"
            )
        self.vocabulary = TokenizerVocabulary(tokenizer)
        self.stop_tokens = [int(tokenizer.eos_token_id)]
        self._tokenizer, self._chat, self._system = tokenizer, chat_template, system

    def encode(self, prompt: Prompt) -> list[int]:
        """See `Codec.encode`; conversations need `chat_template`."""
        if not self._chat:
            if not isinstance(prompt, str):
                raise RolloutError("a conversation needs a chat template", expected="plain text or chat_template=true")
            return list(self._tokenizer.encode(prompt))
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(map(dict, prompt))
        if self._system:
            messages.insert(0, {"role": "system", "content": self._system})
        encoded: Any = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])

    def answer(self, text: str) -> list[int]:
        """See `Codec.answer`."""
        return [*self._tokenizer.encode(text, add_special_tokens=False), *self.stop_tokens]

    def decode(self, tokens: Iterable[int]) -> str:
        """See `Codec.decode`."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


def load_codec(directory: str | Path, *, chat_template: bool = False, system: str = "") -> Codec:
    """The codec of a model directory: its `vocabulary.json` if there is one, else its tokenizer.

    Raises:
        ConfigError: neither is there, or one that cannot be used; chat options for a vocabulary of characters.
    """
    directory = Path(directory)
    if (directory / VOCABULARY_FILE).is_file():
        if chat_template or system:
            raise ConfigError(
                "a vocabulary of characters has no chat template", file=directory / VOCABULARY_FILE,
                setting="chat_template=false, system=''",
            )  # fmt: skip
        return CharacterCodec(Vocabulary.load(directory / VOCABULARY_FILE))
    # Seconds to import, and most tasks have a vocabulary of their own.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            "no tokenizer in this directory", file=directory, found=error,
            expected=f"tokenizer files or {VOCABULARY_FILE}", setting="rollout.environment_options.tokenizer",
        ) from error  # fmt: skip
    return TokenizerCodec(tokenizer, chat_template=chat_template, system=system)
