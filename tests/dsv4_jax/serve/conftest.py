"""A tokenizer, one engine with it, its server and a client, for the tests of a module."""

import functools
import ssl

import pytest

from helpers.clients import openai
from helpers.serve import TOKENIZERS, running, tokenizer_fixture, warm_engine


@pytest.fixture(scope="session", autouse=True)
def one_tls_context():
    """Clients of loopback need none, but each reads all certificates, which takes 30 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


tokenizer_name = tokenizer_fixture("bytes")
"""Bytes and V4's special tokens; with `-m slow` V4's own 129,280, whose engine is another one."""


@pytest.fixture(scope="module")
def tokenizer(tokenizer_name):
    return TOKENIZERS[tokenizer_name]()


@pytest.fixture(scope="module")
def engine(tokenizer_name):
    return warm_engine(tokenizer_name)


@pytest.fixture(scope="module")
def other_engine(tokenizer_name):
    """One like it, for what is asked of an engine itself, and for servers with other settings."""
    return warm_engine(tokenizer_name, number=1)


@pytest.fixture(scope="module")
def server(engine):
    """It serves that engine."""
    with running(engine) as server:
        yield server


@pytest.fixture(scope="module")
def ask(server):
    """OpenAI's client."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client
