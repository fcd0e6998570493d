"""Benchmarks: full-size models with random weights, and kernels beside other projects' kernels.

    decode, prefill, mesh_step      steps: their cases and parts are `decode_case` and `parts`
    kernels, compare                single ops at a model's shapes; beside other projects'
    load                            a server under requests that come when they come
    timing, loops, profile          how calls are timed: by the host, in loops, launch by launch
    roofline, floor, workspace      what is reckoned from sizes: least times, and memory
    weights, noise, fill            random parameters, arrays and caches
    report, results                 tables and files

`program` compiles and counts launches, and `placement` says what the devices of a mesh hold.
"""
