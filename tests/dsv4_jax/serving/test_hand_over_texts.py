"""A request that moves to another engine goes on with its text, its grammar and its settings.

Of the model and the sizes of `test_grammars.py`, whose program serves here too.
"""

import pytest

import dsv4_jax as ds
from dsv4_jax.serving import Grammar
from dsv4_jax.serving.requests.cached_request import CachedRequest
from helpers.serving import SIZES, byte_tokenizer, one_layer, run_to_end

pytestmark = pytest.mark.unoptimised


def test_texts_stops_grammars_and_logprobs_go_on():
    """What held text back, or follows a grammar, is followed anew from the tokens."""
    model = one_layer(vocab_size=260, eos_token_ids=(257,))
    sizes = SIZES | {"tokenizer": byte_tokenizer()}
    source, target = (ds.Engine(*model, **sizes) for _ in range(2))
    wanted = {
        "logprobs": 2, "stop_texts": ("cdx",), "presence_penalty": 0.5, "logit_bias": {97: 3.0},
        "grammar": Grammar("regex", "(ab|cd){6,9}"), "max_new_tokens": 30, "seed": 4,
        "temperature": 1.0,
    }  # fmt: skip
    request_id = source.submit("Once upon a time", **wanted)
    while source.requests[request_id].num_drawn < 3:
        source.step()
    cached = CachedRequest.from_bytes(source.snapshot(request_id).to_bytes())
    assert cached.sampling == source.requests[request_id].sampling
    came = target.restore(cached)
    (done,), (copy,) = run_to_end(source, request_id), run_to_end(target, came)
    assert copy == done
    assert len(done.logprobs) == len(done.token_ids) > 12
    assert set(done.text) <= set("abcd")
