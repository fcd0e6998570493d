"""Each spelling of a config means what transformers reads in it, or is refused with a reason.

`tests/data/make_spellings.py` made the cases and recorded what transformers says.
"""

import json
import pathlib

import pytest

from dsv4_jax.config import DSV4Config
from dsv4_jax.config.read_json import LAYER_TYPE_NAMES, ROUTER_TYPE_NAMES

FILE = pathlib.Path(__file__).parents[2] / "data" / "config_spellings.json"
RECORDED = json.loads(FILE.read_text())
YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
REASONS = (
    "contradict each other",
    "is missing",
    "lacks original_max_position_embeddings",  # transformers takes the longest context
    "lacks attention_factor",
    "which do not tell CSA from HCA",
    "rope_type must be 'yarn' or 'default'",
    "attention_factor must be 1.0",
    "truncate must be true",
    "in a DeepSeek-V4 config",  # another router, KV heads, tied embeddings
)
"""Why a spelling is refused that transformers takes."""

OURS = [
    {"compress_ratios": [0, 8, 64, 8, 64, 0]},  # the smaller is CSA's
    {"swiglu_limit": 10},  # a whole number
]
"""Spellings that transformers refuses."""


def changed(base, changes):
    contents = json.loads(json.dumps(RECORDED["bases"][base]))
    for path, value in changes.items():
        *parents, name = path.split("__")
        place = contents
        for parent in parents:
            place = place[parent]
        if value == "(gone)":
            del place[name]
        else:
            place[name] = value
    return contents


def read(case):
    """The config of a case, or None and why it is refused."""
    try:
        return DSV4Config.from_hf(changed(case["base"], case["changes"])), ""
    except ValueError as error:
        return None, str(error)


def described(config):
    """A config in the words of the recorded answers."""
    scaling = config.rope_scaling
    yarn = None
    if scaling is not None:
        numbers = (scaling.factor, scaling.original_max_positions)
        yarn = dict(zip(YARN, (*numbers, scaling.beta_fast, scaling.beta_slow), strict=True))
    types = {attn: name for name, attn in LAYER_TYPE_NAMES.items()}
    routers = {router: name for name, router in ROUTER_TYPE_NAMES.items()}
    rates = [config.csa_compression_ratio, config.hca_compression_ratio]
    return {
        "layer_types": [types[attn] for attn in config.layer_types],
        "mlp_layer_types": [routers[router] for router in config.router_types],
        "compress_rates": dict(zip(list(LAYER_TYPE_NAMES)[1:], rates, strict=True)),
        "rope_dim": config.rope_dim,
        "rope_theta": config.rope_theta,
        "main_type": "default",
        "compress_rope_theta": config.compress_rope_theta,
        "compress_type": "default" if scaling is None else "yarn",
        "yarn": dict.fromkeys(YARN) if yarn is None else yarn,
        "attention_factor": None if scaling is None else 1.0,
        "n_routed_experts": config.num_routed_experts,
        "moe_intermediate_size": config.moe_intermediate_size,
    }


def answered(answer):
    """What is comparable of a recorded answer."""
    known = {name: answer[name] for name in described(DSV4Config.tiny())}
    if known["compress_type"] == "default":
        known |= {"yarn": dict.fromkeys(YARN), "attention_factor": None}
    # A type that has no rate in the file has transformers' own, with which no model is built.
    defaults = dict(zip(list(LAYER_TYPE_NAMES)[1:], (4, 128), strict=True))
    rates = {
        name: defaults[name] if r is None else r for name, r in answer["compress_rates"].items()
    }
    return known | {"compress_rates": rates}


@pytest.mark.parametrize(
    "case",
    RECORDED["cases"],
    ids=[f"{number}-{'-'.join(case['changes'])}" for number, case in enumerate(RECORDED["cases"])],
)
def test_a_spelling_means_what_transformers_reads(case):
    answer = case["answer"]
    config, reason = read(case)
    if config is None:
        assert "refused" in answer or any(known in reason for known in REASONS), reason
        return
    if "refused" in answer:
        assert case["changes"] in OURS, answer
        return
    assert answer["truncate"] is not False
    assert described(config) == answered(answer)


def test_the_spellings_are_many_and_most_are_taken():
    taken = [case for case in RECORDED["cases"] if read(case)[0] is not None]
    assert len(RECORDED["cases"]) > 100
    assert len(taken) > len(RECORDED["cases"]) / 2


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        ("released", {"num_hidden_layers": 2}),
        ("released", {"compress_rates": {name: 0 for name in list(LAYER_TYPE_NAMES)[:1]}}),
        (
            "released",
            {"rope_theta": "(gone)", "rope_parameters": {"rope_theta": 10000}},
        ),
        ("nested", {"num_hidden_layers": 3}),
    ],
)
def test_spellings_that_people_use_are_taken(base, changes):
    DSV4Config.from_hf(changed(base, changes))
