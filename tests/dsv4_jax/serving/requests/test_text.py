"""Text of a stream: whole characters, nothing doubled or lost, and no part of a stop text."""

import threading
import time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

import dsv4_jax as ds
from dsv4_jax.serving.device.hand_out import HandOut
from dsv4_jax.serving.device.step_result import StepResult
from dsv4_jax.serving.metrics.metrics import Metrics
from dsv4_jax.serving.requests.calls import UndoLog
from dsv4_jax.serving.requests.prompts import encode_prompt
from dsv4_jax.serving.requests.request import Request
from dsv4_jax.serving.requests.text import (
    TextState,
    encode_text,
    find_stop,
    hold_back,
    load_tokenizer,
)
from dsv4_jax.serving.requests.token_texts import TokenTexts
from dsv4_jax.serving.schedule.known_tokens import KnownTokens
from dsv4_jax.serving.schedule.running import Running
from helpers import slow
from helpers.released_tokenizer import released_tokenizer


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


RELEASED = released_tokenizer()
"""V4's own: parts of characters, several characters, and both in one token."""


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


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.text(max_size=20).map(lambda text: RELEASED.encode(text).ids)
    | st.lists(st.integers(0, RELEASED.get_vocab_size() - 1), max_size=30)
)
@example([36073] * 20)  # two letters and a byte of another one
@example(RELEASED.encode("👩‍👩‍👧 𓀀\u2028" * 9).ids)
def test_pieces_of_v4_s_own_tokens_are_their_text(ids):
    pieces, rest, most = pieces_of(ids, RELEASED)
    assert "".join(pieces) + rest == RELEASED.decode(ids)
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


def hand_out(requests, known, undo, drawn, texts):
    """Tokens of a step in which every request draws, and who ended."""
    running = Running({one.slot: one for one in requests}, known)
    places = np.arange(len(requests))
    result = StepResult(drawn, None, None, None)
    step = HandOut(running, places, running.slots, result, 1.0, Metrics(), undo)
    with undo:
        return list(step.run(texts)), step.ended


@pytest.mark.parametrize(
    "tokenizer",
    slow.all_but([RELEASED], [BYTES, WORDS, RELEASED]),
    ids=["bytes", "words", "released"],
)
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_texts_of_a_step_are_those_of_tokens_one_by_one(tokenizer, data):
    """Of any bytes, some requests with stop texts, one to three tokens a step, and a fork."""
    size = tokenizer.get_vocab_size()
    texts, known, undo = TokenTexts(tokenizer, size + 3), KnownTokens(5, 60), UndoLog()
    plain, mine = [], []
    for slot in range(4):
        fields = {
            "max_new_tokens": data.draw(st.integers(1, 30)),
            "stop_texts": data.draw(st.sampled_from([(), (), ("ab", "é")])),
            "stop_token_ids": data.draw(st.sampled_from([(), (5, 98)])),
        }
        sampling, prompt = ds.SamplingParams(**fields), np.array([7, 65], np.int32)
        plain.append(Request(slot, prompt, sampling, 0.0))
        mine.append(Request(slot, prompt, sampling, 0.0, texts=texts))
        enter(mine[-1], slot, known, undo)
    live = list(range(4))
    common = st.sampled_from([*b"ab \n", *"é世😀\ufffd".encode(), size - 1, size, size + 2])
    ids = common | st.integers(0, size - 1)
    while live:
        width = data.draw(st.integers(1, 3))
        drawn = np.full((5, 3), -1, np.int32)
        for number in live:
            drawn[mine[number].slot, :width] = data.draw(
                st.lists(ids, min_size=width, max_size=width)
            )
        expected = []
        for number in live:
            one = plain[number]
            for token in drawn[mine[number].slot, :width].tolist():
                one.add(token, tokenizer)
                expected.append(one.token(one.num_drawn - 1))
                if one.finish_reason:
                    break
        found, ended = hand_out([mine[number] for number in live], known, undo, drawn, texts)
        assert found == expected
        assert [one.request_id for one in ended] == [n for n in live if plain[n].finish_reason]
        for number in live:
            one, other = mine[number], plain[number]
            assert one.known.tolist() == other.known.tolist()
            assert one.completion(tokenizer) == other.completion(tokenizer)
            given_texts = [one.token(n).text for n in range(one.num_drawn)]
            assert given_texts == [other.token(n).text for n in range(other.num_drawn)]
        live = [number for number in live if not plain[number].finish_reason]
        if len(plain) == 4 and live and data.draw(st.booleans()):  # goes on from half a text
            mine.append(mine[live[0]].branch(4, 2, 0.0))
            plain.append(plain[live[0]].branch(4, 2, 0.0))
            enter(mine[-1], 4, known, undo)
            live.append(4)


