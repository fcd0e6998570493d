"""Forms of answers: what a request says of them, as a grammar of the engine."""

from dsv4_jax.serve.forms.constraints import Wanted, grammar_of

__all__ = ["Wanted", "grammar_of"]
