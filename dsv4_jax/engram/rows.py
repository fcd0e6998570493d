"""EngramRows: what tokens read of the tables, on its way to the device."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.config.engram import GROUP
from pallas_kernels.common import numbers

Array = jax.Array | np.ndarray


@flax.struct.dataclass(kw_only=True)
class EngramRows:
    """What each token reads of each table, as it is stored.

    Attributes:
      values: [..., L, columns, head_dim], dense, or E4M3 codes as u8 beside a scale.
      scale: UE8M0 as u8[..., L, columns, head_dim / 32]; None of dense values.
    """

    values: Array
    scale: Array | None = None

    def of_table(self, number: jax.Array | int) -> jax.Array:
        """f32[..., columns * head_dim], what tokens read of one table."""
        values = jnp.asarray(self.values)[..., number, :, :]
        if self.scale is None:
            wide = values.astype(jnp.float32)
        else:
            scale = numbers.decode_ue8m0(jnp.asarray(self.scale)[..., number, :, :])
            scale = jnp.repeat(scale, GROUP, axis=-1)[..., : values.shape[-1]]
            wide = numbers.decode_e4m3(values) * scale
        return wide.reshape(*wide.shape[:-2], -1)
