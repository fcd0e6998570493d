"""Lowers `pl.pallas_call` by way of Triton's language, and compiles that with package `triton`.

It stands in for Pallas's Triton backend where the compiler parameters are those of this module.
"""

from __future__ import annotations

import dataclasses
import functools
import linecache
import re
from typing import Any

import jax
from jaxlib.mlir import ir

from pallas_kernels.common.backend import compute_capability
from pallas_kernels.gpu.compat import mlir, pallas_core
from pallas_kernels.gpu.triton_language import arithmetic, control, disk_cache, memory, shapes
from pallas_kernels.gpu.triton_language.package import load, without_line_info
from pallas_kernels.gpu.triton_language.source import Source, translate, type_of

_WARP = 32
_ALIGNED = 32
"""Bytes: XLA's buffers begin at multiples of more than that."""
_POLICIES_ARE_ATTRIBUTES = jax.__version_info__ >= (0, 12)
"""In XLA's Triton from jax 0.12 on. The package writes words up to 3.8, which jax 0.11 reads."""
_POLICY = re.compile(r"((?: (?:cacheModifier|evictionPolicy) = \w+)+)(?: \{([^}]*)\})? :")
_PTX_CALL, _IR_CALL = "__gpu$xla.gpu.ptx", "__gpu$xla.gpu.triton"
_MADE = ("ptx", "name", "shared_bytes", "scratch_bytes")
"""What is kept of a kernel in PTX."""
_IR_WARPS, _IR_STAGES = 4, 3
"""They say nothing of Triton's IR before its own passes; XLA is told others with it."""
RULES = arithmetic, control, memory, shapes
"""Modules that register the lines of primitives."""


@dataclasses.dataclass(frozen=True)
class CompilerParams:
    """Of `pl.pallas_call`: translate the kernel, and launch it this way.

    Attributes:
      num_warps: a program.
      num_stages: loads of a loop's products on their way at once.
      launch: "ptx", which XLA launches like a kernel of its own; "ir", Triton's, which XLA's own
        Triton compiles; "jax_triton", which launches it through XLA's foreign functions.
    """

    num_warps: int
    num_stages: int | None = None
    launch: str = "ptx"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel in PTX.

    Attributes:
      ptx: its text, whose entry takes the kernel's pointers and nothing else.
      name: of the entry.
      shared_bytes: of shared memory, which a launch asks for.
      num_threads: a program.
    """

    ptx: str
    name: str
    shared_bytes: int
    num_threads: int


@functools.cache
def compile_source(
    source: Source,
    pointers: tuple[str, ...],
    capability: int,
    num_warps: int,
    num_stages: int,
) -> Compiled:
    """PTX of a kernel, without a GPU; `disk_cache` keeps what Triton makes.

    Args:
      source: of the kernel.
      pointers: the types of its parameters in Triton's words, such as "*fp32".
      capability: of the GPU, 90 for Hopper.
      num_warps: a program.
      num_stages: loads of a loop's products on their way at once.
    """
    parts = (source.text, source.name, pointers, capability, _ALIGNED)
    key = disk_cache.key_of("ptx", *parts, options_of(num_warps, num_stages))
    made = disk_cache.kept(
        key, _MADE, lambda: _compile(source, pointers, capability, num_warps, num_stages)
    )
    if made["scratch_bytes"]:
        raise NotImplementedError(f"{source.name} takes scratch memory, which it is not given")
    ptx = _without_scratch(made["ptx"], len(pointers))
    return Compiled(ptx, made["name"], made["shared_bytes"], num_warps * _WARP)


@functools.cache
def triton_ir(source: Source, pointers: tuple[str, ...], capability: int) -> str:
    """Triton's IR of a kernel, as text; the arguments are those of `compile_source`."""
    parts = (source.text, source.name, pointers, capability, _ALIGNED)
    key = disk_cache.key_of("ir", *parts, options_of(_IR_WARPS, _IR_STAGES))
    make = functools.partial(_write_ir, source, pointers, capability)
    return disk_cache.kept(key, ("ir",), lambda: {"ir": make()})["ir"]


