"""What the server makes of a body, and of tokens, without an engine."""

import json

from dsv4_jax.serve import ServeSettings
from dsv4_jax.serve.conversation_renderer import ConversationRenderer
from dsv4_jax.serve.conversations import Conversations
from dsv4_jax.serve.dialects import MESSAGES
from dsv4_jax.serving.requests.request import Completion, Token
from helpers.serve import MODEL, v4_tokenizer

END = "<｜end▁of▁sentence｜>"


class Offline:
    """Rendering and parsing of conversations with a tokenizer."""

    def __init__(self, tokenizer=None, **settings):
        self.tokenizer = tokenizer or v4_tokenizer()
        made = ServeSettings(**({"model_name": MODEL} | settings))
        self.conversations = Conversations(made, self.tokenizer.to_str(), 2**20)

    def read(self, body, dialect):
        least = {"max_tokens": 900} if dialect is MESSAGES else {}
        return self.conversations.read({"model": MODEL} | least | body, dialect)

    def prompt(self, body, dialect):
        """The text that a body is rendered to."""
        ids = self.read(body, dialect).prompt_ids
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def answer(self, body, dialect, text, *, raw=False):
        """What a client gets where the model says a text: the answer, or the events of a stream."""
        asked = self.read(body, dialect)
        renderer = ConversationRenderer(asked, dialect, MODEL, self.conversations.tokenizer)
        ids = self.tokenizer.encode(text + END, add_special_tokens=False).ids
        given = renderer.start(0)
        for number in range(asked.n):
            for place, token in enumerate(ids):
                reason = "stop" if place == len(ids) - 1 else None
                given += renderer.tokens(number, [Token(number, token, reason)])
        done = Completion(ids, None, "stop", prompt_tokens=len(asked.prompt_ids))
        given += renderer.end([done] * asked.n)
        if not asked.streams:
            return given.decode() if raw else json.loads(given)
        data = [part.partition("data: ")[2] for part in given.decode().split("\n\n")]
        return [json.loads(one) for one in data if one[:1] == "{"]
