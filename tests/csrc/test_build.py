"""How fastclip._C is built, and that what cannot be built is said and stands in nobody's way."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shutil
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

import fastclip
from fastclip import doctor
from fastclip.errors import how_to_build
from fastclip.ops import dispatch

ROOT = Path(__file__).resolve().parents[2]
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")


def built() -> Path:
    """The module's file, without importing it or torch."""
    found = importlib.util.find_spec("fastclip._C")
    if found is None:
        pytest.skip("fastclip._C is not built")
    assert found.origin is not None
    return Path(found.origin)


@needs_nvcc
def test_it_is_built_where_it_can_be() -> None:
    """Or the tests of csrc/ would be left out without a word."""
    assert importlib.util.find_spec("fastclip._C") is not None, "run `make build`"


def test_its_absence_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastclip._C", None)
    monkeypatch.delattr(fastclip, "_C", raising=False)
    monkeypatch.delattr(fastclip, "cuda", raising=False)
    # what is found missing here is not missing afterwards
    monkeypatch.setattr(dispatch, "_STATE", dispatch._State(dispatch._STATE.requested))
    for name in [name for name in sys.modules if name.startswith("fastclip.cuda")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r"fastclip\._C is not built .*`make build` with nvcc"):
        importlib.import_module("fastclip.cuda")
    assert "`make build`" in doctor.report(doctor.examine())


def test_a_wheel_has_no_makefile(tmp_path: Path) -> None:
    """Where it was installed from one, the way out is the source distribution."""
    told = how_to_build(tmp_path / "site-packages" / "fastclip")
    assert told.startswith("reinstall fastclip from its source distribution with nvcc on PATH")
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
    sources = len(list((ROOT / "csrc").glob("*.cu")))
    wanted = {("sm", 80), ("sm", 90), ("compute", 90)}
    assert wanted <= set(counts), counts
    assert {counts[kind] for kind in wanted} == {sources}, counts


def test_versions() -> None:
    from fastclip import _C

    found = _C.versions()
    assert found["architectures"] == ["sm_80", "sm_90", "compute_90"]
    assert found["cudart"] >= 12010
    assert found["driver"] >= 0


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


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_any_compiler_takes_the_random_numbers(tmp_path: Path) -> None:
    """csrc/random.cuh without CUDA, without warnings, and the same numbers."""
    (tmp_path / "plain.cpp").write_text(PLAIN)
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{ROOT / 'csrc'}"]
    program = tmp_path / "plain"
    subprocess.run(["g++", *flags, tmp_path / "plain.cpp", "-o", program], check=True)
    text = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    words, values = ([*map(float, line.split())] for line in text.split("\n"))
    built()
    import torch

    from fastclip._C import testing
    from tests.csrc.drawing import fill

    index = 1 << 33 | 5
    assert words[:16] == testing.chacha20_words(list(range(1, 9)), index)
    assert words[16:] == testing.philox_words([1, 2, 3, 4], index)
    guarded, plain = torch.zeros(4096), torch.zeros(4096, dtype=torch.float64)
    key = struct.pack("<8I", *range(1, 9))
    fill("chacha20", [guarded], key, guarded=True)
    fill("philox", [plain], key)
    # the first thread's four runs of four neighbours
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
    for name in ("CUDA_HOME", "CUDA_PATH"):
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


@needs_nvcc
def test_what_changes_is_compiled_again(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A header's change reaches the sources that include it, and no other; new sources join."""
    sources, folder = tmp_path / "with space", tmp_path / "build"
    sources.mkdir()
    (sources / "value.hpp").write_text("inline int value() { return 1; }\n")
    (sources / "uses.cpp").write_text('#include "value.hpp"\nint uses() { return value(); }\n')
    (sources / "other.cpp").write_text("int other() { return 2; }\n")
    monkeypatch.setattr(setup, "SOURCES", sources)

    def times() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in folder.glob("*o")}

    module = setup.build(folder)
    assert module.exists()
    first = times()
    setup.build(folder)
    assert times() == first
    (sources / "value.hpp").write_text("inline int value() { return 3; }\n")
    setup.build(folder)
    second = times()
    changed = {name for name in first if first[name] != second[name]}
    assert changed == {"uses.cpp.o", "_C.so"}
    (sources / "new.cpp").write_text("int more() { return 4; }\n")
    setup.build(folder)
    assert "new.cpp.o" in times()
    with pytest.raises(setup.NotBuilt, match="cannot be imported"):
        setup.versions_of(module)


def checkout(folder: Path, source: str) -> Path:
    """A small copy of the project, with one source of its own, and an extension of an older build."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for package in ("fastclip", "csrc"):
        (folder / package).mkdir()
    (folder / "fastclip" / "__init__.py").touch()
    (folder / "csrc" / "only.cpp").write_text(source)
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    stale = folder / "fastclip" / f"_C{suffix}"
    stale.write_text("of older sources")
    return stale


@pytest.mark.parametrize(
    ("wish", "nvcc", "said", "code"),
    [
        ("", None, "fastclip._C is not built: csrc/ did not compile", 0),
        ("strict", None, "fastclip._C is not built: csrc/ did not compile", 1),
        ("", nvcc_of("10.2"), "is CUDA 10.2: install 12.1 or newer", 0),
        ("strict", nvcc_of("10.2"), "is CUDA 10.2: install 12.1 or newer", 1),
        ("0", None, "fastclip._C is left out: FASTCLIP_BUILD=0", 0),
    ],
)
def test_an_installation_goes_on(
    wish: str, nvcc: str | None, said: str, code: int, tmp_path: Path
) -> None:
    """One sentence says why there is no extension; an old one does not stay; `make build` fails."""
    if nvcc is None and wish != "0" and shutil.which("nvcc") is None:
        pytest.skip("no nvcc")
    stale = checkout(tmp_path, "this is no C++\n")
    path = os.environ["PATH"]
    if nvcc is not None:
        path = f"{program(tmp_path / 'bin' / 'nvcc', nvcc).parent}:{path}"
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"], cwd=tmp_path,
        env={**os.environ, "FASTCLIP_BUILD": wish, "PATH": path},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    lines = (done.stdout + done.stderr).splitlines()
    assert sum(said in line for line in lines) == 1, lines
    assert stale.exists() == (wish == "0")
