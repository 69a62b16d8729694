"""Single-turn tasks: a dataset of prompts, graded by a function.

Invariants:

* Specs are pure functions of iteration and count: a run that resumes at an iteration plays what it would have played,
  and an epoch visits every training prompt exactly once, whatever the iterations it is cut into.
* A prompt set aside for evaluation is never trained on, nor is another row that asks the same.
* Every row is checked before the first episode: a bad one is named with file, row and field.
* A response that was cut at the token limit is graded as it stands and recorded as `truncated_length`.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from megatron_rl.environments.base import EpisodeSpec, StepResult
from megatron_rl.environments.codecs import Codec, load_codec
from megatron_rl.environments.prompt_rows import SETTING, Row, read_rows
from megatron_rl.errors import ConfigError, MegatronRLError, RolloutError

Reward = Callable[[Mapping[str, Any], str, Sequence[int]], "float | Mapping[str, Any]"]
"""Grades a response: called with the prompt's row, the generated text and the generated ids.

Returns a number, or a mapping with `reward` and, optionally, `reward_vector` (a list of numbers) and `success` (bool;
default: the reward is positive). Where it has a method `check(row)`, every row passes it once, at the start.
"""
_NUMBER = re.compile(r"(?<![\d.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")


class LastNumber:
    """1 where the last number of the response equals the last number of the row's `answer`, else 0.

    Thousands separators and trailing zeros do not matter: "1,234.50" is 1234.5. A minus sign right after a digit is a
    subtraction. `answer` is a number or a text that ends in one.
    """

    def __call__(self, row: Mapping[str, Any], text: str, tokens: Sequence[int]) -> float:
        """See `Reward`."""
        found = last_number_of(text)
        return float(found is not None and found == last_number_of(str(row["answer"])))

    def check(self, row: Mapping[str, Any]) -> None:
        """Raise ConfigError unless the row has an `answer` with a number."""
        if last_number_of(str(row.get("answer", ""))) is None:
            raise ConfigError("no number to compare with", field="answer", found=repr(row.get("answer")))


last_number = LastNumber()


def last_number_of(text: str) -> Fraction | None:
    """The last integer or decimal number in a text, exactly, or None."""
    found = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return Fraction(found[-1].replace(",", "")) if found else None


@dataclass(frozen=True)
class PromptRow:
    """A checked row."""

    row: Row
    prompt_id: str
    tokens: tuple[int, ...]
    """The encoded prompt."""


class PromptEnvironment:
    """One prompt, one response, one grade.

    Args:
        prompt: what is asked.
        codec, reward: of the task.
        answers: responses that random valid play chooses among, as ids.
    """

    def __init__(self, prompt: PromptRow, codec: Codec, reward: Reward, answers: Sequence[list[int]]) -> None:
        self.prompt, self.stop_tokens = prompt, codec.stop_tokens
        self._codec, self._reward, self._answers = codec, reward, answers

    def reset(self, seed: int | None, options: Mapping[str, Any] | None = None) -> list[int]:
        """The prompt's tokens; nothing is drawn."""
        return list(self.prompt.tokens)

    def step(self, action_tokens: Sequence[int]) -> StepResult:
        """Grade the response. Raises RolloutError where the grade is no finite number."""
        tokens = [int(token) for token in action_tokens]
        grade = self._reward(self.prompt.row.fields, self._codec.decode(tokens), tokens)
        reward, info = _checked(self.prompt.row, grade)
        if tokens and tokens[-1] in self.stop_tokens:
            return StepResult([], reward, True, False, info)
        return StepResult([], reward, False, True, info | {"outcome": "truncated_length"})

    def valid_actions(self) -> list[list[int]]:
        """The distinct answers of the dataset. Raises RolloutError where its rows have none."""
        if not self._answers:
            raise RolloutError("random valid play needs answers to choose among", field="answer", found="no such field")
        return [list(answer) for answer in self._answers]


