"""An idea: one static value, obeyed by whole sequences, steps on a cache and the engine alike."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
import pallas_kernels as pk
from dsv4_jax.research import Idea
from dsv4_jax.step.draws import guess
from helpers.schedules import step_input
from helpers.serving import one_layer

pytestmark = pytest.mark.unoptimised

SWA, CSA, HCA = ds.AttentionType.SWA, ds.AttentionType.CSA, ds.AttentionType.HCA
CONFIG = dataclasses.replace(
    ds.DSV4Config.tiny(),
    layer_types=(CSA, HCA, CSA),
    router_types=(ds.RouterType.LEARNED,) * 3,
    indexer_top_k=4,
    num_mtp_layers=1,
)
ONE_LAYER = dataclasses.replace(
    CONFIG, layer_types=(CSA,), router_types=CONFIG.router_types[:1], num_mtp_layers=0
)
CHUNK, ANSWER = 24, 8
SIZES = {"max_requests": 1, "max_context_tokens": 128}
PROMPT = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 3 * CHUNK).tolist()
EXACT = pk.CacheFormat("mine", *(pk.get_cache_format("f32").entry,) * 2)
jit_forward = jax.jit(ds.forward, static_argnames=("config", "cache_format", "selector"))


def recent_and_scored(selection):
    """The two newest entries, and the two best of the others."""
    entries = jnp.arange(selection.scores.shape[-1])[None, None]
    recent = entries >= selection.visible[..., None] - 2
    older = selection._replace(visible=selection.visible - 2, top_k=2)
    return recent | ds.research.select_by_score(older)


def by_query(selection):
    """Entries that the first head's query is most like; positions break the symmetry."""
    likeness = jnp.einsum("btc,bec->bte", selection.queries[:, :, 0], selection.entries)
    even = (selection.positions % 2 == 0)[..., None]
    return ds.research.select_by_score(
        selection._replace(scores=jnp.where(even, likeness, -likeness))
    )


def newest_heaviest(tokens):
    """Later tokens of a window weigh more."""
    age = tokens.window_tokens - 1 - tokens.offsets
    return tokens._replace(scores=tokens.scores - 0.5 * age[..., None, None].astype(jnp.float32))


def second_best(logits, sampling, positions):
    return jax.lax.top_k(logits, 2)[1][:, 1]


ALL = Idea(
    selector=recent_and_scored,
    max_selected=4,
    pooling=newest_heaviest,
    sampler=second_best,
    cache_format=EXACT,
)
EACH = {
    "selector": Idea(selector=recent_and_scored, max_selected=4, cache_format="f32"),
    "selector without a bound": Idea(selector=ds.research.select_all, cache_format="f32"),
    "selector by queries and entries": Idea(selector=by_query, cache_format="f32"),
    "reused selector": Idea(selector=by_query, index_reuse=(2,), cache_format="f32"),
    "random selector": Idea(selector=ds.research.select_at_random, cache_format="f32"),
    "pooling": Idea(pooling=newest_heaviest, cache_format="f32"),
    "sampler": Idea(sampler=second_best, cache_format="f32"),
    "index reuse": Idea(index_reuse=(2,), cache_format="f32"),
    "format": Idea(cache_format=EXACT),
}


@pytest.fixture(scope="module")
def params():
    return ds.init_params(CONFIG, jax.random.key(0))


def call_of(tokens):
    return step_input([tokens], [0], [0], num_tokens=len(tokens))


def tokens_on_a_cache(params, config):
    """Prefill in chunks, then decoding on the device; the prompt's own draw is the first token."""
    cache = ds.init_cache(config, **SIZES)
    for start in range(0, len(PROMPT), CHUNK):
        cache, logits = ds.jit_prefill(
            params, cache, call_of(PROMPT[start : start + CHUNK]), config=config
        )
    draw = config.idea.sampler or ds.sample
    sampling = ds.make_sampling(1)
    first = int(draw(logits, sampling, jnp.array([len(PROMPT)], jnp.int32))[0])
    _, drawn = ds.jit_decode_loop(
        params, cache, call_of([first]), sampling, num_steps=ANSWER - 1, config=config
    )
    return [first, *drawn[0].tolist()]


def tokens_of_an_engine(params, config, idea, **options):
    sizes = {"prefill_tokens": (CHUNK,), "decode_tokens": CHUNK} | SIZES
    engine = ds.Engine(config, params, idea=idea, **sizes, **options)
    (done,) = engine.generate([PROMPT], max_new_tokens=ANSWER, stop_token_ids=())
    return list(done.token_ids)


def tokens_of_whole_sequences(params, config, drawn):
    """What would have been drawn after the prompt and each token of an answer."""
    logits = jit_forward(params, jnp.asarray([PROMPT + drawn[:-1]]), config=config)[0]
    positions = jnp.arange(logits.shape[0], dtype=jnp.int32) + 1
    sampling = ds.make_sampling(logits.shape[0])
    return (config.idea.sampler or ds.sample)(logits, sampling, positions)[-ANSWER:].tolist()


