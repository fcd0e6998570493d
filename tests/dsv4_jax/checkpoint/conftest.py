import pytest

from helpers.saved_checkpoint import SAVED, load


@pytest.fixture(scope="module")
def fixture_params():
    """Config and parameters of the checkpoint that transformers saved."""
    return load(SAVED)
