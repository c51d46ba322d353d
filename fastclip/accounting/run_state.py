"""A private run as torch.distributed.checkpoint saves it: each rank writes what it holds."""

from __future__ import annotations

import io
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

from fastclip.accounting.checkpoint_file import KEY, read_checkpoint, stamp
from fastclip.errors import ArgumentError, ArgumentTypeError
from fastclip.parallel.processes import bare, uncompiled
from fastclip.parallel.shards import let_go

_MODEL, _OPTIMIZER, _RUN = "model", "optimizer", "run"


class RunState(Stateful):
    """Weights, the inner optimizer's state, thresholds, the step and the ledger.

    Args:
        ledger: of the run. module, optimizer: as make_private returned them.
    """

    def __init__(self, ledger: Any, module: nn.Module, optimizer: Any) -> None:
        if not hasattr(optimizer, "keeper"):
            raise ArgumentTypeError(
                "optimizer expects what make_private returned in the fast mode, got "
                f"{type(optimizer).__name__}"
            )
        model: Any = module._module if isinstance(module, AbstractGradSampleModule) else module
        self._model, self._inner = bare(uncompiled(model)), optimizer.original_optimizer
        self._ledger, self._keeper = ledger, optimizer.keeper

    def state_dict(self) -> dict[str, Any]:
        let_go(self._model)
        run = io.BytesIO()
        torch.save(
            {
                "ledger": self._ledger.state_dict(), "clipping": self._keeper.clipping.state_dict(),
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
        """The ledger first: a model that fails halfway has got some of the weights.

        Raises:
            ArgumentError: what the run has spent is damaged or not there; nothing is loaded.
        """
        let_go(self._model)
        saved = state_dict.get(_RUN)
        run = read_checkpoint(io.BytesIO(saved), {}) if isinstance(saved, bytes) else {}
        if not {"ledger", "clipping"} <= run.keys():
            raise ArgumentError(
                "the checkpoint holds no ledger, so what its run has spent is not known; load one that "
                "was saved with engine.run_state"
            )
        self._ledger.load_state_dict(run["ledger"])
        set_model_state_dict(self._model, state_dict[_MODEL])
        set_optimizer_state_dict(self._model, self._inner, state_dict[_OPTIMIZER])
        self._keeper.clipping.load_state_dict(run["clipping"], self._keeper.batch.fresh)
