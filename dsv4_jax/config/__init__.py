"""Every size of the model, which layer is of which type, and `config.json`.

    model_config             `DSV4Config` and its presets
    layer_types              how a layer attends and how it routes
    layer_schedule           which layer is of which, and where its arrays lie
    upper_layers             which layers a prompt needs for its last tokens alone
    limits                   type and range of each size
    read_json, write_json    `config.json`: two forms are read, one is written
    idea                     what a researcher puts in the place of parts of the model

`json_file` reads JSON that comes from outside, `kinds` the values of its fields, and `read_rope`,
`formats`, `draft` and `images` parts of it. `yarn` stretches a RoPE table, and `checkpoint_folder`
says which files of a checkpoint there are.
"""

from dsv4_jax.config.idea import Idea
from dsv4_jax.config.model_config import DSV4Config, YarnScaling

__all__ = ["DSV4Config", "Idea", "YarnScaling"]
