"""The models of `on_gpus`: layers of each kind of a family, of released shapes or tiny."""

import dataclasses
import pathlib
import tempfile

import jax
import numpy as np

import dsv4_jax as ds
from dsv4_jax.bench.weights import random_params
from dsv4_jax.config.sources import Candidates, EntrySources
from dsv4_jax.engram import EngramTable, EngramTables
from helpers import serving, v41

PER_ROW = 128
"""Tokens of a request in a step, of all together `harness.ROWS` times as many."""
EXPERTS, VOCABULARY = 16, 512
TABLE_ROWS = 4096
"""At least so many of each column of an Engram table, whose release has 16 million."""
TABLE_SCALE = 119
"""UE8M0 of 2^-8, so that the largest values are below 2."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What runs.

    Attributes:
      lengths: tokens of the prompts, `harness.ROWS` of them.
      events: of the engine's random life.
      cache_format: how entries are stored.
      weights: as of `random_params`.
    """

    lengths: tuple[int, ...]
    events: int
    cache_format: str
    weights: str

    @property
    def context(self):
        return max(self.lengths) + 4 * PER_ROW


RELEASED_LENGTHS, TINY_LENGTHS = (
    (2300, 37, 18, 1, 140, 529, 33, 900),
    (150, 37, 18, 1, 40, 129, 33, 12),
)
RELEASED = {
    "v4": Sizes(RELEASED_LENGTHS, 80, "fp8_ue8m0", "stored"),
    "v41": Sizes(RELEASED_LENGTHS, 80, "fp4_e4m3", "stored"),
}
TINY = dict.fromkeys(RELEASED, Sizes(TINY_LENGTHS, 60, "f32", "float32"))


def model(name, *, tiny):
    """A config and its parameters; `name` is a key of `RELEASED`."""
    makers = {"v4": (_v4, _tiny_v4), "v41": (_v41, _tiny_v41)}
    return makers[name][tiny](RELEASED[name].weights)


def _v4(weights):
    """A layer of each attention type with a draft block."""
    few = {"vocab_size": VOCABULARY, "num_routed_experts": EXPERTS}
    config = dataclasses.replace(ds.DSV4Config.flash(), **_three_layers(), **few)
    return config, random_params(config, weights=weights)


def _tiny_v4(_):
    config = dataclasses.replace(
        ds.DSV4Config.tiny(),
        **_three_layers(),
        num_attention_heads=8,
        o_groups=8,
        hc_sinkhorn_iters=1,
    )
    return config, ds.init_params(config, jax.random.key(0))


def _three_layers():
    config = serving.EVERY_TYPE
    return {"layer_types": config.layer_types, "router_types": config.router_types}


def v41_config():
    """Eight layers of V4.1-Flash's shapes, in the order of the small model of the tests.

    | layer | what it does |
    | --- | --- |
    | 0, 1 | windows, and an Engram table before 1 |
    | 2, 3 | entries of pairs and a selection, made and read |
    | 4 | the same made, with a table before it |
    | 5, 6 | entries of single tokens, a selection and candidates, made and read |
    | 7 | a selection among the candidates |

    Candidates are half of the entries of the longest prompt. Three stages read layers 5 to 7.
    """
    flash, ratios = ds.DSV4Config.v41_flash(), (0, 0, 2, 2, 2, 1, 1, 1)
    swa, csa = ds.AttentionType.SWA, ds.AttentionType.CSA
    return dataclasses.replace(
        flash,
        layer_types=tuple(csa if ratio else swa for ratio in ratios),
        router_types=flash.router_types[: len(ratios)],
        vocab_size=VOCABULARY,
        num_routed_experts=EXPERTS,
        sources=EntrySources(
            ratios=ratios,
            makers=(2, 4, 5),
            selectors=(2, 4, 5, 7),
            candidates=Candidates(layer=5, blocks=128, block_size=8),
        ),
        engram=dataclasses.replace(
            flash.engram,
            layers=(1, 4),
            least_prime=TABLE_ROWS,
            num_normalized_ids=VOCABULARY - 1,
        ),
        dspark=dataclasses.replace(
            flash.dspark,
            noise_token_id=VOCABULARY - 1,
            target_layers=(5, 6, 7),
            num_experts=EXPERTS,
        ),
    )


def _v41(weights):
    config = v41_config()
    params = random_params(config, weights=weights)
    return config, dataclasses.replace(params, engram=random_tables(config))


def random_tables(config):
    """Engram tables of random E4M3 codes, and two tokens that are normalised alike."""
    sizes, rng = config.engram, np.random.default_rng(0)
    tables = []
    for rows in sizes.table_rows:
        codes = rng.integers(0, 127, (rows, sizes.head_dim), np.uint8)  # of numbers above 0
        codes |= rng.integers(0, 2, codes.shape, np.uint8) << 7
        scale = np.full((rows, sizes.head_dim // 32), TABLE_SCALE, np.uint8)
        tables.append(EngramTable(codes.view(jax.numpy.float8_e4m3fn), scale))
    normalized = np.arange(config.vocab_size) % sizes.num_normalized_ids
    return EngramTables(sizes, normalized, tuple(tables), "")


def _tiny_v41(weights):
    """The small model of the tests, whose sizes divide by eight."""
    eight = {"num_attention_heads": 8, "o_groups": 8, "dspark_n_routed_experts": 8}
    with tempfile.TemporaryDirectory() as name:
        folder = v41.write_folder(pathlib.Path(name), "tiny", hc_sinkhorn_iters=1, **eight)
        return ds.load_checkpoint(folder, weights="float32", progress=False)
