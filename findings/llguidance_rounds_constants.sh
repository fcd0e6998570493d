#!/usr/bin/env bash
# llguidance 1.9.1: a `const` of a JSON schema admits another number than the schema has, and not
# that one, although a 64-bit float holds it.
#
# 123456789.12345679 and 2^63 are 64-bit floats, and Python's json reads and writes both without a
# change. The grammar of {"const": N} takes 123456789.1234568 and 9223372036854776000 in their
# place, and refuses the digits that the schema has. There is no warning. An answer that follows
# the grammar is then not valid by the schema that it was made of.
#
# Seen: "123456789.12345679 False, 123456789.1234568 True" and
# "9223372036854775808 False, 9223372036854776000 True".
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
model = models.BPE({text: number for number, text in enumerate([*letters, "<end>"])}, [])
tokenizer = Tokenizer(model)
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.add_special_tokens(["<end>"])
known = LLTokenizer(tokenizer.to_str(), n_vocab=257, eos_token=256)


def takes(schema, text):
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    matcher = LLMatcher(known, grammar, log_level=0)
    assert not matcher.is_error() and not matcher.get_grammar_warnings()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


for value, other in ((123456789.12345679, "123456789.1234568"), (2**63, "9223372036854776000")):
    schema = {"const": value}
    assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(json.dumps(value)))
    assert not jsonschema.Draft202012Validator(schema).is_valid(json.loads(other))
    print(value, takes(schema, str(value)), end=", ")
    print(other, takes(schema, other))
PYTHON
)
echo "$seen"
test "$seen" = "123456789.12345679 False, 123456789.1234568 True
9223372036854775808 False, 9223372036854776000 True"
