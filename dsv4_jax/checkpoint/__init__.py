"""Checkpoints: safetensors in and out."""

from dsv4_jax.checkpoint.convert import convert_checkpoint
from dsv4_jax.checkpoint.find import SHIPPED_CHECKPOINT, find_checkpoint
from dsv4_jax.checkpoint.left_out import LeftOutWarning
from dsv4_jax.checkpoint.load import load_checkpoint
from dsv4_jax.checkpoint.save import save_checkpoint
from dsv4_jax.checkpoint.spread import RoundedWeightsWarning

__all__ = [
    "SHIPPED_CHECKPOINT",
    "LeftOutWarning",
    "RoundedWeightsWarning",
    "convert_checkpoint",
    "find_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
]
