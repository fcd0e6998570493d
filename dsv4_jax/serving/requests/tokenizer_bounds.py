"""What a `tokenizer.json` may ask for: how much longer it makes texts, and how long tokens are.

The `tokenizers` library does what the file says. Forty rules that each double a text take 3 KB of
the file, and no machine has the memory for what they give.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from dsv4_jax.config.kinds import show

MAX_BYTES = 2**26
"""Of the file. V4's has 8 MB, and those of vocabularies of 262,144 some 33."""

MAX_GROWTH = 64
"""How many characters may become of one. SentencePiece's own rules make 18 of one at most."""

MAX_RULES = 256
"""JSON objects of a normalizer, pre-tokenizer or decoder; V4's have seven."""

MAX_INSERTED = 1000
"""Characters that a rule puts in at once, and tokens that are put around a text."""

MAX_TOKEN_CHARS = 4096
"""Of a token's text; V4's longest has 128."""

MAX_ADDED_CHARS = 2**20
"""Of all added tokens, for which the library takes 100 bytes each; V4's have 31,217."""

_INSERTED = ("content", "prepend", "prefix", "suffix", "replacement", "cleanup", "pad_token")
_INSERTED += ("continuing_subword_prefix", "end_of_word_suffix", "unk_token")
_OF_BYTE_LEVEL = {"trim_offsets", "add_prefix_space", "use_regex"}
_BYTES_OF_CHARACTER = 4
_PATTERNS = {"String", "Regex"}
_NEVER_EMPTY = re.compile(
    r"""(?: \[ (?: [^\[\]\\] | \\. )+ \]  # a class, such as [“”]
          | \\[sSdDwW]
          | [^\\\[\](){}.*+?|^$]
        ) (?: \+ | \{ [1-9]\d{0,3} (?: ,\d{0,4} )? \} )?""",
    re.VERBOSE,
)
"""Regular expressions of one character, perhaps repeated, which find no empty text."""


def check_bounds(contents: dict[str, Any]) -> None:
    """Refuses a tokenizer that asks for more than the bounds above.

    Padding and truncation are not looked at: whoever loads the tokenizer switches them off.

    Args:
      contents: of the file; what is malformed in it is left to the library to refuse.

    Raises:
      ValueError: it asks for more. The message names the part, the bound and the value.
    """
    before_tokens = 1
    for part in ("normalizer", "pre_tokenizer"):
        before_tokens *= _growth(part, contents.get(part))
    for part, growth in (
        ("its normalizer and pre_tokenizer", before_tokens),
        ("its decoder", _growth("decoder", contents.get("decoder"))),
    ):
        _limit(f"{part} make of a character", growth, MAX_GROWTH, "characters")
    _check_template(contents.get("post_processor"))
    _check_tokens(contents)


def _growth(part: str, rules: Any) -> int:
    """How many characters may become of one, at most."""
    objects = list(_objects(rules))
    _limit(f"its {part} has", len(objects), MAX_RULES, "objects")
    for one in objects:
        _check_inserted(part, one)
    growth = _Growth(1, {})
    for rule in reversed([one for one in objects if not one.keys() <= _PATTERNS]):
        growth = _with_rule_before(rule, growth)
    return growth.most


class _Growth(NamedTuple):
    """How many characters rules make of one: of any other one, and of those that they name."""

    other: int
    named: dict[str, int]

    @property
    def most(self) -> int:
        return max([self.other, *self.named.values()])

    def of(self, char: str) -> int:
        return self.named.get(char, self.other)


