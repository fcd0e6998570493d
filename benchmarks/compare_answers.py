"""Who agrees with whom: answers of several engines to the same prompts, token by token.

`python -m benchmarks.compare_answers write CONFIG FOLDER` writes a checkpoint of random weights in
the formats of the release, small enough for every engine, and with `--dense` a second one, of the
same weights in BF16. `... ask URL FILE` asks a server with OpenAI's API for greedy answers to
random prompts, and keeps tokens and log-probabilities. `... transformers FOLDER FILE` has them from
transformers in float32, which reads the second checkpoint and computes each token from all before
it, without a cache. `... compare FILE FILE ...` prints, for each pair, how many answers agree, how
far their log-probabilities lie apart, and how sure the first engine was where they part.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import shutil

import numpy as np

from dsv4_jax.cli.arguments import add_weights
from dsv4_jax.model.weight_forms import RELEASE_FORMS, STORED

LENGTHS = [40, 130, 700, 3000]
"""Tokens of prompts: less than an HCA group, more than a window, more than a CSA layer picks."""


def write(args):
    """Writes a checkpoint whose layers are of every kind."""
    import dsv4_jax as ds
    from benchmarks.bench_serving import load
    from benchmarks.serve_random import released_tokenizer

    config, params = load(args.config, args.layers, args.experts, weights=args.weights)
    ds.save_checkpoint(config, stacked(params), args.folder)
    for path in released_tokenizer():
        shutil.copy(path, args.folder)
    if args.dense:
        ds.save_checkpoint(*ds.load_checkpoint(args.folder, weights="bfloat16"), args.dense)
    print(f"{args.folder}: {config.num_layers} layers, {config.num_routed_experts} experts")


def stacked(params):
    """The same with the layers of a kind stacked, as a checkpoint is saved."""
    import jax
    import jax.numpy as jnp

    def stack(layers):
        if not isinstance(layers, tuple):
            return layers
        return jax.tree.map(lambda *rows: jnp.stack(rows), *layers)

    layers = {kind: stack(layers) for kind, layers in params.layers.items()}
    return dataclasses.replace(params, layers=layers)


def draw_prompts(vocab_size, lengths, each):
    """So many prompts of each length."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths for _ in range(each)]


def read_by_transformers(args):
    """Answers as `ask` keeps them."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32).to(device).eval()
    answers = []
    for prompt in draw_prompts(args.vocab_size, args.lengths, args.each):
        ids, logprobs, margins = list(prompt), [], []
        for _ in range(args.tokens):
            with torch.inference_mode():
                logits = model(torch.tensor([ids], device=device), use_cache=False).logits[0, -1]
            top = torch.log_softmax(logits.float(), -1).topk(2)
            ids.append(int(top.indices[0]))
            logprobs.append(float(top.values[0]))
            margins.append(float(top.values[0] - top.values[1]))
        answers.append(
            {
                "prompt_tokens": len(prompt),
                "tokens": [f"token_id:{token}" for token in ids[len(prompt) :]],
                "logprobs": logprobs,
                "margins": margins,
            }
        )
    keep(args, "transformers, float32", answers)


def keep(args, name, answers):
    """Writes them to the file that the command names."""
    pathlib.Path(args.file).write_text(json.dumps({"name": name, "answers": answers}, indent=1))
    print(f"{args.file}: {len(answers)} answers of {args.tokens} tokens by {name}")


def ask(args):
    """Asks for one answer after the other, so that none has company."""
    import httpx

    from dsv4_jax.bench.load import find_model

    url = args.url.rstrip("/")
    model = find_model(url, {}, 30.0)
    answers = []
    with httpx.Client(timeout=600, trust_env=False) as client:
        for prompt in draw_prompts(args.vocab_size, args.lengths, args.each):
            body = {
                "model": model, "prompt": prompt, "max_tokens": args.tokens, "temperature": 0,
                "logprobs": 2, "ignore_eos": True, "return_tokens_as_token_ids": True,
            }  # fmt: skip
            answer = client.post(f"{url}/v1/completions", json=body)
            answer.raise_for_status()
            told = answer.json()["choices"][0]["logprobs"]
            answers.append(
                {
                    "prompt_tokens": len(prompt),
                    "tokens": told["tokens"],
                    "logprobs": told["token_logprobs"],
                    "margins": [margin(top) for top in told["top_logprobs"]],
                }
            )
    keep(args, args.name or model, answers)


def margin(top):
    """How much likelier the likeliest token is than the next one, in nats."""
    first, second, *_ = sorted(top.values(), reverse=True) + [float("nan")] * 2
    return first - second


def pair(ours, theirs):
    """What two engines' answers have in common.

    Returns:
      Answers, those with the same tokens, the mean and largest difference of log-probabilities of
      tokens up to where an answer parts, and the margins there of the first engine.
    """
    apart, margins, same = [], [], 0
    for one, other in zip(ours["answers"], theirs["answers"], strict=True):
        equal = [a == b for a, b in zip(one["tokens"], other["tokens"], strict=True)]
        parts = equal.index(False) if False in equal else len(equal)
        same += parts == len(equal)
        apart += [abs(one["logprobs"][i] - other["logprobs"][i]) for i in range(parts)]
        if parts < len(equal):
            margins.append(one["margins"][parts])
    return {
        "answers": len(ours["answers"]),
        "same": same,
        "logprobs_mean": float(np.mean(apart)) if apart else None,
        "logprobs_most": float(np.max(apart)) if apart else None,
        "tokens_compared": len(apart),
        "margins_where_they_part": sorted(margins),
    }


def compare(args):
    """Prints each pair."""
    found = [json.loads(pathlib.Path(path).read_text()) for path in args.files]
    for ours, theirs in itertools.combinations(found, 2):
        print(json.dumps({"pair": [ours["name"], theirs["name"]]} | pair(ours, theirs)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("write")
    one.add_argument("config")
    one.add_argument("folder")
    one.add_argument("--layers", type=int, default=5)
    one.add_argument("--experts", type=int, default=16)
    add_weights(one, RELEASE_FORMS, STORED, "their form")
    one.add_argument("--dense", help="a folder for the same weights in BF16")
    one.set_defaults(run=write)
    one = commands.add_parser("ask")
    one.add_argument("url")
    one.add_argument("--name", help="of the engine; if not given, that of its model")
    one.set_defaults(run=ask)
    other = commands.add_parser("transformers")
    other.add_argument("folder", help="that of `--dense`")
    other.set_defaults(run=read_by_transformers)
    for each in (one, other):
        each.add_argument("file")
        each.add_argument("--tokens", type=int, default=32, help="of an answer")
        each.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="of prompts")
        each.add_argument("--each", type=int, default=4, help="prompts of each length")
        each.add_argument("--vocab-size", type=int, default=128_000)
    one = commands.add_parser("compare")
    one.add_argument("files", nargs="+")
    one.set_defaults(run=compare)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
