"""What a step's draws take on V4's vocabulary: `python -m benchmarks.bench_draws [results]`.

Rows of `limit_tokens` are the search for the last token of top-p alone, beside XLA's: a sort and a
running sum, as draws were made before, and the reference of the op. Rows of `draw` are all of a
step's draws from logits on, by its two programs: of simple rows, and of rows that ask for whatever
there is. Logits are normal, of a spread at which top-p leaves some hundred tokens.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import baselines
from benchmarks.cases.tokens import DRAWN, DRAWN_CONTEXT, VOCAB
from dsv4_jax.bench import compare, loops, timing
from dsv4_jax.step.draws import DrawnCounts, TokenMasks, draw
from dsv4_jax.step.sampling import MAX_LOGIT_BIAS, SamplingParams, stack_sampling
from dsv4_jax.step.settings_size import count_entries, mask_words
from pallas_kernels import limit_tokens

SPREAD = 2.5
SORT, SEARCH = "XLA, by a sort", "XLA, bit by bit"
_SIMPLE = SamplingParams(temperature=1.0)
_ASKING = SamplingParams(
    temperature=1.0,
    top_p=0.95,
    top_k=1000,
    logit_bias={5: 1.0, 99: -1.0},
    presence_penalty=0.5,
    logprobs=20,
)


def main():
    args = baselines.make_parser(__doc__).parse_args()
    bandwidth = timing.copy_bandwidth()
    cases = [limit_case(rows, bandwidth) for rows in DRAWN]
    for name, asked in (("simple", [_SIMPLE]), ("one asks", [_ASKING]), ("all ask", None)):
        cases += [draw_case(rows, name, asked, bandwidth) for rows in DRAWN]
    return compare.measure(cases, args.results)


def limit_case(rows, bandwidth):
    def time_us(function):
        return loops.median_us(function, limit_inputs(rows), rounds=4)

    search = functools.partial(limit_tokens, backend="reference")
    return compare.Case(
        "limit_tokens",
        f"{rows} x {VOCAB}",
        jax.jit(limit_tokens),
        lambda: (None, limit_inputs(rows)),
        roofline_us=4 * rows * VOCAB / bandwidth * 1e6,
        baseline=SORT,
        baseline_us=lambda: time_us(limit_by_sort),
        rivals={SEARCH: lambda: time_us(search)},
    )


def draw_case(rows, name, asked, bandwidth):
    return compare.Case(
        "draw",
        f"{rows} rows, {name}",
        draw_once,
        lambda: (None, draw_inputs(rows, asked)),
        roofline_us=4 * rows * VOCAB / bandwidth * 1e6,
    )


def limit_by_sort(scaled, top_k, top_p):
    """The last token by a sort of the whole row."""
    token_ids = jax.lax.broadcasted_iota(jnp.int32, scaled.shape, 1)
    negated, order = jax.lax.sort((-scaled, token_ids), is_stable=True, num_keys=1)
    ranked = jax.nn.softmax(-negated, axis=-1)
    before = jnp.cumsum(ranked, axis=-1) - ranked
    limit = jnp.where(top_k > 0, top_k, scaled.shape[1])[:, None]
    kept = (jnp.arange(scaled.shape[1])[None] < limit) & (before < top_p[:, None])
    last = jnp.maximum(jnp.sum(kept, axis=-1, keepdims=True, dtype=jnp.int32), 1) - 1
    least = -jnp.take_along_axis(negated, last, axis=-1)
    return least[:, 0], jnp.take_along_axis(order, last, axis=-1)[:, 0]


@jax.jit
def draw_once(logits, sampling, positions, counts, masks):
    no_drafts = jnp.zeros((logits.shape[0], 0), jnp.int32)
    return draw(logits[:, None], sampling, positions, counts, no_drafts, None, masks)


def limit_inputs(rows):
    logits = random_logits(rows)
    scaled = logits - jnp.max(logits, axis=2, keepdims=True)
    return [(each, jnp.zeros(rows, jnp.int32), jnp.full(rows, 0.95)) for each in scaled]


def draw_inputs(rows, asked):
    """Of an engine of so many slots, whose first ones ask; None is all of them."""
    asking = [_ASKING] * rows if asked is None else asked + [_SIMPLE] * (rows - len(asked))
    stacked = stack_sampling(asking, with_stops=False, bias_width=MAX_LOGIT_BIAS)
    sampling = jax.tree.map(jnp.asarray, stacked)
    if all(each.is_simple for each in asking):
        settings = sampling.simplified(), jnp.full((rows, 1), 1000, jnp.int32), None, None
        return [(each, *settings) for each in random_logits(rows)]
    entries = np.full((3, count_entries(VOCAB, rows, DRAWN_CONTEXT)), -1, np.int32)
    entries[:, :100] = np.zeros(100), np.arange(100), np.ones(100)
    counts = DrawnCounts(**dict(zip(("rows", "token_ids", "counts"), entries, strict=True)))
    bits = jnp.full((rows, 1, mask_words(VOCAB)), 0xFFFFFFFE, jnp.uint32)
    masks = TokenMasks(is_masked=jnp.arange(rows) == 0, bits=bits)
    settings = sampling, jnp.full((rows, 1), 1000, jnp.int32), counts, masks
    return [(each, *settings) for each in random_logits(rows)]


def random_logits(rows):
    """f32[2, T, V], so that no call has the logits of the one before."""
    return SPREAD * jax.random.normal(jax.random.key(rows), (2, rows, VOCAB), jnp.float32)


if __name__ == "__main__":
    sys.exit(main())
