"""The steps that an engine can come to run, one for each program, of which warm-up runs each."""

from __future__ import annotations

from typing import NamedTuple

from dsv4_jax.serving.schedule.known_tokens import KnownTokens
from dsv4_jax.serving.schedule.running import Running
from dsv4_jax.serving.schedule.scheduler import StepPlan
from dsv4_jax.serving.sizing import EnginePlan


class IdleStep(NamedTuple):
    """A step without rows, which finds out a program.

    Attributes:
      name: what it is called where warm-up tells of it.
      plan: its sizes.
      is_simple: it takes the program of simple draws.
    """

    name: str
    plan: StepPlan
    is_simple: bool = False

    def nobody(self) -> Running:
        """The requests that it serves, none."""
        nobody = Running({}, KnownTokens(0, 0))
        nobody.is_simple = self.is_simple
        return nobody


def idle_steps(engine: EnginePlan, *, has_both_forms: bool, simplifies: bool) -> list[IdleStep]:
    """Steps of every program.

    Args:
      engine: sizes of the engine.
      has_both_forms: steps with prompts have other activations than others.
      simplifies: simple draws have programs of their own.
    """
    sizes, several = engine.step_sizes.warmed_up(), engine.steps_per_call
    steps = []
    for size in sizes.prompts:
        idle = StepPlan.idle(size, holds_prompts=True)
        steps.append(IdleStep(name_of(idle), idle))
        if engine.upper is not None and (count := engine.upper.sizes.get(size)):
            idle = StepPlan.idle(size, holds_prompts=True, upper_size=count)
            steps.append(IdleStep(name_of(idle), idle))
    for size in sizes.decoding:
        idle = StepPlan.idle(size, is_plain=sizes.is_plain)
        name = f"{name_of(idle)} without prompts"
        if sizes.is_plain:
            steps.append(IdleStep(name_of(idle), idle))
        elif has_both_forms or simplifies:
            steps.append(IdleStep(name, idle))
        if simplifies and not sizes.is_plain:
            steps.append(IdleStep(f"{name}, simple draws", idle, True))
        if several > 1:
            idle = StepPlan.idle(size, is_plain=sizes.is_plain, num_steps=several)
            steps.append(IdleStep(name_of(idle), idle, simplifies))
    return steps


def name_of(plan: StepPlan) -> str:
    """What people call a step of these sizes."""
    kind = "decode step" if plan.is_plain else "step"
    steps = kind if plan.num_steps == 1 else f"{plan.num_steps} {kind}s"
    by_all = f", {plan.upper_size} by all layers" if plan.upper_size else ""
    return f"{steps} of {plan.size} tokens{by_all}"
