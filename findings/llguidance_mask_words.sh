#!/usr/bin/env bash
# llguidance 1.9.1: a mask has a word more than the same package's own arrays for masks, where the
# vocabulary is a multiple of 32, as DeepSeek-V4's 129,280 tokens are.
#
# `llguidance.numpy.get_bitmask_shape` says ceil(V / 32) words. `LLMatcher.compute_bitmask` gives
# floor(V / 32) + 1: the same for every other size, one more for multiples of 32. Whoever copies
# the mask into an array of that shape works until the vocabulary is such a one.
#
# Seen: "tokens 287 288 289, words of arrays 9 9 10, words of masks 9 10 10".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet llguidance==1.9.1 numpy==2.3.5 tokenizers==0.22.1
seen=$("$folder/venv/bin/python" - <<'PYTHON'
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import get_bitmask_shape
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
model = models.BPE({text: number for number, text in enumerate([*letters, "<end>"])}, [])
tokenizer = Tokenizer(model)
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.add_special_tokens(["<end>"])

sizes, arrays, masks = (287, 288, 289), [], []
for size in sizes:
    known = LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=256)
    matcher = LLMatcher(known, LLMatcher.grammar_from_regex("a+"), log_level=0)
    arrays.append(get_bitmask_shape(1, known.vocab_size)[1])
    masks.append(len(matcher.compute_bitmask()) // 4)
print("tokens", *sizes, end=", ")
print("words of arrays", *arrays, end=", ")
print("words of masks", *masks)
PYTHON
)
echo "$seen"
test "$seen" = "tokens 287 288 289, words of arrays 9 9 10, words of masks 9 10 10"
