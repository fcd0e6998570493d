"""Text of a stream: whole characters, nothing doubled or lost, and no part of a stop text."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

import dsv4_jax as ds
from dsv4_jax.serving.request import Request
from dsv4_jax.serving.text import TextState, find_stop, hold_back, load_tokenizer


def make_tokenizer(words, decoder):
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, words[0]))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<special>"])
    return tokenizer


def spelt(data):
    """Bytes as a vocabulary of bytes writes them."""
    return "".join(SHIPPED.id_to_token(byte) for byte in data)


SHIPPED = load_tokenizer(ds.SHIPPED_CHECKPOINT)  # its ids are bytes
PARTS = [b"ab", b" end", "né".encode(), "é世".encode()[1:3], "😀".encode()[1:3]]
BYTES = make_tokenizer(
    [*map(spelt, [bytes([byte]) for byte in range(256)]), *map(spelt, PARTS)], decoders.ByteLevel()
)
"""Tokens of one to four bytes, some of them parts of characters; the first ids are bytes."""

FALLBACK = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
WORDS = make_tokenizer(
    [*(f"<0x{byte:02X}>" for byte in range(256)), "\u2581the", "\u2581", "end", "\u2581a"],
    decoders.Sequence([*FALLBACK, decoders.Strip(" ", 1, 0)]),
)
"""Words, the first of which loses its space, and bytes of characters that are no words."""

IDS = st.integers(0, BYTES.get_vocab_size() - 1)
CHARACTERS = st.sampled_from(list("é世😀\ufffd".encode()))


def pieces_of(ids, tokenizer):
    """The piece of each token, the rest, and how many tokens were held at most."""
    state, pieces, most = TextState(), [], 0
    for token in ids:
        state, piece = state.add(token, tokenizer)
        pieces.append(piece)
        most = max(most, len(state.held))
    return pieces, state.rest(tokenizer), most


@settings(max_examples=200, deadline=None)
@given(st.lists(IDS, max_size=40) | st.lists(CHARACTERS, max_size=60))
@example(list("\ufffd".encode()) * 30)
@example([0xFF] * 50)
@example([BYTES.token_to_id("<special>")] * 40 + list("é".encode()))
def test_pieces_are_the_text_of_all_tokens(ids):
    """Of any bytes, characters or not, while few tokens are held."""
    pieces, rest, most = pieces_of(ids, BYTES)
    assert "".join(pieces) + rest == BYTES.decode(ids)
    assert most <= 17


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=20))
def test_a_character_comes_with_its_last_token(text):
    pieces, rest, _ = pieces_of(text.encode(), BYTES)
    ends = np.cumsum([len(char.encode()) for char in text]).astype(int) - 1
    whole = dict(zip(ends.tolist(), text, strict=True))
    if "\ufffd" not in text:
        assert pieces == [whole.get(place, "") for place in range(len(pieces))]
    assert "".join(pieces) + rest == text


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(256, WORDS.get_vocab_size() - 1) | st.sampled_from(["é", "😀"])))
@example([WORDS.token_to_id("<special>")] * 30 + [256] * 2)
def test_a_first_space_is_stripped_once(items):
    ids = [token for item in items
           for token in (item.encode() if isinstance(item, str) else [item])]  # fmt: skip
    pieces, rest, most = pieces_of(ids, WORDS)
    assert "".join(pieces) + rest == WORDS.decode(ids)
    assert most <= 17


STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


@settings(max_examples=300, deadline=None)
@given(st.text("abc", max_size=30), STOPS)
def test_no_more_is_held_than_may_begin_a_stop_text(text, stops):
    if find_stop(text, stops) >= 0:
        assert any(text.startswith(stop, find_stop(text, stops)) for stop in stops)
        text = text[: find_stop(text, stops)]
    given_text, held = hold_back(text, stops)
    assert given_text + held == text
    beginnings = {stop[:n] for stop in stops for n in range(1, len(stop))}
    assert held == max((b for b in beginnings if text.endswith(b)), key=len, default="")


def make_request(**fields):
    sampling = ds.SamplingParams(**({"max_new_tokens": 50, "stop_token_ids": ()} | fields))
    return Request(0, np.array([256, 65], np.int32), sampling, 0.0)


@settings(max_examples=200, deadline=None)
@given(
    st.text("abé😀 ", max_size=30), st.lists(st.text("abé😀", min_size=1, max_size=4)), st.data()
)
def test_a_stream_gives_the_completion_s_text(text, stops, data):
    """Whatever the tokens, up to the first stop text, and through a fork."""
    places = [text[:end] for end in range(len(text) + 1) if find_stop(text[:end], stops) >= 0]
    expected = places[0][: find_stop(places[0], stops)] if places else text
    ids = list(text.encode())
    one = make_request(max_new_tokens=max(len(ids), 1), stop_texts=stops)
    fork_at, shown = data.draw(st.integers(0, len(ids))), ""
    for count, token in enumerate(ids):
        if count == fork_at:
            one = one.branch(1, 2, 3.0)
        one.add(token, BYTES)
        shown += one.token(one.num_drawn - 1).text
        assert expected.startswith(shown)
        if one.finish_reason:
            break
    assert shown == expected
    done = one.completion(BYTES)
    assert done.text == shown
    if ids:
        assert done.finish_reason == ("stop" if places else "length")


def test_what_an_undone_step_had_added_is_forgotten():
    """State is a value: what was saved before goes on as if nothing had been added."""
    one = make_request(stop_texts=("xyz",))
    one.add(ord("x"), BYTES)
    saved = dict(vars(one))
    one.add(ord("y"), BYTES)
    one.add(0xC3, BYTES)
    vars(one).update(saved)
    for token in "yé".encode():
        one.add(token, BYTES)
    assert [one.token(n).text for n in range(4)] == ["", "", "", "xyé"]


@pytest.mark.parametrize(("reason", "text"), [("cancelled", "a"), ("stop", "ax\ufffd")])
def test_what_is_held_at_the_end(reason, text):
    """A request that ends by itself gives what it holds; one that is cancelled does not."""
    one = make_request(stop_texts=("xyz",), stop_token_ids=(0xC3,))
    for token in b"ax":
        one.add(token, BYTES)
    if reason == "stop":
        one.add(0xC3, BYTES)  # the beginning of a character
    else:
        one.finish_reason = "cancelled"
    done = one.completion(BYTES)
    assert (done.text, done.finish_reason) == (text, reason)
    assert "".join(one.token(n).text for n in range(one.num_drawn)) == text
