"""Which layer is which, where its arrays lie, and how a schedule is cut for scanning."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_schedule import draft_layers, layer_schedule, split_into_segments
from dsv4_jax.config.layer_types import AttentionType, RouterType

SWA, CSA, HCA = AttentionType.SWA, AttentionType.CSA, AttentionType.HCA
HASH, LEARNED = RouterType.HASH, RouterType.LEARNED


def schedule_of(*layers):
    """The schedule of (attention, router) pairs."""
    attns, routers = zip(*layers, strict=True)
    return layer_schedule(
        dataclasses.replace(DSV4Config.tiny(), layer_types=attns, router_types=routers)
    )


def summary(segments):
    return [([spec.kind for spec in segment.pattern], segment.repeats) for segment in segments]


@pytest.mark.parametrize(
    ("config", "first", "repeats"),
    [(DSV4Config.flash(), "swa_hash", 20), (DSV4Config.pro(), "hca_hash", 29)],
    ids=["flash", "pro"],
)
def test_segments_of_released_models(config, first, repeats):
    segments = split_into_segments(layer_schedule(config))
    repeated = (["hca_learned", "csa_learned"], repeats)
    assert summary(segments) == [([first], 2), (["csa_hash"], 1), repeated]


def test_indices_of_flash():
    schedule = layer_schedule(DSV4Config.flash())
    assert [spec.layer_idx for spec in schedule] == list(range(43))
    # Layer, place in the family's pools, place in the kind's parameters.
    for layer, family_idx, kind_idx in [
        (0, 0, 0),
        (1, 1, 1),
        (2, 0, 0),  # the only CSA layer that routes by hash
        (3, 0, 0),
        (4, 1, 0),  # the second CSA layer, the first that learned to route
        (41, 19, 19),
        (42, 20, 19),
    ]:
        assert (schedule[layer].family_idx, schedule[layer].kind_idx) == (family_idx, kind_idx)


def test_pro_pools_are_shared_by_both_routers():
    schedule = layer_schedule(DSV4Config.pro())
    assert [spec.family_idx for spec in schedule if spec.attn == HCA] == list(range(31))
    assert [spec.kind_idx for spec in schedule if spec.kind == "hca_hash"] == [0, 1]
    assert [spec.kind_idx for spec in schedule if spec.kind == "hca_learned"] == list(range(29))


@pytest.mark.parametrize("attn", AttentionType)
@pytest.mark.parametrize("router", RouterType)
@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_one_type_is_one_segment(attn, router, num_layers):
    schedule = schedule_of(*[(attn, router)] * num_layers)
    assert [(spec.family_idx, spec.kind_idx) for spec in schedule] == [
        (i, i) for i in range(num_layers)
    ]
    assert summary(split_into_segments(schedule)) == [([f"{attn}_{router}"], num_layers)]


def test_routers_split_a_run_of_one_attention_type():
    schedule = schedule_of((CSA, HASH), (CSA, HASH), (CSA, LEARNED), (CSA, LEARNED))
    first, second = split_into_segments(schedule)
    assert (first.repeats, second.repeats) == (2, 2)
    assert (second.pattern[0].family_idx, second.pattern[0].kind_idx) == (2, 0)


def test_the_pattern_that_covers_most_wins():
    a, b = (SWA, LEARNED), (CSA, LEARNED)
    # Two copies of a alone would leave the longer pattern in pieces.
    assert summary(split_into_segments(schedule_of(a, a, b, a, a, b))) == [
        (["swa_learned", "swa_learned", "csa_learned"], 2)
    ]
    # Four copies of a, not two of (a, a).
    assert summary(split_into_segments(schedule_of(a, a, a, a))) == [(["swa_learned"], 4)]


def test_a_pattern_may_hold_a_kind_twice():
    a, b = (SWA, LEARNED), (CSA, LEARNED)
    (segment,) = split_into_segments(schedule_of(a, a, b, a, a, b))
    assert [segment.family_stride(spec) for spec in segment.pattern] == [2, 2, 1]


def test_a_pattern_may_hold_a_family_with_both_routers():
    a, b = (CSA, HASH), (CSA, LEARNED)
    (segment,) = split_into_segments(schedule_of(a, b, a, b))
    assert [segment.family_stride(spec) for spec in segment.pattern] == [2, 2]
    assert [segment.kind_stride(spec) for spec in segment.pattern] == [1, 1]


layer_lists = st.lists(
    st.tuples(st.sampled_from(AttentionType), st.sampled_from(RouterType)),
    min_size=1,
    max_size=40,
)
# Lists drawn freely seldom repeat; these do.
repeating_lists = st.builds(
    lambda head, pattern, repeats: head + pattern * repeats,
    st.lists(st.tuples(st.sampled_from(AttentionType), st.sampled_from(RouterType)), max_size=3),
    st.lists(
        st.tuples(st.sampled_from(AttentionType), st.sampled_from(RouterType)),
        min_size=1,
        max_size=4,
    ),
    st.integers(2, 6),
)


@given(layers=layer_lists | repeating_lists)
def test_segments_expand_to_the_schedule(layers):
    schedule = schedule_of(*layers)
    expanded = []
    for segment in split_into_segments(schedule):
        for copy in range(segment.repeats):
            for spec in segment.pattern:
                layer_idx = spec.layer_idx + copy * len(segment.pattern)
                expanded.append(
                    dataclasses.replace(
                        spec,
                        layer_idx=layer_idx,
                        entry_source=layer_idx if spec.makes_entries else None,
                        family_idx=spec.family_idx + copy * segment.family_stride(spec),
                        kind_idx=spec.kind_idx + copy * segment.kind_stride(spec),
                    )
                )
    assert tuple(expanded) == schedule


@given(layers=layer_lists)
def test_indices_number_families_and_kinds_without_gaps(layers):
    schedule = schedule_of(*layers)
    for attn in AttentionType:
        places = [spec.family_idx for spec in schedule if spec.attn == attn]
        assert places == list(range(len(places)))
    for kind in {spec.kind for spec in schedule}:
        places = [spec.kind_idx for spec in schedule if spec.kind == kind]
        assert places == list(range(len(places)))


@given(layers=layer_lists)
def test_draft_layer_follows_the_trunk(layers):
    attns, routers = zip(*layers, strict=True)
    config = dataclasses.replace(DSV4Config.tiny(), layer_types=attns, router_types=routers)
    (draft,) = draft_layers(config)
    assert (draft.attn, draft.router, draft.kind_idx) == (SWA, LEARNED, 0)
    assert draft.layer_idx == len(layers)
    assert draft.family_idx == attns.count(SWA)


@pytest.mark.parametrize("config", [DSV4Config.flash(), DSV4Config.pro(), DSV4Config.v41_flash()])
def test_copies_of_a_pattern_have_the_places_of_their_layers(config):
    """In the stacks of their type, of their kind, and of the entries that they read."""
    schedule, made = layer_schedule(config), {}
    for spec in schedule:
        if spec.makes_entries:
            family = made.setdefault(spec.entry_family, {})
            family[spec.layer_idx] = len(family)
    found = []
    for segment in split_into_segments(schedule):
        for copy in range(segment.repeats):
            for spec in segment.pattern:
                own = schedule[len(found)]
                found.append(own)
                for name, stride in (
                    ("family_idx", segment.family_stride(spec)),
                    ("kind_idx", segment.kind_stride(spec)),
                    ("entry_idx", segment.entry_stride(spec) if spec.shares else 0),
                ):
                    assert getattr(spec, name) + copy * stride == getattr(own, name)
                if own.shares and own.entry_source is not None:
                    assert own.entry_idx == made[own.entry_family][own.entry_source]
    assert tuple(found) == schedule
    if config.sources is not None:
        assert {name: len(layers) for name, layers in made.items()} == {"csa1": 1, "csa2": 3}