def _checked(row: Row, grade: float | Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """Reward and info of a grade."""
    parts: dict[str, Any] = dict(grade) if isinstance(grade, Mapping) else {"reward": grade}
    unknown = sorted(set(parts) - {"reward", "reward_vector", "success"})
    numbers = [parts.get("reward"), *(parts.get("reward_vector") or ())]
    if unknown or not all(isinstance(n, (int, float, np.number)) and math.isfinite(n) for n in numbers):
        raise RolloutError(
            "a grade cannot be used", file=row.file, row=row.number, field="reward", found=repr(grade),
            expected="a finite number, or a mapping of reward, reward_vector, success", setting=f"{SETTING}.reward",
        )  # fmt: skip
    info: dict[str, Any] = {"success": bool(parts.get("success", parts["reward"] > 0)), "invalid": False}
    if parts.get("reward_vector") is not None:
        info["reward_vector"] = [float(n) for n in parts["reward_vector"]]
    return float(parts["reward"]), info


class PromptsTask:
    """A dataset of prompts with a reward function.

    Args:
        path: the dataset, see `prompt_rows`.
        tokenizer: model directory, or any with a tokenizer or a `vocabulary.json`.
        reward: a `Reward`, as `package.module:name`.
        prompt_field: a row's text or conversation.
        id_field: the field with a row's unique name; None: named by its number and content.
        evaluation_path: a dataset to evaluate on; None: `held_out` prompts are set aside.
        held_out: how many distinct prompts that are.
        responses_per_prompt: episodes of one prompt in an iteration: a group.
        chat_template, system: see `codecs.TokenizerCodec`.
        max_prompt_tokens: longer prompts are refused; None: whatever fits the model.
        seed: of the split and of every epoch's order.

    Raises:
        ConfigError: a file, row or option that cannot be used.
    """

    def __init__(
        self,
        *,
        path: str,
        tokenizer: str,
        reward: str = "megatron_rl.environments.prompts:last_number",
        prompt_field: str = "prompt",
        id_field: str | None = None,
        evaluation_path: str | None = None,
        held_out: int = 64,
        responses_per_prompt: int = 1,
        chat_template: bool = False,
        system: str = "",
        max_prompt_tokens: int | None = None,
        seed: int = 0,
    ) -> None:
        self.codec = load_codec(tokenizer, chat_template=chat_template, system=system)
        self.vocabulary = self.codec.vocabulary
        self._reward, self._seed, self._responses = load_reward(reward), seed, responses_per_prompt
        self._limit = math.inf if max_prompt_tokens is None else max_prompt_tokens
        self._fields = (prompt_field, id_field)
        rows = list(self._read(path))
        if evaluation_path is None:
            self._train, self._evaluation = _split(rows, held_out, seed)
        else:
            self._evaluation = list(self._read(evaluation_path))
            asked = {row.tokens for row in self._evaluation}
            self._train = [row for row in rows if row.tokens not in asked]
        if not self._train or not self._evaluation:
            raise ConfigError(
                "nothing is left to train or to evaluate on", file=path, found=f"{len(rows)} rows",
                setting=f"{SETTING}.held_out",
            )  # fmt: skip
        self._try_reward(self._train[0])
        answers = dict.fromkeys(str(row.row.fields["answer"]) for row in self._train if "answer" in row.row.fields)
        self._answers = [self.codec.answer(text) for text in answers]

    def make_env(self, spec: EpisodeSpec) -> PromptEnvironment:
        """The spec's prompt."""
        side = self._evaluation if spec.options["held_out"] else self._train
        return PromptEnvironment(side[spec.options["row"]], self.codec, self._reward, self._answers)

    def training_specs(self, iteration: int, count: int) -> list[EpisodeSpec]:
        """The next prompts of the running epoch, `responses_per_prompt` episodes each, neighbours in the list."""
        prompts = -(-count // self._responses)
        orders: dict[int, np.ndarray] = {}
        specs: list[EpisodeSpec] = []
        for position in range(iteration * prompts, (iteration + 1) * prompts):
            epoch, place = divmod(position, len(self._train))
            if epoch not in orders:
                orders[epoch] = np.random.default_rng([self._seed, 2, epoch]).permutation(len(self._train))
            row = int(orders[epoch][place])
            names = (f"train-{iteration:06d}-{len(specs) + i:05d}" for i in range(self._responses))
            specs += [_spec(name, self._train[row], row, held_out=False) for name in names]
        return specs[:count]

    def evaluation_specs(self, count: int) -> list[EpisodeSpec]:
        """The prompts set aside, over and over where `count` is larger."""
        places = [i % len(self._evaluation) for i in range(count)]
        return [_spec(f"eval-{i:05d}", self._evaluation[p], p, held_out=True) for i, p in enumerate(places)]

    def _read(self, path: str) -> Iterator[PromptRow]:
        seen: dict[str, int] = {}
        for row in read_rows(path):
            checked = self._check(row)
            if checked.prompt_id in seen:
                raise row.fault(
                    "two rows of one name",
                    str(self._fields[1]),
                    checked.prompt_id,
                    f"not that of row {seen[checked.prompt_id]}",
                )
            seen[checked.prompt_id] = row.number
            yield checked

    def _check(self, row: Row) -> PromptRow:
        """Encode a row's prompt and let the reward function look at it."""
        prompt_field, id_field = self._fields
        prompt = row.fields.get(prompt_field)
        if not prompt or not isinstance(prompt, (str, list)):
            raise row.fault("no prompt", prompt_field, repr(prompt), "a text, or a list of messages")
        try:
            tokens = tuple(self.codec.encode(prompt))
        except Exception as error:  # templates raise what they like
            raise row.fault("a prompt cannot be encoded", prompt_field, error, "words of the vocabulary") from error
        if not 0 < len(tokens) <= self._limit:
            raise row.fault("length of a prompt", prompt_field, f"{len(tokens)} tokens", f"1..{self._limit}")
        self._check_reward(row)
        if id_field is None:
            content = hashlib.sha256(repr(tokens).encode()).hexdigest()[:8]
            return PromptRow(row, f"{row.file.stem}-{row.number:06d}-{content}", tokens)
        if row.fields.get(id_field) in (None, ""):
            raise row.fault("no name", id_field, repr(row.fields.get(id_field)), "a name of its own")
        return PromptRow(row, str(row.fields[id_field]), tokens)

    def _try_reward(self, prompt: PromptRow) -> None:
        """Grade an empty response: a function that cannot would turn every episode into an environment error."""
        try:
            PromptEnvironment(prompt, self.codec, self._reward, []).step(self.codec.stop_tokens[:1])
        except Exception as error:  # a plug-in raises what it likes
            raise prompt.row.fault(
                "the reward function cannot grade an empty response", "reward", error, "a grade"
            ) from error

    def _check_reward(self, row: Row) -> None:
        check = getattr(self._reward, "check", None)
        if check is None:
            return
        try:
            check(row.fields)
        except Exception as error:  # a plug-in raises what it likes
            field = error.field if isinstance(error, MegatronRLError) else None
            raise row.fault("the reward function refuses a row", field, error, "a row it can grade") from error


def load_reward(name: str) -> Reward:
    """Import `package.module:name`.

    Raises:
        ConfigError: not importable, or not callable.
    """
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            "unknown reward function", found=name, expected="package.module:name", setting=f"{SETTING}.reward"
        ) from error
    if not callable(found):
        raise ConfigError("a reward function is called", found=repr(found), setting=f"{SETTING}.reward")
    return found


def _split(rows: list[PromptRow], held_out: int, seed: int) -> tuple[list[PromptRow], list[PromptRow]]:
    """(training, evaluation) rows; rows that ask the same are on the same side."""
    asked = list(dict.fromkeys(row.tokens for row in rows))
    chosen = np.random.default_rng([seed, 1]).permutation(len(asked))[:held_out]
    apart = {asked[i] for i in chosen}
    return [row for row in rows if row.tokens not in apart], [row for row in rows if row.tokens in apart]


def _spec(name: str, prompt: PromptRow, place: int, *, held_out: bool) -> EpisodeSpec:
    options = {"row": place, "held_out": held_out}
    return EpisodeSpec(name, prompt_id=prompt.prompt_id, group_id=prompt.prompt_id, seed=0, options=options)
