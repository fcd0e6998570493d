"""Grammars that fail while an answer is drawn, as llguidance can only where it is out of room."""


class Failing:
    """A matcher that fails at one of its masks, or allows nothing there, or takes no token more."""

    def __init__(self, matcher, how, at):
        self._matcher, self._how, self._left = matcher, how, at

    def deep_copy(self):
        return Failing(self._matcher.deep_copy(), self._how, self._left)

    def compute_bitmask(self):
        mask = self._matcher.compute_bitmask()
        if self._left > 0:
            return mask
        if self._how == "raises":
            raise RuntimeError("the grammar is lost")
        return bytes(len(mask)) if self._how == "allows nothing" else mask

    def consume_tokens(self, tokens):
        self._left -= len(tokens)
        is_over = self._how == "takes nothing" and self._left <= 0
        return not is_over and self._matcher.consume_tokens(tokens)

    def __getattr__(self, name):
        return getattr(self._matcher, name)


def fail(monkeypatch, engine, how, at):
    """Makes grammars of an engine's requests fail after so many tokens."""
    grammars = engine.limits.grammars
    start = grammars.start
    monkeypatch.setattr(grammars, "start", lambda grammar: Failing(start(grammar), how, at))
