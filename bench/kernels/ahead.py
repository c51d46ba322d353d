"""Compiles Triton's kernels for GPUs that are not there, as the driver would, and reads the code.

Triton needs a card to run a kernel, not to build it. While `Ahead` is entered, a launch passes through
Triton's own specialisation (alignment of pointers, integers that are 1 or divisible by 16, what
`do_not_specialize` names) and ends at the compiled code; an autotuned kernel is compiled in every
configuration that suits its arguments. Not to be used under TRITON_INTERPRET.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

SHARED = {80: 163 << 10, 90: 227 << 10}
"""Bytes of shared memory that a block may use, by architecture."""
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_WIDTH = re.compile(r"\.(U8|S8|U16|S16|64|128)\b")
_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


class _Driver:
    """In the place of the driver's: the card of an architecture, whose device number it is."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


def read_code(cubin: bytes) -> dict[str, Any]:
    """What the machine code of a kernel holds.

    Returns:
        registers and bytes of stack a thread; instructions: local_loads and local_stores (of spills,
        or of arrays in memory), async_copies (cp.async), tma, wgmma, mma, float (of one number), all;
        widths in bytes of loads from global memory and of cp.async -> instructions.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_TOOLS / "cuobjdump"), "-sass", "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = _RESOURCES.search(text)
    assert usage is not None, text[:500]
    names = _INSTRUCTION.findall(text)
    heads = Counter(name.split(".")[0] for name in names)
    loads: Counter[int] = Counter()
    copies: Counter[int] = Counter()
    for name in names:
        if name.startswith(("LDG.", "LDGSTS")):
            width = _WIDTH.search(name)
            into = copies if name.startswith("LDGSTS") else loads
            into[_BYTES[width.group(1)] if width else 4] += 1
    return {
        "registers": int(usage.group(1)),
        "stack": int(usage.group(2)) + int(usage.group(4)),
        "local_loads": heads["LDL"],
        "local_stores": heads["STL"],
        "async_copies": heads["LDGSTS"],
        "tma": heads["UTMALDG"] + heads["UBLKCP"],
        "wgmma": heads["HGMMA"],
        "mma": heads["HMMA"],
        "float": sum(heads[name] for name in ("FADD", "FFMA", "FMUL", "FSEL")),
        "instructions": len(names),
        "loads": {str(width): loads[width] for width in sorted(loads)},
        "copies": {str(width): copies[width] for width in sorted(copies)},
    }


class Ahead:
    """While it is entered, launches become compilations.

    Attributes:
        rows: of each distinct piece of code, `read_code` of it, with kernel, arch, shared, most,
            config, and the forms that led to it.
        form: what is being launched, for the rows.
    """

    def __init__(self, archs: Sequence[int] = (80, 90), every: bool = True) -> None:
        """archs: for which GPUs. every: all configurations of a search, not the first alone."""
        self.archs, self.every = archs, every
        self.form = ""
        self.found: dict[tuple[int, str], dict[str, Any]] = {}

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One a kernel, architecture, specialisation and configuration."""
        return list(self.found.values())

    def compile(
        self,
        run: Callable[..., Any],
        kernel: JITFunction,
        args: tuple,
        kw: Any,
        archs: Sequence[int],
    ) -> None:
        """One launch, for each architecture."""
        for arch in archs:
            driver.set_active(_Driver(arch))
            built = run(kernel, *args, **{**kw, "warmup": True})
            key = arch, built.hash
            if key not in self.found:
                self.found[key] = self._row(kernel, arch, built, kw)
            forms = self.found[key]["forms"]
            if self.form not in forms:
                forms.append(self.form)

    def _row(self, kernel: JITFunction, arch: int, built: Any, kw: Any) -> dict[str, Any]:
        module = kernel.__module__.rsplit(".", 1)[-1]
        blocks = {
            k: v for k, v in kw.items()
            if k.startswith("BLOCK_") or k == "ELEMENTS" or (k == "TAILS" and v)
        }  # fmt: skip
        return {
            "kernel": f"{module}.{kernel.__name__}", "arch": f"sm_{arch}", "forms": [],
            "config": {**blocks, "warps": built.metadata.num_warps,
                       "stages": built.metadata.num_stages},
            "mode": kw.get("MODE", kw.get("G_MODE", "")), "code": built.hash[:12],
            "shared": built.metadata.shared, "most": SHARED[arch],
            **read_code(built.asm["cubin"]),
        }  # fmt: skip

    def __enter__(self) -> Ahead:
        self._saved = JITFunction.run, Autotuner.run, driver._active
        run = JITFunction.run

        def launch(kernel: JITFunction, *args: Any, **kw: Any) -> None:
            self.compile(run, kernel, args, kw, self.archs)

        def search(tuner: Autotuner, *args: Any, **kw: Any) -> None:
            tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
            for arch in self.archs:
                driver.set_active(_Driver(arch))
                configs = tuner.prune_configs(kw)  # what the search would try for these arguments
                for config in configs if self.every else configs[:1]:
                    self.compile(run, tuner.fn, args, {**kw, **config.all_kwargs()}, (arch,))

        JITFunction.run, Autotuner.run = launch, search
        driver.set_active(_Driver(self.archs[0]))  # launchers may ask which it is
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        JITFunction.run, Autotuner.run, driver._active = self._saved
