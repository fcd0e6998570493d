"""What multiplies quantised weights is said once, where a step or a forward pass begins."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.cache.snapshots import SnapshotPlan
from dsv4_jax.model import forward, mtp
from dsv4_jax.model.activations import DEFAULT_ACTIVATIONS
from dsv4_jax.step import decode, plain_step, prefill, serve_step, step
from helpers import serving, tolerance
from pallas_kernels.common.weights import ACTIVATIONS, decode_weight, is_quantized

pytestmark = pytest.mark.unoptimised

CONFIG = dataclasses.replace(
    serving.CONFIG, layer_types=(serving.SWA,), router_types=(ds.RouterType.LEARNED,)
)


@functools.cache
def params():
    return ds.model.quantize_params(CONFIG, ds.init_params(CONFIG, jax.random.key(0)))


@functools.cache
def shapes():
    found = ds.model.param_shapes(CONFIG, jnp.float32, weights="stored")
    return dataclasses.replace(found, embed=jnp.zeros(found.embed.shape))


def token_ids():
    return jnp.asarray(np.random.default_rng(0).integers(0, CONFIG.vocab_size, (1, 13)), jnp.int32)


whole_sequence = jax.jit(ds.forward, static_argnames=("config", "activations"))


@functools.cache
def arguments():
    """The arguments of every function that takes a form, a call of one token."""
    one = jnp.zeros(1, jnp.int32)
    call = ds.StepInput(token_ids=one, request_ids=one, request_slots=one)
    cache = ds.init_cache(CONFIG, max_requests=1, max_context_tokens=128)
    snapshots = SnapshotPlan(rows=one - 1, ends=one, places=one)
    serve = serve_step.ServeInput(
        step_input=call,
        num_checked=one + 1,
        next_token_ids=one - 1,
        sampling=ds.make_sampling(1),
        snapshots=snapshots,
    )
    streams = jnp.zeros((1, 1, CONFIG.hc_mult, CONFIG.hidden_size))
    return {
        ds.decode_step: (cache, call),
        ds.decode_loop: (cache, call, serve.sampling),
        ds.prefill: (cache, call),
        ds.stage_step: (cache, call),
        serve_step.serve_step: (cache, None, serve),
        serve_step.plain_decode_step: (cache, serve),
        plain_step.plain_trunk: (cache, call),
        ds.forward: (one[None],),
        ds.model.forward_streams: (one[None],),
        ds.model.forward_draft: (streams, one[None]),
    }


MORE = {ds.decode_loop: {"num_steps": 1}, serve_step.serve_step: {"draft_tokens": 0}}
FUNCTIONS = [
    ds.decode_step,
    ds.decode_loop,
    ds.prefill,
    ds.stage_step,
    serve_step.serve_step,
    serve_step.plain_decode_step,
    plain_step.plain_trunk,
    ds.forward,
    ds.model.forward_streams,
    ds.model.forward_draft,
]


class Seen(Exception):
    """Ends a call where the layers would begin."""


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_layers_get_weights_of_that_form(function, monkeypatch):
    def layers(params, *_, **__):
        leaves = jax.tree.leaves(params, is_leaf=is_quantized)
        raise Seen({leaf.activations for leaf in leaves if is_quantized(leaf)})

    for module, name in (
        (decode, "run_step"),
        (prefill, "run_step"),
        (step, "run_layers"),
        (plain_step, "run_step"),
        (serve_step, "run_layers"),
        (forward, "embed"),
        (mtp, "draft_input"),
    ):
        monkeypatch.setattr(module, name, layers)
    more = {"config": CONFIG} | MORE.get(function, {})
    for named, form in (
        ({}, DEFAULT_ACTIVATIONS),
        *(({"activations": form}, form) for form in ACTIVATIONS),
    ):
        with pytest.raises(Seen) as seen:
            function(shapes(), *arguments()[function], **more, **named)
        assert seen.value.args == ({form},)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_another_form_is_refused(function):
    more = {"config": CONFIG} | MORE.get(function, {})
    message = r"activations must be one of \('fp8', 'bfloat16'\), got 'int8'"
    with pytest.raises(ValueError, match=message):
        function(shapes(), *arguments()[function], **more, activations="int8")


@pytest.mark.slow
def test_rows_left_alone_give_the_decoded_model_and_rounded_ones_do_not():
    dense = jax.tree.map(decode_weight, params(), is_leaf=is_quantized)
    expected = whole_sequence(dense, token_ids(), config=CONFIG)
    for form in ACTIVATIONS:
        logits = whole_sequence(params(), token_ids(), config=CONFIG, activations=form)
        off = float(jnp.max(jnp.abs(logits - expected)))
        assert (off < tolerance.INTERMEDIATE) == (form == "bfloat16"), off


@pytest.mark.slow
@pytest.mark.parametrize("form", ACTIVATIONS)
def test_prefill_and_decode_steps_agree_with_whole_sequences(form):
    logits = whole_sequence(params(), token_ids(), config=CONFIG, activations=form)
    cache = ds.init_cache(CONFIG, max_requests=1, max_context_tokens=128, cache_format="f32")
    zeros, ids = jnp.zeros(12, jnp.int32), token_ids()[0]
    prompt = ds.StepInput(token_ids=ids[:12], request_ids=zeros, request_slots=zeros[:1])
    last = ds.StepInput(token_ids=ids[12:], request_ids=zeros[:1], request_slots=zeros[:1])
    more = {"config": CONFIG, "activations": form}
    cache, stepped = ds.jit_prefill(params(), cache, prompt, **more)
    np.testing.assert_allclose(stepped[0], logits[0, 11], rtol=0, atol=tolerance.INTERMEDIATE)
    _, stepped = ds.jit_decode_step(params(), cache, last, **more)
    np.testing.assert_allclose(stepped[0], logits[0, 12], rtol=0, atol=tolerance.INTERMEDIATE)
