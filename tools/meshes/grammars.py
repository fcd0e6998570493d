"""Answers that follow grammars, on meshes and on one device: tokens without drafts, tokens with
drafts, how many drafts were kept, and the texts; and tokens of steps with their draws apart.
"""

import numpy as np

import dsv4_jax as ds
from dsv4_jax.serving import Grammar
from helpers import serving
from tools.meshes.harness import mesh_of

END, VOCAB = 257, 260
EXPRESSION, LARK = "(ab|cd){3,9}", 'start: "x" <[65]> /[0-9]{2}/'
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "k": {"enum": ["a"]}},
    "required": ["n", "k"],
    "additionalProperties": False,
}
ASKED = (
    {"grammar": Grammar.json_schema(SCHEMA)},
    {"grammar": Grammar("regex", EXPRESSION), "temperature": 1.0, "seed": 3},
    {"max_new_tokens": 30},
    {"grammar": Grammar("lark", LARK), "presence_penalty": 1.0},
    {"grammar": Grammar.json_schema(SCHEMA), "temperature": 1.3, "seed": 5},
)


def check_all(arguments):
    found = {"one device": check(None)}
    alone = found["one device"]["plain"]
    return found | {name: check(mesh_of(name), alone) for name in arguments.meshes}


def engine_on(mesh, **changes):
    """Two slots on each data shard, so that some requests wait; bytes are tokens."""
    sizes = {"num_attention_heads": 8, "o_groups": 8, "hc_sinkhorn_iters": 1}
    config, params = serving.one_layer(vocab_size=VOCAB, eos_token_ids=(END,), **sizes)
    shards = 1 if mesh is None else mesh.shape["data"]
    counts = {"max_requests": 2 * shards, "num_snapshots": 8 * shards}
    options = serving.SIZES | counts | {"mesh": mesh} | changes
    return ds.Engine(config, params, tokenizer=serving.byte_tokenizer(), **options)


def answers(engine, known=None):
    """Completions of `ASKED`, all at once.

    With `known` tokens drafts are those, or every third time tokens that a grammar may refuse.
    """
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, 256, length).tolist() for length in (30, 5, 50, 17, 9)]
    ids = [
        engine.submit(text, **({"max_new_tokens": 200} | asked))
        for text, asked in zip(texts, ASKED, strict=True)
    ]
    step = 0
    while engine.num_unfinished:
        for request_id, right in zip(ids, known or [], strict=known is not None):
            request = engine.requests[request_id]
            if request.drafts:
                following = right[request.num_drawn :][:3]
                request.drafts = following if step % 3 else [*following[:1], 0, 0]
        engine.step()
        step += 1
    return [engine.completion(request_id) for request_id in ids]


def check(mesh, known=None):
    """What a mesh gives; drafts are the tokens `known`, or what it gives without drafts."""
    plain = answers(engine_on(mesh, draft_tokens=0))
    plain_ids = [[int(token) for token in one.token_ids] for one in plain]
    apart = engine_on(mesh, draft_tokens=0, decode_tokens=None)
    apart.loop.runner.simplifies = True  # as on a GPU
    apart_ids = [[int(token) for token in one.token_ids] for one in answers(apart)]
    engine = engine_on(mesh, draft_tokens=3)
    drafted = answers(engine, known or plain_ids)
    assert not engine.verify().problems
    return {
        "plain": plain_ids,
        "drafted": [[int(token) for token in one.token_ids] for one in drafted],
        "apart": apart_ids,
        "accepted": engine.metrics.accepted_tokens,
        "texts": [one.text for one in drafted],
        "reasons": [one.finish_reason for one in drafted],
    }
