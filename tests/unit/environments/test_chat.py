"""String environments behind a chat template: pieces that add up to the conversation, answers that stay untouched."""

from __future__ import annotations

import asyncio

import gymnasium
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatron_rl.environments.base import EpisodeSpec
from megatron_rl.environments.chat import ChatEnvironment
from megatron_rl.episodes.concurrent import PlayLimits, play
from megatron_rl.episodes.episode import EpisodeLimits
from megatron_rl.episodes.lockstep import play_episodes
from megatron_rl.errors import ConfigError
from tests.unit.episodes.counting import CountingEngine

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = (  # drops what earlier answers thought, and opens the last one with an empty thought
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% elif m.role == 'assistant' %}<think>\n\n</think>\n\n{{ m.content }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HIDING = "{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content }}{% endif %}{% endfor %}<|im_end|>"
CORPUS = ["guess a number between 1 and 9", "higher lower right", "assistant user system think hmm maybe 5 or 7"]


def tokenizer(template=CHATML, eos="<|endoftext|>", special=("<|im_start|>", "<|im_end|>", "<|endoftext|>")):
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=list(special), initial_alphabet=alphabet)
    inner.train_from_iterator(CORPUS, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=eos, additional_special_tokens=list(special))
    wrapped.chat_template = template
    return wrapped


class Guess(gymnasium.Env):
    """Guess a number in three turns."""

    def __init__(self, show=None):
        self.heard: list[str] = []
        self.closed, self._show = False, show

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._number = int(self.np_random.integers(1, 10))
        return "guess a number", {}

    def step(self, action):
        self.heard.append(action)
        right = action.strip() == str(self._number)
        shown = "right" if right else "try <|im_end|> again"
        return (
            shown if self._show is None else self._show,
            float(right),
            right,
            len(self.heard) == 3,
            {"success": right},
        )

    def close(self):
        self.closed = True


def test_pieces_add_up_to_the_rendered_conversation():
    tok, inner = tokenizer(), Guess()
    env = ChatEnvironment(inner, tok, system="be brief")
    tokens = env.reset(seed=0)
    (end,) = tok.convert_tokens_to_ids(["<|im_end|>"])
    assert end in env.stop_tokens and tok.eos_token_id in env.stop_tokens
    conversation = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "guess a number"}]
    for said in ("maybe 5", "7"):
        action = [*tok.encode(said, add_special_tokens=False), end]
        result = env.step(action)
        tokens += action + result.observation
        conversation += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": "try <|im_end|> again"},
        ]
    rendered = tok.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert tok.decode(tokens, skip_special_tokens=False) == rendered
    assert inner.heard == ["maybe 5", "7"]


def test_answer_that_was_cut_is_closed_by_the_next_message():
    tok = tokenizer()
    inner = Guess()
    env = ChatEnvironment(inner, tok, role="tool")
    env.reset(seed=0)
    said = tok.encode("hmm", add_special_tokens=False)
    following = env.step(said).observation
    assert (
        tok.decode(following) == "<|im_end|>\n<|im_start|>tool\ntry <|im_end|> again<|im_end|>\n<|im_start|>assistant\n"
    )
    assert env.step([*said, tok.eos_token_id]).observation == following
    assert inner.heard == ["hmm", "hmm"]


def test_odd_ids_are_recorded_as_sampled():
    """Ids of "maybe" letter by letter, which no tokenizer would produce from the text, stay in the record."""
    tok, inner = tokenizer(), Guess()
    env = ChatEnvironment(inner, tok)
    letters = [tok.convert_tokens_to_ids(letter) for letter in "maybe"]
    assert tok.encode("maybe") != letters

    class Spells(CountingEngine):
        def sample(self, prompt, limit, stops):
            n = len(letters) + 1
            made = super().sample(prompt, 1, stops)
            sampled = np.asarray([*letters, env.stop_tokens[0]], np.int32)
            return type(made)(sampled, np.zeros(n, np.float32), None, 0)

    limits = EpisodeLimits(max_turns=2, max_action_tokens=8, context_limit=500)
    (record,) = play_episodes(Spells(), lambda _spec: env, [EpisodeSpec("t", "p", "g", seed=0)], limits)
    for turn in (0, 1):
        assert record.tokens[record.turn_id == turn].tolist() == [*letters, env.stop_tokens[0]]
    assert inner.heard == ["maybe", "maybe"]
    assert inner.closed


def test_template_that_rewrites_history_changes_no_token():
    tok = tokenizer(FORGETFUL)
    env = ChatEnvironment(Guess(), tok)
    tokens = env.reset(seed=0)
    thought = "<think>hmm</think>5"
    tokens += [*tok.encode(thought, add_special_tokens=False), env.stop_tokens[0]]
    tokens += env.step(tokens[-4:]).observation
    assert thought in tok.decode(tokens)
    assert tok.decode(tokens).count("<think>") == 1


def test_environment_that_shows_no_text_is_an_environment_error():
    finished = []

    async def keep(trajectory):
        finished.append(trajectory)

    tok, inner = tokenizer(), Guess(show=np.zeros(3))
    limits = PlayLimits(EpisodeLimits(max_turns=3, max_action_tokens=4, context_limit=500), concurrency=1)
    asyncio.run(play(CountingEngine(), lambda _spec: ChatEnvironment(inner, tok), [EpisodeSpec("t", "p", "g")], limits,
                     keep))  # fmt: skip
    assert finished[0].outcome == "environment_error"
    assert "ndarray" in finished[0].metadata["error"]
    assert inner.closed


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda: tokenizer(template=None), "no chat template"),
        (lambda: tokenizer(HIDING), "does not show answers"),
        (lambda: tokenizer(eos=None, special=()), "nothing ends an answer"),
    ],
)
def test_tokenizers_that_cannot_hold_a_conversation_are_refused(made, reason):
    with pytest.raises(ConfigError, match=reason):
        ChatEnvironment(Guess(), made())
