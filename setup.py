"""The packages under fastclip/, and csrc/, whose folders become modules: host/ becomes fastclip._host
where there is a C++ compiler, path/ fastclip._path and step/ fastclip._step where there is torch, too,
and cuda/ becomes fastclip._C where there is an nvcc.

All are optional: without them every operation still runs, in Triton or PyTorch. So a module that
cannot be built is told in one sentence and the installation goes on. FASTCLIP_BUILD=0 leaves all
out, FASTCLIP_BUILD=strict (`make build`) makes a failed build an error. How they are compiled is said by
fastclip/core/build_recipe.py. The rest of the metadata is in pyproject.toml.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
SOURCES = ROOT / "csrc"


def imported(path: Path) -> ModuleType:
    """A module of this file alone: no package is imported for it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


recipe = imported(ROOT / "fastclip" / "core" / "build_recipe.py")
NotBuilt, NoCompiler, find_cxx = recipe.NotBuilt, recipe.NoCompiler, recipe.find_cxx
OLDEST_NVCC = (12, 1)  # the first whose kernels take 32,764 bytes of parameters
GENCODE = {  # architecture -> what is kept of it; PTX (compute_*) serves what comes after
    "compute_80": ["sm_80"],
    "compute_90": ["sm_90", "compute_90"],
}
COMPILING = recipe.compiling(["$compiler"], ["$flags", "-MD", "-MF", "$out.d"], "$in", "$out")
LINKING = recipe.linking(["$compiler"], ["$in"], ["$libraries"], "$out")
RULES = f"""\
rule compile
  command = {" ".join(COMPILING)}
  depfile = $out.d
  deps = gcc
  description = $in
rule link
  command = {" ".join(LINKING)}
  description = $out
"""


def find_nvcc() -> str:
    """The CUDA compiler on PATH, or of CUDA_HOME, or where it is installed by default."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    places = [os.path.join(home, "bin") for home in (*homes, "/usr/local/cuda") if home]
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=os.pathsep.join(places))
    if nvcc is None:
        raise NoCompiler("there is no nvcc: install the CUDA toolkit or put its bin on PATH")
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    except OSError as error:
        raise NotBuilt(f"{nvcc} cannot be run ({error}): check the CUDA toolkit") from error
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


def find_pybind11() -> str:
    """The folder of its headers."""
    try:
        import pybind11
    except ImportError as error:
        raise NotBuilt("pybind11 is missing: pip install ninja pybind11") from error
    return str(pybind11.get_include())


def nvcc_flags() -> list[str]:
    """What nvcc is told beside."""
    kept = [code for codes in GENCODE.values() for code in codes]
    flags = [
        f"-Xcompiler={','.join(recipe.OF_THE_HOST)}",
        f"-DFASTCLIP_ARCHITECTURES={'/'.join(kept)}",
    ]
    return flags + [
        f"-gencode=arch={arch},code=[{','.join(kept)}]" for arch, kept in GENCODE.items()
    ]


class Module(NamedTuple):
    """A folder of csrc/ and what becomes of it."""

    name: str
    folder: str
    find: Callable[[], str]
    """Its compiler."""
    flags: Callable[[], list[str]]
    libraries: Callable[[], list[str]]
    other_compiler: str
    """How the user names another one, where this one fails."""
    needs: str = "sys"
    """A module that is imported before."""


HOST = Module(
    "_host", "host", find_cxx, lambda: recipe.OF_THE_HOST, lambda: ["-pthread", "-ldl"], recipe.ANOTHER
)  # fmt: skip
PATH = Module(
    "_path", "path", recipe.find_cxx_and_torch, recipe.torch_flags, recipe.torch_libraries,
    recipe.ANOTHER, needs="torch",
)  # fmt: skip
STEP = PATH._replace(name="_step", folder="step")
CUDA = Module(
    "_C", "cuda", find_nvcc, nvcc_flags, lambda: ["-cudart", "static"],
    "NVCC_PREPEND_FLAGS='-ccbin ...' chooses another host compiler",
)  # fmt: skip
MODULES = HOST, PATH, STEP, CUDA


def escape(text: str | Path) -> str:
    """A path or a word in ninja's syntax."""
    return re.sub(r"([$ :])", r"$\1", str(text))


def dollars(text: str) -> str:
    """What the shell is to see, in ninja's syntax."""
    return text.replace("$", "$$")


