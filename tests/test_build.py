"""How the modules of csrc/ are built, and that one that cannot be is told and stands in nobody's way."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

import fastclip
from fastclip import doctor, ops
from fastclip.core import build_recipe
from fastclip.core.building import check_built, how_to_build
from fastclip.ops import dispatch

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"_host": "host", "_path": "path", "_step": "step", "_C": "cuda"}
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
needs_cxx = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
of_each = pytest.mark.parametrize(
    "module",
    [
        pytest.param("_host", marks=needs_cxx),
        pytest.param("_path", marks=needs_cxx),
        pytest.param("_step", marks=needs_cxx),
        pytest.param("_C", marks=needs_nvcc),
    ],
)


def built(module: str = "_C") -> Path:
    """The module's file, without importing it or torch."""
    found = importlib.util.find_spec(f"fastclip.{module}")
    if found is None:
        pytest.skip(f"fastclip.{module} is not built")
    assert found.origin is not None
    return Path(found.origin)


@of_each
def test_it_is_built_where_it_can_be(module: str) -> None:
    """Or the tests of csrc/ would be left out without a word."""
    assert importlib.util.find_spec(f"fastclip.{module}") is not None, "run `make build`"


@pytest.mark.parametrize(
    ("module", "package", "compiler"),
    [("_C", "cuda", "nvcc"), ("_host", "host", r"a C\+\+ compiler")],
)
def test_its_absence_names_the_way_out(
    module: str, package: str, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = f"fastclip.ops.{package}"
    monkeypatch.setitem(sys.modules, f"fastclip.{module}", None)
    monkeypatch.delitem(vars(fastclip), module, raising=False)
    monkeypatch.delitem(vars(ops), package.rpartition(".")[2], raising=False)
    # what is found missing here is not missing afterwards
    monkeypatch.setattr(dispatch, "_STATE", dispatch._State(dispatch._STATE.requested))
    for name in [name for name in sys.modules if name.startswith(package)]:
        monkeypatch.delitem(sys.modules, name)
    said = rf"fastclip\.{module} is not built .*`make build` with {compiler}"
    with pytest.raises(ImportError, match=said):
        importlib.import_module(package)
    assert re.search(said, doctor.report(doctor.examine()))
    with_loops = module == "_C" and importlib.util.find_spec("fastclip._host") is not None
    assert dispatch.has_loops("draw_normals") == with_loops


@of_each
def test_it_is_of_the_sources_that_are_here(module: str) -> None:
    folder = FOLDERS[module]
    check_built(module, folder, "")
    found = importlib.import_module(f"fastclip.{module}").versions()["sources"]
    assert found == build_recipe.mark_of(folder)


@pytest.mark.parametrize("told", [{"sources": "0123456789abcdef"}, {}], ids=["another", "before"])
@pytest.mark.parametrize(("module", "package"), [("_C", "cuda"), ("_host", "host")])
def test_one_of_other_sources_is_refused(
    module: str, package: str, told: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launchers believe that it does what the sources say."""
    old = ModuleType(f"fastclip.{module}")
    old.versions = lambda: told  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, f"fastclip.{module}", old)
    monkeypatch.setattr(fastclip, module, old, raising=False)
    monkeypatch.delitem(vars(ops), package, raising=False)
    monkeypatch.setattr(dispatch, "_STATE", dispatch._State(dispatch._STATE.requested))
    for name in [name for name in sys.modules if name.startswith(f"fastclip.ops.{package}")]:
        monkeypatch.delitem(sys.modules, name)
    said = rf"fastclip\.{module} was built from other sources than csrc/{package} has now"
    with pytest.warns(UserWarning, match=said):
        assert dispatch._load(package) == {}
    assert re.search(said, dispatch._STATE.why_not[package])


def test_what_the_mark_tells(tmp_path: Path) -> None:
    """Any source of the module or shared header, by its name and content; nothing else."""
    for name in ("both.hpp", "host/a.cpp", "host/b.inc", "cuda/c.cu"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    first = build_recipe.mark_of("host", tmp_path)
    assert build_recipe.is_current("host", first, tmp_path)
    (tmp_path / "cuda" / "c.cu").write_text("other")
    (tmp_path / "host" / "notes.txt").write_text("other")
    (tmp_path / "host" / ".#a.cpp").symlink_to("nowhere")  # an editor's
    assert build_recipe.mark_of("host", tmp_path) == first
    marks = {first}
    for name in ("both.hpp", "host/a.cpp", "host/b.inc"):
        (tmp_path / name).write_text("other")
        marks.add(build_recipe.mark_of("host", tmp_path))
    (tmp_path / "host" / "a.cpp").rename(tmp_path / "host" / "d.cpp")
    marks.add(build_recipe.mark_of("host", tmp_path))
    assert len(marks) == 5
    assert not build_recipe.is_current("host", first, tmp_path)
    assert build_recipe.is_current("host", "", tmp_path / "an installed package has none")


def test_a_wheel_has_no_makefile(tmp_path: Path) -> None:
    """Where it was installed from one, the way out is the source distribution."""
    told = how_to_build("nvcc", tmp_path / "site-packages" / "fastclip")
    assert told.startswith("Reinstall fastclip from its source distribution with nvcc on PATH")
    assert "make" not in told


# ---- What was built -------------------------------------------------------------------------------


def fat_binary(path: Path) -> Counter[tuple[str, int]]:
    """Kinds and architectures of the code in a file, from the headers of its fat binaries.

    A fat binary begins with a magic number, its header's size and its own; entries follow, each with
    its kind (1: PTX, 2: machine code), header's size, payload's size and, at byte 28, architecture.
    """
    data, found = path.read_bytes(), Counter[tuple[str, int]]()
    magic = struct.pack("<I", 0xBA55ED50)
    at = data.find(magic)
    while at >= 0:
        header, size = struct.unpack_from("<HQ", data, at + 6)
        entry, end = at + header, at + header + size
        while entry < end:
            kind, _, entry_header, payload = struct.unpack_from("<HHIQ", data, entry)
            (architecture,) = struct.unpack_from("<I", data, entry + 28)
            found[{1: "compute", 2: "sm"}.get(kind, "other"), architecture] += 1
            entry += entry_header + payload
        at = data.find(magic, end)
    return found


def test_every_source_has_code_for_all_architectures() -> None:
    counts = fat_binary(built())
    sources = len(list((ROOT / "csrc" / "cuda").glob("*.cu")))
    wanted = {("sm", 80), ("sm", 90), ("compute", 90)}
    assert wanted <= set(counts), counts
    assert {counts[kind] for kind in wanted} == {sources}, counts


def test_versions() -> None:
    from fastclip import _C

    found = _C.versions()
    assert found["architectures"] == ["sm_80", "sm_90", "compute_90"]
    assert found["cudart"] >= 12010
    assert found["driver"] >= 0


def test_loops_for_the_cpu_know_their_compiler() -> None:
    host = pytest.importorskip("fastclip._host")
    assert re.match(r"(GCC|Clang) \d+", host.versions()["compiler"])


ALONE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_C", sys.argv[1])
core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(core)
assert "torch" not in sys.modules
assert core.device_count() == 0, core.device_count()
rows = [(0, 4096, 10, 0)]
how = dict(rows=rows, std=1.0, device_std=0, divisor=1.0, guarded=False, device=0, stream=0)
launches = [
    lambda: core.noise_silent(rows=rows, divisor=1.0, device=0, stream=0),
    lambda: core.noise_philox(seed=4096, **how),
    lambda: core.noise_chacha20(key=bytes(32), **how),
]
for launch in launches * 2:  # nothing of the first failure is left for the second
    try:
        launch()
    except core.CudaError as error:
        assert isinstance(error, RuntimeError)
        print(error)
    else:
        raise AssertionError("launched without a device")
"""


def test_without_a_device_it_imports_and_launches_raise() -> None:
    """In a process of its own: no torch, no device, and an address that nobody owns."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(built())],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    messages = done.stdout.splitlines()
    assert len(messages) == 6
    for message in messages:  # function, code, description, what for
        assert "returned cudaError" in message
        assert "(" in message
        assert message.endswith("at: noise")


PLAIN = r"""
#include <cstdio>
#include "random.cuh"
int main() {
  using namespace fastclip;
  const ChaCha20 chacha{{1, 2, 3, 4, 5, 6, 7, 8}};
  const Philox philox{{1, 2}, {3, 4}};
  uint32_t words[kBlockWords];
  chacha.block(1ull << 33 | 5, words);
  for (uint32_t word : words) std::printf("%u ", word);
  philox.block(1ull << 33 | 5, words);
  for (uint32_t word : words) std::printf("%u ", word);
  float guarded[16];
  double plain[16];
  draw_normals<true>(chacha, 0, guarded);
  draw_normals<false>(philox, 0, plain);
  std::printf("\n");
  for (float x : guarded) std::printf("%.9g ", x);
  for (double x : plain) std::printf("%.17g ", x);
}
"""


@needs_cxx
def test_any_compiler_takes_the_random_numbers(tmp_path: Path) -> None:
    """csrc/cuda/random.cuh without CUDA, without warnings, and the same numbers."""
    (tmp_path / "plain.cpp").write_text(PLAIN)
    flags = [
        "-std=c++17",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Wpedantic",
        "-Werror",
        f"-I{ROOT / 'csrc' / 'cuda'}",
    ]
    program = tmp_path / "plain"
    subprocess.run(["g++", *flags, tmp_path / "plain.cpp", "-o", program], check=True)
    text = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    words, values = ([*map(float, line.split())] for line in text.split("\n"))
    built()
    import torch

    from fastclip._C import testing
    from tests.ops.cuda.drawing import fill

    index = 1 << 33 | 5
    assert words[:16] == testing.chacha20_words(list(range(1, 9)), index)
    assert words[16:] == testing.philox_words([1, 2, 3, 4], index)
    guarded, plain = torch.zeros(4096), torch.zeros(4096, dtype=torch.float64)
    key = struct.pack("<8I", *range(1, 9))
    fill("chacha20", [guarded], key, guarded=True)
    fill("philox", [plain], key)
    # the first thread's four runs of four neighbors
    runs = [i + j for i in range(0, 4096, 1024) for j in range(4)]
    assert values[:16] == pytest.approx(guarded[runs].tolist(), rel=1e-6)
    assert values[16:] == pytest.approx(plain[runs].tolist(), rel=1e-14)


# ---- How it is built ------------------------------------------------------------------------------


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """setup.py as a module."""
    spec = importlib.util.spec_from_file_location("fastclip_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)
    return module


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def nvcc_of(release: str) -> str:
    return f"echo 'Cuda compilation tools, release {release}, V{release}.1'"


def test_no_compiler(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup.shutil, "which", lambda *_args, **_kwargs: None)
    with pytest.raises(setup.NoCompiler, match="install the CUDA toolkit or put its bin on PATH"):
        setup.find_nvcc()
    with pytest.raises(setup.NoCompiler, match="Install g\\+\\+"):
        setup.find_cxx()


def test_the_compiler_that_is_named(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With its arguments; another one does not take its place."""
    path = program(tmp_path / "my tools" / "cxx", "")
    monkeypatch.setenv("CXX", f"'{path}' -O1")
    assert setup.find_cxx() == f"'{path}' -O1"
    path.unlink()
    with pytest.raises(setup.NotBuilt, match=r"is not on PATH\. Set CXX to a C\+\+ compiler"):
        setup.find_cxx()


def test_the_compilers_place_and_age(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvcc = program(tmp_path / "bin" / "nvcc", nvcc_of("12.1"))
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert setup.find_nvcc() == str(nvcc)
    for release in ("10.2", "11.8", "12.0"):
        program(nvcc, nvcc_of(release))
        with pytest.raises(setup.NotBuilt, match=rf"is CUDA {release}: install 12.1 or newer"):
            setup.find_nvcc()
    program(nvcc, "echo nothing of the kind")
    with pytest.raises(setup.NotBuilt, match="does not tell its release"):
        setup.find_nvcc()


@of_each
def test_what_changes_is_compiled_again(
    module: str, setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A header's change reaches the sources that include it, and no other; new sources join."""
    chosen = next(each for each in setup.MODULES if each.name == module)
    root, folder = tmp_path / "with space", tmp_path / "a build"
    of_module = root / chosen.folder
    of_module.mkdir(parents=True)
    (root / "value.hpp").write_text("inline int value() { return 1; }\n")
    (of_module / "uses.cpp").write_text('#include "value.hpp"\nint uses() { return value(); }\n')
    (of_module / "other.cpp").write_text("int other() { return 2; }\n")
    monkeypatch.setattr(setup, "SOURCES", root)

    def times() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in folder.glob("*o")}

    path = setup.build(folder, chosen)
    assert path.exists()
    first = times()
    setup.build(folder, chosen)
    assert times() == first
    (root / "value.hpp").write_text("inline int value() { return 3; }\n")
    setup.build(folder, chosen)
    second = times()
    changed = {name for name in first if first[name] != second[name]}
    assert changed == {"uses.cpp.o", f"{module}.so"}
    # of an archive that is unpacked over the sources, and older than the last build
    (of_module / "other.cpp").write_text("int other() { return 5; }\n")
    os.utime(of_module / "other.cpp", (0, 0))
    setup.build(folder, chosen)
    third = times()
    changed = {name for name in second if second[name] != third[name]}
    assert changed == {"other.cpp.o", f"{module}.so"}
    (of_module / "new.cpp").write_text("int more() { return 4; }\n")
    setup.build(folder, chosen)
    assert "new.cpp.o" in times()
    (of_module / "new.cpp").unlink()
    (of_module / ".#uses.cpp").symlink_to("nowhere")  # an editor's
    setup.build(folder, chosen)
    assert "new.cpp" not in (folder / "build.ninja").read_text()
    with pytest.raises(setup.NotBuilt, match="cannot be imported"):
        setup.versions_of(path)


def checkout(folder: Path, source: str) -> list[Path]:
    """A small copy of the project, with sources of its own, and the modules of an older build."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name, part in FOLDERS.items():
        (folder / "csrc" / part).mkdir(parents=True)
        (folder / "csrc" / part / "only.cpp").write_text(source.replace("_NAME", name))
    (folder / "fastclip" / "core").mkdir(parents=True)
    (folder / "fastclip" / "__init__.py").write_text('__version__ = "0.1.0"\n')
    shutil.copy(ROOT / "fastclip/core/build_recipe.py", folder / "fastclip/core/build_recipe.py")
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    stale = [folder / "fastclip" / f"{name}{suffix}" for name in FOLDERS]
    for path in stale:
        path.write_text("of older sources")
    return stale


def build_in(folder: Path, *options: str, **environment: str) -> tuple[int, list[str]]:
    """The exit code of a build there, and all that it said."""
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", *(options or ("--inplace",))], cwd=folder,
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return done.returncode, (done.stdout + done.stderr).splitlines()


@of_each
def test_a_header_in_the_place_of_another(
    module: str, setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All is compiled again: a compiler would find the new one first."""
    chosen = next(each for each in setup.MODULES if each.name == module)
    root, folder = tmp_path / "csrc", tmp_path / "build"
    (root / chosen.folder).mkdir(parents=True)
    (root / "value.hpp").write_text("inline int value() { return 1; }\n")
    (root / chosen.folder / "uses.cpp").write_text(
        '#include "value.hpp"\nint uses() { return value(); }\n'
    )
    monkeypatch.setattr(setup, "SOURCES", root)
    setup.build(folder, chosen)
    first = (folder / "uses.cpp.o").stat().st_mtime_ns
    (root / chosen.folder / "value.hpp").write_text("inline int value() { return 2; }\n")
    setup.build(folder, chosen)
    assert (folder / "uses.cpp.o").stat().st_mtime_ns != first


@needs_cxx
def test_a_killed_build_is_waited_for(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its compilers go on, and hold the lock."""
    import fcntl

    (tmp_path / "csrc" / "host").mkdir(parents=True)
    (tmp_path / "csrc" / "host" / "only.cpp").write_text("int only() { return 1; }\n")
    monkeypatch.setattr(setup, "SOURCES", tmp_path / "csrc")
    held = []

    def run(command: list[str], pass_fds: list[int]) -> subprocess.CompletedProcess:
        going_on = subprocess.Popen(["sleep", "60"], pass_fds=pass_fds)
        held.append(going_on)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(setup.subprocess, "run", run)
        with pytest.raises(KeyboardInterrupt):
            setup.build(tmp_path / "build", setup.HOST)
    with open(tmp_path / "build" / "lock") as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held[0].kill()
        held[0].wait()
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_wheel_without_modules_has_none_of_an_earlier_build(tmp_path: Path) -> None:
    checkout(tmp_path, "")
    packed = tmp_path / "build" / "lib" / "fastclip"
    packed.mkdir(parents=True)
    for name in FOLDERS:
        (packed / f"{name}{importlib.machinery.EXTENSION_SUFFIXES[0]}").write_text("older")
    code, lines = build_in(tmp_path, "--build-lib", "build/lib", FASTCLIP_BUILD="0")
    assert code == 0, lines
    assert not [*packed.iterdir()]


@pytest.mark.parametrize(
    ("cxx", "said"), [("'g++ -O1", "is not a valid command"), ("nothing-there", "is not on PATH")]
)
def test_a_compiler_that_is_none(cxx: str, said: str, tmp_path: Path) -> None:
    stale = checkout(tmp_path, "int only() { return 1; }\n")
    nvcc = tmp_path / "bin" / "nvcc"
    program(nvcc, "").write_text("no program")
    path = f"{nvcc.parent}:{os.environ['PATH']}"
    code, lines = build_in(tmp_path, FASTCLIP_BUILD="", CXX=cxx, PATH=path)
    assert code == 0, lines
    assert sum(said in line for line in lines) == 3, lines  # of the modules that ask for one
    assert sum("nvcc cannot be run" in line for line in lines) == 1, lines
    assert not any(map(Path.exists, stale))


@needs_nvcc
@needs_cxx
@pytest.mark.parametrize(
    ("wish", "nvcc", "said", "code"),
    [
        (
            "",
            None,
            [f"{name} is not built: csrc/{folder} did" for name, folder in FOLDERS.items()],
            0,
        ),
        (
            "strict",
            None,
            [f"{name} is not built: csrc/{folder} did" for name, folder in FOLDERS.items()],
            1,
        ),
        ("", nvcc_of("10.2"), ["is CUDA 10.2: install 12.1 or newer"], 0),
        ("strict", nvcc_of("10.2"), ["is CUDA 10.2: install 12.1 or newer"], 1),
        ("0", None, ["the modules of csrc/ are left out: FASTCLIP_BUILD=0"], 0),
    ],
)
def test_an_installation_goes_on(
    wish: str, nvcc: str | None, said: list[str], code: int, tmp_path: Path
) -> None:
    """One sentence says why a module is not there; an old one does not stay; `make build` fails."""
    stale = checkout(tmp_path, "this is no C++\n")
    path = os.environ["PATH"]
    if nvcc is not None:
        path = f"{program(tmp_path / 'bin' / 'nvcc', nvcc).parent}:{path}"
    found, lines = build_in(tmp_path, FASTCLIP_BUILD=wish, PATH=path)
    assert found == code, lines
    for sentence in said:
        assert sum(sentence in line for line in lines) == 1, lines
    assert {path.exists() for path in stale} == {wish == "0"}


LEAST_MODULE = """
#include <pybind11/pybind11.h>
PYBIND11_MODULE(_NAME, module) {
  module.def("versions", [] { return pybind11::dict(pybind11::arg("compiler") = __VERSION__); });
}
"""


@pytest.mark.extras
@needs_cxx
def test_the_loops_ask_for_no_nvcc(tmp_path: Path) -> None:
    """A C++ compiler makes them; that there is nothing to build the other module with is no error."""
    *loops, of_cuda = checkout(tmp_path, LEAST_MODULE)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("g++", "as", "ld"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    path = f"{Path(sys.executable).parent}:{tools}"
    assert not shutil.which("nvcc", path=path)
    text = (tmp_path / "setup.py").read_text()
    (tmp_path / "setup.py").write_text(text.replace('"/usr/local/cuda"', "str(ROOT)"))
    code, lines = build_in(
        tmp_path, FASTCLIP_BUILD="strict", PATH=path, CUDA_HOME="", CUDA_PATH="", CXX=""
    )
    assert code == 0, lines
    assert any("fastclip._C is not built: there is no nvcc" in line for line in lines)
    assert any(line.startswith("fastclip._host: compiler ") for line in lines)
    assert all(map(Path.exists, loops))
    assert not of_cuda.exists()
