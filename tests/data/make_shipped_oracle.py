"""Writes oracle_shipped.npz: transformers' logits of the checkpoint that ships in the package.

Needs torch 2.13 and transformers 5.23, not this project: `python make_shipped_oracle.py`. Run it
again whenever the checkpoint is trained anew; the test compares the checksum.
"""

import hashlib
import pathlib

import numpy as np
import torch
from transformers import AutoModelForCausalLM

HERE = pathlib.Path(__file__).parent
CHECKPOINT = HERE.parents[1] / "dsv4_jax" / "data" / "checkpoint"
TEXT = (
    "The import statement finds a module and binds it to a name. The statement runs in two steps: "
    "it looks for the module, then it binds the name in the local scope of the statement.\n"
)
NUM_TOKENS = 400
EVERY = 7


def main():
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    token_ids = [256, *(TEXT * 3).encode()][:NUM_TOKENS]
    with torch.no_grad():
        logits = model(torch.tensor([token_ids]), use_cache=False).logits[0].numpy()
    weights = (CHECKPOINT / "model.safetensors").read_bytes()
    np.savez_compressed(
        HERE / "oracle_shipped.npz",
        token_ids=np.array(token_ids, np.int32),
        best=np.argmax(logits, axis=-1).astype(np.int32),
        positions=np.arange(0, NUM_TOKENS, EVERY, dtype=np.int32),
        logits=logits[::EVERY],
        checksum=hashlib.sha256(weights).hexdigest(),
    )


if __name__ == "__main__":
    main()
