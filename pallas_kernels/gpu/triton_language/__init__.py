"""Kernels traced by Pallas, translated to Triton's language: what outlives Pallas's backend."""
