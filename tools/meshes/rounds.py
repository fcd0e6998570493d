"""Rounds of the benchmark of drafts on meshes and on one device: whether they say the same, and
keep what they are taught.

Every data shard has the caches of one device, so that its requests are those of one device alone.
"""

import dataclasses

import numpy as np

import dsv4_jax as ds
from dsv4_jax.bench.mesh_rounds import MeshRoundCase
from dsv4_jax.bench.mesh_step import MeshSteps, param_shapes_on
from dsv4_jax.bench.prompt_calls import PromptCalls, PromptPlan
from dsv4_jax.bench.round_case import RoundCase, usual_stages
from dsv4_jax.bench.round_programs import Model, RoundPrograms
from dsv4_jax.bench.taught_rounds import recorded, taught_rounds
from dsv4_jax.bench.weights import random_params
from dsv4_jax.model.params import param_shapes, unstack_layers
from tools.meshes.harness import mesh_of

SIZES = {"context": 48, "draft_tokens": 3, "cache_format": "f32", "limit_s": 0.0}
REQUESTS = 2  # of a data shard
WEIGHTS = "float32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfAShard(RoundCase):
    """The requests of one data shard of a point, on one device."""

    whole: MeshRoundCase
    shard: int

    def first_tokens(self, config):
        first = self.shard * self.batch
        return self.whole.first_tokens(config)[first : first + self.batch]


def small_model():
    config = ds.DSV4Config.tiny().without_draft()
    layers = slice(1, 2)
    config = dataclasses.replace(
        config, layer_types=config.layer_types[layers], router_types=config.router_types[layers]
    )
    return dataclasses.replace(config, dspark=usual_stages(config))


def add_arguments(parser):
    del parser


def compile_round(config, case, mesh=None):
    if mesh is None:
        shapes = unstack_layers(param_shapes(config, weights=WEIGHTS))
    else:
        shapes = param_shapes_on(mesh, config, weights=WEIGHTS, peers=None)
    round_program = RoundPrograms(Model(config, shapes), case, ("round",), 1).wait()["round"]
    if isinstance(round_program, Exception):
        raise round_program
    return round_program


def check_all(arguments):
    config, found = small_model(), {}
    alone = Model(config, random_params(config, weights=WEIGHTS))
    one = compile_round(config, RoundCase(batch=REQUESTS, **SIZES))
    for name in arguments.meshes:
        mesh = mesh_of(name)
        data = mesh.shape["data"]
        case = MeshRoundCase(batch=REQUESTS * data, mesh=mesh, **SIZES)
        expected = []
        for shard in range(data):
            part = OfAShard(batch=REQUESTS, whole=case, shard=shard, **SIZES)
            expected.append(recorded(alone, part, one, part.fill(config))[1])
        program = compile_round(config, case, mesh)
        model = Model(config, random_params(config, weights=WEIGHTS, mesh=mesh))
        _, said = recorded(model, case, program, case.fill(config))
        row = {"batch": case.batch, "parts": {}}
        for _ in taught_rounds(model, case, program, row, lambda *_: {}):
            pass
        found[name] = {
            "same": float(np.mean(said == np.concatenate(expected))),
            "different_tokens": len(np.unique(said)),
            "as_taught": [each["as_taught"] for each in row["kept"].values()],
            "shards": tokens_of_shards(config, mesh),
        }
    return found


def tokens_of_shards(config, mesh):
    """First tokens of each device, in a timed step and in a timed prompt."""
    plan = PromptPlan.of(config, num_tokens=128, chunk_tokens=64)
    call, *_ = PromptCalls(config, plan, cache_format="f32", mesh=mesh).inputs
    step = MeshSteps(config, mesh, weights=WEIGHTS).step_input(REQUESTS)
    return [
        [np.asarray(part.data)[:4].tolist() for part in one.token_ids.addressable_shards]
        for one in (step, call)
    ]
