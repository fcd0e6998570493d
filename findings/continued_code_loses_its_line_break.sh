#!/bin/sh
# deepseek-recipe 0.2.0: a chat message with `prefix: true` is continued without the line breaks that the
# continuation begins with, if thinking is disabled; with thinking enabled they stay.
#
# The library converts such a request without an error and renders it right: the prompt ends with the message's
# text. It parses the answer by options that `convert` made of the same request. These say `None` for the stage
# where parsing begins, as for a new answer, whose leading line breaks are dropped. A model that continues
# "def f():" with "\n    return 1" is therefore heard to say "    return 1", and prefix and answer together are
# "def f():    return 1". With thinking enabled the stage is `ContentContinuation`, which keeps them. Whoever sets
# that stage himself gets the right text with thinking disabled, too.
#
# Seen on 2026-11-28 with Python 3.12 and deepseek-recipe 0.2.0:
#     disabled '    return 1'
#     enabled '\n    return 1'
#     disabled, stage set '\n    return 1'
# This script fails if that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check deepseek-recipe==0.2.0
cat > "$folder/seen.py" <<'PYTHON'
import json

import deepseek_recipe as recipe

MESSAGES = [
    {"role": "user", "content": "Complete the function."},
    {"role": "assistant", "content": "def f():", "prefix": True},
]


def heard(thinking, stage=None):
    body = {"model": "DeepSeek-V4-Pro", "messages": MESSAGES, "thinking": {"type": thinking}}
    request = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
    prompt = recipe.DeepseekV4Encoding().render_conversation(request.conversation).prompt
    assert prompt.endswith("</think>def f():"), prompt
    options = request.parsing_options
    if stage is not None:
        options.thinking_initial_stage = stage
    generator = recipe.ChatCompletionRequest.chunk_generator(request, "id", "model")
    parser = recipe.StreamProcessor(generator, options)
    events = parser.push(recipe.InferenceChunk.ready())
    events += parser.push(recipe.InferenceChunk.text("\n    return 1", 5))
    events += parser.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop))
    events += parser.finish()
    answer = recipe.ChatCompletionResponse("id", "model", 0, 0, 0)
    for event in events:
        answer.accumulate(event)
    return json.loads(answer.to_json())["choices"][0]["message"]["content"]


print("disabled", repr(heard("disabled")))
print("enabled", repr(heard("enabled")))
print("disabled, stage set", repr(heard("disabled", recipe.ThinkingInitialStage.ContentContinuation)))
PYTHON
"$folder/venv/bin/python" "$folder/seen.py" | tee "$folder/seen"
printf '%s\n' "disabled '    return 1'" "enabled '\\n    return 1'" "disabled, stage set '\\n    return 1'" > "$folder/wanted"
diff "$folder/wanted" "$folder/seen"
