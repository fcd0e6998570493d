"""The engine on weights in the formats of the release, and which activations each step takes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.step.serve_values import ServeOutput
from helpers import serving
from helpers.serving import prompt, run_to_end
from pallas_kernels.common.weights import MXFP4, BlockFP8

pytestmark = pytest.mark.unoptimised

CONFIG = serving.one_layer_config(serving.CSA, num_mtp_layers=0)
SIZES = {"max_requests": 2, "max_context_tokens": 128, "prefill_tokens": (8,), "num_blocks": 4}


@functools.cache
def params():
    return ds.model.quantize_params(CONFIG, ds.init_params(CONFIG, jax.random.key(0)))


def by_hand(text, count):
    """Greedy tokens by decode steps alone, one token after the other."""
    cache = ds.init_cache(CONFIG, max_requests=1, max_context_tokens=128)
    row, drawn, known = jnp.zeros(1, jnp.int32), [], list(text)
    for number in range(len(text) + count - 1):
        token = jnp.asarray(known[number : number + 1], jnp.int32)
        step_input = ds.StepInput(token_ids=token, request_ids=row, request_slots=row)
        cache, logits = ds.jit_decode_step(params(), cache, step_input, config=CONFIG)
        if number >= len(text) - 1:
            drawn.append(int(jnp.argmax(logits[0])))
            known.append(drawn[-1])
    return drawn


@pytest.mark.slow
def test_the_engine_serves_what_decode_steps_give():
    engine = ds.Engine(CONFIG, params(), **SIZES, decode_tokens=8)
    rng = np.random.default_rng(0)
    texts = [prompt(rng, length) for length in (21, 9)]
    ids = [engine.submit(text, max_new_tokens=6, stop_token_ids=()) for text in texts]
    for text, done in zip(texts, run_to_end(engine, *ids), strict=True):
        assert done.token_ids == by_hand(text, 6)


class Calls:
    """In place of the device: draws 5 for every row, and keeps which form each step took."""

    def __init__(self, engine):
        self.forms, self.results, self.simple, self.begun = [], [], [], []
        self.drawn_simply = []
        self.num_slots = engine.loop.runner.plan.max_requests
        engine.loop.runner.devices.launch = self.launch
        engine.loop.runner.devices.launch_draw = self.launch_draw
        engine.loop.runner.devices.finish_compiling = lambda: self.begun
        engine.loop.runner.devices.read = lambda back: self.results[-1 - back]

    def launch(self, step_input, *_, is_plain, is_simple, activations, only_compiles=False, **__):
        if only_compiles:
            self.begun.append(0.0)
            return
        rows = np.asarray(step_input.request_ids)
        counts = np.bincount(rows[rows >= 0], minlength=self.num_slots).astype(np.int32)
        self.forms.append((is_plain, activations))
        self.simple.append(is_simple)
        no_drafts = np.zeros((self.num_slots, 0), np.int32)
        drawn = np.full((self.num_slots, 1), 5, np.int32)
        self.results.append(ServeOutput.of(drawn, counts, no_drafts, None))

    def launch_draw(self, *, is_simple, wants_logprobs):
        self.drawn_simply.append(is_simple)


def engine_of(weights=None, **options):
    engine = ds.Engine(CONFIG, weights or shapes(), **SIZES | options)
    return engine, Calls(engine)


@functools.cache
def shapes(weights="stored"):
    return ds.model.param_shapes(CONFIG, jnp.float32, weights=weights)


@pytest.mark.parametrize(
    ("options", "in_prefill", "in_decode"),
    [
        ({}, "fp8", "fp8"),
        ({"activations": "bfloat16"}, "bfloat16", "bfloat16"),
        ({"prefill_activations": "bfloat16"}, "bfloat16", "fp8"),
        ({"activations": "bfloat16", "prefill_activations": "fp8"}, "fp8", "bfloat16"),
    ],
)
@pytest.mark.parametrize("decode_tokens", [None, 8], ids=["lean", "one size"])
def test_steps_that_hold_prompts_take_the_prefill_form(
    options, in_prefill, in_decode, decode_tokens
):
    engine, calls = engine_of(decode_tokens=decode_tokens, overlap=False, **options)
    first = engine.submit([1] * 10, max_new_tokens=5, stop_token_ids=())
    for _ in range(3):
        engine.step()
    is_lean = decode_tokens is None
    assert calls.forms == [(False, in_prefill)] * 2 + [(is_lean, in_decode)]
    second = engine.submit([1] * 3, max_new_tokens=1, stop_token_ids=())
    engine.step()  # the first one's token takes the form of the prompt beside it
    assert calls.forms[3:] == [(False, in_prefill)]
    run_to_end(engine, first, second)
    assert calls.forms[4:] == [(is_lean, in_decode)] * 2


@pytest.mark.slow
def test_each_form_of_a_size_is_compiled_before_serving():
    def names(**options):
        engine, calls = engine_of(**options)
        listed = [name for name, _ in engine.warmup() if "step" in name]
        return [name for name in listed if "steps" not in name], [form for _, form in calls.forms]

    both = {"prefill_activations": "bfloat16"}
    steps = ["step of 8 tokens", "decode step of 2 tokens"]
    assert names() == (steps, ["fp8", "fp8"])
    assert names(**both) == (steps, ["bfloat16", "fp8"])
    assert names(decode_tokens=8) == (steps[:1], ["fp8"])
    split = [steps[0], "step of 8 tokens without prompts"]
    assert names(decode_tokens=8, **both) == (split, ["bfloat16", "fp8"])
    assert names(decode_tokens=8, weights=shapes("float32"), **both) == (steps[:1], ["fp8"])


def test_on_a_gpu_decode_steps_are_compiled_for_simple_draws_too():
    def programs(**options):
        engine, calls = engine_of(**options)
        engine.loop.runner.simplifies = True
        engine.warmup()
        plain = (is_plain for is_plain, _ in calls.forms)
        return list(zip(plain, calls.simple, strict=True)), calls.drawn_simply

    prompts, trunk = (False, False), (True, False)
    assert programs() == ([prompts, trunk, trunk], [False, True])
    for forms in ({}, {"prefill_activations": "bfloat16"}):
        assert programs(decode_tokens=8, **forms) == ([prompts, (False, False), (False, True)], [])


@pytest.mark.parametrize("name", ["activations", "prefill_activations"])
def test_another_form_is_refused(name):
    message = rf"^{name} must be one of \('fp8', 'bfloat16'\), got 'int8'"
    with pytest.raises(ValueError, match=message):
        ds.Engine(CONFIG, shapes(), **SIZES, **{name: "int8"})


@pytest.mark.slow
def test_a_checkpoint_keeps_its_formats_unless_told_otherwise(tmp_path):
    ds.save_checkpoint(CONFIG, params(), tmp_path)
    stored = ds.Engine.from_checkpoint(tmp_path, **SIZES, unroll=True)
    (layer,) = stored.params.layers["csa_learned"]
    assert [type(w) for w in (layer.ffn.w1, layer.attn.wq_a)] == [MXFP4, BlockFP8]
    decoded = ds.Engine.from_checkpoint(tmp_path, **SIZES, weights="float32")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(decoded.params)} == {"float32"}
