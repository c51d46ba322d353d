"""Several ranks (gloo, processes of this machine) that run one function, and what each returned.

Ranks are forks of one server a test process, which has imported once and trains nothing itself: each
would import torch, Opacus and what the function needs for seconds. How a launcher starts processes is
tested apart (test_faults.py, `torchrun`).
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, TextIO

import numpy as np
import torch
from torch import distributed

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240
_TICK = 0.02
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Of libraries that start threads while they are imported; a fork has none of them."""
_save = torch.save


def run(world: int, name: str, folder: Path, *arguments: str) -> list[Any]:
    """Run `name` ("module:function") with these arguments on so many ranks.

    Returns:
        What the function returned on each rank, as torch saves it.
    """
    said = ended(world, name, folder, *arguments)
    assert not any(code for code, _ in said), "\n".join(text for _, text in said)
    return [returned(folder, rank) for rank in range(world)]


def ended(world: int, name: str, folder: Path, *arguments: str) -> list[tuple[int, str]]:
    """The same where ranks may fail: the exit code of each, and what it has said."""
    request = {
        "world": world, "name": name, "folder": str(folder), "arguments": arguments,
        "environment": dict(os.environ),
    }  # fmt: skip
    answers = _server()(request)
    if any(code is None for code, _ in answers):
        said = "\n".join(text for _, text in answers)
        raise TimeoutError(f"{name} on {world} ranks: no end after {SECONDS} s\n{said}")
    return [(code, text) for code, text in answers]


def returned(folder: Path, rank: int) -> Any:
    """What the function returned on this rank."""
    return torch.load(folder / f"{rank}.pt", weights_only=True)


def as_torchrun() -> None:
    """The environment that torchrun gives its processes; the process group is there already."""
    mine, ranks = str(distributed.get_rank()), str(distributed.get_world_size())
    os.environ.update(RANK=mine, LOCAL_RANK=mine, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
    os.environ.update(GROUP_RANK="0", TORCHELASTIC_RUN_ID="0")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")  # asked for, and not used


@functools.cache
def _server() -> Callable[[dict[str, Any]], list[tuple[Any, str]]]:
    """Starts the server of this process; it ends with it.

    Returns:
        A function from a request to the exit code of each rank (None where its time was up) and to
        what the rank has said.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.distributed.world"], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, **dict.fromkeys(_THREADS, "1")},
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    requests, answers = process.stdin, process.stdout

    def ask(request: dict[str, Any]) -> list[tuple[Any, str]]:
        print(json.dumps(request), file=requests, flush=True)
        answer = answers.readline()
        assert answer, "the server of ranks has ended; what it said is in the captured output"
        return json.loads(answer)

    def end() -> None:
        requests.close()
        process.wait()  # so that its time counts as that of this process' children

    atexit.register(end)
    return ask


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer requests, one a line, until there are no more."""
    torch.set_num_threads(1)
    for line in requests:
        request = json.loads(line)
        with suppress(Exception):  # each rank fails by the same error, and says so
            import_module(request["name"].partition(":")[0])
        threads = os.listdir("/proc/self/task")
        assert len(threads) == 1, f"a fork has one thread alone, and importing started {threads}"
        with ExitStack() as files:
            said = [files.enter_context(TemporaryFile("w+")) for _ in range(request["world"])]
            ranks = [_forked(rank, request, file) for rank, file in enumerate(said)]
            found = list(zip(_codes(ranks), map(_text, said), strict=True))
        print(json.dumps(found), file=answers, flush=True)


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _forked(rank: int, request: dict[str, Any], said: IO[str]) -> int:
    """The number of a process that is this rank, and says what it says into the file."""
    process = os.fork()
    if process:
        return process
    try:
        os.environ.clear()
        os.environ.update(request["environment"])
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        np.random.seed()  # as a process of its own; Python's own generator does so by itself
        main(rank, request["world"], request["folder"], request["name"], *request["arguments"])
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's threads abort an interpreter that ends now and then


def _codes(ranks: list[int]) -> Iterator[int | None]:
    """The exit code of each process, once it has ended; None where it was ended."""
    last = time.monotonic() + SECONDS
    for process in ranks:
        done, status = os.waitpid(process, os.WNOHANG)
        while not done and time.monotonic() < last:
            time.sleep(_TICK)
            done, status = os.waitpid(process, os.WNOHANG)
        if not done:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        yield os.waitstatus_to_exitcode(status) if done else None


def main(rank: int, world: int, folder: str, name: str, *arguments: str) -> None:
    """One rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world
    )
    module, function = name.split(":")
    found = getattr(import_module(module), function)(*arguments)
    _save(found, Path(folder) / f"{rank}.pt")
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever an import prints is no answer
    serve(sys.stdin, answers)
