"""What a cache holds of one request, as plain arrays and as a picture."""

from dsv4_jax.inspection.inspect import inspect
from dsv4_jax.inspection.request_view import LayerView, RequestView

__all__ = ["LayerView", "RequestView", "inspect"]
