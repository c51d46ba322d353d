"""Checkpoints of a run, as a file without code, and for torch.distributed.checkpoint."""

from __future__ import annotations

import errno
import io
import pickle
import re
import zipfile
from collections.abc import Mapping
from typing import Any

import torch
from opacus.grad_sample import AbstractGradSampleModule
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from fastclip.core.system import write_whole
from fastclip.distributed.checkpoints import Kept, as_alone, is_sharded, model_of, optimizer_alone
from fastclip.distributed.processes import bare, uncompiled
from fastclip.distributed.shards import let_go
from fastclip.errors import ArgumentError, ArgumentTypeError, say

_ACCOUNTANT, _MODULE = "privacy_accountant_state_dict", "module_state_dict"
_FOLDER = 0x10
"""Folder bit of an archive entry's attributes, which no checksum covers."""
KEY = "fastclip_checkpoint"
FORMAT = 1
"""Format of files that are written. Files without a stamp (0) are Opacus' or of older fastclip."""


def stamp() -> dict[str, Any]:
    """Return the stamp of a file, its format and PyTorch version."""
    return {"format": FORMAT, "torch": str(torch.__version__)}


def save_checkpoint(
    ledger: Any, *, writes: bool, path: Any, module: nn.Module, optimizer: Any = None,
    noise_scheduler: Any = None, grad_clip_scheduler: Any = None,
    checkpoint_dict: Mapping[str, Any] | None = None,
    module_state_dict_kwargs: Mapping[str, Any] | None = None,
    torch_save_kwargs: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Implement `FastPrivacyEngine.save_checkpoint`. If `writes`, this process writes the file."""
    module = model_of(module)
    model, options = as_alone(module), dict(module_state_dict_kwargs or {})
    if is_sharded(module):
        model, options = Kept(model, writes, **options), {}
        if optimizer is not None:
            optimizer = Kept(optimizer_alone(optimizer), writes)
    if not writes:
        return
    saved = {**(checkpoint_dict or {}), KEY: stamp(), _MODULE: model.state_dict(**options)}
    saved[_ACCOUNTANT] = ledger.state_dict()
    parts = {
        "optimizer": optimizer, "noise_scheduler": noise_scheduler,
        "grad_clip_scheduler": grad_clip_scheduler,
    }  # fmt: skip
    saved |= {f"{name}_state_dict": x.state_dict() for name, x in parts.items() if x is not None}

    def write(file: Any) -> None:
        begin = file.tell() if hasattr(file, "tell") else 0
        torch.save(saved, file, **(torch_save_kwargs or {}))
        check_loads(file, begin)

    write_whole(path, write)


def load_checkpoint(
    ledger: Any, *, path: Any, module: nn.Module, optimizer: Any = None,
    noise_scheduler: Any = None, grad_clip_scheduler: Any = None,
    module_load_dict_kwargs: Mapping[str, Any] | None = None,
    torch_load_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Implement `FastPrivacyEngine.load_checkpoint`, for files of `save_checkpoint` or of Opacus."""
    saved = read_checkpoint(path, torch_load_kwargs or {})
    if _ACCOUNTANT not in saved:
        raise ArgumentError(
            f"The checkpoint holds no {_ACCOUNTANT}, so the privacy spent by its run is unknown. Load a "
            "file that engine.save_checkpoint wrote.",
            doc="checkpoints",
        )
    if _MODULE not in saved:
        raise ArgumentError(
            f"The checkpoint holds no {_MODULE}, and nothing was loaded. Load a file that "
            "engine.save_checkpoint wrote.",
            doc="checkpoints",
        )
    # The ledger comes first, because a module that fails halfway has already loaded some weights.
    ledger.load_state_dict(saved[_ACCOUNTANT])
    as_alone(model_of(module)).load_state_dict(saved[_MODULE], **(module_load_dict_kwargs or {}))
    state = saved.pop("optimizer_state_dict", {})
    if optimizer is not None and state:
        optimizer_alone(optimizer).load_state_dict(state)
    elif optimizer is not None or state:
        held, given = ("an", "no") if optimizer is None else ("no", "an")
        say(
            f"The checkpoint holds {held} optimizer state and load_checkpoint got {given} optimizer, so "
            "momentum, thresholds and noise schedules keep their current values. Pass optimizer= to "
            "both save_checkpoint and load_checkpoint.",
            doc="checkpoints",
        )
    schedulers = {"noise_scheduler": noise_scheduler, "grad_clip_scheduler": grad_clip_scheduler}
    for name, scheduler in schedulers.items():
        state = saved.pop(f"{name}_state_dict", {})
        if scheduler is not None and state:
            scheduler.load_state_dict(state)
    return saved


def check_loads(path: Any, begin: int = 0) -> None:
    """Check that `read_checkpoint` can load a file that was just written, without reading tensors.

    Args:
        path: path of a file, or an open file. An open file that is not readable is not checked.
        begin: where the checkpoint begins in an open file.

    Raises:
        ArgumentError: the file holds objects other than tensors and plain values. An open file is
            truncated to `begin`.
    """
    opened = hasattr(path, "read")
    if opened and not (path.readable() and path.seekable()):
        return
    try:
        if opened:
            path.seek(begin)
        torch.load(path, weights_only=True, map_location="meta")
    except pickle.UnpicklingError as error:
        if opened:
            path.seek(begin)
            path.truncate()
        found = re.search(r"GLOBAL (\S+)", str(error))
        raise ArgumentError(
            "The checkpoint holds something other than tensors and plain values "
            f"({found.group(1) if found else _first_line(error)}), so it could not be loaded again. "
            "Remove it from checkpoint_dict and the saved states, or store it as plain values "
            "(vars(options), str(path)).",
            doc="checkpoints",
        ) from error
    if opened:
        path.seek(0, 2)


def read_checkpoint(path: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a file without its stamp. No code in it runs, unless the caller allows it.

    Every byte is first checked against the file's checksums. torch.load does not check them, so a
    flipped bit of a weight or of a ledger would not be noticed.

    Args:
        path: path of a file, or an open file.
        options: options of torch.load, with `weights_only=True` by default.

    Raises:
        ArgumentError: the file is damaged, of a newer format, or holds objects other than tensors and
            plain values.
        OSError: the file does not exist or cannot be read.
    """
    name = getattr(path, "name", "The checkpoint") if hasattr(path, "read") else str(path)
    _check_whole(path, name)
    try:
        saved = torch.load(path, **{"weights_only": True, **options})
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # torch.load seeks before the beginning of a file that lost its end.
        raise _damaged(name, error) from error
    except pickle.UnpicklingError as error:
        raise ArgumentError(
            f"{name} is damaged, or holds objects other than tensors and plain values that could run "
            f"code ({_first_line(error)}). Load another checkpoint, or pass "
            "torch_load_kwargs={'weights_only': False} if you trust its author.",
            doc="checkpoints",
        ) from error
    except Exception as error:
        raise _damaged(name, error) from error
    if not isinstance(saved, dict):
        raise ArgumentError(
            f"{name} holds a {type(saved).__name__}, not a checkpoint. Load a file that "
            "engine.save_checkpoint wrote.",
            doc="checkpoints",
        )
    found = saved.pop(KEY, {"format": 0})
    number = found.get("format") if isinstance(found, Mapping) else None
    if type(number) is not int or number > FORMAT:
        raise ArgumentError(
            f"{name} is a checkpoint of format {number!r}, but this fastclip reads formats up to "
            f"{FORMAT}. Install the version that wrote it, or a newer one.",
            doc="checkpoints",
        )
    return saved


def _check_whole(path: Any, name: str) -> None:
    begin = path.tell() if hasattr(path, "read") else None
    try:
        if zipfile.is_zipfile(path):  # otherwise torch.load raises an error
            with zipfile.ZipFile(path) as archive:
                for entry in archive.infolist():
                    # torch's reader would read no bytes and leave the tensor's memory uninitialized
                    if entry.external_attr & _FOLDER and not entry.filename.endswith("/"):
                        raise ValueError(f"{entry.filename} is marked as a folder")
                wrong = archive.testzip()
            if wrong is not None:
                raise ValueError(f"the checksum of {wrong} is wrong")
    except MemoryError:
        raise
    except Exception as error:
        raise _damaged(name, error) from error
    finally:
        if begin is not None:
            path.seek(begin)


def _damaged(name: str, error: Exception) -> ArgumentError:
    return ArgumentError(
        f"{name} is damaged ({_first_line(error)}), and nothing was loaded. Resume from another "
        "checkpoint, and count the steps that were taken after it.",
        doc="checkpoints",
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


# -------------------------------------------------------------------------------------------------
# A private run for torch.distributed.checkpoint, where each rank writes its own shards.


_MODEL, _OPTIMIZER, _RUN = "model", "optimizer", "run"


class RunState(Stateful):
    """State of a run: weights, the inner optimizer's state, thresholds, the step and the ledger.

    Args:
        ledger: ledger of the run.
        module: the module that make_private returned.
        optimizer: the optimizer that make_private returned.
    """

    def __init__(self, ledger: Any, module: nn.Module, optimizer: Any) -> None:
        if not hasattr(optimizer, "grad_state"):
            raise ArgumentTypeError(
                "optimizer expects what make_private returned in the fast mode, got "
                f"{type(optimizer).__name__}."
            )
        model: Any = module._module if isinstance(module, AbstractGradSampleModule) else module
        self._model, self._inner = bare(uncompiled(model)), optimizer.original_optimizer
        self._ledger, self._grad_state = ledger, optimizer.grad_state

    def state_dict(self) -> dict[str, Any]:
        let_go(self._model)
        run = io.BytesIO()
        torch.save(
            {
                "ledger": self._ledger.state_dict(), "clipping": self._grad_state.clipping.state_dict(),
                KEY: stamp(),
            },
            run,
        )  # fmt: skip
        return {
            _MODEL: get_model_state_dict(self._model),
            _OPTIMIZER: get_optimizer_state_dict(self._model, self._inner),
            _RUN: run.getvalue(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the ledger first, because a model that fails halfway has already loaded some weights.

        Raises:
            ArgumentError: the ledger is damaged or missing. Nothing is loaded.
        """
        let_go(self._model)
        saved = state_dict.get(_RUN)
        run = read_checkpoint(io.BytesIO(saved), {}) if isinstance(saved, bytes) else {}
        if not {"ledger", "clipping"} <= run.keys():
            raise ArgumentError(
                "The checkpoint holds no ledger, so the privacy spent by its run is unknown. Load one "
                "that was saved with engine.run_state.",
                doc="checkpoints",
            )
        self._ledger.load_state_dict(run["ledger"])
        set_model_state_dict(self._model, state_dict[_MODEL])
        set_optimizer_state_dict(self._model, self._inner, state_dict[_OPTIMIZER])
        self._grad_state.clipping.load_state_dict(run["clipping"], self._grad_state.batch.fresh)
