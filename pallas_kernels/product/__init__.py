"""The product of rows with weights, of which `block_linear` and `expert_mlp` are made.

`multiply.py` is where to begin: it plans a call and launches the kernel. Ops import from here
alone.
"""

from pallas_kernels.product import triton_blocks
from pallas_kernels.product.call_shapes import Shapes, can_join, find_obstacle, shapes_of
from pallas_kernels.product.choose_tiling import plan
from pallas_kernels.product.decoded import MANY_ROWS
from pallas_kernels.product.multiply import launch, multiply_rows, swiglu_rows
from pallas_kernels.product.operands import Product, SwiGLU
from pallas_kernels.product.raw_rows import RawRows
from pallas_kernels.product.tiling import (
    BLACKWELL,
    HOPPER,
    MAX_MMA_ROWS,
    TensorCore,
    Tiling,
    choose_core,
    scale_rows,
)
from pallas_kernels.product.triton_groups import round_groups
from pallas_kernels.product.triton_rows import Rows, make_rows, padded, pick_rows
from pallas_kernels.product.work_list import EvenItems, Items, PickedItems

__all__ = [
    "BLACKWELL",
    "HOPPER",
    "MANY_ROWS",
    "MAX_MMA_ROWS",
    "EvenItems",
    "Items",
    "PickedItems",
    "Product",
    "RawRows",
    "Rows",
    "Shapes",
    "SwiGLU",
    "TensorCore",
    "Tiling",
    "can_join",
    "choose_core",
    "find_obstacle",
    "launch",
    "make_rows",
    "multiply_rows",
    "padded",
    "pick_rows",
    "plan",
    "round_groups",
    "scale_rows",
    "shapes_of",
    "swiglu_rows",
    "triton_blocks",
]
