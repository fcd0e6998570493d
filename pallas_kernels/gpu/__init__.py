"""What GPU kernels share: Mosaic, Triton, and a table of devices."""
