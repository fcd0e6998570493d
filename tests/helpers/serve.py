"""Servers for tests: one small model, with V4's tokenizer or the shipped one."""

import contextlib
import dataclasses
import functools
import json
import pathlib

import deepseek_recipe as recipe
import jax
from tokenizers import Tokenizer

import dsv4_jax as ds
from dsv4_jax.serve import Server, ServeSettings
from dsv4_jax.serving import AsyncEngine
from helpers.serving import CONFIG

MODEL = "small"
SPECIAL = [
    getattr(recipe.SpecialToken, name).default_str()
    for name in sorted(dir(recipe.SpecialToken))
    if name[0].isupper()
]
SPOKEN = ("</think>", "<think>", "｜DSML｜")
"""Tokens of V4's tokenizer that are no special ones: decoding shows them."""

EOS = 256 + SPECIAL.index("<｜end▁of▁sentence｜>")
STEP = 64
"""Tokens of the one step that there is."""

_SHIPPED = pathlib.Path(ds.SHIPPED_CHECKPOINT) / "tokenizer.json"


def shipped_tokenizer():
    return Tokenizer.from_file(str(_SHIPPED))


@functools.cache
def v4_tokenizer():
    """Bytes, and all the tokens that conversations need."""
    made = json.loads(_SHIPPED.read_text())
    made["added_tokens"] = [
        made["added_tokens"][0] | {"id": 256 + i, "content": text, "special": text not in SPOKEN}
        for i, text in enumerate(SPECIAL)
    ]
    begin = "<｜begin▁of▁sentence｜>"
    made["post_processor"]["single"][0]["SpecialToken"]["id"] = begin
    entry = {"id": begin, "ids": [256 + SPECIAL.index(begin)], "tokens": [begin]}
    made["post_processor"]["special_tokens"] = {begin: entry}
    return Tokenizer.from_str(json.dumps(made))


@functools.cache
def model():
    """One CSA layer with a vocabulary for either tokenizer."""
    config = dataclasses.replace(
        CONFIG,
        layer_types=(ds.AttentionType.CSA,),
        router_types=(ds.RouterType.LEARNED,),
        vocab_size=256 + len(SPECIAL),
        eos_token_ids=(EOS,),
        num_mtp_layers=0,
    )
    return config, ds.init_params(config, jax.random.key(0))


def small_engine(tokenizer=None, **changes):
    """An engine of one program."""
    sizes = {
        "max_requests": 8, "max_context_tokens": 2048, "prefill_tokens": (STEP,),
        "decode_tokens": STEP, "num_snapshots": 16,
    }  # fmt: skip
    return ds.Engine(*model(), tokenizer=tokenizer or v4_tokenizer(), **(sizes | changes))


def warm_engine():
    """That engine, its program compiled."""
    engine = small_engine()
    engine.warmup()
    return engine


@contextlib.contextmanager
def running(engine, *, queue=None, **settings):
    """A server in a thread."""
    shared = AsyncEngine(engine, **(queue or {}))
    with Server(shared, ServeSettings(**({"model_name": MODEL} | settings))) as server:
        yield server


def script(monkeypatch, engine, text):
    """Makes requests draw the tokens of a text and the end, whatever the model says.

    Those with a grammar draw what the model gives under its masks.
    """
    ids = [*v4_tokenizer().encode(text, add_special_tokens=False).ids, EOS]
    run = (
        engine._runner.run if not hasattr(engine._runner.run, "plain") else engine._runner.run.plain
    )

    def say(plan, requests, *rest):
        read, rows = run(plan, requests, *rest), plan.rows

        def read_and_say():
            result = read()
            token_ids = result.token_ids.copy()
            for slot in rows.slots[rows.draws].tolist():
                if requests[slot].sampling.grammar is not None:
                    continue
                token_ids[slot, 0] = ids[min(requests[slot].num_drawn, len(ids) - 1)]
            return result._replace(token_ids=token_ids)

        return read_and_say

    say.plain = run
    monkeypatch.setattr(engine._runner, "run", say)
