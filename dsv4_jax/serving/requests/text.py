"""Text in and out, by the `tokenizers` library; a checkpoint brings its `tokenizer.json`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from tokenizers import Encoding, Tokenizer, decoders

from dsv4_jax import checks
from dsv4_jax.config.checkpoint_folder import find_file
from dsv4_jax.config.json_file import parse_json_object
from dsv4_jax.lines import without_mark
from dsv4_jax.regular_files import read_regular, show_path
from dsv4_jax.serving.requests.tokenizer_bounds import MAX_BYTES, check_bounds

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What stands for bytes that are no character, or none yet."""
_MAX_HELD = 16
"""Tokens that may wait for a character's end before they are looked through."""


def load_tokenizer(path: str | os.PathLike[str], *, follow_links: bool = False) -> Tokenizer | None:
    """The tokenizer of a checkpoint directory, or None if it has none.

    A file may ask for padding or truncation, which belong to batches of training: a prompt is
    neither filled up nor cut here.

    Raises:
      ValueError: `path` is none; the file is broken, too large, no regular file or a link out of
        the directory that is not followed; or it asks for more than `tokenizer_bounds` allows.
    """
    file = find_file(checks.path("path", path), "tokenizer.json", follow_links=follow_links)
    if not file.is_file():
        return None
    data = without_mark(read_regular(file, MAX_BYTES))
    try:
        check_bounds(parse_json_object(data, "it"))
        tokenizer = Tokenizer.from_buffer(data)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.decode(tokenizer.encode("a").ids)
    except BaseException as error:
        # What is wrong with a file is a bare Exception; what shows in use alone, such as a special
        # token that is named and not defined, is a panic.
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        told = f"{show_path(file)} is no tokenizer that can be read: {str(error)[:300]}"
        raise ValueError(told) from error
    return tokenizer


def encode_text(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> Encoding:
    """A text's token ids, as `ids` of what it gives, while other threads go on.

    `Tokenizer.encode` keeps Python's lock for all of its time, a second for a megabyte.

    Raises:
      ValueError: the tokenizer cannot encode it, as a regular expression may give up on one text.
    """
    try:
        return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ValueError(f"the tokenizer cannot encode it: {str(error)[:300]}") from error


def is_panic(error: BaseException) -> bool:
    """Whether an error is a panic of a library in Rust, which is no Exception."""
    return type(error).__name__ == "PanicException"


@dataclasses.dataclass(frozen=True)
class TextState:
    """Where the text of a row of tokens stands: a value, so that it can be kept and gone back to.

    A character may be made of several tokens: a text that ends with a replacement character waits
    for more. What a token adds may depend on the ones before it, such as a space that is stripped
    at the beginning of a text, and therefore those that gave the last piece are decoded with it.

    Attributes:
      context: token ids of the last piece.
      held: token ids after them, that have given no text yet.
      shown: text of the context.
    """

    context: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    shown: str = ""

    def add(self, token_id: int, tokenizer: Tokenizer) -> tuple[TextState, str]:
        """The state after one more token, and the text that it completes, perhaps none."""
        held = (*self.held, token_id)
        text = decode(self.context + held, tokenizer)
        if len(text) > len(self.shown) and not text.endswith(INCOMPLETE):
            return TextState(held, (), decode(held, tokenizer)), text[len(self.shown) :]
        if not self.held and text == self.shown and is_of_bytes(tokenizer):
            return self, ""  # such as a special token, on which no later text depends
        state = dataclasses.replace(self, held=held)
        return state._shorten(tokenizer) if len(held) > _MAX_HELD else (state, "")

    def rest(self, tokenizer: Tokenizer) -> str:
        """What the held tokens give if no other follows."""
        return decode(self.context + self.held, tokenizer)[len(self.shown) :] if self.held else ""

    def _shorten(self, tokenizer: Tokenizer) -> tuple[TextState, str]:
        """Gives what no later token can change, so that held tokens stay few.

        A character has at most four bytes, and a token at least one. Where the held tokens are
        cut in two and both parts together give the same text as before, no character is cut.
        """
        text = decode(self.context + self.held, tokenizer)
        for cut in range(len(self.held) - 4, len(self.held) - 8, -1):
            head = decode(self.context + self.held[:cut], tokenizer)
            state = dataclasses.replace(self, held=self.held[cut:])
            if head + state.rest(tokenizer) == text:
                return state, head[len(self.shown) :]
        return self, ""


def is_of_bytes(tokenizer: Tokenizer) -> bool:
    """Whether a text is the bytes of its tokens next to each other."""
    return isinstance(tokenizer.decoder, decoders.ByteLevel)


def decode(token_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """The text of tokens, without special ones."""
    return tokenizer.decode(list(token_ids), skip_special_tokens=True)


def find_stop(text: str, stops: Sequence[str]) -> int:
    """Where the first stop text in a text begins; -1 if there is none."""
    return min((position for position in map(text.find, stops) if position >= 0), default=-1)


def hold_back(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """Cuts a text without stop texts in two: what may be shown, and what may begin a stop text."""
    longest = max(map(len, stops), default=0) - 1
    for cut in range(max(len(text) - longest, 0), len(text)):
        end = text[cut:]
        if any(stop.startswith(end) for stop in stops):
            return text[:cut], end
    return text, ""
