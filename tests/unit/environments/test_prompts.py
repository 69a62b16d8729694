"""Prompt datasets: every format, bad rows by name, held-out prompts, whole epochs, grades."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_rl.engines.local import LocalEngine
from megatron_rl.engines.tiny import TinyShape, write_tiny_checkpoint
from megatron_rl.environments.base import END
from megatron_rl.environments.codecs import character_vocabulary, load_codec
from megatron_rl.environments.prompt_rows import read_rows
from megatron_rl.environments.prompts import LastNumber, PromptsTask, last_number_of
from megatron_rl.environments.tasks import make_task
from megatron_rl.episodes.episode import EpisodeLimits
from megatron_rl.episodes.lockstep import play_episodes, random_play
from megatron_rl.errors import ConfigError, RolloutError
from megatron_rl.rollouts.schema import EXCLUDED_OUTCOMES

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "prompts"
ROWS = [{"prompt": f"{a}+{b}=", "answer": a + b} for a in range(3) for b in range(3)]


def write_lines(path: Path, rows: list) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def write_hf_dataset(directory: Path, rows: list, shards: int = 2) -> Path:
    """The layout that `datasets` saves: Arrow streams, and a state that lists them."""
    directory.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{shards:05d}.arrow" for i in range(shards)]
    for i, name in enumerate(names):
        table = pa.Table.from_pylist(rows[i * len(rows) // shards : (i + 1) * len(rows) // shards])
        with pa.OSFile(str(directory / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    (directory / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in names], "_split": None}))
    (directory / "dataset_info.json").write_text("{}")
    return directory


def write_parquet(path: Path, rows: list) -> Path:
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_ipc_file(path: Path, rows: list) -> Path:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return path


def task(tmp_path: Path, rows: list = ROWS, **options) -> PromptsTask:
    path = write_lines(tmp_path / "rows.jsonl", rows)
    return PromptsTask(**{"path": str(path), "tokenizer": str(EXAMPLE), "held_out": 3} | options)


@pytest.fixture(scope="module")
def hf_tokenizer(tmp_path_factory) -> Path:
    """A word-level tokenizer with a chat template, saved as models carry it."""
    words = ["<eos>", "<user>", "<assistant>", "<system>", "?", *"0123456789+=", "be", "brief", "hello"]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}<assistant>"
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", chat_template=template)
    directory = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    "write",
    [
        lambda d: write_lines(d / "a.jsonl", ROWS),
        lambda d: write_parquet(d / "a.parquet", ROWS),
        lambda d: write_ipc_file(d / "a.arrow", ROWS),
        lambda d: write_hf_dataset(d / "saved", ROWS),
    ],
)
def test_every_format_gives_the_same_rows(tmp_path, write):
    assert [row.fields for row in read_rows(write(tmp_path))] == ROWS


def test_rows_are_numbered_within_their_file(tmp_path):
    lines = read_rows(write_lines(tmp_path / "a.jsonl", [ROWS[0], "", ROWS[1]]))
    assert [row.number for row in lines] == [0, 2]
    saved = read_rows(write_hf_dataset(tmp_path / "saved", ROWS[:4]))
    assert [(row.file.name[:10], row.number) for row in saved] == [
        ("data-00000", 0), ("data-00000", 1), ("data-00001", 0), ("data-00001", 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ("{", None),
        ("[1]", None),
        ({"answer": 3}, "prompt"),
        ({"prompt": "", "answer": 3}, "prompt"),
        ({"prompt": 7, "answer": 3}, "prompt"),
        ({"prompt": "1 + 1", "answer": 2}, "prompt"),
        ({"prompt": "x", "answer": 2}, "prompt"),
        ({"prompt": [{"role": "user", "content": "1"}], "answer": 2}, "prompt"),
        ({"prompt": "1" * 9, "answer": 2}, "prompt"),
        ({"prompt": "1+1="}, "answer"),
        ({"prompt": "1+1=", "answer": None}, "answer"),
        ({"prompt": "1+1=", "answer": "two"}, "answer"),
    ],
)
def test_a_bad_row_is_named(tmp_path, bad, field):
    with pytest.raises(ConfigError) as error:
        task(tmp_path, [*ROWS[:4], bad, *ROWS[4:]], max_prompt_tokens=8)
    assert error.value.row == 4
    assert error.value.file.name == "rows.jsonl"
    assert error.value.field == field


def test_bad_files_are_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 is not enough")
    (tmp_path / "a.csv").write_text("prompt\n")
    (tmp_path / "empty.jsonl").write_text("\n")
    write_hf_dataset(tmp_path / "splits" / "train", ROWS)
    for name, said in {
        "a.parquet": "unreadable", "a.csv": "format", "missing.jsonl": "unreadable", "empty.jsonl": "without rows",
        "splits": "train",
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=said) as error:
            read_rows(tmp_path / name)
        assert error.value.file == tmp_path / name


def test_a_torn_shard_is_named(tmp_path):
    saved = write_hf_dataset(tmp_path / "saved", ROWS)
    shard = saved / "data-00001-of-00002.arrow"
    shard.write_bytes(shard.read_bytes()[:-200])
    with pytest.raises(ConfigError, match="data-00001"):
        read_rows(saved)


def test_names_of_their_own_must_differ(tmp_path):
    rows = [{**row, "id": i} for i, row in enumerate(ROWS)]
    assert task(tmp_path, rows, id_field="id").training_specs(0, 1)[0].prompt_id in {str(i) for i in range(9)}
    with pytest.raises(ConfigError, match="row 8") as error:
        task(tmp_path, [*rows, {**rows[0], "id": 8}], id_field="id")
    assert (error.value.row, error.value.field) == (9, "id")
    with pytest.raises(ConfigError, match="field=id"):
        task(tmp_path, ROWS, id_field="id")


def asked(played: PromptsTask, specs) -> list[tuple[int, ...]]:
    return [played.make_env(spec).prompt.tokens for spec in specs]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, 20), st.integers(0, 3))
def test_an_epoch_visits_every_training_prompt_once(tmp_path_factory, responses, count, seed):
    """In whatever iterations it is cut, also after a resume: specs know nothing but the iteration."""
    played = task(tmp_path_factory.mktemp("t"), seed=seed, responses_per_prompt=responses)
    prompts = -(-count // responses)
    seen = []
    for iteration in range(-(-6 // prompts) + 1):
        specs = played.training_specs(iteration, count)
        assert len(specs) == count
        assert specs == played.training_specs(iteration, count)
        groups = list(dict.fromkeys((spec.group_id, i // responses) for i, spec in enumerate(specs)))
        seen += [group for group, _ in groups]
    assert len(set(seen[:6])) == 6
    held_out = asked(played, played.evaluation_specs(9))
    assert len(set(held_out)) == 3
    assert not set(held_out) & set(asked(played, played.training_specs(0, 60)))


def test_groups_are_prompts_and_names_differ(tmp_path):
    specs = task(tmp_path, responses_per_prompt=4).training_specs(2, 10)
    assert [spec.group_id for spec in specs] == [spec.prompt_id for spec in specs]
    assert [specs.index(next(s for s in specs if s.group_id == spec.group_id)) for spec in specs] == [0] * 4 + [
        4, 4, 4, 4, 8, 8,
    ]  # fmt: skip
    assert len({spec.trajectory_id for spec in specs}) == 10


@pytest.mark.parametrize("seed", range(5))
def test_a_repeated_question_is_never_on_both_sides(tmp_path, seed):
    played = task(tmp_path, ROWS + [{**row, "answer": 99} for row in ROWS], seed=seed)
    train, held_out = asked(played, played.training_specs(0, 12)), asked(played, played.evaluation_specs(6))
    assert not set(train) & set(held_out)
    assert len(set(held_out)) == 3
    assert len(held_out) == 6


def test_an_evaluation_file_takes_its_questions_out_of_training(tmp_path):
    other = write_lines(tmp_path / "other.jsonl", ROWS[:2])
    played = task(tmp_path, evaluation_path=str(other))
    train = asked(played, played.training_specs(0, 7))
    assert len(set(train)) == 7
    assert not set(train) & set(asked(played, played.evaluation_specs(2)))


@pytest.mark.parametrize("held_out", [0, 9])
def test_something_must_be_left_on_both_sides(tmp_path, held_out):
    with pytest.raises(ConfigError, match="held_out"):
        task(tmp_path, held_out=held_out)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", 7), ("so it is 1,234.", 1234), ("3-2", 2), ("3 -2", -2), ("= −5", -5), ("1.50 eggs", Fraction(3, 2)),
        ("12 then 13", 13), ("a 1,2 b", 2), ("none", None), ("", None), ("007", 7), ("1.2.3", Fraction(6, 5)),
    ],
)  # fmt: skip
def test_last_number_reads(text, number):
    assert last_number_of(text) == number


@settings(max_examples=100, deadline=None)
@given(st.integers(-(10**9), 10**9), st.text("abc .\n", max_size=5))
def test_last_number_grades_any_spelling(number, noise):
    grade = LastNumber()
    for spelled in (f"{number}", f"{number:,}", f"{number}.00"):
        assert grade({"answer": f"thus\n#### {spelled}"}, f"1 or {number}{noise}", []) == 1.0
    assert grade({"answer": number}, f"{number + 1}{noise}", []) == 0.0
    assert grade({"answer": number}, noise, []) == 0.0


def vector_reward(row, text, tokens):
    """A plug-in: three kinds of merit, and success apart from the reward."""
    return {"reward": -0.5, "reward_vector": [len(text), len(tokens), row["answer"]], "success": text == "1"}


def bad_reward(row, text, tokens):
    """A plug-in that forgets to return."""


def refuses_two(row, text, tokens):
    """Grades by the row; `check` refuses one."""
    return float(row["answer"])


def _no_two(row):
    if row["answer"] == 2:
        raise ValueError("two is not graded here")


refuses_two.check = _no_two


def step(played: PromptsTask, text: str, end: bool = True):
    env = played.make_env(played.training_specs(0, 1)[0])
    env.reset(0)
    tokens = played.codec.answer(text)
    return env, env.step(tokens if end else tokens[:-1])


def test_a_plug_in_sees_row_text_and_tokens(tmp_path):
    env, result = step(task(tmp_path, reward=f"{__name__}:vector_reward"), "12")
    assert result.reward == -0.5
    assert result.info["reward_vector"] == [2.0, 3.0, float(env.prompt.row.fields["answer"])]
    assert not result.info["success"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bad_reward", "empty response"),
        ("refuses_two", "two is not graded"),
        ("nothing", "unknown"),
        ("ROWS", "called"),
    ],
)
def test_a_reward_that_cannot_grade_stops_the_run_at_once(tmp_path, name, said):
    with pytest.raises(ConfigError, match=said):
        task(tmp_path, reward=f"{__name__}:{name}")


NO_GRADES = [float("nan"), float("inf"), None, "1", {"score": 1}, {"reward": 1, "reward_vector": [float("nan")]}]


@pytest.mark.parametrize("grade", NO_GRADES)
def test_a_grade_that_is_no_number_is_refused(tmp_path, grade):
    played = task(tmp_path)
    env = played.make_env(played.training_specs(0, 1)[0])
    env._reward = lambda row, text, tokens: grade
    with pytest.raises(RolloutError, match="grade"):
        env.step(played.codec.stop_tokens)


def test_right_wrong_and_cut_responses(tmp_path):
    played = task(tmp_path)
    env, wrong = step(played, "99")
    right = str(env.prompt.row.fields["answer"])
    _, solved = step(played, right)
    _, cut = step(played, right, end=False)
    assert (wrong.reward, wrong.info["success"], wrong.terminated) == (0.0, False, True)
    assert (solved.reward, solved.info["success"], solved.observation) == (1.0, True, [])
    assert (cut.reward, cut.terminated, cut.truncated, cut.info["outcome"]) == (1.0, False, True, "truncated_length")


def test_characters_are_encoded_and_special_words_are_not_said(tmp_path):
    codec = load_codec(EXAMPLE)
    assert codec.decode([*codec.encode("1+2="), *codec.vocabulary.encode([END])]) == "1+2="
    with pytest.raises(ConfigError, match="chat_template"):
        load_codec(EXAMPLE, chat_template=True)
    with pytest.raises(ConfigError, match="no tokenizer"):
        load_codec(tmp_path)


def test_a_tokenizer_of_a_model_directory(hf_tokenizer, tmp_path):
    rows = [{"prompt": "1 + 2 =", "answer": 3}, {"prompt": "hello", "answer": 0}]
    options = {"tokenizer": str(hf_tokenizer), "held_out": 1}
    plain = task(tmp_path, rows, **options)
    assert plain.codec.decode([7, 0]) == "2"
    assert plain.codec.answer("3") == [8, 0]
    assert len(plain.vocabulary) == 20
    chat = task(tmp_path, rows, chat_template=True, system="be brief", **options)
    spoken = [{"role": "user", "content": "hello"}]
    expected = [3, 17, 18, 1, 19, 2]
    assert chat.codec.encode("hello") == chat.codec.encode(spoken) == expected
    with pytest.raises(RolloutError, match="chat"):
        plain.codec.encode(spoken)


def test_fingerprint_of_a_tokenizer_depends_on_its_words(hf_tokenizer):
    first, again = load_codec(hf_tokenizer), load_codec(hf_tokenizer)
    assert first.vocabulary.fingerprint == again.vocabulary.fingerprint
    again._tokenizer.add_tokens(["more"])
    assert first.vocabulary.fingerprint != again.vocabulary.fingerprint


def test_the_example_is_what_its_function_writes():
    import runpy

    module = runpy.run_path(str(EXAMPLE / "arithmetic.py"))
    rows = [json.loads(line) for line in (EXAMPLE / "arithmetic.jsonl").read_text().splitlines()]
    assert rows == module["arithmetic_rows"](9)
    words = json.loads((EXAMPLE / "vocabulary.json").read_text())
    assert words == list(character_vocabulary(module["CHARACTERS"]).words)


def test_a_tiny_model_answers_and_is_recorded(tmp_path):
    played = make_task(
        "prompts", {"path": str(EXAMPLE / "arithmetic.jsonl"), "tokenizer": str(EXAMPLE), "responses_per_prompt": 2}
    )
    write_tiny_checkpoint(tmp_path / "model", played.vocabulary, TinyShape(num_layers=1))
    engine = LocalEngine(tmp_path / "model")
    specs = played.training_specs(0, 40)
    limits = EpisodeLimits(max_turns=1, max_action_tokens=3, context_limit=64)
    found = play_episodes(engine, played.make_env, specs, limits)
    assert not {t.outcome for t in found} & EXCLUDED_OUTCOMES
    assert {t.outcome for t in found} <= {"completed", "truncated_length"}
    for spec, trajectory in zip(specs, found, strict=True):
        prompt = played.make_env(spec).prompt
        said = played.codec.decode(trajectory.tokens[len(prompt.tokens) :])
        assert trajectory.tokens[: len(prompt.tokens)].tolist() == list(prompt.tokens)
        right = last_number_of(said) == prompt.row.fields["answer"]
        assert trajectory.turn_rewards.tolist() == [float(right)]
    plays = random_play(played.make_env, specs, max_turns=1, context_limit=64)
    assert {played.codec.decode(play.tokens[play.action_mask]) for play in plays} <= {str(n) for n in range(19)}
