"""The product of rows with weights, of which `block_linear` and `expert_mlp` are made."""

from pallas_kernels.product.call_shapes import (
    BLACKWELL,
    HOPPER,
    Shapes,
    TensorCore,
    Tiling,
    can_join,
    choose_core,
    find_obstacle,
    shapes_of,
)
from pallas_kernels.product.launch import Product, multiply_items
from pallas_kernels.product.multiply import multiply_rows, swiglu_rows
from pallas_kernels.product.raw_rows import RawRows
from pallas_kernels.product.triton_rows import Rows, make_rows, pick_rows
from pallas_kernels.product.work import SwiGLU
from pallas_kernels.product.work_list import EvenItems, Items, PickedItems

__all__ = [
    "BLACKWELL",
    "HOPPER",
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
    "make_rows",
    "multiply_items",
    "multiply_rows",
    "pick_rows",
    "shapes_of",
    "swiglu_rows",
]
