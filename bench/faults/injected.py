"""Errors where nobody expects them: at an operator of a step, a line of fastclip, in a hook, in time."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fastclip
from bench.faults.runs import Run

FASTCLIP = str(Path(fastclip.__file__).parent) + os.sep
Fails = Callable[[], None]
"""Raises, or ends the process."""


class UsersError(Exception):
    """Of a hook of the user's own."""


def out_of_memory() -> None:
    """As a GPU's allocator."""
    raise torch.OutOfMemoryError("no room (of bench.faults)")


def no_memory() -> None:
    """As a CPU's allocator."""
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory (of bench.faults)")


def interrupt() -> None:
    """As Ctrl-C."""
    raise KeyboardInterrupt


def kill() -> None:
    """Nothing of the process runs after this."""
    os.kill(os.getpid(), signal.SIGKILL)


class AtOperator(TorchDispatchMode):
    """Fails at the n-th operator that runs inside, counted from 0, forward and backward.

    Attributes:
        seen: operators so far.
    """

    def __init__(self, n: int, fails: Fails) -> None:
        super().__init__()
        self.n, self.fails, self.seen = n, fails, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        number, self.seen = self.seen, self.seen + 1
        if number == self.n:
            self.fails()
        return func(*args, **(kwargs or {}))


class AtMoment:
    """Fails at the n-th moment inside fastclip at which Python takes a signal, counted from 0.

    These are the begin of a function and the return from one of C; others would be no signal's: a lock,
    for one, that `with` has taken is always given back.

    Attributes:
        seen: moments so far.
    """

    def __init__(self, n: int, fails: Fails) -> None:
        self.n, self.fails, self.seen = n, fails, 0

    def __enter__(self) -> AtMoment:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: Any, event: str, _: object) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(FASTCLIP):
            number, self.seen = self.seen, self.seen + 1
            if number == self.n:
                sys.setprofile(None)
                self.fails()


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """A real signal after so long, of which Python makes a Ctrl-C."""
    before = signal.signal(signal.SIGALRM, lambda *_: interrupt())
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _fail(*_: Any) -> None:
    raise UsersError("of a hook of the user's own")


def _on_output(module: Any, args: Any, out: torch.Tensor) -> None:
    out.register_hook(_fail)


HOOKS: dict[str, Callable[[Run, Any], Any]] = {
    "forward pre-hook": lambda run, part: part.register_forward_pre_hook(_fail),
    "forward hook": lambda run, part: part.register_forward_hook(_fail),
    "backward pre-hook": lambda run, part: part.register_full_backward_pre_hook(_fail),
    "backward hook": lambda run, part: part.register_full_backward_hook(_fail),
    "hook on an output": lambda run, part: part.register_forward_hook(_on_output),
    "pre-hook of the inner step": lambda run, part: run.inner.register_step_pre_hook(_fail),
    "post-hook of the inner step": lambda run, part: run.inner.register_step_post_hook(_fail),
    "step hook": lambda run, part: None,
}


@contextmanager
def hooked(run: Run, kind: str, part: int) -> Iterator[None]:
    """A hook of the user's own that fails, on one part of the model where it is on one."""
    parts = [m for m in run.model.modules() if not list(m.children())]
    handle = HOOKS[kind](run, parts[part % len(parts)])
    if handle is None:
        run.optimizer.attach_step_hook(_fail)
    try:
        yield
    finally:
        if handle is None:
            run.optimizer.step_hook = None
        else:
            handle.remove()


Injection = Callable[[Run], AbstractContextManager[Any]]
"""Makes one step of a run fail."""
