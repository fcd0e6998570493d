"""One engine, its server and a client, for the tests of a module."""

import openai
import pytest

from helpers.serve import running, warm_engine


@pytest.fixture(scope="module")
def engine():
    return warm_engine()


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
