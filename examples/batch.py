"""A file of prompts, answered as fast as the machine can.

    python examples/batch.py prompts.txt answers.jsonl

A prompt is a line. Answers are written as soon as each is done, in any order. Prompts that begin
alike share what was computed for their beginning. `dsv4-jax batch` does this for files in OpenAI's
batch format, and goes on where it was interrupted.
"""

import argparse
import json
import pathlib

import dsv4_jax as ds


def main(argv: list[str] | None = None) -> int:
    """Returns how many prompts were answered."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=pathlib.Path)
    parser.add_argument("answers", type=pathlib.Path)
    parser.add_argument("--checkpoint", default=str(ds.SHIPPED_CHECKPOINT))
    parser.add_argument("--max-new-tokens", type=int, default=60)
    parser.add_argument("--max-requests", type=int, default=8, help="that run at the same time")
    args = parser.parse_args(argv)

    prompts = [line for line in args.prompts.read_text().splitlines() if line]
    engine = ds.Engine.from_checkpoint(
        args.checkpoint,
        max_requests=args.max_requests,
        max_context_tokens=512,
        progress=False,
    )
    # All are queued at once; the engine gives each a slot as soon as one is free.
    number_of = {
        engine.submit(prompt, max_new_tokens=args.max_new_tokens): number
        for number, prompt in enumerate(prompts)
    }
    with args.answers.open("w") as file:
        while engine.num_unfinished:
            for token in engine.step():
                if token.finish_reason is None:
                    continue
                done = engine.completion(token.request_id)
                answer = {
                    "number": number_of[token.request_id],
                    "text": done.text,
                    "finish_reason": done.finish_reason,
                    "prompt_tokens": done.prompt_tokens,
                    "from_cache": done.hit_tokens,
                }
                file.write(json.dumps(answer) + "\n")
                file.flush()
    metrics = engine.metrics
    print(f"{len(prompts)} prompts, {metrics.hit_tokens} prompt tokens from the cache")
    return len(prompts)


if __name__ == "__main__":
    ds.use_compilation_cache()
    ds.set_xla_flags()
    main()
