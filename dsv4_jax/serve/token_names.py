"""TokenNames: what log-probabilities of completions call tokens, so that each has a name."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders

from dsv4_jax.serving.requests.text import INCOMPLETE


class TokenNames:
    r"""A token is called by its text, or by its bytes where these are parts of characters.

    Bytes are spelled as OpenAI does, `bytes:\xf0\x9f`. What has no text at all, such as an id that
    pads a vocabulary, is `token_id:7`, and so is every token where that is asked for.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, by_id: bool = False) -> None:
        """Of a tokenizer; without one, names are ids."""
        self._tokenizer, self._by_id = tokenizer, by_id
        self._names: dict[int, str] = {}
        self._added: dict[int, str] = {}
        if tokenizer is not None:
            added = tokenizer.get_added_tokens_decoder()
            self._added = {token: one.content for token, one in added.items()}

    def of(self, token_id: int) -> str:
        """The name of a token."""
        name = self._names.get(token_id)
        if name is None:
            name = self._names[token_id] = self._find(token_id)
        return name

    def of_best(self, drawn: int, best: Iterable[tuple[int, float]]) -> dict[str, float]:
        """Log-probabilities by name, in their order.

        Where tokens share a text, which a decoder may strip of its spaces, the drawn one has it, or
        else the first one, and others are called by their ids.
        """
        found: dict[str, float] = {}
        for token, logprob in best:
            name = self.of(token)
            if name in found or (token != drawn and name == self.of(drawn)):
                name = _by_id(token)
            found[name] = logprob
        return found

    def _find(self, token_id: int) -> str:
        if self._by_id:
            return _by_id(token_id)
        if self._tokenizer is None:
            return str(token_id)
        if token_id in self._added:
            return self._added[token_id] or _by_id(token_id)
        piece = self._tokenizer.id_to_token(token_id)
        if not piece:
            return _by_id(token_id)
        data = None
        if isinstance(self._tokenizer.decoder, decoders.ByteLevel):
            data = bytes(_BYTES[char] for char in piece) if _BYTES.keys() >= set(piece) else None
        elif len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            data = bytes.fromhex(piece[3:5])
        if data is not None:
            try:
                return data.decode()
            except UnicodeDecodeError:
                return "bytes:" + "".join(f"\\x{one:02x}" for one in data)
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return piece if not text or INCOMPLETE in text else text


def _by_id(token_id: int) -> str:
    return f"token_id:{token_id}"


def _byte_alphabet() -> dict[str, int]:
    """The character of each byte in tokens of a byte-level vocabulary.

    Printable characters of Latin-1 stand for themselves; the other 68 bytes, in their order, are
    the characters from 256 on.

    Source: `bytes_to_unicode` of GPT-2's tokenizer.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [one for one in range(256) if one not in shown]
    return {chr(one): one for one in shown} | {
        chr(256 + index): one for index, one in enumerate(others)
    }


_BYTES = _byte_alphabet()
