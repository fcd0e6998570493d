"""Checkpoints: safetensors in and out."""
