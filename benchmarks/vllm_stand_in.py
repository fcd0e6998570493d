"""Stand-ins for the names of vLLM that its Triton ops import, so that they run without vLLM."""

import inspect
import os
import sys
import types

PACKAGE = "vllm.models.deepseek_v4.common.ops"


class _Launcher:
    """Binds a launcher's arguments to its Triton kernel's parameters by name, and launches."""

    def __class_getitem__(cls, _):
        return cls

    def launch(self, spec, inputs):
        grid, named = spec[0], dict(spec[1])
        kernel = named.pop("kernel", None) or self.kernel
        parameters = kernel.arg_names
        for name, value in inputs.items():
            spellings = (name, f"{name}_ptr", name.upper(), f"{name.upper()}_PTR")
            for spelling in spellings:
                if spelling in parameters:
                    named.setdefault(spelling, value)
                    break
        for name in parameters:
            base, stride, axis = name.rpartition("_stride")
            if name not in named and stride and (not axis or axis.lstrip("_").isdigit()):
                source = named.get(base, named.get(f"{base}_ptr"))
                if source is not None:
                    named[name] = source.stride(int(axis.lstrip("_") or 0))
        kernel[grid](**named)


def _kernel_launcher(function):
    signature = inspect.signature(function)

    def call(self, *args, **kwargs):
        spec = function(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        self.launch(spec, {name: v for name, v in bound.arguments.items() if name != "self"})

    return call


class _Unused:
    """Warm-up helpers that matter only inside vLLM."""

    def __init__(self, *args, **kwargs):
        pass

    def __class_getitem__(cls, _):
        return cls


def stand_in(folder):
    """Registers modules with the names that the folder's files import from vLLM."""
    import torch
    import triton
    import triton.language as tl

    def module(name, **attributes):
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in sys.modules:
                made = types.ModuleType(path)
                made.__path__ = []
                sys.modules[path] = made
                if end > 1:
                    setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], made)
        vars(sys.modules[name]).update(attributes)
        return sys.modules[name]

    def no(*_):
        return False

    @triton.jit
    def never_called(scale):
        return scale

    platform = types.SimpleNamespace(
        is_rocm=no,
        is_xpu=no,
        is_cpu=no,
        is_cuda=lambda: True,
        is_cuda_alike=lambda: True,
        is_fp8_fnuz=no,
        fp8_dtype=lambda: torch.float8_e4m3fn,
        device_type="cuda",
        is_device_capability_family=no,
        get_device_capability=lambda *_: (9, 0),
    )
    warmup = "vllm.model_executor.warmup.jit_warmup"
    module("vllm.platforms", current_platform=platform)
    module("vllm.triton_utils", tl=tl, triton=triton)
    module(warmup, kernel_launcher=_kernel_launcher, WarmupIntRange=_Unused, zip_inputs=_Unused)
    module(
        f"{warmup}_triton_helper",
        LaunchSpec=tuple,
        TritonWarmupTensor=_Unused,
        VllmTritonJitKernel=_Launcher,
        TritonPointerInputVariant=_Unused,
        triton_scalar_specialization_rep=_Unused,
    )
    module(
        "vllm.model_executor.layers.quantization.utils.quant_utils",
        get_fp8_min_max=lambda: (-448.0, 448.0),
    )
    module("vllm.transformers_utils.deepseek_v4_utils", get_compress_ratios=lambda *_: [])
    module("vllm.utils.deep_gemm", mqa_logits_use_mx_scales=no)
    module("vllm.utils.import_utils", has_cutedsl=no)
    module(
        "vllm.utils.math_utils",
        next_power_of_2=lambda n: 1 if n < 1 else 1 << (n - 1).bit_length(),
        round_up=round_up,
    )
    module("vllm.v1.attention.ops.common", pack_ue8m0_x4=never_called)
    module(PACKAGE).__path__ = [os.path.abspath(folder)]


def round_up(number, multiple):
    return -(-number // multiple) * multiple