def in_xla_s_dialect(text: str) -> str:
    """Triton's IR as XLA's Triton reads it, which is of another version than the package.

    Args:
      text: of a module, as the package writes it.
    """

    def write_policy(found: re.Match[str]) -> str:
        words = dict(re.findall(r"(\w+) = (\w+)", found[1]))
        modifier, eviction = words.get("cacheModifier"), words.get("evictionPolicy")
        policy = f"cache_modifier = {modifier or 'none'}, "
        policy += f"eviction_policy = {eviction or 'evict_normal'}"
        others = f"{found[2]}, " if found[2] else ""
        return f" {{{others}cachePolicy = #tt.cache_policy<{policy}>}} :"

    return _POLICY.sub(write_policy, text) if _POLICIES_ARE_ATTRIBUTES else text


def _compile(source, pointers, capability, num_warps, num_stages):
    """What `compile_source` makes of a kernel, as Triton has it."""
    module, backend, options, language = _read(source, pointers, capability, num_warps, num_stages)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, language)
    metadata: dict[str, Any] = {}
    with without_line_info():
        for name, stage in stages.items():
            module = stage(module, metadata)
            if name == "ptx":
                break
    return {
        "ptx": str(module),
        "name": metadata["name"],
        "shared_bytes": metadata["shared"],
        "scratch_bytes": metadata.get("global_scratch_size") or 0,
    }


def _write_ir(source, pointers, capability):
    module, backend, options, language = _read(source, pointers, capability, _IR_WARPS, _IR_STAGES)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, language)
    module = stages["ttir"](module, {})  # XLA's Triton has no pass that puts functions in place
    return re.sub(r" loc\((?:[^()]|\([^()]*\))*\)|^#loc.*$", "", str(module), flags=re.M)


def _read(source, pointers, capability, num_warps, num_stages):
    """What Triton makes of a source: the module, the backend, its options and the language."""
    compiler, libtriton = load("triton.compiler.compiler"), load("triton._C.libtriton")
    target = load("triton.backends.compiler").GPUTarget("cuda", capability, _WARP)
    backend = compiler.make_backend(target)
    options = backend.parse_options(options_of(num_warps, num_stages))
    attributes = {(i,): [["tt.divisibility", _ALIGNED]] for i in range(len(pointers))}
    signature = dict(zip(source.parameters, pointers, strict=True))
    read = compiler.ASTSource(load_function(source), signature, attrs=attributes)
    context = libtriton.ir.context()
    libtriton.ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    with without_line_info():
        module = read.make_ir(target, options, functions, backend.get_module_map(), context)
    return module, backend, options, read.language


def options_of(num_warps: int, num_stages: int) -> dict[str, Any]:
    """Triton's options, under which arithmetic is that of Pallas's Triton backend."""
    return {
        "num_warps": num_warps,
        "num_stages": num_stages,
        "enable_fp_fusion": True,  # as XLA has it: ptxas fuses what is not spelt out
        "enable_reflect_ftz": False,  # libdevice's functions keep subnormal numbers
        "sanitize_overflow": False,
    }


@functools.cache
def load_function(source: Source) -> Any:
    """The function of a source, as Triton reads it: with lines of a file that `inspect` finds."""
    file = f"<triton {source.name} {hash(source.text):x}>"
    lines = source.text.splitlines(keepends=True)
    linecache.cache[file] = (len(source.text), None, lines, file)
    names: dict[str, Any] = {"__name__": file, "__file__": file}
    exec(compile(source.text, file, "exec"), names)
    return names[source.name]


def _without_scratch(ptx: str, count: int) -> str:
    """PTX whose entry has `count` parameters: Triton adds two, which a kernel may not read."""
    [found] = re.finditer(r"\.entry \w+\((.*?)\)", ptx, re.S)
    head, rest = found.span(1)
    parameters = [text.strip() for text in ptx[head:rest].split(",")]
    for added in parameters[count:]:
        if re.search(rf"\b{added.split()[-1]}\b", ptx[rest:]):
            raise NotImplementedError(f"a kernel reads {added}, which is Triton's own")
    kept = ",\n\t".join(parameters[:count])
    return f"{ptx[:head]}\n\t{kept}\n{ptx[rest:]}"


