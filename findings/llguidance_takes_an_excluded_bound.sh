#!/usr/bin/env bash
# llguidance 1.9.1: the grammar of a number above 3 and below 3.27 takes 3, which the schema excludes.
#
# `exclusiveMinimum` is held where it stands alone, and beside an upper bound that begins with other
# digits. Where both bounds begin with the same digits, the whole number that is excluded is an
# answer. So it is with 0 and 0.27, and where the bounds come from two parts of an `allOf`. There is
# no warning.
#
# Seen: of "3", taken are False alone, False below 4, True below 3.27, and True from an `allOf`.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet llguidance==1.9.1 jsonschema==4.25.1 tokenizers==0.22.1
seen=$("$folder/venv/bin/python" - <<'PYTHON'
import json

import jsonschema
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE({text: id for id, text in enumerate([*letters, "<end>"])}, []))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.add_special_tokens(["<end>"])
known = LLTokenizer(tokenizer.to_str(), n_vocab=257, eos_token=256)
above = {"type": "number", "exclusiveMinimum": 3}
for schema in (
    above,
    above | {"exclusiveMaximum": 4},
    above | {"exclusiveMaximum": 3.27},
    {"allOf": [above, {"type": "number", "maximum": 3.27}]},
):
    assert not jsonschema.Draft202012Validator(schema).is_valid(3)
    matcher = LLMatcher(known, LLMatcher.grammar_from_json_schema(json.dumps(schema)), log_level=0)
    assert not matcher.is_error() and not matcher.get_grammar_warnings()
    ids = tokenizer.encode("3", add_special_tokens=False).ids
    print(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting(), end=" ")
PYTHON
)
echo "$seen"
test "$seen" = "False False True True "
