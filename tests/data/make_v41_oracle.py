"""Writes oracle_v41_<preset>.npz: what an oracle in NumPy computes for small DeepSeek-V4.1 models.

transformers has no DeepSeek-V4.1. The oracle is a NumPy model in float64, written from
deepseek_v41.md and compared with DeepSeek's released code as that document says. It is not part of
this repository: this script takes the path of a module that has

    Oracle(config, tensors, tokenizer_json, dtype, quant).row(token_ids)

and `trip_fp8`, `trip_fp4_e4m3` and `trip_mxfp4`, its round trips of windows, entries and keys.
There `config` is a `config.json`, `tensors` {name of the release: (array, "F32")}, and a row gives
{name: array [T, ...]}. With `quant` "cache" it rounds as a cache in the model's own formats does:
the files oracle_v41_<preset>_cache.npz. quant_v41.npz has what the round trips alone make of
vectors with ties, zeros and values of all sizes. Run by hand (python 3.12, numpy 2.5.1 wrote the
committed files):

    PYTHONPATH=.:tests python tests/data/make_v41_oracle.py ORACLE.py [preset ...]

Weights come from `helpers.v41.draw_weights` and are not stored. Arrays, for B rows of T tokens:

    config                   JSON, as `helpers.v41.contents` has it
    seed, weight_sums        of `draw_weights`
    token_ids                i32[B, T]
    logits                   f32[B, T, V]
    L<i>/idx/topk            i16[B, T, K], entries selected, ascending, then -1
    L<i>/idx/margin          f32[B, T], score of the last selected entry above the best one left out
    L<i>/idx/candidates      bool[B, T, E], and `margin_blocks`, likewise of blocks
    L<i>/engram/hash         i32[B, T, columns], rows of the table
    main_hidden              f32[B, T, K * D], means of the streams for the draft
    <name>, L<i>/<name>      f32[B, P, n], other intermediates, of some tokens (or entries) and, of
                             long ones, some values: see `helpers.v41.sample`

and in oracle_v41_<preset>_drafts.npz, of drafts whose anchor stands at position p:

    <p>/tokens               i32[B, N + 1], the anchor and the guesses
    <p>/logits               f32[B, N, V], and <p>/confidence, f32[B, N], before the sigmoid
"""

import importlib.util
import json
import sys

import numpy as np

from dsv4_jax.config import DSV4Config
from helpers import v41

SIZES = {"tiny": (2, 41), "ratios": (1, 300), "engram": (2, 48)}
SEEDS = {"tiny": 0, "ratios": 0, "engram": 0}
WHOLE = ("logits", "main_hidden", "idx/topk", "idx/candidates", "engram/hash")
DRAFTS = {("tiny", "none"): (1, 7, 8, 30), ("tiny", "cache"): (8, 30)}
"""Anchors: with a short window, at its end, after it has wrapped."""
# Of presets other than "tiny".
FEW = ("out", "head/normed", "comp/normed", "comp/entries", "idx/keys", "engram/gate")
SKIPPED = (
    "embed",
    "mask",
    "probs",
    "engram/ids",
    "idx/scores",
    "comp/pooled",
    "pre_used",
    "gate/w",
)


def load(path):
    spec = importlib.util.spec_from_file_location("oracle", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["oracle"] = module
    spec.loader.exec_module(module)
    return module


def rows_first(name, array, tokens):
    """[T, ...], where the oracle has heads first, and keys of the window before entries."""
    last = name.split("/", 1)[-1]
    if last == "q":
        return array.transpose(1, 0, 2)
    return array[0, :tokens] if last == "kv" and name.startswith("L") else array


def make(oracle, preset, quant="none"):
    said, seed = v41.contents(preset), SEEDS[preset]
    weights = v41.draw_weights(DSV4Config.from_hf(said), seed)
    tensors = {name: (array, "F32") for name, array in weights.items()}
    model = oracle.Oracle(said, tensors, v41.tokenizer_json(), np.float64, quant)
    batch, tokens = SIZES[preset]
    vocab = said["text_config"]["vocab_size"]
    token_ids = np.random.default_rng(seed + 1).integers(0, vocab, (batch, tokens))
    rows = [model.row(ids) for ids in token_ids]
    found = {}
    for name in rows[0]:
        array = np.stack([rows_first(name, row[name], tokens) for row in rows])
        last = name.split("/", 1)[-1]
        if last in ("margin", "margin_blocks"):
            found[name.replace("/margin", "/idx/margin")] = array.astype(np.float32)
        elif name in WHOLE or last in WHOLE:
            kind = {"f": np.float32, "b": bool, "i": np.int16}[array.dtype.kind]
            found[name] = array.astype(np.int32 if last == "engram/hash" else kind)
        elif any(part in name for part in SKIPPED) or last == "gate/indices":
            continue
        elif (preset == "tiny" and quant == "none") or last in FEW or name in FEW:
            found[name] = v41.sample(array).astype(np.float32)
    file = v41.oracle_path(preset if quant == "none" else f"{preset}_{quant}")
    np.savez_compressed(
        file,
        **found,
        config=json.dumps(said),
        seed=seed,
        weight_sums=v41.weight_sums(weights),
        token_ids=token_ids.astype(np.int32),
    )
    if (preset, quant) in DRAFTS:
        make_drafts(model, rows, token_ids, preset, quant)
    least = min(array.min() for name, array in found.items() if "margin" in name)
    print(f"{preset}: {file.stat().st_size / 1e6:.2f} MB, least margin {least:.1e}")


def make_drafts(model, rows, token_ids, preset, quant):
    found = {}
    for place in DRAFTS[preset, quant]:
        made = [
            model.propose(row["main_hidden"], ids[place], place)
            for row, ids in zip(rows, token_ids, strict=True)
        ]
        for name, kind in (
            ("tokens", np.int32),
            ("logits", np.float32),
            ("confidence", np.float32),
        ):
            found[f"{place}/{name}"] = np.stack([one[name] for one in made]).astype(kind)
    name = preset if quant == "none" else f"{preset}_{quant}"
    np.savez_compressed(v41.oracle_path(f"{name}_drafts"), **found)


def make_round_trips(oracle):
    rng = np.random.default_rng(0)
    whole = np.round(rng.normal(size=(24, 128)) * 64) / 16  # many of them halfway between codes
    wide = rng.normal(size=(24, 128)) * np.exp2(rng.integers(-24, 12, (24, 1)))
    spread = rng.normal(size=(8, 128)) * np.exp2(rng.integers(-12, 6, (8, 128)))
    x = np.concatenate([whole, wide, spread]).astype(np.float32)
    x[3], x[4, :40], x[5, ::2] = 0, 0, -0.0
    trips = ("trip_fp8", "trip_fp4_e4m3", "trip_mxfp4")
    np.savez_compressed(
        v41.DATA / "quant_v41.npz", x=x, **{name: getattr(oracle, name)(x) for name in trips}
    )


if __name__ == "__main__":
    module = load(sys.argv[1])
    for name in sys.argv[2:] or [*v41.PRESETS, "tiny_cache", "engram_cache", "trips"]:
        if name == "trips":
            make_round_trips(module)
        else:
            make(module, *name.split("_"))
