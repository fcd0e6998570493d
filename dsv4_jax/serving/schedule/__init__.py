"""The schedule: who waits, who has a slot, and what the next step runs, on the host alone.

`request_queue` admits and preempts, `scheduler` and `step_plans` fill a step, whose size `pace`
chooses by the time that `step_times` predicts. `step_boundaries` and `snapshot_policy` say which
block boundaries it keeps, and `flight` is a step that was launched.
"""
