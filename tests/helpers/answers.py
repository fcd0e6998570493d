"""Answers without a model: what a request's grammar allows, and what a client gets of it."""

import dataclasses
import json
import types

from tokenizers import Tokenizer

from dsv4_jax.serve import ServeSettings
from dsv4_jax.serve.conversation_renderer import ConversationRenderer
from dsv4_jax.serve.conversations import Conversations
from dsv4_jax.serve.dialects import CHAT
from dsv4_jax.serving.requests.grammars import Grammars
from dsv4_jax.serving.requests.request import Token
from helpers.serving import CONFIG

HI = [{"role": "user", "content": "hi"}]
PLAIN = {"thinking": {"type": "disabled"}}
D = "｜DSML｜"


class Spelled(str):
    """A text whose characters are tokens of their own, so that none of it is an added token."""


class Answers:
    """Reads requests, follows answers and parses them, all with one tokenizer."""

    def __init__(self, tokenizer_json, vocab_size, end, *, is_v41=False):
        self.tokenizer = Tokenizer.from_str(tokenizer_json)
        config = dataclasses.replace(CONFIG, vocab_size=vocab_size, eos_token_ids=(end,))
        self.grammars = Grammars(config, self.tokenizer)
        self.end = end
        self._conversations = Conversations(
            ServeSettings(model_name="m"), tokenizer_json, 2**16, is_v41=is_v41
        )

    def read(self, body, dialect=CHAT):
        turns = {} if {"input", "messages"} & set(body) else {"messages": HI}
        return self._conversations.read({"model": "m", **turns, **body}, dialect)

    def ids(self, *parts):
        """Tokens of texts, `Spelled` ones a character at a time."""
        found = []
        for part in parts:
            for text in part if isinstance(part, Spelled) else [part]:
                found += self.tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def start(self, body, dialect=CHAT):
        return self.grammars.start(self.read(body, dialect).sampling.grammar)

    def allows(self, body, *parts, dialect=CHAT):
        """The whole answer and the end after it may be drawn."""
        matcher, ids = self.start(body, dialect), self.ids(*parts)
        return matcher.try_consume_tokens(ids) == len(
            ids
        ) and self.end in self.grammars.compiler.allowed(matcher)

    def message(self, body, ids):
        """What a client of chat completions gets."""
        asked = self.read(body)
        renderer = ConversationRenderer(
            asked._replace(streams=False), CHAT, "m", self._conversations.tokenizer
        )
        renderer.start(0)
        for number, token in enumerate([*ids, self.end]):
            reason = "stop" if number == len(ids) else None
            renderer.tokens(0, [Token(0, token, reason)])
        done = types.SimpleNamespace(
            prompt_tokens=1, hit_tokens=0, token_ids=ids, finish_reason="stop"
        )
        return json.loads(renderer.end([done]))["choices"][0]["message"]

    def calls(self, body, *parts):
        """Names and arguments of the calls that a client gets."""
        calls = self.message(body, self.ids(*parts)).get("tool_calls") or ()
        return [(one["function"]["name"], one["function"]["arguments"]) for one in calls]

    def draw(self, body, rng, max_tokens=2000):
        """Tokens by chance, mostly those that close something; None if they are too many."""
        matcher, drawn = self.start(body), []
        while len(drawn) < max_tokens:
            allowed = self.grammars.compiler.allowed(matcher).tolist()
            assert allowed, (self.tokenizer.decode(drawn), matcher.get_error())
            closing = [one for one in allowed if one >= 256 or one in b'"}],</-0']
            token = rng.choice(closing if closing and rng.random() < 0.6 else allowed)
            if token == self.end:
                return drawn
            assert matcher.consume_token(token)
            drawn.append(token)
        return None


def tool(parameters, name="f", *, strict=True):
    function = {"name": name, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": function}


def closed(**properties):
    return {"type": "object", "properties": properties, "required": list(properties)}


def format_of(schema):
    named = {"name": "x", "strict": True, "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def parameter(name, value, is_text=True):
    told = "true" if is_text else "false"
    return f'<{D}parameter name="{name}" string="{told}">{value}</{D}parameter>\n'


def call(*parameters, name="f"):
    return f'<{D}invoke name="{name}">\n{"".join(parameters)}</{D}invoke>\n'


def block(*calls):
    return f"<{D}tool_calls>\n{''.join(calls)}</{D}tool_calls>"
