"""A DSpark draft against an oracle in NumPy and float64, which transformers lacks.

The oracle is written token by token from dspark.md sections 3 and 4.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.model import dspark, dspark_sequence
from dsv4_jax.model.draft_params import dspark_shapes
from dsv4_jax.model.forward import forward_means
from dsv4_jax.model.layer_params import layer_of
from dsv4_jax.model.params import leaf_spread
from helpers import block_oracle as oracle
from helpers import dspark as released
from helpers import slow
from helpers.tolerance import INTERMEDIATE
from pallas_kernels.common.formats import get_cache_format

pytestmark = pytest.mark.unoptimised

# Three layers and two stages compile sooner. The clamp is low enough to bind, and some anchors
# lie beyond the window.
TRUNK = dataclasses.replace(
    released.TRUNK,
    layer_types=released.TRUNK.layer_types[:3],
    router_types=released.TRUNK.router_types[:3],
)
DRAFT = dataclasses.replace(released.DRAFT, target_layers=(0, 1, 2), num_stages=2)
CONFIG = dataclasses.replace(TRUNK, swiglu_limit=1.0, dspark=DRAFT)
T, WINDOW = 40, CONFIG.sliding_window
ANCHORS = (1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 23, T)
F32 = get_cache_format("f32")

jit_streams = jax.jit(ds.model.forward_streams, static_argnames="config")
jit_means = jax.jit(forward_means, static_argnames=("target_layers", "config"))
jit_entries = jax.jit(dspark_sequence.context_entries, static_argnames=("config", "fmt"))
jit_guess = jax.jit(dspark_sequence.guess_block, static_argnames=("config", "fmt"))
jit_blocks = jax.jit(dspark_sequence.guess_blocks, static_argnames=("config", "fmt"))


def random_draft(seed=0):
    """Parameters of a draft, none of them trivial."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        mean, spread = leaf_spread(jax.tree_util.keystr(path).rsplit(".", 1)[-1], leaf.shape)
        return (mean + spread * rng.standard_normal(leaf.shape)).astype(leaf.dtype)

    draft = jax.tree.map_with_path(draw, dspark_shapes(CONFIG, DRAFT, jnp.float32))
    table = rng.standard_normal(draft.markov_w1.shape).astype(np.float32)
    return dataclasses.replace(draft, markov_w1=table)


@pytest.fixture(scope="module")
def case():
    """Parameters and those of the draft, token ids [T + 1], drawn means [T, K, D] of streams."""
    draft = random_draft()
    params = dataclasses.replace(ds.init_params(TRUNK, jax.random.key(0)), mtp=draft)
    rng = np.random.default_rng(1)
    token_ids = rng.integers(0, CONFIG.vocab_size, T + 1).astype(np.int32)
    shape = T, len(DRAFT.target_layers), CONFIG.hidden_size
    return params, draft, token_ids, rng.standard_normal(shape).astype(np.float32)


@pytest.fixture(scope="module")
def entries(case):
    params, _, _, means = case
    return np.asarray(jit_entries(params, means, np.arange(T, dtype=np.int32), CONFIG, F32))


@pytest.fixture(scope="module")
def found(case, entries):
    """Guesses and drafts of a block at each anchor."""
    params, _, token_ids, _ = case
    anchors = np.array(ANCHORS, np.int32)
    stacked = np.broadcast_to(entries[:, None], (len(entries), len(anchors), *entries.shape[1:]))
    guesses = jit_guess(params, token_ids[anchors], anchors, stacked, config=CONFIG, fmt=F32)
    drafts = dspark.chain(params, token_ids[anchors], guesses, dspark.choose_likeliest)
    return jax.tree.map(np.asarray, (guesses, drafts))


def context_key(draft, stage, mean, position, config=CONFIG):
    """Section 3 for one token: means [K, D] -> [C]."""
    context = oracle.rms(draft.main_proj @ mean.reshape(-1), draft.main_norm)
    return oracle.window_key(layer_of(draft.stages, stage).attn, context, position, config)


