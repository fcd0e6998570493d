"""Experts of the models, and calls of `expert_mlp`, `mixture_mlp` and what sorts their tokens."""

from typing import NamedTuple

from benchmarks.cases.product import BOTH, FLASH, HOPPER, PRO, V41


class Experts(NamedTuple):
    """So many of them, D and I."""

    count: int
    dim: int
    width: int


def experts_of(config, *, devices=1):
    """Those of a layer that one of some devices has."""
    count = config.num_routed_experts // devices
    return Experts(count, config.hidden_size, config.moe_intermediate_size)


MODELS = {"Flash": experts_of(FLASH), "Pro": experts_of(PRO)}
TOKENS = (1, 8, 64, 256, 8192)
PICKS, LIMIT, NUM_INPUTS = FLASH.num_experts_per_token, FLASH.swiglu_limit, 3
LAWS = ("uniform", "Zipf")


class Mixture(NamedTuple):
    """A call with a shared expert that is compiled; `block` is that of the shared expert's."""

    name: str
    targets: tuple[str, ...]
    tokens: int
    experts: Experts
    block: int


COMPILED_MIXTURES = [
    Mixture(name, targets, tokens, experts, block)
    for name, targets, counts, experts, block in (
        ("flash", BOTH, (1, 2, 6, 8), MODELS["Flash"], 128),
        ("pro", HOPPER, (1, 4, 6), MODELS["Pro"], 128),
        ("v41", HOPPER, (1, 6, 8), experts_of(V41, devices=4), 32),
    )
    for tokens in counts
]


class Routed(NamedTuple):
    """A call of routed experts that is compiled."""

    name: str
    picked_among: int
    experts: Experts
    tokens: int
    activations: str


_FLASH = MODELS["Flash"]
_SLIM = _FLASH._replace(count=8)
COMPILED = [
    Routed("flash", _FLASH.count, _FLASH, 1, "fp8"),
    Routed("flash", _FLASH.count, _FLASH, 64, "bfloat16"),
    Routed("flash", _FLASH.count, _FLASH, 8192, "fp8"),
    Routed("flash of four", _FLASH.count, experts_of(FLASH, devices=4), 8192, "fp8"),
    Routed("flash", _FLASH.count, _FLASH, 18_688, "fp8"),
    Routed("slim", _SLIM.count, _SLIM, 64, "dense"),
    Routed("slim", _SLIM.count, _SLIM, 8192, "dense"),
]

COMPILED_UNPACKED = [(192, _FLASH.width, _FLASH.dim)]
"""Experts, their outputs and inputs, that become block FP8."""
COMPILED_SORTED = [(256, experts_of(FLASH, devices=4).count), (1024, MODELS["Pro"].count)]
"""Tokens, and the experts by which their picks are sorted."""
