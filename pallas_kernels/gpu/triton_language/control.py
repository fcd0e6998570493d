"""Calls, branches and loops in Triton's language."""

from __future__ import annotations

import jax.numpy as jnp
from jax.extend.core import Literal

from pallas_kernels.gpu.triton_language.source import rule


@rule("program_id")
def _program_id(writer, equation):
    expression = writer.program_ids[equation.params["axis"]]
    return writer.let(expression) if expression else writer.constant(0, jnp.int32)


@rule("num_programs")
def _num_programs(writer, equation):
    raise NotImplementedError(f"{writer.name} asks for the number of programs, which is its grid's")


@rule("jit", "pjit", "closed_call", "core_call")
def _jit(writer, equation, *values):
    return writer.call(equation.params.get("jaxpr", equation.params.get("call_jaxpr")), values)


@rule("custom_jvp_call", "custom_vjp_call")
def _custom(writer, equation, *values):
    return writer.call(equation.params["call_jaxpr"], values)


@rule("cond")
def _cond(writer, equation, index, *values):
    branches = equation.params["branches"]
    results = [writer.fresh() for _ in equation.outvars]

    def branch(number: int) -> None:
        found = writer.call(branches[number], values)
        for result, value in zip(results, found, strict=True):
            writer.line(f"{result} = {value}")

    def choose(number: int) -> None:
        if number == len(branches) - 1:
            branch(number)
            return
        with writer.block(f"if {index} == {number}:"):
            branch(number)
        with writer.block("else:"):
            choose(number + 1)

    choose(0)
    return results


@rule("scan")
def _scan(writer, equation, *values):
    given = equation.params
    jaxpr = given["jaxpr"]
    body = getattr(jaxpr, "jaxpr", jaxpr)
    if "ft_in" in given:
        num_consts, num_carry, num_scanned = (len(group) for group in given["ft_in"].unpack())
    else:
        num_consts, num_carry = given["num_consts"], given["num_carry"]
        num_scanned = len(values) - num_consts - num_carry
    if num_scanned or len(body.outvars) != num_carry or given["reverse"] or given["unroll"] != 1:
        raise NotImplementedError(f"{writer.name} scans over arrays, backwards or unrolled")
    consts, carry = values[:num_consts], values[num_consts:]
    counter = _counter(body, num_consts, 0)
    if counter is None:
        return _for(writer, jaxpr, consts, "0", str(given["length"]), carry, index=None)
    start, *others = carry
    stop = writer.let(f"{start} + {writer.constant(given['length'], counter.aval.dtype)}")
    return [stop, *_for(writer, jaxpr, consts, start, stop, others, index=counter)]


@rule("while")
def _while(writer, equation, *values):
    given = equation.params
    num_cond, num_body = given["cond_nconsts"], given["body_nconsts"]
    cond, body = given["cond_jaxpr"], given["body_jaxpr"]
    cond_consts, consts = values[:num_cond], values[num_cond : num_cond + num_body]
    carry = values[num_cond + num_body :]
    counter = _bounded_counter(getattr(cond, "jaxpr", cond), getattr(body, "jaxpr", body), given)
    if counter is not None:
        start, stop, *others = carry
        results = _for(writer, body, consts, start, stop, others, index=counter, fixed=[stop])
        return [stop, stop, *results]
    names = [writer.let(str(value)) for value in carry]
    (going,) = writer.call(cond, [*cond_consts, *names])
    going = writer.let(going)
    with writer.block(f"while {going}:"):
        found = writer.call(body, [*consts, *names])
        _assign(writer, names, found)
        (again,) = writer.call(cond, [*cond_consts, *names])
        writer.line(f"{going} = {again}")
    return names


def _for(writer, jaxpr, consts, start, stop, carry, *, index, fixed=()):
    """A loop over an index of which the body's carry is the rest; `index` is its variable."""
    names = [writer.let(str(value)) for value in carry]
    step = writer.fresh()
    with writer.block(f"for {step} in range({start}, {stop}):"):
        counted = [] if index is None else [step]
        found = writer.call(jaxpr, [*consts, *counted, *fixed, *names])
        _assign(writer, names, found[len(counted) + len(fixed) :])
    return names


def _assign(writer, names, values):
    """All at once: a value may be another of the names."""
    if names:
        taken = [writer.let(value) if value in names else value for value in values]
        for name, value in zip(names, taken, strict=True):
            if name != value:
                writer.line(f"{name} = {value}")


def _counter(body, num_consts, position):
    """The variable that a loop's body only adds 1 to; None where that carry is anything else."""
    variables = body.invars[num_consts:]
    if len(variables) <= position:
        return None
    variable, result = variables[position], body.outvars[position]
    if variable.aval.shape or variable.aval.dtype not in (jnp.int32, jnp.int64):
        return None
    for equation in body.eqns:
        if equation.outvars[:1] == [result] and equation.primitive.name == "add":
            left, right = equation.invars
            literal = isinstance(right, Literal) and right.val == 1
            return variable if literal and left is variable else None
    return None


def _bounded_counter(cond, body, given):
    """That of a loop which ends where it reaches the carry after it; None of another loop."""
    num_cond, num_body = given["cond_nconsts"], given["body_nconsts"]
    counter = _counter(body, num_body, 0)
    if counter is None or num_cond or len(cond.eqns) != 1 or len(body.outvars) < 2:
        return None
    (equation,) = cond.eqns
    compared = equation.primitive.name == "lt" and equation.invars == cond.invars[:2]
    kept = body.outvars[1] is body.invars[num_body + 1]
    return counter if compared and kept else None
