"""Servers for tests: a small model, and V4's tokenizer, a stand-in of bytes or the shipped one."""

import contextlib
import dataclasses
import functools
import json
import pathlib

import deepseek_recipe as recipe
import jax
import pytest
from tokenizers import Tokenizer

import dsv4_jax as ds
from dsv4_jax.serve import Server, ServeSettings
from dsv4_jax.serving import AsyncEngine
from dsv4_jax.serving.requests.prompts import Limits
from helpers import slow
from helpers.released_tokenizer import END as RELEASED_END
from helpers.released_tokenizer import VOCAB, released_tokenizer
from helpers.serving import CONFIG

MODEL = "small"
BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SPECIAL = [
    getattr(recipe.SpecialToken, name).default_str()
    for name in sorted(dir(recipe.SpecialToken))
    if name[0].isupper()
]
SPOKEN = ("</think>", "<think>", "｜DSML｜")
"""Tokens of V4's tokenizer that are no special ones: decoding shows them."""

EOS = 256 + SPECIAL.index(END)
STEP = 64
"""Tokens of the one step that there is."""

CHECK_PROMPT = Limits.check_prompt
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
    made["post_processor"]["single"][0]["SpecialToken"]["id"] = BEGIN
    entry = {"id": BEGIN, "ids": [256 + SPECIAL.index(BEGIN)], "tokens": [BEGIN]}
    made["post_processor"]["special_tokens"] = {BEGIN: entry}
    return Tokenizer.from_str(json.dumps(made))


TOKENIZERS = {"bytes": v4_tokenizer, "released": released_tokenizer}
"""What tests of the server run on, by name: see the fixture `tokenizer`."""
BYTES_ALONE = pytest.mark.parametrize("tokenizer_name", ["bytes"], indirect=True)
"""Tests whose texts have as many tokens as bytes, or in which the tokenizer has no part."""


def tokenizer_fixture(usual):
    """A module's `tokenizer_name`: that one by default, with `-m slow` the others."""

    @pytest.fixture(scope="module", params=slow.all_but([usual], list(TOKENIZERS)))
    def tokenizer_name(request):
        return request.param

    return tokenizer_name


def ids_of(tokenizer, text):
    """Token ids of a text by itself."""
    return tokenizer.encode(text, add_special_tokens=False).ids


def byte_ids(tokenizer, data):
    """Token ids of bytes one by one; all vocabularies here have one for each, of the same name."""
    return [tokenizer.token_to_id(v4_tokenizer().id_to_token(byte)) for byte in data]


def added_ids(tokenizer):
    """By content, the tokens that are no part of any text."""
    return {one.content: number for number, one in tokenizer.get_added_tokens_decoder().items()}


def model(tokenizer=None, *, num_mtp_layers=0):
    """One CSA layer with a vocabulary for either tokenizer of bytes, or for the released one."""
    if tokenizer is not None and _is_released(tokenizer):
        return _model(VOCAB, RELEASED_END, num_mtp_layers)
    return _model(256 + len(SPECIAL), EOS, num_mtp_layers)


def _is_released(tokenizer):
    return tokenizer.get_vocab_size() == VOCAB


@functools.cache
def _model(vocab_size, end, num_mtp_layers):
    config = dataclasses.replace(
        CONFIG,
        layer_types=(ds.AttentionType.CSA,),
        router_types=(ds.RouterType.LEARNED,),
        vocab_size=vocab_size,
        eos_token_ids=(end,),
        num_mtp_layers=num_mtp_layers,
    )
    return config, ds.init_params(config, jax.random.key(0))


def small_engine(tokenizer=None, *, num_mtp_layers=0, sinkhorn_iters=1, **changes):
    """An engine of one program, of half the slots where a slot's draw takes long."""
    tokenizer = tokenizer or v4_tokenizer()
    sizes = {
        "max_requests": 2 if _is_released(tokenizer) else 8, "max_context_tokens": 2048,
        "prefill_tokens": (STEP,), "decode_tokens": STEP, "num_snapshots": 16,
    }  # fmt: skip
    config, params = model(tokenizer, num_mtp_layers=num_mtp_layers)
    config = dataclasses.replace(config, hc_sinkhorn_iters=sinkhorn_iters)
    return ds.Engine(config, params, tokenizer=tokenizer, **(sizes | changes))


def num_slots(engine):
    return engine.plan.pools.max_requests


@functools.cache
def warm_engine(name="bytes", *, number=0):
    """That engine, its program compiled: one of each number for all files of a process."""
    engine = small_engine(TOKENIZERS[name]())
    engine.warmup()
    return engine


@contextlib.contextmanager
def running(engine, *, queue=None, bound=None, **settings):
    """A server in a thread."""
    shared = AsyncEngine(engine, **(queue or {}))
    with Server(shared, ServeSettings(**({"model_name": MODEL} | settings)), bound) as server:
        yield server


def script(monkeypatch, engine, text, *, replaces_masked=False):
    """Makes requests draw the tokens of a text and the end, whatever the model says.

    Those with a grammar draw what the model gives under its masks, unless `replaces_masked`: then
    they draw the text too, and the engine refuses a token that their grammar does not allow. Of
    all that are replaced the device takes the likeliest tokens, since sorting 129,280 of them to
    draw one is most of a step on a CPU.
    """
    ids = [*ids_of(engine.tokenizer, text), *engine.config.eos_token_ids]
    run = engine.loop.runner.run
    run = getattr(run, "plain", run)

    def say(plan, requests, *rest):
        read, rows = run(plan, requests, *rest), plan.rows

        def read_and_say():
            result = read()
            token_ids = result.token_ids.copy()
            for slot in rows.slots[rows.draws].tolist():
                if requests[slot].sampling.grammar is not None and not replaces_masked:
                    continue
                token_ids[slot, 0] = ids[min(requests[slot].num_drawn, len(ids) - 1)]
            return result._replace(token_ids=token_ids)

        return read_and_say

    say.plain = run
    monkeypatch.setattr(engine.loop.runner, "run", say)

    def check_prompt(limits, prompt, row, *, name):
        prompt_ids, row = CHECK_PROMPT(limits, prompt, row, name=name)
        if row.grammar is None or replaces_masked:
            row = dataclasses.replace(row, temperature=0.0)
        return prompt_ids, row

    monkeypatch.setattr(Limits, "check_prompt", check_prompt)
