"""Checkpoints: safetensors in and out."""

from dsv4_jax.checkpoint.convert import convert_checkpoint
from dsv4_jax.checkpoint.load import SHIPPED_CHECKPOINT, load_checkpoint
from dsv4_jax.checkpoint.save import save_checkpoint

__all__ = ["SHIPPED_CHECKPOINT", "convert_checkpoint", "load_checkpoint", "save_checkpoint"]
