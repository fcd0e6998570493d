"""The model without a cache against transformers: every intermediate, layer by layer.

Both sides use one set of names, the tags of our code; `tests/data/make_oracle.py` says which value
of transformers each one is, and brings its axes into our order.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.attention import compressor, full_sequence
from dsv4_jax.attention.rope import rope_frequencies
from dsv4_jax.config.layer_types import AttentionType
from dsv4_jax.model.hyper_connections import Reading
from helpers import capture, oracle, slow, tolerance
from pallas_kernels.common.norm_rope import rotate

pytestmark = pytest.mark.unoptimised

each_preset = pytest.mark.parametrize("preset", slow.all_but(["kernel"], list(oracle.PRESETS)))
jit_rotate = jax.jit(rotate)
ENTRIES = ("comp/normed", "comp/entries", "idx/normed", "idx/keys")


def run(case, config, params):
    """Intermediates [B, T or E, ...] by name; experts of a token in the order of their numbers."""
    batch, num_tokens = case.data["token_ids"].shape
    tagged = capture.capture(
        lambda params, token_ids: ds.forward(params, token_ids, config=config),
        params,
        jnp.asarray(case.data["token_ids"]),
    )
    values = {}
    for name, value in capture.by_layer(tagged).items():
        value = np.asarray(value)
        rows = len(value) == batch * num_tokens
        values[name] = value.reshape(batch, num_tokens, -1) if rows else value
    for name in [name for name in values if name.endswith("gate/share")]:
        share, picked = values.pop(name), values.pop(name.replace("share", "picked"))
        order = np.argsort(picked, axis=-1)
        values[name.replace("share", "indices")] = np.take_along_axis(picked, order, axis=-1)
        values[name.replace("share", "weights")] = np.take_along_axis(share, order, axis=-1)
    return values


@functools.cache
def computed(preset):
    case = oracle.load_case(preset)
    return run(case, case.config, case.params)


def deviations(case, values):
    """The largest absolute deviation of each intermediate, in the order of computation."""
    tokens = case.data["tokens"]
    found = {}
    for name, value in values.items():
        if name.endswith("idx/topk"):
            continue
        rows = tokens
        if name.endswith(ENTRIES):
            attn = case.config.layer_types[layer_of(name)]
            rows = oracle.chosen_entries(tokens, case.config.compression_ratio(attn))
        actual, expected = oracle.sample(value, rows), case.data[name]
        assert actual.shape == expected.shape, name
        found[name] = float(np.max(np.abs(actual - expected)))
    return found


def layer_of(name):
    return int(name[1 : name.index("/")])


@each_preset
def test_every_intermediate_agrees(preset):
    case = oracle.load_case(preset)
    recorded = {name for name, array in case.data.items() if array.ndim == 3}
    recorded -= {name for name in recorded if "idx/topk" in name}
    found = deviations(case, computed(preset))
    assert set(found) == recorded
    worst = max(found, key=found.__getitem__)
    print(f"{preset}: at most {found[worst]:.1e} off, in {worst}")
    beyond = {name: dev for name, dev in found.items() if not dev <= tolerance.INTERMEDIATE}
    assert not beyond, f"first {list(itertools.islice(beyond.items(), 3))}, worst {worst}"


@each_preset
def test_selected_entries_agree_as_sets(preset):
    case, values = oracle.load_case(preset), computed(preset)
    layers = [name for name in values if name.endswith("idx/topk")]
    assert layers
    queries = skipped = cut = 0
    for name in layers:
        margin = case.data[name.replace("topk", "margin")]
        clear = margin > tolerance.INDEX_MARGIN
        np.testing.assert_array_equal(values[name][clear], case.data[name][clear], err_msg=name)
        queries, skipped = queries + clear.size, skipped + np.sum(~clear)
        cut += np.sum(np.isfinite(margin))
    assert skipped <= queries // 1000, f"{skipped} of {queries} queries are too close to compare"
    assert cut > queries // 10, "hardly any query had entries to leave out"


@each_preset
def test_entries_rotate_at_the_start_of_their_block(preset):
    """Appendix C 6 and 8, B25: on their values, by our tables; no other position or table fits."""
    case = oracle.load_case(preset)
    main = rope_frequencies(case.config, AttentionType.SWA)
    pairs = [("comp/normed", "comp/entries"), ("idx/normed", "idx/keys")]
    for layer, attn in enumerate(case.config.layer_types):
        if attn == AttentionType.SWA:
            continue
        compression_ratio, table = (
            case.config.compression_ratio(attn),
            rope_frequencies(case.config, attn),
        )
        chosen = oracle.chosen_entries(case.data["tokens"], compression_ratio)
        for normed, rotated in pairs if attn == AttentionType.CSA else pairs[:1]:
            # Theirs as far as kept whole, else ours, which agree: pairs must not be torn apart.
            after = case.data[f"L{layer}/{rotated}"]
            before = case.data[f"L{layer}/{normed}"]
            if before.shape[-1] != computed(preset)[f"L{layer}/{normed}"].shape[-1]:
                before = computed(preset)[f"L{layer}/{normed}"][:, chosen]

            def off(positions, table, before=before, after=after):
                ours = oracle.sample(np.asarray(jit_rotate(before, positions, table)), slice(None))
                return float(np.max(np.abs(ours - after)))

            assert off(np.int32(chosen * compression_ratio), table) <= tolerance.INTERMEDIATE
            for other in (
                chosen * compression_ratio + compression_ratio - 1,
                (chosen - 1) * compression_ratio,
            ):
                assert off(np.int32(other), table) > 0.1
            if len(chosen) > 1:  # entry 0 is at position 0, where all tables agree
                assert off(np.int32(chosen * compression_ratio), main) > 0.1


def mix_streams_untransposed(monkeypatch, config, params):
    """Appendix C 4; first seen after L0/ffn, since streams are alike before L0/attn."""
    write = Reading.write

    def broken(mix, output):
        return write(mix._replace(comb=mix.comb.mT), output)

    monkeypatch.setattr(Reading, "write", broken)
    return config, params


def one_table_everywhere(monkeypatch, attn):
    """Appendix C 6: every layer turns by the table of one attention type."""
    monkeypatch.setattr(
        full_sequence, "rope_frequencies", lambda config, _: rope_frequencies(config, attn)
    )


def main_table_on_compressed_layers(monkeypatch, config, params):
    one_table_everywhere(monkeypatch, AttentionType.SWA)
    return config, params


def compress_table_on_window_layers(monkeypatch, config, params):
    one_table_everywhere(monkeypatch, AttentionType.CSA)
    return config, params


def no_yarn(monkeypatch, config, params):
    return dataclasses.replace(config, rope_scaling=None), params


def entries_at_the_end_of_their_block(monkeypatch, config, params):
    """Appendix C 8, B25: the last of the four tokens of a CSA entry."""
    monkeypatch.setattr(compressor, "rotate", lambda x, starts, table: rotate(x, starts + 3, table))
    return config, params


def position_bias_one_row_off(monkeypatch, config, params):
    """Appendix C 9."""

    def roll(path, leaf):
        return jnp.roll(leaf, 1, axis=1) if jax.tree_util.keystr(path).endswith("ape") else leaf

    return config, jax.tree_util.tree_map_with_path(roll, params)


def window_without_the_query(monkeypatch, config, params):
    """Appendix C 5: one token too few."""
    return dataclasses.replace(config, sliding_window=config.sliding_window - 1), params


@pytest.mark.parametrize(
    ("break_it", "first"),
    slow.all_but(
        [(position_bias_one_row_off, "L1/comp/normed")],
        [
            (mix_streams_untransposed, "L0/out"),
            (main_table_on_compressed_layers, "L1/q"),
            (compress_table_on_window_layers, "L0/q"),
            (no_yarn, "L1/q"),
            (entries_at_the_end_of_their_block, "L1/comp/entries"),
            (position_bias_one_row_off, "L1/comp/normed"),
            (window_without_the_query, "L0/ctx"),
        ],
    ),
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_broken_model_is_rejected_where_it_is_broken(break_it, first, monkeypatch):
    case = oracle.load_case("kernel")
    found = deviations(case, run(case, *break_it(monkeypatch, case.config, case.params)))
    beyond = [name for name, dev in found.items() if dev > tolerance.INTERMEDIATE]
    assert beyond[0] == first
    assert found[first] > 100 * tolerance.INTERMEDIATE
    assert found["logits"] > 100 * tolerance.INTERMEDIATE


def test_capture_sees_tags_inside_calls():
    tag = jax.ad_checkpoint.checkpoint_name

    @jax.custom_jvp
    def derived(x):
        return tag(x + 1, "custom_jvp")

    derived.defjvp(lambda primals, tangents: (derived(*primals), *tangents))

    def function(tree):
        x = tag(tree["x"], "plain") + np.arange(3.0, dtype=np.float32)
        x = derived(jax.jit(lambda x: tag(x * 2, "jit"))(x))
        return jax.checkpoint(lambda x: tag(x * 3, "remat"))(x)

    tagged = capture.capture(function, {"x": jnp.zeros(3)})
    assert [(name, value.tolist()) for name, value in tagged] == [
        ("plain", [0, 0, 0]),
        ("jit", [0, 2, 4]),
        ("custom_jvp", [1, 3, 5]),
        ("remat", [3, 9, 15]),
    ]
