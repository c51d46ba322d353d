"""A model's state as one process has it: what one number of ranks saved, another goes on from."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opacus.grad_sample import AbstractGradSampleModule
from torch import nn

from fastclip.parallel.processes import bare

_WRAPPED = "_module."
"""Before the keys of a model that make_private returned, as with Opacus."""


def as_alone(module: nn.Module) -> Any:
    """What holds the state of a model with the keys that it has without DistributedDataParallel.

    Args:
        module: private, as make_private returned it or in place; or not.
    """
    returned = isinstance(module, AbstractGradSampleModule)
    model: Any = module._module if returned else module
    return module if bare(model) is model else _Alone(bare(model), _WRAPPED if returned else "")


class _Alone:
    def __init__(self, model: nn.Module, prefix: str) -> None:
        self._model, self._prefix = model, prefix

    def state_dict(self, **options: Any) -> dict[str, Any]:
        return self._model.state_dict(prefix=self._prefix, **options)

    def load_state_dict(self, state: dict[str, Any], **options: Any) -> Any:
        bare_keys = {key.removeprefix(self._prefix): value for key, value in state.items()}
        if not bare_keys.keys() & self._model.state_dict().keys():  # as Opacus saves DPDDP
            bare_keys = {key.removeprefix("module."): value for key, value in bare_keys.items()}
        return self._model.load_state_dict(bare_keys, **options)


def write_whole(path: Any, write: Callable[[Any], None]) -> None:
    """`write(file)`, so that `path` holds the old file or the new one, whenever the process ends.

    Args:
        path: of a file; or an open file, which is written to as it is.
    """
    if not isinstance(path, (str, os.PathLike)):
        write(path)
        return
    final = Path(path)
    part = final.with_name(f"{final.name}.{os.getpid()}.part")
    try:
        write(part)
        part.replace(final)
    finally:
        part.unlink(missing_ok=True)
