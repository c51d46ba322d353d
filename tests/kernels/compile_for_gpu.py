"""Compiles the kernels for GPUs that are not there: Triton needs a card to run them, not to build.

Run as a script, without TRITON_INTERPRET: every launch is replaced by a compilation of the very
kernel, argument types and configuration for sm_80 and sm_90. Prints a line of JSON a kernel. With
--all float32 is compiled too, beside bfloat16, and every configuration of the search.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

SHARED = {80: 163 << 10, 90: 227 << 10}  # bytes of shared memory a block may use
TYPES = {
    torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.int64: "i64", torch.int32: "i32", torch.bool: "i1",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
EVERY = "--all" in sys.argv
_DONE: dict[str, dict[str, Any]] = {}


def compile_launch(
    self: JITFunction, *args: Any, grid: Any, warmup: bool = False, **kw: Any
) -> None:
    """In the place of JITFunction.run."""
    names = [parameter.name for parameter in self.params]
    values = dict(zip(names, args, strict=False))
    options = {k: v for k, v in kw.items() if k in OPTIONS and k not in names and v is not None}
    values.update({k: v for k, v in kw.items() if k in names})
    signature, constants = {}, {}
    for parameter in self.params:
        value = values.get(parameter.name, parameter.default)
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i64" if abs(int(value)) >= 2**31 else "i32"
    source = ASTSource(self, signature, constants)
    for arch, most in SHARED.items():
        key = f"{self.__module__.rsplit('.', 1)[-1]}.{self.__name__} sm_{arch}"
        built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        shared = built.metadata.shared
        entry = _DONE.setdefault(key, {"kernel": key, "variants": 0, "shared": 0, "most": most})
        entry["variants"] += 1
        entry["shared"] = max(entry["shared"], shared)


def compile_tuned(self: Autotuner, *args: Any, **kwargs: Any) -> None:
    """In the place of Autotuner.run: no search, the first configuration or all of them."""
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    configs = self.prune_configs(kwargs)  # what the search would try for these arguments
    self.best_config = configs[0]
    for config in configs if EVERY else configs[:1]:
        self.fn.run(*args, **kwargs, **config.all_kwargs())


def main() -> None:
    JITFunction.run = compile_launch
    Autotuner.run = compile_tuned
    from tests.kernels.launches import launch_everything

    for name, module in list(sys.modules.items()):
        if name.startswith("fastclip.kernels.") and hasattr(module, "runs_on"):
            module.runs_on = lambda *tensors: True
    launch_everything((torch.bfloat16, torch.float32) if EVERY else (torch.bfloat16,))
    assert _DONE, "no kernel was launched"
    for entry in _DONE.values():
        print(json.dumps(entry))


if __name__ == "__main__":
    main()
