"""Text in and out, by the `tokenizers` library; a checkpoint brings its `tokenizer.json`."""

from __future__ import annotations

import os
import pathlib

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer | None:
    """The tokenizer of a checkpoint directory, or None if it has none."""
    file = pathlib.Path(path) / "tokenizer.json"
    return Tokenizer.from_file(str(file)) if file.is_file() else None


class TextStream:
    """Tokens to text, one at a time; a character of several tokens comes with its last one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Starts a text."""
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def add(self, token_id: int) -> str:
        """The text that this token completes, perhaps none."""
        return self._stream.step(self._tokenizer, token_id) or ""