@dataclasses.dataclass(frozen=True)
class Reading:
    """How the oracle reads section 4; the defaults are right.

    Attributes:
      late: positions by which the block stands behind the anchor's.
      window: settled tokens that a row sees.
      causal: whether a row sees no row after it.
      shift: how many tokens earlier than its own a context key's means are.
      rows: of a block.
      has_sink: whether attention has one.
      markov: whether a guess is corrected.
      reads_normed: whether the confidence reads the normed row.
      reads_own: whether it reads the guess in place of the token before.
    """

    late: int = 0
    window: int = WINDOW
    causal: bool = False
    shift: int = 0
    rows: int = DRAFT.block_size
    has_sink: bool = True
    markov: bool = True
    reads_normed: bool = False
    reads_own: bool = False


def propose(case, anchor, how=Reading()):
    """Section 4 for one anchor: hidden [N, D], corrected logits [N, V], guesses, confidences."""
    params, draft = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), case[:2])
    token_ids, means = case[2], case[3].astype(np.float64)
    positions = anchor + how.late + np.arange(how.rows)
    x = [
        np.tile(params.embed[token], (CONFIG.hc_mult, 1))
        for token in (token_ids[anchor], *[DRAFT.noise_token_id] * (how.rows - 1))
    ]
    for stage in range(DRAFT.num_stages):
        layer = layer_of(draft.stages, stage)
        attn = layer.attn if how.has_sink else layer.attn.replace(attn_sink=np.full(4, -np.inf))
        context = [
            context_key(draft, stage, means[max(t - how.shift, 0)], t)
            for t in range(max(anchor - how.window, 0), anchor)
        ]

        def attention(hidden, attn=attn, context=tuple(context)):
            places = list(zip(hidden, positions, strict=True))
            own = [oracle.window_key(attn, h, p, CONFIG) for h, p in places]
            seen = [own[: i + 1] if how.causal else own for i in range(how.rows)]
            return [
                oracle.attend(attn, h, p, np.stack([*context, *keys]), CONFIG)
                for (h, p), keys in zip(places, seen, strict=True)
            ]

        def experts(hidden, ffn=layer.ffn):
            return [oracle.experts(ffn, h, CONFIG) for h in hidden]

        x = oracle.sublayer(layer.hc_attn, layer.attn_norm, attention, x, CONFIG)
        x = oracle.sublayer(layer.hc_ffn, layer.ffn_norm, experts, x, CONFIG)
    hidden = np.stack([oracle.collapsed(draft.hc_head, token) for token in x])
    previous, logits, guesses, confidences = token_ids[anchor], [], [], []
    for row in hidden:
        normed = oracle.rms(row, draft.norm)
        bias = draft.markov_w2 @ draft.markov_w1[previous]
        logits.append(params.head @ normed + (bias if how.markov else 0))
        guesses.append(int(np.argmax(logits[-1])))
        read = normed if how.reads_normed else row
        hint = draft.markov_w1[guesses[-1] if how.reads_own else previous]
        confidences.append(np.concatenate([read, hint]) @ draft.confidence)
        previous = guesses[-1]
    return hidden, np.stack(logits), guesses, np.array(confidences)


@pytest.mark.slow
@pytest.mark.parametrize("number", slow.all_but([0], range(len(DRAFT.target_layers))))
def test_means_are_those_of_the_streams_after_the_target_layers(case, number):
    """The streams of a trunk that ends at the target, averaged."""
    params, _, token_ids, _ = case
    _, means = jit_means(params, token_ids[None, :T], DRAFT.target_layers, config=CONFIG)
    end = DRAFT.target_layers[number] + 1
    cut = dataclasses.replace(
        CONFIG.without_draft(),
        layer_types=CONFIG.layer_types[:end],
        router_types=CONFIG.router_types[:end],
    )
    shapes = ds.model.param_shapes(cut)
    layers = {
        kind: jax.tree.map(lambda leaf, own: leaf[: own.shape[0]], params.layers[kind], own)
        for kind, own in shapes.layers.items()
    }
    short = dataclasses.replace(params, layers=layers)
    streams = jit_streams(short, token_ids[None, :T], config=cut)
    expected = np.asarray(streams[0], np.float64).mean(axis=-2)
    assert np.abs(means[0, :, number] - expected).max() < INTERMEDIATE


