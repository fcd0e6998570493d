"""What the host knows of a cache: who holds which slot and block, and whether it is sound."""
