"""A tokenizer.json asks for no more than its bounds, and neither pads nor cuts a prompt."""

import base64
import json

import pytest

import dsv4_jax as ds
from dsv4_jax.serving.requests.text import load_tokenizer
from dsv4_jax.serving.requests.tokenizer_bounds import MAX_BYTES, check_bounds
from helpers.released_tokenizer import released_tokenizer

SHIPPED = json.loads((ds.SHIPPED_CHECKPOINT / "tokenizer.json").read_text())


def load(tmp_path, **changes):
    (tmp_path / "tokenizer.json").write_text(json.dumps(SHIPPED | changes))
    return load_tokenizer(tmp_path)


@pytest.mark.parametrize("count", [5, 10**9, 2**40, 2**63])
def test_padding_and_truncation_of_a_file_change_no_prompt(tmp_path, count):
    padding = {"strategy": {"Fixed": count}, "direction": "Right", "pad_to_multiple_of": count,
               "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}  # fmt: skip
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    expected = load(tmp_path).encode("abc").ids
    assert len(expected) == 4
    tokenizer = load(tmp_path, padding=padding, truncation=truncation)
    assert tokenizer.encode("abc").ids == expected
    assert tokenizer.encode_batch(["abc", "a"])[1].ids == expected[:2]


def sequence(name, *rules):
    return {"type": "Sequence", name: list(rules)}


def replace(pattern, content, kind="String"):
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def template(*pieces, ids=(256,)):
    both = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
    known = {"s": {"id": "s", "ids": list(ids), "tokens": ["<bos>"] * len(ids)}}
    named = {"A": both[0], "s": {"SpecialToken": {"id": "s", "type_id": 0}}}
    return {"type": "TemplateProcessing", "single": [named[p] for p in pieces], "pair": both,
            "special_tokens": known}  # fmt: skip


def charsmap(text):
    data = base64.b64encode(bytes(4) + text.encode() + b"\0")
    return {"type": "Precompiled", "precompiled_charsmap": data.decode()}


BYTE_LEVEL = SHIPPED["pre_tokenizer"]
DOUBLED = [replace("a", "aa")] * 40
PAIR = {"id": 300, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
        "special": False}  # fmt: skip
TOO_MUCH = {
    "normalizer doubles": (
        {"normalizer": sequence("normalizers", *DOUBLED)},
        "make of a character 4,398,046,511,104 characters",  # four by the bytes that follow
    ),
    "normalizer without types": (
        {"normalizer": {"normalizers": [{"pattern": "a", "content": "aa"}] * 40}},
        "make of a character",
    ),
    "nothing is replaced": (
        {"normalizer": replace("", "b" * 100, "Regex")}, "make of a character 404 characters",
    ),
    "classes double": (
        {"normalizer": sequence("normalizers", *[replace("[ab]+", "aa", "Regex")] * 40)},
        "make of a character 4,398,046,511,104 characters",
    ),
    "two rules, one after the other": (
        {"normalizer": sequence("normalizers", *[replace("a", "bbb"), replace("b", "aaa")] * 2)},
        "make of a character 324 characters",
    ),
    "a rule between changes characters": (
        {"normalizer": sequence("normalizers", replace("a", "B" * 8), {"type": "Lowercase"},
                                replace("b", "c" * 8))},
        "make of a character 256 characters",
    ),
    "what may find nothing": (
        {"normalizer": sequence("normalizers", *[replace("x*", "y", "Regex")] * 5)},
        "make of a character 128 characters",
    ),
    "one long text": ({"normalizer": {"type": "Prepend", "prepend": "b" * 1001}},
                      "prepend of its normalizer has 1,001"),
    "many rules": ({"normalizer": sequence("normalizers", *[{"type": "Lowercase"}] * 300)},
                   "its normalizer has 301 objects"),
    "charsmap": ({"normalizer": charsmap("x" * 100)}, "make of a character 400 characters"),
    "bytes of bytes": ({"pre_tokenizer": sequence("pretokenizers", *[BYTE_LEVEL] * 4)},
                       "make of a character 256"),
    "decoder doubles": ({"decoder": sequence("decoders", *DOUBLED)},
                        "its decoder make of a character 1,099,511,627,776"),
    "text twice": ({"post_processor": template("A", "s", "A")}, "repeats a text 2 time"),
    "text twice, twice": (
        {"post_processor": sequence("processors", *[template("A", "A")] * 2)}, "repeats a text 4",
    ),
    "specials": ({"post_processor": template("s", "s", "A", ids=[256] * 501)},
                 "adds 1,002 special tokens"),
    "long token": ({"added_tokens": [*SHIPPED["added_tokens"], PAIR | {"content": "a" * 5000}]},
                   "longest token has 5,000"),
    "long word": ({"model": {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a",
                             "continuing_subword_prefix": "#",
                             "max_input_chars_per_word": 10**9}},
                  "max_input_chars_per_word is 1,000,000,000"),
    "added": ({"added_tokens": [PAIR | {"id": i, "content": f"{i:04000}"} for i in range(300)]},
              "added_tokens have 1,200,000 characters"),
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_asks_for_too_much_is_refused_before_it_is_made(tmp_path, name, monkeypatch):
    changes, message = TOO_MUCH[name]
    monkeypatch.setattr("dsv4_jax.serving.requests.text.Tokenizer", None)  # is not reached
    with pytest.raises(
        ValueError, match=r"tokenizer\.json is no tokenizer that can be read"
    ) as got:
        load(tmp_path, **changes)
    assert message in str(got.value)
    assert "allowed" in str(got.value)


def test_what_real_tokenizers_ask_for_is_allowed(tmp_path):
    """V4's own; rules as Gemma, Llama, ALBERT, T5 and SigLIP have; many that add little."""
    check_bounds(json.loads(released_tokenizer().to_str()))
    compatible = charsmap("\ufdfa" * 18)  # the longest of NMT's rules
    for rules in (
        [replace(" ", "\u2581")],
        [{"type": "Prepend", "prepend": "\u2581"}, replace(" ", "\u2581")],
        [replace("``", '"'), {"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}],
        [replace("\u2026", "..."), replace("\u2014", "--"), replace("\u00bd", "1/2"),
         replace("\u201c", "''")],
        [replace(found, made, "Regex") for found, made in (
            ("[\u201c\u201d]", '"'), ("[\u2018\u2019]", "'"), (r"\s+", " "), (" {2,}", " "),
            ("[!,.?]", ""), (r"[\p{Cc}]", " "), ("\u2028", " "))],
    ):  # fmt: skip
        found = load(tmp_path, normalizer=sequence("normalizers", *rules))
        assert found.decode(found.encode("a b").ids)
    spaces = [replace(" {2,}", " ", "Regex"), replace(r"\s+", " ", "Regex")]
    check_bounds({"normalizer": sequence("normalizers", spaces[1], compatible, spaces[0])})
    check_bounds({"normalizer": sequence("normalizers", compatible, replace(" {2,}", " ", "Regex")),
                  "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581"}})  # fmt: skip


@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer", "post_processor", "decoder",
                                  "model", "added_tokens"])  # fmt: skip
def test_what_is_malformed_is_left_to_the_library(tmp_path, part):
    odd = [3, "x", [], [3, None], {"type": 3}, {"single": 3, "special_tokens": {}},
           {"content": "x", "pattern": []}, {"precompiled_charsmap": "@@@@"},
           {"vocab": [[], 3, [None]]}, {"single": [3, {"SpecialToken": {"id": []}}],
                                        "special_tokens": {"s": 3}}]  # fmt: skip
    for value in odd:
        check_bounds(SHIPPED | {part: value})


def test_a_file_of_three_gigabytes_of_nothing_is_not_read(tmp_path):
    with (tmp_path / "tokenizer.json").open("wb") as stream:
        stream.truncate(3 * 2**30)
    with pytest.raises(ValueError, match=rf"at most {MAX_BYTES:,} bytes, got 3,221,225,472"):
        load_tokenizer(tmp_path)
