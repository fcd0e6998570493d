"""An engine on several devices.

    python examples/on_a_mesh.py --data-shards 2 --model-shards 2    # of 4 devices

A mesh has two axes. Each data shard serves requests of its own; the devices of a shard share its
weights and the work of each layer. Many requests want `data`, few requests want `model`
(docs/design/several_gpus.md). On a machine without GPUs the devices are simulated by the CPU.
"""

import argparse
import os

PROMPTS = ["The import statement", "A for loop", "A class definition", "The with statement"]


def main(argv: list[str] | None = None) -> list[str | None]:
    """Prints and returns the answers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", help="a directory; if not given, the shipped one")
    parser.add_argument(
        "--data-shards", type=int, default=2, help="shards that serve their own requests"
    )
    parser.add_argument("--model-shards", type=int, default=1, help="size of `model`")
    parser.add_argument("--tokens", type=int, default=40)
    args = parser.parse_args(argv)
    if not os.path.exists("/dev/nvidiactl"):  # before jax is imported
        count = args.data_shards * args.model_shards
        flag = f"--xla_force_host_platform_device_count={count}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"

    import jax

    import dsv4_jax as ds

    ds.use_compilation_cache()
    ds.set_xla_flags()
    mesh = ds.make_mesh(data=args.data_shards, model=args.model_shards)
    print(f"{args.data_shards} x {args.model_shards} of {jax.devices()[0].device_kind}")
    engine = ds.Engine.from_checkpoint(
        args.checkpoint or ds.SHIPPED_CHECKPOINT,
        mesh=mesh,
        max_requests=2 * args.data_shards,  # of all shards together
        max_context_tokens=512,
        progress=False,
    )
    answers = [done.text for done in engine.generate(PROMPTS, max_new_tokens=args.tokens)]
    for prompt, text in zip(PROMPTS, answers, strict=True):
        print(f"{prompt!r} -> {text!r}")
    return answers


if __name__ == "__main__":
    main()
