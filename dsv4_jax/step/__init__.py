"""One step as a pure function: prefill, decode, staged steps, and the step of the engine."""
