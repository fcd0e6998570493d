"""A rule stands on its field, and Python, HTTP and the command line each read it in their words."""

import dataclasses
from typing import Annotated

import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.cli import arguments
from dsv4_jax.cli.parser import Parser
from dsv4_jax.rules import (
    Flag,
    ListOf,
    NumberByToken,
    Real,
    Ruled,
    Share,
    Texts,
    Whole,
    Word,
    check_fields,
    rules_of,
)  # fmt: skip
from dsv4_jax.serve import dialects, fields_messages, fields_openai, fields_responses
from dsv4_jax.serve.drawing import DRAWN, read_sampling
from dsv4_jax.serve.errors import ApiError
from dsv4_jax.serve.fields import read_by
from dsv4_jax.step.sampling import FullSampling, SamplingFields, stack_sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """One field of each kind."""

    count: Annotated[int, Ruled(Whole(1, 8), http=Whole(1, 8), help="how many")] = 2
    warmth: Annotated[float, Ruled(Real(0, 4), http=Real(0, 2), help="how warm")] = 1.0
    part: Annotated[float | None, Ruled(Share(), flag=Real(0.1, 1), help="which part")] = None
    is_on: Annotated[bool, Ruled(Flag(), help="whether")] = False
    is_off: Annotated[bool, Ruled(Flag(), help="whether not")] = True
    form: Annotated[str, Ruled(Word(("a", "b"), also=(("old", "b"),)), help="which form")] = "a"
    sizes: Annotated[tuple[int, ...], Ruled(ListOf(Whole(1), 3, "sizes"), help="sizes")] = (4,)
    free: int = 0

    def __post_init__(self):
        check_fields(self)


def test_python_gets_checked_plain_values():
    settings = Settings(count=np.int64(3), warmth=1, part=np.float32(0.5), sizes=iter([1, 2]))
    assert dataclasses.astuple(settings) == (3, 1.0, 0.5, False, True, "a", (1, 2), 0)
    assert [type(one) for one in (settings.count, settings.warmth, settings.part)] == [
        int, float, float,
    ]  # fmt: skip
    assert "free" not in rules_of(Settings)
    assert Settings(form="old") == Settings(form="b")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"count": 9}, "count must be at most 8, got 9"),
        ({"count": True}, "count must be an integer, got True"),
        ({"warmth": -1}, "warmth must be at least 0, got -1"),
        ({"part": 0}, "part must be above 0 and at most 1, got 0"),
        ({"warmth": None}, "warmth must be a number, got None"),
        ({"is_on": 1}, "is_on must be True or False, got 1"),
        ({"form": "c"}, "form must be one of .* got 'c'"),
        ({"sizes": [0]}, "sizes must be at least 1, got 0"),
        ({"sizes": range(9)}, "sizes must hold at most 3 sizes, got more"),
    ],
)
def test_python_is_told_what_is_wrong(fields, told):
    with pytest.raises(ValueError, match=told):
        Settings(**fields)


def test_a_body_has_its_own_range_and_words():
    rule = rules_of(Settings)["warmth"].http
    assert read_by(rule, {"warmth": 2}, "warmth", 1.0) == 2.0
    assert read_by(rule, {}, "warmth", 1.0) == 1.0
    with pytest.raises(ApiError, match="warmth: must be a number from 0 to 2, got 3"):
        read_by(rule, {"warmth": 3}, "warmth", 1.0)
    with pytest.raises(ApiError, match=r"count: must be a whole number from 1 to 8, got 1\.5"):
        read_by(rules_of(Settings)["count"].http, {"count": 1.5}, "count", 2)
    texts, numbers = Texts(2, 3), NumberByToken(1, -1, 2)
    assert read_by(texts, {"stop": "ab"}, "stop", ()) == ("ab",)
    assert read_by(texts, {"stop": ["ab", "c"]}, "stop", ()) == ("ab", "c")
    assert read_by(texts, {}, "stop", ()) == read_by(numbers, {}, "bias", ()) == ()
    for wrong in ("abcd", "", ["a", ""], ["a"] * 3, [1], {"a": 1}):
        with pytest.raises(ApiError, match="stop: must be at most 2 texts of 1 to 3 characters"):
            read_by(texts, {"stop": wrong}, "stop", ())
    assert read_by(numbers, {"bias": {"07": 2}}, "bias", ()) == {7: 2.0}
    for wrong in ([], {"a": 1}, {"-1": 1}, {"1": 1, "2": 1}, {"1" * 10: 1}):
        with pytest.raises(ApiError, match="bias: must be an object of at most 1 token ids with n"):
            read_by(numbers, {"bias": wrong}, "bias", ())
    with pytest.raises(ApiError, match=r"bias\.7: must be a number from -1 to 2, got 3"):
        read_by(numbers, {"bias": {"7": 3}}, "bias", ())
    with pytest.raises(TypeError, match="a body holds nothing by"):
        read_by(Flag(), {}, "is_on", False)


