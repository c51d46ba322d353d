"""Processes that a program starts under `python -m fastclip.opacus` have this engine, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = "from opacus import PrivacyEngine as E; from opacus.optimizers import DPOptimizer as D"
TELL = "print(sys.argv[-1], *{k.__module__.partition('.')[0] for k in (E, D)}, flush=True)"

SPAWNS = f"""
import subprocess, sys
from torch import multiprocessing as mp
def work(number):
    {NAMES}
    {TELL.replace("sys.argv[-1]", "number")}
if __name__ == "__main__":
    mp.spawn(work, nprocs=1)
"""
STARTS = f"""
import subprocess, sys
code = "import sys; assert 'fastclip' not in sys.modules; {NAMES}; {TELL}"
subprocess.run([sys.executable, "-c", code, "0"], check=True)
"""
LATER = f"""
import subprocess, sys
code = "import sys, opacus.accountants; {NAMES}; {TELL}"
subprocess.run([sys.executable, "-c", code, "0"], check=True)
"""
WITHOUT = """
import subprocess, sys
code = "import sys, json; print(0, 'fastclip' if 'torch' not in sys.modules else 'torch')"
subprocess.run([sys.executable, "-c", code], check=True)
"""
KINDS = {"spawn": SPAWNS, "subprocess": STARTS, "a part first": LATER, "without opacus": WITHOUT}


def said(script: str, folder: Path, paths: str = str(ROOT), *settings: str) -> str:
    (folder / "program.py").write_text(script)
    command = [sys.executable, "-W", "ignore", "-m", "fastclip.opacus", *settings, "program.py"]
    environment = {"PYTHONPATH": paths, "PATH": "/usr/bin:/bin", "FASTCLIP_BUILD": "0"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert not done.returncode, done.stderr
    return done.stdout.strip()


@pytest.mark.extras
@pytest.mark.parametrize("kind", KINDS)
def test_children(kind: str, tmp_path: Path) -> None:
    assert said(KINDS[kind], tmp_path) == "0 fastclip"


@pytest.mark.extras
def test_another_sitecustomize_runs(tmp_path: Path) -> None:
    """Of an environment that has its own: children run it as before."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import sys; sys.argv_of_site = 'own'")
    code = f"import sys; {NAMES}; print(sys.argv_of_site, E.__module__.partition('.')[0])"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}], check=True)"
    assert said(script, tmp_path, f"{own}:{ROOT}") == "own fastclip"


@pytest.mark.extras
def test_settings_reach_children(tmp_path: Path) -> None:
    """--set gives every make_private a keyword, in the processes that the program starts, too."""
    code = f"import sys; {NAMES}; from fastclip.opacus import engine; print(engine.DEFAULTS)"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}], check=True)"
    settings = [
        "--set",
        "model_loss=per_sample",
        "--set",
        "clipping=automatic",
        "--set",
        "gamma=0.0",
    ]
    found = said(script, tmp_path, str(ROOT), *settings)
    assert found == str({"model_loss": "per_sample", "clipping": "automatic", "gamma": 0.0})
