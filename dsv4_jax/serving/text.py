"""Text in and out, by the `tokenizers` library; a checkpoint brings its `tokenizer.json`."""

from __future__ import annotations

import os
import pathlib

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from dsv4_jax.config.checkpoint_folder import find_file


def load_tokenizer(path: str | os.PathLike[str], *, follow_links: bool = False) -> Tokenizer | None:
    """The tokenizer of a checkpoint directory, or None if it has none.

    Raises:
      ValueError: the file is broken, or a link out of the directory that is not followed.
    """
    file = find_file(pathlib.Path(path), "tokenizer.json", follow_links=follow_links)
    if not file.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_buffer(file.read_bytes())
        tokenizer.decode(tokenizer.encode("a").ids)
    except BaseException as error:
        # What is wrong with a file is a bare Exception; what shows in use alone, such as a special
        # token that is named and not defined, is a panic, which is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{file} is no tokenizer that can be read: {str(error)[:300]}") from error
    return tokenizer


class TextStream:
    """Tokens to text, one at a time; a character of several tokens comes with its last one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Starts a text."""
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def add(self, token_id: int) -> str:
        """The text that this token completes, perhaps none."""
        return self._stream.step(self._tokenizer, token_id) or ""
