"""Tokens of a step, which are made when they are read."""

import numpy as np
import pytest

from dsv4_jax.serving.requests.request import Token
from dsv4_jax.serving.requests.step_tokens import StepTokens

COLUMNS = np.array([4, 4, 7], np.int64), np.array([11, 12, 13], np.int32)
TOKENS = [Token(4, 11, None), Token(4, 12, "stop"), Token(7, 13, None)]


def test_it_reads_as_the_list_of_its_tokens():
    tokens = StepTokens(*COLUMNS, {1: "stop"})
    assert list(tokens) == TOKENS
    assert [tokens[number] for number in (0, 1, -1)] == TOKENS
    assert tokens[1:] == TOKENS[1:]
    assert len(tokens) == 3
    assert repr(tokens) == repr(TOKENS)
    assert all(type(token) is Token and type(token.token_id) is int for token in tokens)
    with pytest.raises(IndexError):
        tokens[3]


def test_it_equals_what_holds_the_same_tokens():
    tokens = StepTokens(*COLUMNS, {1: "stop"})
    assert tokens == TOKENS
    assert tokens != StepTokens(*COLUMNS, {})
    assert tokens != TOKENS[:2]
    assert [*TOKENS[:1], *tokens[1:]] == tokens
