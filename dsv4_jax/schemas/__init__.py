"""JSON schemas: what of them is held and what is refused, and the grammars of their values."""

from dsv4_jax.schemas.json_values import json_value
from dsv4_jax.schemas.read_schema import Schema, read_schema
from dsv4_jax.schemas.values import SchemaError

__all__ = ["Schema", "SchemaError", "json_value", "read_schema"]
