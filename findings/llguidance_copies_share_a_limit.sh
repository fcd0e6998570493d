#!/usr/bin/env bash
# llguidance 1.9.1: `LLMatcher.deep_copy` copies what an answer has had so far, but not the states of
# the lexer. All copies of a matcher fill one table of them, whose size `max_lexer_states` limits.
#
# A server that compiles a grammar once and copies it for each request works until the answers so far
# have filled the table, together, whichever request drew them and however long ago. From then on
# every copy fails at its first mask, also a new one, whose answer has no token; so does the matcher
# that was copied. A matcher that is compiled again from the same text does not.
#
# Here each answer has 60 letters, for which the limit is enough for one answer alone.
#
# Seen: "letters of copies 60 60 50 0, compiled again 60, error lexer error: too many states: 130 >= 130".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet llguidance==1.9.1 tokenizers==0.22.1
seen=$("$folder/venv/bin/python" - <<'PYTHON'
import random

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
model = models.BPE({text: number for number, text in enumerate([*letters, "<end>"])}, [])
tokenizer = Tokenizer(model)
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.add_special_tokens(["<end>"])
known = LLTokenizer(tokenizer.to_str(), eos_token=256)
limits = LLParserLimits(max_lexer_states=130)
grammar = LLMatcher.grammar_from_regex("[a-z]*a[a-z]{300}")  # the last 301 letters matter


def compiled():
    return LLMatcher(known, grammar, log_level=0, limits=limits)


def draw(matcher, seed):
    """How many of 60 letters a matcher follows."""
    rng = random.Random(seed)
    for place in range(60):
        matcher.compute_bitmask()
        if matcher.is_error():
            return place
        matcher.consume_token(tokenizer.token_to_id(rng.choice("abcdefghijklmnopqrstuvwxyz")))
    return 60


first = compiled()
copies = [first.deep_copy() for _ in range(3)]
drawn = [draw(copy, seed) for seed, copy in enumerate(copies)]
late = first.deep_copy()
drawn.append(draw(late, 3))
told = late.get_error().partition("\n")[0]
print("letters of copies", *drawn, end=", ")
print("compiled again", draw(compiled(), 4), end=", ")
print("error", told)
PYTHON
)
echo "$seen"
test "$seen" = "letters of copies 60 60 50 0, compiled again 60, error lexer error: too many states: 130 >= 130"
