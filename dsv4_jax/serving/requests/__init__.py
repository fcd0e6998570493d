"""Requests: what callers ask for, what they have got so far, and its text.

`prompts` checks what comes in, `request` has the state of one request, `calls` makes a call of the
engine one change, `text` and `token_texts` turn tokens into text, and `grammars` compiles grammars.
"""
