import jax
import pytest


@pytest.fixture(autouse=True)
def _strict_promotion():
    """No silent dtype or rank promotion anywhere in the packages."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