def _lower(
    ctx: Any,
    *operands: Any,
    jaxpr: Any,
    grid_mapping: Any,
    compiler_params: CompilerParams,
    input_output_aliases: tuple[tuple[int, int], ...],
    **_: Any,
) -> Any:
    """The lowering of a `pl.pallas_call` that names these parameters."""
    num_inputs = len(ctx.avals_in)
    capability = compute_capability()
    if capability is None:
        raise NotImplementedError("a kernel in Triton's language needs an NVIDIA GPU to be for")
    name = mlir.sanitize_name(jaxpr.debug_info.func_name)
    same = [(i, num_inputs + j) for i, j in input_output_aliases]
    lowered = functools.partial(translate, jaxpr, name=name, grid=tuple(grid_mapping.grid))
    if compiler_params.launch == "jax_triton":
        call = functools.partial(
            _triton_call,
            source=lowered(same=same),
            outputs=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in ctx.avals_out],
            aliases=dict(input_output_aliases),
            params=compiler_params,
        )
        _load_jax_triton()
        with without_line_info():
            return mlir.lower_fun(call, multiple_results=True)(ctx, *operands)
    source = lowered()
    pointers = tuple(f"*{_pointee(a.dtype)}" for a in (*ctx.avals_in, *ctx.avals_out))
    number = capability[0] * 10 + capability[1]
    num_warps, num_stages = compiler_params.num_warps, compiler_params.num_stages or 3
    numbers = dict(zip(("grid_x", "grid_y", "grid_z"), source.grid, strict=True))
    if compiler_params.launch == "ir":
        texts = {"name": source.name, "ir": in_xla_s_dialect(triton_ir(source, pointers, number))}
        numbers |= {"num_warps": num_warps, "num_stages": num_stages}
        target, flags = _IR_CALL, {"debug": ir.BoolAttr.get(False)}
    else:
        kernel = compile_source(source, pointers, number, num_warps, num_stages)
        texts = {"name": kernel.name, "kernel_type": "ptx", "kernel_data": kernel.ptx}
        numbers |= {"block_x": kernel.num_threads, "block_y": 1, "block_z": 1}
        numbers |= {"shared_mem_bytes": kernel.shared_bytes}
        target, flags = _PTX_CALL, {}
    config: dict[str, ir.Attribute] = {key: ir.StringAttr.get(text) for key, text in texts.items()}
    config |= {key: mlir.i32_attr(number) for key, number in numbers.items()} | flags
    layouts = [
        [list(reversed(range(a.ndim))) for a in part] for part in (ctx.avals_in, ctx.avals_out)
    ]
    return mlir.custom_call(
        call_target_name=target,
        result_types=[mlir.aval_to_ir_type(ctx.module_context, a) for a in ctx.avals_out],
        operands=operands,
        backend_config=config,
        api_version=4,
        operand_layouts=layouts[0],
        result_layouts=layouts[1],
        operand_output_aliases=dict(input_output_aliases),
    ).results


def _triton_call(*arrays, source, outputs, aliases, params):
    """The kernel's results, by jax-triton.

    jaxlib hands a kernel the buffers of operands and then of results, in their order, one to each
    parameter. A result that has an operand's place has no parameter, so those come last: before
    another one it would take that one's parameter.
    """
    jax_triton = _load_jax_triton()
    order = sorted(range(len(outputs)), key=lambda output: output in aliases.values())
    place = {output: index for index, output in enumerate(order)}
    results = jax_triton.triton_call(
        *arrays,
        kernel=load_function(source),
        out_type=[outputs[output] for output in order],
        grid=source.grid,
        name=source.name,
        input_output_aliases={operand: place[output] for operand, output in aliases.items()},
        num_warps=params.num_warps,
        num_stages=params.num_stages or 3,
        backend_options={
            key: value
            for key, value in options_of(params.num_warps, params.num_stages or 3).items()
            if not key.startswith("num_")
        },
    )
    return [results[place[output]] for output in range(len(outputs))]


def _load_jax_triton() -> Any:
    try:
        return load("jax_triton")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the lowering jax_triton (PALLAS_KERNELS_TRITON, or use_lowering) needs the packages "
            f"jax-triton and triton, and {error.name} is not installed; pip install "
            "'jax-triton>=0.4,<0.5' 'triton>=3.7,<3.9', or choose another lowering"
        ) from error


def _pointee(dtype: Any) -> str:
    """Triton's short name of a type, as signatures have it."""
    name = type_of(dtype).removeprefix("tl.")
    short = {"bfloat16": "bf16", "float8e4nv": "fp8e4nv", "float8e5": "fp8e5", "int1": "i1"}
    for long, brief in (("uint", "u"), ("int", "i"), ("float", "fp")):
        if name not in short and name.startswith(long):
            return brief + name.removeprefix(long)
    return short[name]


pallas_core.register_lowering_rule(CompilerParams, _lower, "gpu")
