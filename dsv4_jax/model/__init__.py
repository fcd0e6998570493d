"""Parameters, checkpoints, and the model from token ids to logits."""