def mirror(folder: str, to: Path) -> None:
    """A copy of the module's sources in which what has another content, and nothing else, is new.

    A compiler is asked only for what is new, and an archive that is unpacked over a checkout holds
    files that are older than the last build.
    """
    paths = [path for of in (SOURCES, SOURCES / folder) for path in of.glob("*.*")]
    wanted = {to / path.relative_to(SOURCES): path.read_bytes() for path in paths if path.is_file()}
    for old in set(to.rglob("*.*")) - wanted.keys():
        old.unlink()
    for path, content in wanted.items():
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def write_ninja(folder: Path, module: Module, compiler: str) -> None:
    """build.ninja: every *.cu and *.cpp of the module's folder of csrc/, of which there is a copy."""
    copy = folder / "csrc"
    # A header that is new may take the place of one that was found elsewhere: all is compiled again.
    headers = sorted(
        str(p.relative_to(copy)) for p in copy.rglob("*.*") if p.suffix not in recipe.UNITS
    )
    names = f"-DFASTCLIP_HEADERS={zlib.crc32('/'.join(headers).encode())}"
    plain = recipe.plain_flags(copy, find_pybind11())
    flags = " ".join(map(shlex.quote, (*plain, *module.flags(), names)))
    lines = [f"compiler = {dollars(compiler)}", f"flags = {dollars(flags)}"]
    lines.append(f"libraries = {dollars(shlex.join(module.libraries()))}")
    lines.append(RULES)
    objects, mark = [], recipe.mark_of(module.folder, copy)
    for unit in recipe.units_of(copy / module.folder):
        objects.append(escape(f"{unit.name}.o"))
        lines.append(f"build {objects[-1]}: compile {escape(unit)}")
        for flag in recipe.mark_flag(unit, mark):
            lines.append(f"  flags = $flags {shlex.quote(flag)}")
    lines.append(f"build {module.name}.so: link {' '.join(objects)}")
    (folder / "build.ninja").write_text("\n".join(lines) + "\n")


def build(folder: Path, module: Module) -> Path:
    """Compile what has changed; the module's path.

    Raises:
        NotBuilt: no compiler, one that is too old, or an error of the compiler.
    """
    recipe.check_system()
    compiler, ninja = module.find(), find_ninja()
    import fcntl  # Linux has it, and so has whoever comes this far

    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two builds of one checkout
        mirror(module.folder, folder / "csrc")
        write_ninja(folder, module, compiler)
        # The lock is held as long as anyone writes there, should this process be killed.
        command = [ninja, "-C", str(folder), "-j", str(os.cpu_count() or 1)]
        done = subprocess.run(command, pass_fds=[lock.fileno()])
    if done.returncode != 0:
        raise NotBuilt(
            f"csrc/{module.folder} did not compile with {compiler}: the compiler's message is above "
            f"(with pip: pip install -v); {module.other_compiler}"
        )
    return folder / f"{module.name}.so"


def versions_of(path: Path, needs: str = "sys") -> str:
    """Import a module by its path alone and ask it what it was built for.

    Raises:
        NotBuilt: it cannot be imported.
    """
    try:
        importlib.import_module(needs)
        versions = imported(path).versions()
        return ", ".join(f"{name} {value}" for name, value in versions.items())
    except ImportError as error:
        raise NotBuilt(f"the module is compiled and cannot be imported: {error}") from error


class BuildModules(build_ext):
    """Builds the modules of csrc/ with ninja and their compilers, or says why not."""

    def run(self) -> None:
        """What fails is an error after all was tried, and where the build was asked for."""
        if os.environ.get("FASTCLIP_BUILD") == "0":
            print("the modules of csrc/ are left out: FASTCLIP_BUILD=0")
            if not self.inplace:  # what an earlier build has left would be packed
                for module in MODULES:
                    self.path_of(module).unlink(missing_ok=True)
            return
        failed = [module for module in MODULES if not self.build_module(module)]
        if failed and os.environ.get("FASTCLIP_BUILD") == "strict":
            raise SystemExit(1)

    def path_of(self, module: Module) -> Path:
        """Where it is to lie."""
        return Path(self.get_ext_fullpath(f"fastclip.{module.name}")).resolve()

    def build_module(self, module: Module) -> bool:
        """Whether it is there now, or there is nothing to build it with."""
        name = f"fastclip.{module.name}"
        target = self.path_of(module)
        kept = ROOT / "build" / f"{module.folder}-{sys.implementation.cache_tag}"
        try:
            path = build(kept, module)
            versions = versions_of(path, module.needs)
            target.parent.mkdir(parents=True, exist_ok=True)
            fresh = target.with_suffix(f".{os.getpid()}.new")
            shutil.copyfile(path, fresh)
            os.replace(fresh, target)  # a process that has the old one loaded keeps it
        except (NotBuilt, OSError) as reason:
            target.unlink(missing_ok=True)  # one of older sources must not serve
            print(f"{name} is not built: {reason}", file=sys.stderr)
            return isinstance(reason, NoCompiler)
        print(f"{name}: {versions}")
        return True


class BuildPackage(build_py):
    """Packs the sources of what fits one torch alone; fastclip.core.building compiles them."""

    def run(self) -> None:
        """As ever, and these files."""
        super().run()
        if self.editable_mode:  # they are where they are
            return
        packed = Path(self.build_lib) / "fastclip" / "_csrc"
        shutil.rmtree(packed, ignore_errors=True)  # of an earlier build
        for module in (PATH, STEP):
            for path in recipe.files_of(module.folder, SOURCES):
                to = packed / path.relative_to(SOURCES)
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, to)


if __name__ == "__main__":  # setuptools and pip run this file as a program
    setup(
        packages=find_packages(include=["fastclip", "fastclip.*"]),
        ext_modules=[
            Extension(f"fastclip.{module.name}", sources=[], optional=True) for module in MODULES
        ],
        cmdclass={"build_ext": BuildModules, "build_py": BuildPackage},
    )