@pytest.mark.slow
def test_entries_are_those_of_the_oracle_and_of_their_token_alone(case, entries):
    params, draft, _, means = case
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), draft)
    for stage in range(DRAFT.num_stages):
        expected = [context_key(exact, stage, mean, t) for t, mean in enumerate(means)]
        assert np.abs(entries[stage] - np.stack(expected)).max() < INTERMEDIATE
    other = means.copy()
    other[7] += 1
    changed = np.asarray(jit_entries(params, other, np.arange(T, dtype=np.int32), CONFIG, F32))
    differs = np.any(changed != entries, axis=(0, 2))
    assert list(np.flatnonzero(differs)) == [7]


@pytest.mark.slow
def test_blocks_of_one_sequence_are_those_run_alone(case, entries, found):
    """Two sequences, the second one turned round, with the same anchors in another order."""
    params, _, token_ids, _ = case
    both = np.stack([entries, entries[:, ::-1]], axis=1)
    anchors = np.array([ANCHORS, ANCHORS[::-1]], np.int32)
    guesses = jit_blocks(params, token_ids[anchors], anchors, both, config=CONFIG, fmt=F32)
    logits = np.asarray(guesses.logits).reshape(2, len(ANCHORS), DRAFT.block_size, -1)
    assert np.abs(logits[0] - found[0].logits).max() < INTERMEDIATE
    turned = np.broadcast_to(both[:, 1:], (len(both), len(ANCHORS), *both.shape[2:]))
    alone = jit_guess(params, token_ids[anchors[1]], anchors[1], turned, config=CONFIG, fmt=F32)
    assert np.abs(logits[1] - alone.logits).max() < INTERMEDIATE


@pytest.mark.parametrize("number", range(len(ANCHORS)), ids=[str(anchor) for anchor in ANCHORS])
def test_a_block_is_that_of_the_oracle(case, found, number):
    guesses, drafts = found
    hidden, logits, tokens, confidences = propose(case, ANCHORS[number])
    assert np.abs(guesses.hidden[number] - hidden).max() < INTERMEDIATE
    assert np.abs(drafts.logits[number] - logits).max() < INTERMEDIATE
    assert list(drafts.token_ids[number]) == tokens
    assert np.abs(drafts.confidence[number] - confidences).max() < INTERMEDIATE


@pytest.mark.parametrize(
    "wrong",
    [
        {"late": 1},
        {"window": WINDOW - 1},
        {"window": WINDOW + 1},
        {"causal": True},
        {"shift": 1},
        {"rows": DRAFT.block_size - 1},
        {"has_sink": False},
        {"markov": False},
    ],
    ids=str,
)
def test_the_oracle_tells_a_wrong_reading(case, found, wrong):
    """A block that is read so still gives drafts, of which fewer are kept; see section 10."""
    how = Reading(**wrong)
    number = ANCHORS.index(23)
    _, logits, _, _ = propose(case, ANCHORS[number], how)
    difference = np.abs(found[1].logits[number, :1] - logits[:1]).max()
    assert difference > 100 * INTERMEDIATE


@pytest.mark.parametrize("wrong", ["reads_normed", "reads_own"])
def test_the_oracle_tells_a_wrong_confidence(case, found, wrong):
    number = ANCHORS.index(23)
    confidences = propose(case, ANCHORS[number], Reading(**{wrong: True}))[3]
    difference = np.abs(found[1].confidence[number] - confidences).max()
    assert difference > 100 * INTERMEDIATE


def test_what_lies_beyond_the_window_or_from_the_anchor_on_is_not_read(case, entries, found):
    params, _, token_ids, _ = case
    number, anchors = ANCHORS.index(23), np.array(ANCHORS, np.int32)
    poisoned = np.repeat(entries[:, None], len(anchors), axis=1)
    poisoned[:, number, : 23 - WINDOW] = poisoned[:, number, 23:] = 1e9
    guesses = jit_guess(params, token_ids[anchors], anchors, poisoned, config=CONFIG, fmt=F32)
    assert np.abs(guesses.logits[number] - found[0].logits[number]).max() < INTERMEDIATE


@pytest.mark.parametrize("targets", [(), (2, 1), (1, 1), (0, 3), (-1,)], ids=str)
def test_targets_that_are_no_ascending_layers_are_refused(case, targets):
    params, _, token_ids, _ = case
    with pytest.raises(ValueError, match=r"target_layers must be layers of the trunk, 0 to 2"):
        forward_means(params, token_ids[None], targets, config=CONFIG)
