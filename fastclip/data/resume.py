"""A file with which a run resumes within a pass over the data. Only its owner may read it.

Amplification by sampling holds as long as nobody knows which samples were drawn. The file tells it, so
it is as secret as the data, and is no part of any checkpoint of a model. Batches that were released
must not be drawn again either. So the file is valid until the next step, which deletes it first. A copy
of the file would repeat batches whose steps are recorded as independent.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from fastclip.accounting.checkpoint import KEY, read_checkpoint, stamp
from fastclip.accounting.ledger import Ledger
from fastclip.core.system import write_whole
from fastclip.data.design import Releases
from fastclip.data.loader import PoissonSampler, drawing, outermost, unwatched
from fastclip.distributed.ranks import Ranks
from fastclip.errors import ArgumentError, StepError


def save_sampling(
    path: Any, releases: Releases, loader: DataLoader | None, ranks: Ranks | None
) -> None:
    """Implements `FastPrivacyEngine.save_sampling`."""
    sampler, newest = _sampler_of(loader), releases.draws.newest
    if newest is not None and newest.begun is not sampler.begun:
        raise StepError(
            "Two passes over the data loader were open at once, so the rest of neither can be drawn "
            "again. Resume with a new pass over the data.",
            doc="checkpoints",
        )
    if newest is None or newest.done >= sampler.steps:  # the next batch begins a pass
        state, done, recorded = sampler.stream().get_state(), 0, math.inf
    else:
        state, done = newest.begun, newest.done
        recorded = newest.recorded if newest.left else math.inf
    saved = {
        "design": releases.design.described(), "state": state, "done": done, "recorded": recorded,
        "steps": _recorded(releases.ledger), KEY: stamp(),
    }  # fmt: skip
    file = _of_rank(path, ranks)
    write_whole(file, partial(torch.save, saved), secret=True)
    releases.valid_until_release.append(file)


def load_sampling(
    path: Any, releases: Releases, loader: DataLoader | None, ranks: Ranks | None
) -> None:
    """Implements `FastPrivacyEngine.load_sampling`."""
    sampler, file = _sampler_of(loader), _of_rank(path, ranks)
    try:
        saved = read_checkpoint(file, {})
        design, state, done = saved["design"], saved["state"], int(saved["done"])
        recorded, steps = float(saved["recorded"]), dict(saved["steps"])
    except FileNotFoundError:
        raise ArgumentError(
            f"There is no file {file}, because a step that is taken after it was saved deletes it. "
            "Begin a new pass over the data.",
            doc="checkpoints",
        ) from None
    except KeyError as error:
        raise ArgumentError(
            f"path expects a file of engine.save_sampling, got one without {error}. Begin a new pass "
            "over the data.",
            doc="checkpoints",
        ) from None
    if design != releases.design.described():
        raise ArgumentError(
            "This run samples in another way than the one that saved the file, so its pass cannot be "
            "continued. Pass the same data, batch size and sampling to make_private.",
            doc="checkpoints",
        )
    if steps != _recorded(releases.ledger):
        raise ArgumentError(
            "The ledger holds other steps than when the sampling was saved, so batches may be drawn "
            "again. Load the checkpoint of the same moment first, or begin a new pass over the data.",
            doc="checkpoints",
        )
    sampler.resumed = (state, done)
    releases.draws.resumed = (done, recorded, releases.ledger.check_cuts())
    releases.valid_until_release.append(file)


def _sampler_of(loader: DataLoader | None) -> PoissonSampler:
    """Returns the sampler of a loader, if its state can be kept."""
    sampler: Any = None if loader is None else outermost(loader)
    if isinstance(sampler, PoissonSampler) and not sampler.secure:
        return sampler
    why = "no data loader is in use"
    if loader is not None:
        own = f"the data loader's own {unwatched(drawing(loader)).__name__} draws"
        why = "secure mode keeps no state" if getattr(sampler, "secure", False) else own
    raise StepError(
        f"The pass cannot be continued in another process, because {why}. Resume with a new pass over "
        "the data.",
        doc="checkpoints",
    )


def _recorded(ledger: Ledger) -> dict[str, int]:
    """Number of recorded steps by the name of their segment."""
    return {name: sum(n for *_, n in entries) for name, entries in ledger.segments().items()}


def _of_rank(path: Any, ranks: Ranks | None) -> Path:
    """Returns the file of this rank, which draws its own samples."""
    file = Path(path).absolute()
    if ranks is None or ranks.count == 1:
        return file
    return file.with_name(f"{file.name}.rank{ranks.number}")
