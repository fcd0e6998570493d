"""Token ids to normalised ids: tokens whose texts differ in case, accents or spaces share one."""

from __future__ import annotations

import numpy as np

_REPLACEMENT = "\ufffd"
"""What decodes to it is part of a character, and stands for itself."""
_SPACE = " "


def normalize_ids(tokenizer_json: str) -> np.ndarray:
    """The normalised id of every token, numbered in the order in which they first appear.

    Args:
      tokenizer_json: the contents of a `tokenizer.json`.

    Returns:
      i64[number of tokens, added ones included].

    Raises:
      ValueError: the tokenizer cannot be read.
    """
    from tokenizers import Regex, Tokenizer, normalizers  # which a loop of one's own does without

    try:
        tokenizer = Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # of Rust, whose type is no other
        raise ValueError(f"tokenizer.json must be a tokenizer's: {error}") from error
    fold = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), _SPACE),
        ]
    )
    strip = normalizers.Strip()
    numbers: dict[str | None, int] = {}
    found = []
    for token in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if _REPLACEMENT in text:
            key = tokenizer.id_to_token(token)
        else:
            folded = fold.normalize_str(text)
            key = (folded if folded == _SPACE else strip.normalize_str(folded)) or text
        found.append(numbers.setdefault(key, len(numbers)))
    return np.array(found, np.int64)
