"""The cache part of a decode step beside the sum of other projects' launches for the same shapes.

    python -m benchmarks.bench_decode_baselines results.json --decode cache.json \
        --flashmla SO --deep-gemm FOLDER --vllm SO --ops FOLDER

Our figure is the row of that batch and context in `cache.json`, which `dsv4-jax bench decode
--parts cache --json cache.json` wrote on the same GPU: all layers in one program. The baseline is
vLLM's window insert (queries normed and rotated) and compressor launches, DeepGEMM's FP8 paged
logits, vLLM's top-k and FlashMLA, each timed alone and summed over the layers. It does not include
the attention of SWA layers, the preparation of index queries, and the time between its launches.
Every figure is written as soon as it is measured.
"""

import argparse
import json
import pathlib

from benchmarks import bench_index_scores, bench_sparse_attention, bench_topk, vllm_compressor
from dsv4_jax import AttentionType, DSV4Config
from dsv4_jax.config.layer_schedule import layer_schedule

HEADS, K = 64, 512


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=pathlib.Path, help="JSON file for the figures")
    parser.add_argument("--decode", type=pathlib.Path, help="JSON file of `dsv4-jax bench decode`")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=16_384)
    parser.add_argument("--flashmla", required=True, help="vLLM's _flashmla_C.abi3.so")
    parser.add_argument("--deep-gemm", required=True, help="folder that holds deep_gemm")
    parser.add_argument("--vllm", required=True, help="vLLM's _C_stable_libtorch.abi3.so")
    parser.add_argument("--ops", required=True, help="folder of vLLM's Triton ops")
    args = parser.parse_args()
    found = {"batch": args.batch, "context": args.context, "us": {}}
    for name, time_us in launches(args).items():
        try:
            found["us"][name] = time_us()
        except Exception as error:
            found.setdefault("failed", {})[name] = str(error)[:300]
        print(name, found["us"].get(name, found.get("failed", {}).get(name)), flush=True)
        args.results.write_text(json.dumps(found, indent=1) + "\n")
    if "failed" not in found:
        found |= summed(found["us"])
        if args.decode:
            found |= compared(found, json.loads(args.decode.read_text())["rows"])
    args.results.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def launches(args):
    """{launches of one layer: a function that gives their microseconds}."""
    batch, context = args.batch, args.context
    entries = {"csa": context // 4, "hca": context // 128}
    loaded = {}

    def once(name, load, *places):
        if name not in loaded:
            loaded[name] = load(*places)
        return loaded[name]

    def compressor():
        return once("compressor", vllm_compressor.load, args.ops, args.vllm)

    def attend(count):
        flashmla = once("flashmla", bench_sparse_attention.load_baseline, args.flashmla)
        return flashmla(batch, 1, HEADS, count)

    def logits():
        return once("logits", bench_index_scores.load_baseline, args.deep_gemm)(
            batch, entries["csa"]
        )

    def topk():
        return once("topk", bench_topk.load_baseline, args.vllm)(batch, entries["csa"], K)

    return {
        "swa append": lambda: compressor().insert_us(batch, HEADS),
        "csa append": lambda: compressor().decode_us("csa", batch, "some", HEADS),
        "hca append": lambda: compressor().decode_us("hca", batch, "some", HEADS),
        "csa logits": logits,
        "csa topk": topk,
        "csa attention": lambda: attend(min(K, entries["csa"])),
        "hca attention": lambda: attend(entries["hca"]),
    }


def summed(us):
    """The layers of Flash by attention type, and the sum of the baseline's launches over them."""
    counts = {attn: 0 for attn in AttentionType}
    for spec in layer_schedule(DSV4Config.flash()):
        counts[spec.attn] += 1
    total = sum(counts[AttentionType(name.split()[0])] * time for name, time in us.items())
    return {"layers": {str(attn): n for attn, n in counts.items()}, "baseline_ms": total / 1e3}


def compared(found, rows):
    """Our figure at the same batch and context, and the ratio; {} if it was not timed."""
    for row in rows:
        if (row["batch"], row["context"]) == (found["batch"], found["context"]):
            ours = row.get("cache_part_ms")
            if ours is not None:
                return {
                    "ours_ms": ours,
                    "ours_tokens_per_s": found["batch"] / ours * 1e3,
                    "baseline_tokens_per_s": found["batch"] / found["baseline_ms"] * 1e3,
                    "times_the_baselines_tokens": found["baseline_ms"] / ours,
                }
    return {}


if __name__ == "__main__":
    main()