def enter(request, slot, known, undo):
    with undo:
        undo.save(request)
        request.slot = slot
        known.enter(request, undo)


@pytest.mark.parametrize("first", [0xC3, ord("a")])
def test_a_step_that_is_undone_leaves_texts_alone(first):
    """Half a character and a whole one, then the other half or another request's whole one."""
    texts, known, undo = TokenTexts(BYTES, 300), KnownTokens(1, 20), UndoLog()
    one = make_request(max_new_tokens=9)
    one = one.branch(1, 0, 0.0)
    one._token_texts = texts
    enter(one, 0, known, undo)
    hand_out([one], known, undo, np.int32([[first]]), texts)
    undo.__enter__()
    running = Running({0: one}, known)
    result = StepResult(np.int32([[0xA9, ord("b")]]), None, None, None)
    HandOut(running, np.arange(1), running.slots, result, 1.0, Metrics(), undo).run(texts)
    undo.roll_back()
    undo.forget()
    assert one.num_drawn == 1
    assert known.holds_text[0] == (first == 0xC3)
    hand_out([one], known, undo, np.int32([[ord("x"), -1]]), texts)
    assert one.completion(BYTES).text == BYTES.decode([first, ord("x")])


def test_a_token_without_text_is_held_nowhere():
    """A special token, and then bytes that are no characters: pieces end where they would without.

    Tokens that are added by whole steps and those that are added alone held different ones.
    """
    state, alone = TextState(), TextState()
    assert state.add(261, BYTES) == (TextState(), "")
    state, _ = state.add(261, BYTES)
    for token in [191, 191, 264, 152, 159, 191, 191, 191, 261, 191, 191, 150, 191, 191, 264, 150]:
        state, text = state.add(token, BYTES)
        alone, expected = alone.add(token, BYTES)
        assert text == expected


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("tokenizer", [SHIPPED, RELEASED], ids=["bytes", "released"])
def test_a_text_is_encoded_as_the_tokenizer_does(tokenizer, special):
    for text in ("", "a", "The 😀\n\n  end <｜User｜>", "é世" * 50):
        wanted = tokenizer.encode(text, add_special_tokens=special).ids
        assert encode_text(tokenizer, text, add_special_tokens=special).ids == wanted


@pytest.fixture
def giving_up():
    """A tokenizer of bytes whose expression gives up on 40 a's before a b."""
    tokenizer = Tokenizer.from_str(SHIPPED.to_str())
    hard = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([hard, SHIPPED.pre_tokenizer])
    return tokenizer


def test_a_text_that_a_tokenizer_gives_up_on_is_refused_by_name(giving_up):
    """The library panics, which is no Exception, and ended whoever did not expect it."""
    assert encode_text(giving_up, "aab").ids == SHIPPED.encode("aab").ids
    with pytest.raises(ValueError, match=r"the tokenizer cannot encode it: .*retry-limit"):
        encode_text(giving_up, "a" * 40 + "b")
    with pytest.raises(ValueError, match="prompt must be a text that the tokenizer can encode"):
        encode_prompt("a" * 40 + "b", ds.DSV4Config.tiny(), giving_up, name="prompt")


def test_other_threads_go_on_while_a_long_text_is_encoded():
    """A server answers /health meanwhile."""
    text, times = "some words of a long prompt " * 10_000, [time.perf_counter()]
    thread = threading.Thread(target=encode_text, args=(RELEASED, text))
    thread.start()
    while thread.is_alive():
        times.append(time.perf_counter())
    assert max(np.diff(times)) < 0.5 * (times[-1] - times[0])
