"""A small model that takes part in conversations, to try a client on a machine without a GPU.

    python examples/chat_checkpoint.py chat_model
    dsv4-jax serve chat_model --no-think

The model that ships in the package only completes text. This gives it the tokens by which
DeepSeek-V4 marks turns, thinking and calls of tools. What it says stays a completion of the
conversation's text. The form is right: `tool_choice="required"` gives a call of a tool, whose
arguments obey the tool's schema.
"""

import argparse
import dataclasses
import json
import pathlib
from typing import Any

import deepseek_recipe as recipe
import jax
import jax.numpy as jnp

import dsv4_jax as ds

BEGIN = recipe.SpecialToken.Bos.default_str()
END = recipe.SpecialToken.Eos.default_str()
NAMES = [name for name in sorted(dir(recipe.SpecialToken)) if name[0].isupper()]
ADDED = [getattr(recipe.SpecialToken, name).default_str() for name in NAMES]
SPOKEN = ("<think>", "</think>", "｜DSML｜")
"""Tokens that a decoded text shows."""


def add_tokens(tokenizer: dict[str, Any]) -> int:
    """Adds the tokens of conversations to a `tokenizer.json` that has two tokens beside its bytes.

    Returns:
      The size of the vocabulary.
    """
    first = len(tokenizer["model"]["vocab"])
    texts = [BEGIN, END, *(text for text in ADDED if text not in (BEGIN, END))]
    form = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] = [
        form | {"id": first + number, "content": text, "special": text not in SPOKEN}
        for number, text in enumerate(texts)
    ]
    processor = tokenizer["post_processor"]
    processor["single"][0]["SpecialToken"]["id"] = BEGIN
    processor["special_tokens"] = {BEGIN: {"id": BEGIN, "ids": [first], "tokens": [BEGIN]}}
    return first + len(texts)


def grow(params: Any, vocab_size: int, *, read_as: int, drawn_as: int) -> Any:
    """Parameters with rows for new tokens.

    Args:
      params: parameters for fewer tokens.
      vocab_size: how many there will be.
      read_as: the token that the model reads in the place of a new one.
      drawn_as: the token whose logit each new one has.
    """
    old = params.embed.shape[0]
    reads = jnp.concatenate([jnp.arange(old), jnp.full(vocab_size - old, read_as)])
    draws = jnp.concatenate([jnp.arange(old), jnp.full(vocab_size - old, drawn_as)])

    def grown(path: Any, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path).rsplit(".", 1)[-1]
        if name == "tid2eid":  # the experts of each token, in layers that hash
            return jnp.take(leaf, reads, axis=-2)
        return leaf

    params = jax.tree_util.tree_map_with_path(grown, params)
    return params.replace(embed=params.embed[reads], head=params.head[draws])


def main(argv: list[str] | None = None) -> pathlib.Path:
    """Writes the checkpoint and returns its directory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=pathlib.Path, help="where it is written")
    args = parser.parse_args(argv)

    shipped = pathlib.Path(ds.SHIPPED_CHECKPOINT)
    tokenizer = json.loads((shipped / "tokenizer.json").read_text())
    config, params = ds.load_checkpoint(shipped, drafts=False, progress=False)
    begin = config.vocab_size - 2  # which text never holds, so that it is hardly ever drawn
    size = add_tokens(tokenizer)
    params = grow(params, size, read_as=ord("\n"), drawn_as=begin)
    ds.save_checkpoint(dataclasses.replace(config, vocab_size=size), params, args.directory)
    (args.directory / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    print(f".venv/bin/dsv4-jax serve {args.directory} --no-think")
    return args.directory


if __name__ == "__main__":
    main()
