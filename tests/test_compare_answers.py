"""`benchmarks.compare_answers`: what it says of answers that agree, and of those that part."""

import json
import math

import pytest

from benchmarks import compare_answers


def answers(name, *told):
    """A file's contents: of each answer its tokens, their log-probabilities and margins."""
    keys = ("tokens", "logprobs", "margins")
    return {"name": name, "answers": [dict(zip(keys, one, strict=True)) for one in told]}


def test_answers_are_compared_up_to_where_they_part():
    ours = answers("a", ("xyz", [-1.0, -2.0, -3.0], [0.5, 0.25, 0.125]), ("u", [-1.0], [2.0]))
    theirs = answers("b", ("xzz", [-1.5, -9.0, -3.0], [0.5, 0.5, 0.5]), ("u", [-1.1], [2.0]))
    found = compare_answers.pair(ours, theirs)
    assert (found["answers"], found["same"], found["tokens_compared"]) == (2, 1, 2)
    assert found["logprobs_mean"] == pytest.approx((0.5 + 0.1) / 2)
    assert found["logprobs_most"] == pytest.approx(0.5)
    assert found["margins_where_they_part"] == [0.25]  # the first engine's, at the second token


def test_answers_that_part_at_once_have_nothing_to_compare():
    found = compare_answers.pair(
        answers("a", ("x", [-1.0], [0.5])), answers("b", ("y", [-1.0], [0.5]))
    )
    assert (found["same"], found["tokens_compared"], found["logprobs_mean"]) == (0, 0, None)


def test_a_margin_is_between_the_two_likeliest_tokens():
    assert compare_answers.margin({"a": -3.0, "b": -0.5, "c": -1.25}) == 0.75
    assert math.isnan(compare_answers.margin({"a": -3.0}))  # another token had the same text


def test_prompts_are_the_same_for_every_engine():
    prompts = compare_answers.draw_prompts(96, [4, 9], 2)
    assert prompts == compare_answers.draw_prompts(96, [4, 9], 2)
    assert [len(prompt) for prompt in prompts] == [4, 4, 9, 9]
    assert all(0 <= token < 96 for prompt in prompts for token in prompt)


def test_each_pair_of_files_is_told(tmp_path, monkeypatch, capsys):
    paths = []
    for name in "abc":
        paths.append(str(tmp_path / name))
        (tmp_path / name).write_text(json.dumps(answers(name, ("x", [-1.0], [0.5]))))
    monkeypatch.setattr("sys.argv", ["compare_answers", "compare", *paths])
    compare_answers.main()
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["pair"] for one in told] == [["a", "b"], ["a", "c"], ["b", "c"]]
    assert all(one["same"] == 1 for one in told)