def _with_rule_before(rule: dict[str, Any], rest: _Growth) -> _Growth:
    """The growth of rules with one more before them."""
    content, pattern = rule.get("content"), rule.get("pattern")
    if isinstance(content, str) and pattern is not None:
        made = sum(map(rest.of, content))
        text, expression = _pattern_of(pattern)
        if text:
            share = -(-made // len(text))
            named = {char: max(rest.of(char), share) for char in text}
            return _Growth(rest.other, rest.named | named)
        if _NEVER_EMPTY.fullmatch(expression):
            named = {char: max(count, made) for char, count in rest.named.items()}
            return _Growth(max(rest.other, made), named)
        named = {char: count + made for char, count in rest.named.items()}
        return _Growth(rest.other + made, named)
    return _Growth(_growth_of_other(rule) * rest.most, {})  # it may make any character of another


def _pattern_of(pattern: Any) -> tuple[str, str]:
    """The text that a rule looks for, or else the regular expression; "" if it is not that."""
    if not isinstance(pattern, dict):
        return (pattern if isinstance(pattern, str) else ""), ""
    text, expression = pattern.get("String"), pattern.get("Regex")
    return (
        text if isinstance(text, str) else "",
        expression if isinstance(expression, str) else "",
    )


def _growth_of_other(rule: dict[str, Any]) -> int:
    if isinstance(charsmap := rule.get("precompiled_charsmap"), str):
        return _longest_replacement(charsmap)
    is_byte_level = rule.get("type") == "ByteLevel" or rule.keys() & _OF_BYTE_LEVEL
    return _BYTES_OF_CHARACTER if is_byte_level else 1


def _longest_replacement(charsmap: str) -> int:
    """Characters of the longest text in SentencePiece's map: a trie's size, the trie, the texts."""
    try:
        data = base64.b64decode(charsmap)
    except (binascii.Error, ValueError):
        return 1  # which the library refuses
    texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
    return max((len(text.decode("utf-8", "replace")) for text in texts), default=1) or 1


def _check_inserted(part: str, rule: dict[str, Any]) -> None:
    for name in _INSERTED:
        if isinstance(text := rule.get(name), str):
            _limit(f"{name} of its {part} has", len(text), MAX_INSERTED, "characters")


def _check_template(processor: Any) -> None:
    """A text stands once in what is made of it, among few special tokens."""
    copies, tokens = 1, 0
    for one in _objects(processor):
        pieces, special_tokens = one.get("single"), one.get("special_tokens")
        if not isinstance(pieces, list) or not isinstance(special_tokens, dict):
            continue
        names = [p["SpecialToken"].get("id") for p in _holding(pieces, "SpecialToken")]
        tokens += sum(
            _count_ids(special_tokens.get(name)) for name in names if isinstance(name, str)
        )
        copies *= max(1, sum(1 for _ in _holding(pieces, "Sequence")))
    _limit("its post_processor repeats a text", copies, 1, "times")
    _limit("its post_processor adds", tokens, MAX_INSERTED, "special tokens")


def _holding(pieces: list[Any], name: str) -> Iterator[dict[str, Any]]:
    for piece in pieces:
        if isinstance(piece, dict) and isinstance(piece.get(name), dict):
            yield piece


def _count_ids(special: Any) -> int:
    ids = special.get("ids") if isinstance(special, dict) else None
    return len(ids) if isinstance(ids, list) else 0


def _check_tokens(contents: dict[str, Any]) -> None:
    model = contents.get("model")
    model = model if isinstance(model, dict) else {}
    _check_inserted("model", model)
    chars = model.get("max_input_chars_per_word")  # the time of a word is the square of it
    _limit("max_input_chars_per_word is", chars, MAX_INSERTED, "characters")
    vocab = model.get("vocab")
    pairs = vocab if isinstance(vocab, list) else []
    pairs = [pair for pair in pairs if isinstance(pair, list) and pair]
    texts = list(vocab) if isinstance(vocab, dict) else [pair[0] for pair in pairs]
    added = contents.get("added_tokens")
    found = [one.get("content") for one in _objects(added if isinstance(added, list) else [])]
    found = [text for text in found if isinstance(text, str)]
    longest = max((len(text) for text in (*texts, *found) if isinstance(text, str)), default=0)
    _limit("its longest token has", longest, MAX_TOKEN_CHARS, "characters")
    _limit("its added_tokens have", sum(map(len, found)), MAX_ADDED_CHARS, "characters in all")


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Every JSON object in a value."""
    if isinstance(value, dict):
        yield value
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _objects(inner)


def _limit(what: str, count: Any, most: int, unit: str) -> None:
    if isinstance(count, int) and count > most:
        shown = f"{count:,}" if count < 10**15 else show(count)
        raise ValueError(f"{what} {shown} {unit}, and at most {most:,} are allowed")
