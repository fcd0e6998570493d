"""What kernels take of JAX that is not public: the names of `jax._src` that their lowerings need.

No other module of the package imports from `jax._src`. The tests of `tests/pallas_kernels/gpu/`
run what is here, and fail on a JAX that does it otherwise.
"""

from jax._src import core as jax_core
from jax._src import effects
from jax._src.interpreters import mlir
from jax._src.pallas import core as pallas_core
from jax._src.pallas import primitives

__all__ = ["effects", "jax_core", "mlir", "pallas_core", "primitives"]
