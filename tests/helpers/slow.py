"""Parameters of tests of which the default run takes a few, and `-m slow` the others."""

import pytest


def all_but(usual, values):
    """The values, those that are not among the usual ones marked slow.

    Args:
      usual: values that every run takes.
      values: all of them; a tuple is one set of several parameters.
    """
    unknown = [value for value in usual if value not in values]
    assert not unknown, f"usual values must be among all, got {unknown}"

    def marked(value):
        parameters = value if isinstance(value, tuple) else (value,)
        return pytest.param(*parameters, marks=pytest.mark.slow)

    return [value if value in usual else marked(value) for value in values]
