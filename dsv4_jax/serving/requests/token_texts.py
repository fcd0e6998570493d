"""TokenTexts: the texts of many tokens at once, where each token's is its own."""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer

from dsv4_jax.serving.requests.text import INCOMPLETE, decode, is_of_bytes


class TokenTexts:
    """A tokenizer, and the texts of its tokens as far as they were asked for.

    A decoder of bytes puts the bytes of tokens next to each other. Where those so far are whole
    characters, a token of whole characters adds the same text whatever it follows. With another
    decoder a text may depend on its neighbours, and no token counts as whole.

    Attributes:
      tokenizer: the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """No text is known yet; tokens are 0 to `vocab_size` - 1."""
        self.tokenizer = tokenizer
        self._is_unknown = np.full(vocab_size, is_of_bytes(tokenizer))
        self._is_whole = np.zeros(vocab_size, bool)
        self._texts = np.full(vocab_size, "", object)

    def of(self, token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Texts of tokens i32[...], objects, and which of them are whole: bool[...]."""
        for token in np.unique(token_ids[self._is_unknown[token_ids]]).tolist():
            self._learn(token)
        return self._texts[token_ids], self._is_whole[token_ids]

    def _learn(self, token: int) -> None:
        try:
            text = decode((token,), self.tokenizer)
        except Exception:  # it is the error of the request that decodes the token
            text = INCOMPLETE
        self._texts[token], self._is_whole[token] = text, not text.endswith(INCOMPLETE)
        self._is_unknown[token] = False
