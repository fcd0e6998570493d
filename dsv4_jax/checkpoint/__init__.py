"""Checkpoints: safetensors in and out.

    find, before_weights    a directory, or a model of a hub, which is downloaded
    load, shards            a checkpoint to parameters, on one device or over a mesh
    sources                 its tensors, compared with those that the model has
    files, header           tensors of a file: memory-mapped, and how they are told
    names, named_sources    three namings; tensors by DeepSeek's, fused ones apart
    save, layout            parameters to files
    convert                 one checkpoint to another's formats, tensor by tensor

`problems`, `finite`, `zero_groups` and `spread` say what is wrong with values, `left_out` and
`inventory` what files hold beside the model, and `write_files` writes whole files or none.
"""

from dsv4_jax.checkpoint.convert import convert_checkpoint
from dsv4_jax.checkpoint.engram_tables import HostMemoryWarning
from dsv4_jax.checkpoint.find import SHIPPED_CHECKPOINT, find_checkpoint
from dsv4_jax.checkpoint.left_out import LeftOutWarning
from dsv4_jax.checkpoint.load import load_checkpoint
from dsv4_jax.checkpoint.save import save_checkpoint
from dsv4_jax.checkpoint.spread import RoundedWeightsWarning

__all__ = [
    "SHIPPED_CHECKPOINT",
    "HostMemoryWarning",
    "LeftOutWarning",
    "RoundedWeightsWarning",
    "convert_checkpoint",
    "find_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
]