def test_a_command_line_has_an_option_for_each_field_with_a_help():
    parser = Parser("test")
    arguments.add_fields(parser, Settings, rules_of(Settings), warmth=3.0)
    assert arguments.chosen_fields(parser.parse_args([]), Settings) == {
        "count": 2, "warmth": 3.0, "part": None, "is_on": False, "is_off": True, "form": "a",
        "sizes": (4,),
    }  # fmt: skip
    words = ["--count=1", "--warmth=0", "--part=1", "--is-on", "--no-is-off", "--form=b"]
    words += ["--sizes=1,2"]
    assert Settings(**arguments.chosen_fields(parser.parse_args(words), Settings)) == Settings(
        count=1, warmth=0, part=1, is_on=True, is_off=False, form="b", sizes=(1, 2)
    )
    assert arguments.chosen_fields(parser.parse_args(["--form=old"]), Settings)["form"] == "b"
    for word, told in (
        ("--count=9", "argument --count: must be a whole number from 1 to 8, got '9'"),
        ("--part=0", "argument --part: must be a finite number from 0.1 to 1"),
        ("--form=c", "argument --form: invalid choice"),
        ("--sizes=0", "argument --sizes: must be a whole number from 1 to"),
    ):
        with pytest.raises(ValueError, match=told):
            parser.parse_args([word])
    help_text = parser.format_help()
    assert "how many (default: 2)" in help_text
    assert "whether not (default: on)" in help_text


def test_every_setting_of_a_request_has_a_rule_and_a_keyword():
    names = [field.name for field in dataclasses.fields(ds.SamplingParams)]
    assert list(rules_of(ds.SamplingParams)) == names
    assert set(SamplingFields.__annotations__) == set(names)


def test_what_bodies_may_hold_follows_from_the_settings():
    for protocol in (fields_openai.CHAT, fields_openai.COMPLETIONS):
        assert DRAWN.keys() <= protocol.keys()
    own = {"temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias"}
    for protocol in (fields_messages.MESSAGES, fields_responses.RESPONSES):
        assert DRAWN.keys() - own <= protocol.keys()
    assert DRAWN.keys() - {"temperature", "top_p"} <= set(dialects._OWN)
    body = _numbers() | {"logit_bias": {"5": -2}}
    assert body.keys() == DRAWN.keys()
    found = read_sampling(body, max_new_tokens=7)
    body["logit_bias"] = ((5, -2.0),)
    assert {name: getattr(found, name) for name in body} == body
    assert found == ds.SamplingParams(max_new_tokens=7, **body)


def test_every_number_of_a_draw_reaches_the_device():
    """Under the same name, from each row; what a row leaves out is the default."""
    body = _numbers()
    asked = stack_sampling([ds.SamplingParams(**body), ds.SamplingParams()])
    for name, value in body.items():
        np.testing.assert_allclose(
            getattr(asked, name), [value, getattr(ds.SamplingParams, name)], err_msg=name
        )
    assert body.keys() <= {field.name for field in dataclasses.fields(FullSampling)}


def _numbers():
    """Settings of one number each, as a body has them."""
    kinds = {Real: 0.5, Whole: 3}
    return {name: kinds[type(rule)] for name, rule in DRAWN.items() if type(rule) in kinds}
