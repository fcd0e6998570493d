"""plan_step, a pure function: what fits, what is fair, and what is the smallest shape."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dsv4_jax as ds
from dsv4_jax.config.upper_layers import UPPER_SHARE, upper_layers
from dsv4_jax.serving.requests.reading import Reading
from dsv4_jax.serving.schedule.scheduler import (
    RowNeed,
    RowPlan,
    ShardPlan,
    plan_decoding,
    plan_shards,
    plan_step,
)
from dsv4_jax.serving.sizing import UpperSteps
from dsv4_jax.serving.step_sizes import StepSizes


def sizes_of(*prompts, plain=None):
    """Decode steps of the sizes of prompts, or plain ones."""
    return StepSizes(prompts=prompts, decoding=plain or prompts, is_plain=plain is not None)


SIZES = sizes_of(16, 64)
PLAIN = sizes_of(16, 64, plain=(1, 4))


def tokens(plan):
    return {row.slot: (row.num_tokens, row.num_drafts) for row in plan.rows}


def test_decoding_alone_is_the_lean_program():
    needs = [RowNeed(slot, 1, 0) for slot in (2, 0)]
    plan = plan_step(needs, sizes=PLAIN)
    assert plan == ShardPlan((RowPlan(2, 1, 0, True), RowPlan(0, 1, 0, True)))
    whole = plan_shards([needs], sizes=PLAIN)
    assert (whole.size, whole.is_plain, whole.holds_prompts) == (4, True, False)
    whole = plan_shards([needs[:1], []], sizes=PLAIN)
    assert (whole.size, whole.is_plain) == (1, True)
    whole = plan_shards([needs], sizes=SIZES)
    assert (whole.size, whole.is_plain) == (16, False)


def test_drafts_and_prompts_take_the_general_program():
    plan = plan_shards([[RowNeed(0, 1, 3), RowNeed(1, 1, 0)]], sizes=SIZES)
    assert (plan.size, plan.is_plain, tokens(plan)) == (16, False, {0: (1, 3), 1: (1, 0)})
    plan = plan_shards([[RowNeed(0, 1, 0), RowNeed(1, 20, 0)]], sizes=PLAIN)
    assert (plan.size, plan.is_plain) == (64, False)
    assert tokens(plan) == {0: (1, 0), 1: (20, 0)}


def test_the_oldest_prompt_gets_half_and_short_ones_come_next():
    needs = [RowNeed(0, 500, 0), RowNeed(1, 400, 0), RowNeed(2, 10, 0), RowNeed(3, 1, 0)]
    plan = plan_step(needs, sizes=SIZES)
    assert tokens(plan) == {0: (32, 0), 1: (21, 0), 2: (10, 0), 3: (1, 0)}
    assert [row.draws for row in plan.rows] == [False, False, True, True]


def test_nothing_is_left_unused():
    plan = plan_step([RowNeed(0, 500, 0), RowNeed(1, 5, 0)], sizes=SIZES)
    assert tokens(plan) == {0: (59, 0), 1: (5, 0)}
    plan = plan_step([RowNeed(0, 5, 0), RowNeed(1, 500, 0)], sizes=SIZES)
    assert tokens(plan) == {0: (5, 0), 1: (59, 0)}


def test_drafts_give_way_to_prompts_and_to_a_small_step():
    many = [RowNeed(slot, 1, 8) for slot in range(8)]  # 72 tokens with drafts
    assert set(tokens(plan_step(many, sizes=SIZES)).values()) == {(1, 0)}
    four = many[:4]  # 36, more than half of 64
    mixed = plan_step([*four, RowNeed(9, 300, 0)], sizes=SIZES)
    assert tokens(mixed) == dict.fromkeys(range(4), (1, 0)) | {9: (60, 0)}
    assert set(tokens(plan_step(four, sizes=SIZES)).values()) == {(1, 8)}


needs_lists = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 8)), min_size=1, max_size=16)


@settings(max_examples=300, deadline=None)
@given(needs_lists, st.sampled_from([(16,), (16, 64), (24, 40, 256)]), st.booleans())
def test_every_plan_keeps_the_rules(pairs, prompt_sizes, has_plain):
    needs = [
        RowNeed(slot, pending, drafts if pending == 1 and not has_plain else 0)
        for slot, (pending, drafts) in enumerate(pairs)
    ]
    sizes = sizes_of(*prompt_sizes, plain=(1, 5, 16) if has_plain else None)
    plan = plan_shards([needs], sizes=sizes)
    fitting = sizes.prompts if plan.holds_prompts else sizes.decoding
    rows = {row.slot: row for row in plan.rows}
    total = sum(row.num_tokens + row.num_drafts for row in plan.rows)
    assert total <= plan.size
    assert plan.is_plain == (has_plain and not plan.holds_prompts)
    assert total > max((size for size in fitting if size < plan.size), default=0)
    for need in needs:
        row = rows.get(need.slot)
        if need.num_pending == 1:
            assert row is not None  # an answer is in every step
            assert row.draws
        if row is not None:
            assert 1 <= row.num_tokens <= need.num_pending
            assert row.draws == (row.num_tokens == need.num_pending)
            assert row.num_drafts in (0, need.num_drafts)
    prompts = [need for need in needs if need.num_pending > 1]
    assert plan.holds_prompts == bool(prompts)
    if prompts:
        assert prompts[0].slot in rows  # the oldest always goes on
        unread = sum(n.num_pending - rows[n.slot].num_tokens if n.slot in rows else n.num_pending
                     for n in prompts)  # fmt: skip
        assert not unread or total == sizes.prompts[-1]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 8)), min_size=1, max_size=16),
    st.sampled_from([(16,), (16, 64), (24, 40, 256)]),
    st.booleans(),
)
def test_decoding_is_planned_at_once_as_row_by_row(pairs, prompt_sizes, has_plain):
    sizes = sizes_of(*prompt_sizes, plain=(1, 5, 16) if has_plain else None)
    pairs = [(shard, 0 if has_plain else drafts) for shard, drafts in pairs]
    needs = [[], [], []]
    for slot, (shard, drafts) in enumerate(pairs):
        needs[shard].append(RowNeed(slot, 1, drafts))
    expected = plan_shards(needs, sizes=sizes)
    slots = np.arange(len(pairs), dtype=np.int32)
    shards, drafts = np.array(pairs, np.int32).T
    plan = plan_decoding(slots, drafts, shards, sizes=sizes)
    for name in ("size", "is_plain", "holds_prompts"):
        assert getattr(plan, name) == getattr(expected, name)
    for name in ("slots", "num_tokens", "num_drafts", "draws"):
        np.testing.assert_array_equal(getattr(plan.rows, name), getattr(expected.rows, name))


def test_every_prompt_is_read_in_the_end():
    """With new short prompts in every step, the long one still gets its half."""
    rng, left, steps = np.random.default_rng(0), 1000, 0
    while left:
        others = [RowNeed(1 + i, int(rng.integers(2, 60)), 0) for i in range(6)]
        plan = plan_step([RowNeed(0, max(left, 2), 0), *others], sizes=SIZES)
        left -= min(tokens(plan)[0][0], left)
        steps += 1
    assert steps == pytest.approx(1000 / 32, abs=1)


UPPER = {16: 8, 64: 12}


def plan_resting(*needs):
    return plan_shards([needs], sizes=PLAIN, upper_sizes=UPPER)


def test_who_may_rest_does_beside_who_decodes():
    plan = plan_resting(RowNeed(0, 1, 3), RowNeed(1, 500, 0, draws=False, rests=True))
    assert (plan.size, plan.upper_size, tokens(plan)) == (64, 12, {0: (1, 3), 1: (60, 0)})
    assert plan.rows.rests.tolist() == [False, True]
    last = plan_resting(RowNeed(0, 1, 0), RowNeed(1, 1, 0, draws=False, rests=True))
    assert (last.is_plain, last.upper_size, last.rows.draws.tolist()) == (False, 8, [True, False])


def test_prompts_that_all_layers_run_get_what_is_left_of_the_upper_ones():
    resting, other = RowNeed(0, 500, 0, draws=False, rests=True), RowNeed(1, 100, 0)
    plan = plan_resting(resting, other, RowNeed(2, 1, 0))
    assert (plan.upper_size, tokens(plan)) == (12, {0: (52, 0), 1: (11, 0), 2: (1, 0)})


def test_nobody_rests_where_an_older_prompt_needs_all_layers():
    plan = plan_resting(RowNeed(0, 100, 0), RowNeed(1, 500, 0, draws=False, rests=True))
    assert (plan.upper_size, tokens(plan)) == (None, {0: (32, 0), 1: (32, 0)})
    assert not plan.rows.rests.any()


def test_data_shards_rest_together_or_not_at_all():
    """They run one program."""
    resting = [RowNeed(0, 500, 0, draws=False, rests=True)]
    options = {"sizes": SIZES, "upper_sizes": UPPER}
    assert plan_shards([resting, [RowNeed(8, 9, 0)]], **options).upper_size == 12
    plan = plan_shards([resting, [RowNeed(8, 30, 0)]], **options)
    assert plan.upper_size is None
    assert not plan.rows.rests.any()


@pytest.mark.parametrize("sizes", [(4096,), (64, 256, 2048), (64, 1024), (4096, 8192)])
def test_a_prompt_of_32768_tokens_costs_at_most_0_6_of_all_layers(sizes):
    """Rows of its steps, padding included, times the layers that run them, of V4.1-Flash."""
    config = ds.DSV4Config.v41_flash()
    upper, count = upper_layers(config), 32_768
    uppers = {size: 8 + size // UPPER_SHARE for size in sizes}
    options = {"look_back": upper.look_back, "step_sizes": sizes, "share": 0.5}
    steps = UpperSteps(sizes=uppers, **options)
    options = {"look_back": upper.look_back, "rest_cost": steps.rest_cost}
    reading = Reading.of(0, count, [count - 128], sizes=sizes, **options)
    length, cost = 0, 0
    while length < count:
        part, rests = reading.next_part(length)
        pending = count - length if part is None else part
        need = RowNeed(0, pending, 0, draws=part is None, rests=rests)
        plans = [
            plan_shards([[need]], sizes=sizes_of(*sizes[: n + 1]), upper_sizes=uppers)
            for n in range(len(sizes))
        ]
        plan = min(plans, key=lambda plan: (plan.size / plan.rows.num_tokens.sum(), -plan.size))
        highest = plan.size if plan.upper_size is None else plan.upper_size
        cost += plan.size * upper.first + highest * (config.num_layers - upper.first)
        length += int(plan.rows.num_tokens.sum())
    assert cost / (count * config.num_layers) <= 0.6