def check_same_everywhere(params, plain, idea, **options):
    config = idea.applied_to(plain)
    drawn = tokens_on_a_cache(params, config)
    assert tokens_of_whole_sequences(params, config, drawn) == drawn
    assert tokens_of_an_engine(params, plain, idea, **options) == drawn
    return drawn


@pytest.mark.slow
def test_an_idea_gives_the_same_tokens_everywhere():
    check_same_everywhere(ds.init_params(ONE_LAYER, jax.random.key(0)), ONE_LAYER, ALL)


@pytest.mark.slow
def test_an_idea_gives_the_same_tokens_with_drafts(params):
    """Its sampler draws them, and decides which of them stay."""
    drawn = check_same_everywhere(params, CONFIG, ALL, draft_tokens=2)
    assert drawn != tokens_on_a_cache(params, CONFIG)


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_each_field_alone_gives_the_same_tokens_everywhere(params, name):
    check_same_everywhere(params, CONFIG, EACH[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(EACH) - {"sampler", "format"}))
def test_each_field_changes_the_model(params, name):
    ids = jnp.asarray([PROMPT])
    changed = jit_forward(params, ids, config=EACH[name].applied_to(CONFIG))
    assert np.abs(np.asarray(changed - jit_forward(params, ids, config=CONFIG))).max() > 1e-3


@pytest.mark.slow
def test_the_models_own_selector_given_as_an_idea_changes_nothing(params):
    own = Idea(selector=ds.research.select_by_score, cache_format="f32")
    plain = Idea(cache_format="f32")
    logits = []
    for idea in (own, plain):
        config = idea.applied_to(CONFIG)
        cache = ds.init_cache(config, **SIZES)
        logits.append(ds.jit_prefill(params, cache, call_of(PROMPT), config=config)[1])
    np.testing.assert_allclose(logits[0], logits[1], atol=2e-5, rtol=0)


@pytest.mark.slow
def test_no_idea_is_the_same_program():
    """Nor does it change the program to say what is the default anyway."""
    plain, params = one_layer(num_mtp_layers=0)
    assert Idea().applied_to(plain) == plain

    def program(idea):
        config = idea.applied_to(plain)
        cache = ds.cache.cache_shapes(config, **SIZES, cache_format=None)
        arguments = (params, cache, call_of([3]))
        return ds.jit_decode_step.lower(*arguments, config=config).as_text()

    expected = program(Idea())
    assert program(Idea(cache_format="fp8_ue8m0", index_reuse=())) == expected
    assert program(Idea(sampler=second_best)) == expected, "a step that draws nothing"
    assert program(Idea(pooling=newest_heaviest)) != expected


def test_a_format_of_ones_own_sizes_the_cache():
    grouped = pk.get_cache_format("fp8_ue8m0").entry
    config = Idea(cache_format=pk.CacheFormat("mine", grouped, EXACT.entry)).applied_to(CONFIG)
    sizes = {"max_requests": 2, "max_context_tokens": 256}
    mine, fp8, f32 = (
        ds.cache.cache_shapes(config, **sizes, cache_format=name).paged["csa"]
        for name in (None, "fp8_ue8m0", "f32")
    )
    assert jax.tree.map(jnp.shape, mine.entries) == jax.tree.map(jnp.shape, fp8.entries)
    assert jax.tree.map(jnp.shape, mine.index_keys) == jax.tree.map(jnp.shape, f32.index_keys)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"selector": 3}, "selector must be a function or None, got 3"),
        ({"pooling": "mean"}, "pooling must be a function or None, got 'mean'"),
        ({"max_selected": 0, "selector": recent_and_scored}, "max_selected must be at least 1"),
        ({"max_selected": 4}, "max_selected=4 needs a selector"),
        ({"cache_format": []}, "cache_format must be hashable"),
        ({"index_reuse": (1,)}, "index_reuse must name CSA layers, got layer 1"),
    ],
)
def test_what_cannot_be_an_idea_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Idea(**fields).applied_to(CONFIG)


def test_reuse_that_only_the_idea_knows_is_refused():
    with pytest.raises(ValueError, match=r"index_reuse must be \(2,\) of the idea, got \(\)"):
        dataclasses.replace(CONFIG, idea=Idea(index_reuse=(2,)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"selector": lambda s: s.scores}, r"a selector gives must be bool\[1, 5, 1\]"),
        ({"pooling": lambda t: t._replace(values=t.values[..., :1])}, "values of a pooling must"),
        ({"cache_format": "fp4"}, "cache_format must be one of"),
    ],
)
def test_what_gives_something_else_is_refused_while_it_is_traced(params, fields, message):
    config = Idea(**fields).applied_to(CONFIG)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda p: ds.forward(p, jnp.zeros((1, 5), jnp.int32), config=config), params)


def test_a_sampler_that_gives_no_tokens_is_refused():
    config = Idea(sampler=lambda logits, sampling, positions: logits).applied_to(CONFIG)
    with pytest.raises(ValueError, match=r"a sampler gives must be int32\[2\], one token per row"):
        guess(
            jnp.zeros((2, 5)),
            ds.make_sampling(2),
            jnp.zeros(2, jnp.int32),
            None,
            config.idea.sampler,
        )
