"""Gymnasium environments that talk in strings, as token ids of an HF tokenizer and its chat template.

A conversation grows by pieces: the first prompt, what was sampled, the next message with everything the template puts
around it, and so on. Each piece becomes ids once. What was sampled is never turned into text and back, and earlier
turns are never rendered again, so templates that rewrite history (some drop reasoning from past turns) cannot change a
token that has been fed.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
from transformers import PreTrainedTokenizerBase

from megatron_rl.environments.base import StepResult
from megatron_rl.errors import ConfigError, RolloutError

_ANSWER = "0f5e8a7c-answer-0f5e8a7c"


class ChatEnvironment:
    """A `TextEnvironment` over a `gymnasium.Env` whose observations and actions are strings.

    The environment's `info` may hold `success`, `invalid` and `outcome` (see `StepResult`).

    Args:
        env: `reset` and `step` return text; `step` receives the sampled text without special tokens.
        tokenizer: with a chat template; its `eos_token` and the token that closes an answer end an action.
        system: system message; None: none.
        role: role that observations after the first are given, for instance ``tool``.
        template_options: passed to the template, for instance ``{"enable_thinking": False}``.

    Raises:
        ConfigError: the tokenizer has no chat template, or the template does not render answers as they are.
    """

    # Fast tokenizers change their own state while encoding: two threads in one of them raise "Already borrowed".
    _one_at_a_time = threading.Lock()

    def __init__(
        self,
        env: gymnasium.Env,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system: str | None = None,
        role: str = "user",
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        if tokenizer.chat_template is None:
            raise ConfigError("the tokenizer has no chat template", found=tokenizer.name_or_path, setting="tokenizer")
        self.env, self.tokenizer = env, tokenizer
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._role, self._options = role, dict(template_options or {})
        closing = self._after_answer("x")[0]
        stops = {closing} & set(tokenizer.all_special_ids) | {tokenizer.eos_token_id} - {None}
        if not stops:
            raise ConfigError(
                "nothing ends an answer", field="chat_template", found=tokenizer.decode([closing]),
                expected="a special token after each answer, or an eos_token", setting="tokenizer",
            )  # fmt: skip
        self.stop_tokens: list[int] = sorted(stops)

    def reset(self, seed: int | None, options: Mapping[str, Any] | None = None) -> list[int]:
        """Start an episode: the prompt up to where the first answer begins."""
        observation, _ = self.env.reset(seed=seed, options=dict(options) if options else None)
        return self._ids(self._render([*self._system, {"role": "user", "content": _text(observation)}]))

    def step(self, action_tokens: Sequence[int]) -> StepResult:
        """Play the text of the action and return the next message, up to where the next answer begins.

        The message begins with what the template puts after an answer, less the closing token if that was sampled.
        """
        ids = [int(token) for token in action_tokens]
        said = ids[:-1] if ids[-1] in self.stop_tokens else ids
        with self._one_at_a_time:
            action = self.tokenizer.decode(said, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        observation, reward, terminated, truncated, info = self.env.step(action)
        following = self._after_answer(_text(observation))
        if following[:1] == ids[-1:]:
            del following[0]
        ended = bool(terminated)
        return StepResult(following, float(reward), ended, bool(truncated) and not ended, dict(info))

    def valid_actions(self) -> list[list[int]]:
        """None that could be listed: any text is one."""
        return []

    def close(self) -> None:
        """Close the inner environment."""
        self.env.close()

    def _after_answer(self, observation: str) -> list[int]:
        """Ids from the end of an answer, through a message, to the beginning of the next answer."""
        conversation = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": _ANSWER},
            {"role": self._role, "content": observation},
        ]
        _, found, following = self._render(conversation).partition(_ANSWER)
        if not found:
            raise ConfigError(
                "the chat template does not show answers as they are", field="chat_template",
                found=self._render(conversation[:2]), expected=f"the text {_ANSWER}", setting="tokenizer",
            )  # fmt: skip
        return self._ids(following)

    def _render(self, conversation: list[dict[str, str]]) -> str:
        text: Any = self.tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True, **self._options
        )
        return text

    def _ids(self, text: str) -> list[int]:
        with self._one_at_a_time:
            return self.tokenizer.encode(text, add_special_tokens=False)


def _text(observation: Any) -> str:
    if not isinstance(observation, str):
        raise RolloutError(
            "observation is not text", field="observation", found=type(observation).__name__, expected="a string"
        )
    return observation
