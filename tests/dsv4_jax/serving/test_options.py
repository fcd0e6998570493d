"""Options of an engine are declared once: Python, the command line and processes read that."""

import argparse
import dataclasses
import functools
import inspect

import jax
import pytest

import dsv4_jax as ds
from dsv4_jax.cli import arguments, engine_options, memory
from dsv4_jax.cli.parser import Parser
from dsv4_jax.rules import rules_of
from dsv4_jax.serving import sizing
from dsv4_jax.serving.options import EngineOptions
from helpers import taught

FIELDS = {field.name: field for field in dataclasses.fields(EngineOptions)}


def test_every_field_has_a_rule_and_a_doc():
    assert rules_of(EngineOptions).keys() == FIELDS.keys()
    described = inspect.getdoc(EngineOptions)
    for name in FIELDS:
        assert f"\n  {name}: " in described, name


def test_what_takes_options_has_few_arguments():
    for function in (ds.Engine.__init__, sizing.plan_engine, memory.check_engine_memory):
        assert len(inspect.signature(function).parameters) <= 6, function


@pytest.mark.parametrize("serves", [False, True])
def test_options_of_the_command_line_give_the_defaults(serves):
    """The format among them, which is the model's own."""
    parser = Parser("test")
    engine_options.add_engine_options(parser, serves=serves)
    chosen = arguments.chosen_fields(parser.parse_args([]), EngineOptions)
    assert ("max_requests" in chosen) == serves
    assert EngineOptions(**chosen) == EngineOptions()


def test_each_option_of_the_command_line_reaches_its_field():
    parser = Parser("test")
    engine_options.add_engine_options(parser, serves=True)
    arguments.add_fields(parser, EngineOptions, ["split_cache"])
    words = {
        "split_cache": [], "max_requests": ["3"], "max_context_tokens": ["99"],
        "cache_format": ["f32"], "prefill_tokens": ["8,16"], "decode_batch_sizes": ["1,2"],
        "draft_tokens": ["2"],
        "steps_per_call": ["4"], "activations": ["bfloat16"], "prefill_activations": ["fp8"],
        "gpu_memory_fraction": ["0.5"], "max_step_ms": ["40"], "engram_tables": ["device"],
        "host_cache_bytes": ["3MiB"], "disk_cache_dir": ["pages"], "disk_cache_bytes": ["5GiB"],
    }  # fmt: skip
    given = [word for name, text in words.items() for word in (arguments.option_of(name), *text)]
    chosen = arguments.chosen_fields(parser.parse_args([*given, "--no-grammars"]), EngineOptions)
    assert chosen == {
        "split_cache": True, "max_requests": 3, "max_context_tokens": 99, "cache_format": "f32",
        "prefill_tokens": [8, 16], "decode_batch_sizes": [1, 2], "draft_tokens": 2,
        "steps_per_call": 4,
        "activations": "bfloat16", "prefill_activations": "fp8", "gpu_memory_fraction": 0.5,
        "grammars": False, "max_step_ms": 40.0, "engram_tables": "device",
        "host_cache_bytes": 3 * 2**20,
        "disk_cache_dir": "pages", "disk_cache_bytes": 5 * 2**30,
    }  # fmt: skip
    assert {name for name, ruled in rules_of(EngineOptions).items() if ruled.help} == set(chosen)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--draft-tokens", "17"], "argument --draft-tokens: must be a whole number from 0 to 16"),
        (["--host-cache", "64gb"], "argument --host-cache: must be a number of bytes such as 4096"),
        (["--steps-per-call", "0"], "argument --steps-per-call: must be a whole number from 1 to"),
        (["--gpu-memory-fraction", "0"], "must be a finite number from 0.01 to 1"),
        (
            ["--max-step-ms", "0"],
            "--max-step-ms: must be a finite number from 1 to 600000, got '0'",
        ),
        (["--max-step-ms", "nan"], "--max-step-ms: must be a finite number from 1 to 600000"),
        (["--max-step-ms", "inf"], "--max-step-ms: must be a finite number from 1 to 600000"),
        (["--max-step-ms", "fast"], "--max-step-ms: must be a finite number from 1 to 600000"),
    ],
)
def test_the_command_line_has_its_own_words(words, told):
    parser = Parser("test")
    engine_options.add_engine_options(parser, serves=True)
    with pytest.raises(ValueError, match=told):
        parser.parse_args(words)


