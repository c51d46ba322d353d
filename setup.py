"""The packages under fastclip/, and csrc/, which becomes fastclip._C where there is an nvcc.

The extension is optional: without it every operation still runs, in Triton or PyTorch. So a build
that cannot be done is told in one sentence and the installation goes on. FASTCLIP_BUILD=0 leaves the
extension out, FASTCLIP_BUILD=strict (`make build`) makes a failed build an error. The rest of the
metadata is in pyproject.toml.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
SOURCES = ROOT / "csrc"
OLDEST_NVCC = (12, 1)  # the first whose kernels take 32,764 bytes of parameters
GENCODE = {  # architecture -> what is kept of it; PTX (compute_*) serves what comes after
    "compute_80": ["sm_80"],
    "compute_90": ["sm_90", "compute_90"],
}
RULES = """\
rule compile
  command = $nvcc $flags -MD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = $in
rule link
  command = $nvcc -shared -cudart static $in -o $out
  description = $out
"""


class NotBuilt(Exception):
    """Why there is no extension, and what to do about it."""


class NoCompiler(NotBuilt):
    """There is nothing to build it with: no error, even where the build is asked for."""


def find_nvcc() -> str:
    """The CUDA compiler on PATH, or of CUDA_HOME, or where it is installed by default."""
    if sys.platform != "linux":
        raise NoCompiler(f"it is built on Linux only, and this is {sys.platform}")
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    places = [os.path.join(home, "bin") for home in (*homes, "/usr/local/cuda") if home]
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=os.pathsep.join(places))
    if nvcc is None:
        raise NoCompiler("there is no nvcc: install the CUDA toolkit or put its bin on PATH")
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release (\d+)\.(\d+)", text)
    if release is None:
        raise NotBuilt(f"{nvcc} --version does not tell its release: check the CUDA toolkit")
    if tuple(map(int, release.groups())) < OLDEST_NVCC:
        oldest = ".".join(map(str, OLDEST_NVCC))
        raise NotBuilt(f"{nvcc} is CUDA {'.'.join(release.groups())}: install {oldest} or newer")
    return nvcc


def find_ninja() -> str:
    """ninja on PATH or of the Python package."""
    try:
        import ninja

        return os.path.join(ninja.BIN_DIR, "ninja")
    except ImportError:
        found = shutil.which("ninja")
    if found is None:
        raise NotBuilt("ninja is missing: pip install ninja pybind11")
    return found


def compile_flags() -> list[str]:
    """What every source is compiled with; nvcc hands *.cpp to the host's compiler."""
    try:
        import pybind11
    except ImportError as error:
        raise NotBuilt("pybind11 is missing: pip install ninja pybind11") from error
    kept = [code for codes in GENCODE.values() for code in codes]
    flags = ["-std=c++17", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra,-Wno-psabi"]
    flags += [f"-isystem={x}" for x in (pybind11.get_include(), sysconfig.get_path("include"))]
    flags += [f"-DFASTCLIP_ARCHITECTURES={'/'.join(kept)}"]
    flags += [f"-gencode=arch={arch},code=[{','.join(kept)}]" for arch, kept in GENCODE.items()]
    return flags


def escape(text: str | Path) -> str:
    """A path or a word in ninja's syntax."""
    return re.sub(r"([$ :])", r"$\1", str(text))


def write_ninja(folder: Path, nvcc: str, flags: list[str]) -> None:
    """build.ninja: every *.cu and *.cpp of csrc/, one module of them."""
    objects = []
    lines = [f"nvcc = {nvcc}", "flags = " + " ".join(f"'{flag}'" for flag in flags), RULES]
    for source in sorted([*SOURCES.glob("*.cu"), *SOURCES.glob("*.cpp")]):
        objects.append(escape(f"{source.name}.o"))
        lines.append(f"build {objects[-1]}: compile {escape(source)}")
    lines.append(f"build _C.so: link {' '.join(objects)}")
    (folder / "build.ninja").write_text("\n".join(lines) + "\n")


def build(folder: Path) -> Path:
    """Compile what has changed; the module's path.

    Raises:
        NotBuilt: no compiler, one that is too old, or an error of the compiler.
    """
    nvcc, ninja, flags = find_nvcc(), find_ninja(), compile_flags()
    import fcntl  # Linux has it, and so has whoever comes this far

    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two builds of one checkout
        write_ninja(folder, nvcc, flags)
        done = subprocess.run([ninja, "-C", str(folder), "-j", str(os.cpu_count() or 1)])
    if done.returncode != 0:
        raise NotBuilt(
            f"csrc/ did not compile with {nvcc}: the compiler's message is above (with pip: "
            "pip install -v); NVCC_PREPEND_FLAGS='-ccbin ...' chooses another host compiler"
        )
    return folder / "_C.so"


def versions_of(module: Path) -> str:
    """Import the module by its path alone and ask it what it was built for.

    Raises:
        NotBuilt: it cannot be imported.
    """
    spec = importlib.util.spec_from_file_location("_C", module)
    assert spec is not None
    assert spec.loader is not None
    try:
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
        return ", ".join(f"{name} {value}" for name, value in found.versions().items())
    except ImportError as error:
        raise NotBuilt(f"the module is compiled and cannot be imported: {error}") from error


class BuildCore(build_ext):
    """Builds fastclip._C with ninja and nvcc, or says why not."""

    def run(self) -> None:
        wish = os.environ.get("FASTCLIP_BUILD", "")
        target = Path(self.get_ext_fullpath("fastclip._C")).resolve()
        if wish == "0":
            print("fastclip._C is left out: FASTCLIP_BUILD=0")
            return
        try:
            module = build(ROOT / "build" / f"cuda-{sys.implementation.cache_tag}")
            versions = versions_of(module)
        except NotBuilt as reason:
            target.unlink(missing_ok=True)  # one of older sources must not serve
            print(f"fastclip._C is not built: {reason}", file=sys.stderr)
            if wish == "strict" and not isinstance(reason, NoCompiler):
                raise SystemExit(1) from reason
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_suffix(".new")
        shutil.copyfile(module, fresh)
        os.replace(fresh, target)  # a process that has the old one loaded keeps it
        print(f"fastclip._C: {versions}")


if __name__ == "__main__":  # setuptools and pip run this file as a program
    setup(
        packages=find_packages(include=["fastclip", "fastclip.*"]),
        ext_modules=[Extension("fastclip._C", sources=[], optional=True)],
        cmdclass={"build_ext": BuildCore},
    )
