"""The device: a plan becomes arrays, the jitted step runs, and what it drew goes to requests.

`runner` makes a step's input, `engine_arrays` owns the arrays and calls the programs, in every
process of a mesh, `drawn_counts` and `grammar_masks` keep what draws depend on, `step_result` is
what a call gave, in NumPy, and `hand_out` gives requests their tokens.
"""
