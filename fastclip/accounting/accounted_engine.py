"""opacus.PrivacyEngine whose accountant never forgets: not by a checkpoint, a copy or a replacement."""

from __future__ import annotations

import copy
import warnings
from typing import Any

from opacus import PrivacyEngine
from opacus.accountants import IAccountant
from torch import distributed, nn

from fastclip.accounting.checkpoint_file import KEY, check_loads, read_checkpoint, stamp
from fastclip.accounting.history import open_accountant, spent
from fastclip.accounting.ledger import Ledger, keep_ledger
from fastclip.accounting.run_state import RunState
from fastclip.accounting.write_ahead import WriteAheadLog
from fastclip.errors import ArgumentError, ArgumentTypeError, say
from fastclip.files import write_whole
from fastclip.parallel.checkpoints import Kept, as_alone, is_spread, model_of, optimizer_alone
from fastclip.parallel.ranks import Ranks, together

_ACCOUNTANT, _MODULE = "privacy_accountant_state_dict", "module_state_dict"


class AccountedEngine(PrivacyEngine):
    """The part of FastPrivacyEngine that accounts."""

    _accountant: Ledger | None = None

    def __init__(self, *, accountant: str = "prv", secure_mode: bool = False) -> None:
        opened = open_accountant(accountant)  # names the choices, where it is none
        with warnings.catch_warnings():
            # Opacus says so at every start; explain() and mechanism() do where it matters.
            warnings.filterwarnings("ignore", "Secure RNG turned off")
            super().__init__(accountant="rdp", secure_mode=False)
        self._accountant = keep_ledger(opened)  # not all versions of Opacus know all of its kinds
        self.secure_mode = secure_mode

    @property
    def accountant(self) -> Ledger:
        """Opacus' accountant of every step that was taken under this engine.

        Another one that is assigned takes over what was recorded so far, beside its own steps (an
        empty one of another mechanism accounts for the same run); steps go to it from now on.
        """
        assert self._accountant is not None
        return self._accountant

    @accountant.setter
    def accountant(self, value: IAccountant) -> None:
        if not isinstance(value, IAccountant):
            raise ArgumentTypeError(
                f"accountant expects an accountant of Opacus, got {type(value).__name__}; take one of "
                "opacus.accountants.create_accountant"
            )
        new, old = keep_ledger(value), self._accountant
        if old is not None and old is not new:
            new.take_over(old)
            new.drawn.join(old.drawn)
        self._accountant = new

    def get_epsilon(self, delta: float) -> float:
        """The (epsilon, delta) that all steps taken so far have spent.

        Formal guarantee: for neighbours that differ in one row (or unit) that was added or removed,
        where q and B were given; else, and where rows were not drawn by Poisson sampling, in one that
        is zeroed out. `mechanism()` says which.

        Args:
            delta: in (0, 1), smaller than 1 / rows.

        Returns:
            epsilon; 0 before the first step, inf if a step had no noise.

        Raises:
            ArgumentError, ArgumentTypeError: for another delta, or a failure of the accountant's
                numerics.
        """
        return spent(self.accountant, delta)

    def write_ahead(self, path: Any) -> None:
        """Keep the ledger in a file, too: each step is on the disk before it is released.

        A run that is killed, or goes on from an older checkpoint, counts every step that it has taken:
        what the file holds is counted at once. On several ranks all of them call this, after
        make_private, with a path under which all of them see the same file; the first one writes. It
        costs one fsync a step, on several ranks one small exchange, too.

        Formal guarantee: whatever kills the process, the file holds every released step. A step that
        cannot be written (the disk is full; the file was closed, moved, replaced or touched; this is a
        copy or a fork) is a StepError and not released, until another file is named or none is kept.

        Args:
            path: of the file, which is made if it is not there; one for each run. None: keep none any
                more, and let somebody else have the file.

        Raises:
            ArgumentError: the engine keeps a file already; this one is damaged, no ledger, of steps that
                this accountant cannot compose, or is being written by somebody else; ranks see
                different files. The engine goes on as before, and the file is left as it is.
            OSError: it cannot be opened or made.
            StepError: it cannot be written.
        """
        self._check_ranks("write_ahead")
        ranks, first, log = self._ranks, self._writes, None
        try:
            with together(ranks) as told:
                told["number of files for the ledger"] = int(path is not None)
                if path is not None and first:
                    self.accountant.check_no_file()
                    log = WriteAheadLog(path, ranks=ranks)
            if path is not None:
                with together(ranks) as told:
                    if not first:
                        log = WriteAheadLog(path, writes=False, ranks=ranks)
                    assert log is not None
                    told["ledger file (one path, on a file system that all of them share)"] = (
                        log.seen
                    )
                with together(ranks):
                    self.accountant.count(log)
        except BaseException:
            if log is not None:
                log.give_up()
            raise
        self.accountant.keep_in(log)

    def save_checkpoint(self, *, path: Any, module: nn.Module, **options: Any) -> None:  # type: ignore[override]
        """Save what `load_checkpoint` goes on from; on several ranks the first one writes.

        The file is whole whenever it is there: an old one stays until the new one is written. Its keys
        and tensors are those of the model in one process, so that any number of ranks can load it;
        where parameters are spread (fully_shard), all ranks gather them, and come here together.

        Args:
            As in Opacus.

        Raises:
            ArgumentError: it would hold other things than tensors and plain values, which could not be
                loaded; an old file stays.
        """
        module = model_of(module)
        save, alone = super().save_checkpoint, as_alone(module)
        writes = self._writes
        if is_spread(module):
            own = options.pop("module_state_dict_kwargs", None) or {}
            alone = Kept(alone, writes, **own)
            if options.get("optimizer") is not None:
                options["optimizer"] = Kept(optimizer_alone(options["optimizer"]), writes)
        if writes:
            options["checkpoint_dict"] = {**(options.get("checkpoint_dict") or {}), KEY: stamp()}

            def write(part: Any) -> None:
                begin = part.tell() if hasattr(part, "tell") else 0
                save(path=part, module=alone, **options)
                check_loads(part, begin)

            write_whole(path, write)

    @property
    def _ranks(self) -> Ranks | None:
        """Who trains the model that was made private last; the first of them writes what all have."""
        return None

    @property
    def _writes(self) -> bool:
        """This process writes what all ranks have."""
        return self._ranks is None or self._ranks.number == 0

    def _check_ranks(self, call: str) -> None:
        if self._ranks is not None or not (
            distributed.is_available() and distributed.is_initialized()
        ):
            return
        if (world := distributed.get_world_size()) > 1:
            raise ArgumentError(
                f"this process group has {world} processes, and {call} does not know which of them "
                "train together, and so who writes: call make_private first, in the fast mode"
            )

    def load_checkpoint(
        self, *, path: Any, module: nn.Module, optimizer: Any = None, noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None, module_load_dict_kwargs: dict[str, Any] | None = None,
        torch_load_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Go on from `save_checkpoint`, Opacus' own files included.

        What this engine has recorded itself stays: a model that is set back in the middle of a run
        has been seen further on. Steps of the same run count once, all others are added. Files hold
        tensors and plain values; nothing in them is run (`torch_load_kwargs={"weights_only": False}`
        trusts a file that holds more).

        Args:
            As in Opacus; objects that are given get the state that the file holds for them.

        Returns:
            The rest of the file.

        Raises:
            ArgumentError: if the file is damaged, does not say what its run has spent, or was
                accounted by another mechanism; nothing is loaded.
        """
        saved = read_checkpoint(path, torch_load_kwargs or {})
        if _ACCOUNTANT not in saved:
            raise ArgumentError(
                f"the checkpoint holds no {_ACCOUNTANT}, so what its run has spent is not known; load "
                "one that engine.save_checkpoint wrote"
            )
        if _MODULE not in saved:
            raise ArgumentError(
                f"the checkpoint holds no {_MODULE}, and nothing was loaded; load one that "
                "engine.save_checkpoint wrote"
            )
        # First: a module that fails halfway has got some of the weights.
        self.accountant.load_state_dict(saved[_ACCOUNTANT])
        as_alone(model_of(module)).load_state_dict(
            saved[_MODULE], **(module_load_dict_kwargs or {})
        )
        state = saved.pop("optimizer_state_dict", {})
        if optimizer is not None and state:
            optimizer_alone(optimizer).load_state_dict(state)
        elif optimizer is not None or state:
            held, given = "a" if state else "no", "none" if optimizer is None else "one"
            say(
                f"the checkpoint holds {held} state of an optimizer and load_checkpoint got {given}: "
                "momentum, thresholds and noise schedules go on from where they are"
            )
        for scheduler, key in (
            (noise_scheduler, "noise_scheduler_state_dict"),
            (grad_clip_scheduler, "grad_clip_scheduler_state_dict"),
        ):
            state = saved.pop(key, {})
            if scheduler is not None and state:
                scheduler.load_state_dict(state)
        return saved

    def run_state(self, *, module: nn.Module, optimizer: Any) -> RunState:
        """The run for torch.distributed.checkpoint, which saves each rank's part by that rank.

        Examples:
            >>> state = {"private run": engine.run_state(module=model, optimizer=optimizer)}
            >>> torch.distributed.checkpoint.save(state, checkpoint_id=folder)
            >>> torch.distributed.checkpoint.load(state, checkpoint_id=folder)  # on any number of ranks

        Args:
            module: as make_private returned them.
            optimizer: as make_private returned them.

        Raises:
            ArgumentTypeError: for another optimizer.
        """
        return RunState(self.accountant, model_of(module), optimizer)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy gets, in this process or another."""
        return dict(self.__dict__)

    def __deepcopy__(self, memo: dict[int, Any]) -> AccountedEngine:
        """A copy goes on in the same ledger, where copied optimizers record, too."""
        twin = memo[id(self)] = type(self).__new__(type(self))
        if self._accountant is not None:
            memo[id(self._accountant)] = self._accountant
        twin.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return twin
