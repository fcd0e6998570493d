"""Every size of the model, which layer is of which type, and `config.json`."""

from dsv4_jax.config.idea import Idea
from dsv4_jax.config.model_config import DSV4Config, YarnScaling

__all__ = ["DSV4Config", "Idea", "YarnScaling"]