def test_a_field_that_the_command_line_cannot_read_is_refused_there():
    with pytest.raises(TypeError, match="reads nothing by"):
        arguments.add_fields(argparse.ArgumentParser(), EngineOptions, ["mesh"])


def test_values_are_plain_and_replaced_by_name():
    options = EngineOptions(prefill_tokens=iter([8, 16]), max_requests=3)
    assert options.prefill_tokens == (8, 16)
    assert options.changed(max_requests=4) == EngineOptions(prefill_tokens=(8, 16), max_requests=4)
    assert options.changed() is options
    with pytest.raises(ValueError, match="prefill_tokens must be ascending sizes"):
        options.changed(prefill_tokens=[16, 8])
    with pytest.raises(TypeError, match="max_request"):
        options.changed(max_request=1)


@pytest.mark.parametrize("value", [0, -5, 0.5, 2e7, float("nan"), float("inf"), True, "80"])
def test_a_step_has_a_time_that_is_one(value):
    with pytest.raises(ValueError, match=r"^max_step_ms must be (a number|1 to 600000), got "):
        EngineOptions(max_step_ms=value)


def test_steps_have_a_bound_on_gpus_by_default_and_elsewhere_if_it_is_given(monkeypatch):
    config = taught.CONFIG
    shapes = ds.model.param_shapes(config)

    def bound(**fields):
        options = EngineOptions(max_requests=4, **fields)
        return sizing.plan_engine(config, options, params=shapes, has_tokenizer=False).max_step_s

    assert bound() == float("inf")
    assert bound(max_step_ms=40) == 0.04
    monkeypatch.setattr(sizing.jax, "default_backend", lambda: "gpu")
    assert bound() == 0.12
    assert bound(max_step_ms=600_000) == float("inf")


def test_contexts_of_as_many_blocks_share_programs():
    """Which the page on serving tells those who run a file after another."""
    config = taught.CONFIG

    def arrays(context):
        options = EngineOptions(max_context_tokens=context)
        given = {"params": ds.model.param_shapes(config), "has_tokenizer": True}
        plan = sizing.plan_engine(config, options, **given)
        sizes = {
            "max_requests": 8,
            "max_context_tokens": context,
            "num_blocks": plan.pools.num_blocks,
        }
        cache = jax.eval_shape(functools.partial(ds.init_cache, config, **sizes))
        shapes = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(cache)]
        return shapes, plan.pools.num_snapshots, plan.count_entries, plan.step_sizes

    assert arrays(385) == arrays(500) == arrays(512)
    assert arrays(513) != arrays(512)


def test_processes_of_a_mesh_see_every_option_of_another_engine():
    """They compare what a plan shows; an idea is the model's, and shows there."""
    config = taught.CONFIG
    shapes = ds.model.param_shapes(config)

    def shown(options):
        return repr(sizing.plan_engine(config, options, params=shapes, has_tokenizer=True))

    plain, others = EngineOptions(max_requests=4, draft_tokens=2), {
        "max_requests": 8, "max_context_tokens": 128, "cache_format": "f32",
        "prefill_tokens": (8,), "decode_tokens": 64, "decode_batch_sizes": (1,),
        "draft_tokens": 1, "draft_cut": True,
        "grammars": False, "activations": "bfloat16", "prefill_activations": "bfloat16",
        "num_blocks": 200, "num_snapshots": 1, "memory_bytes": 2**32, "unroll": True,
        "overlap": False, "debug": True, "progress": True, "split_cache": True, "steps_per_call": 2,
        "max_step_ms": 40, "host_cache_bytes": 2**20, "disk_cache_dir": "pages",
        "engram_tables": "host",
    }  # fmt: skip
    not_shown = {"mesh", "idea", "gpu_memory_fraction", "disk_cache_bytes"}
    assert FIELDS.keys() - others.keys() == not_shown
    seen = {shown(plain.changed(**{name: value})) for name, value in others.items()}
    assert len(seen | {shown(plain)}) == len(others) + 1
