"""A request that moves to another engine goes on with its text, its grammar and its settings.

Of the small model of `test_dspark.py` and `test_grammars.py`, whose program serves here too.
"""

import pytest

from dsv4_jax.serving import Grammar
from dsv4_jax.serving.requests.cached_request import CachedRequest
from helpers import taught
from helpers.serving import run_to_end

pytestmark = pytest.mark.unoptimised


def test_texts_stops_grammars_and_logprobs_go_on():
    """What held text back, or follows a grammar, is followed anew from the tokens."""
    source, target = taught.make_small(), taught.make_small()
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
