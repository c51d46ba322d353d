"""Values of parameters that a reentrant checkpoint is called with.

Such a checkpoint detaches its arguments and computes its part again on the copies, so that what a
copy was derived from is lost. It is given one row a sample instead: an ordinary tensor, whose
gradient is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fastclip._torch import CheckpointFunction, applied_by
from fastclip.errors import UnsupportedLayerError
from fastclip.uses.arguments import leaves_of
from fastclip.uses.proxy import Derived

if TYPE_CHECKING:
    from fastclip.samples.calls import Forward


@contextmanager
def rows_for_checkpoints(forward: Forward) -> Iterator[None]:
    """Inside, reentrant checkpoints get derived values as rows of this forward pass.

    Raises:
        UnsupportedLayerError: a value has no leading dimension of size 1 to hold them.
    """
    before = CheckpointFunction.apply

    def apply(run_function: Callable, preserve_rng_state: bool, *args: Any) -> Any:
        given = [_rows(x, forward) if type(x) is Derived else x for x in args]
        return before(_checked(run_function), preserve_rng_state, *given)

    with applied_by(apply):
        yield


def _checked(run_function: Callable) -> Callable:
    def run(*args: Any) -> Any:
        out = run_function(*args)
        if any(type(x) is Derived for x in leaves_of(out)):
            raise UnsupportedLayerError(
                "a part of the model under a reentrant checkpoint returns a value computed from "
                "parameters alone (T5's position bias), whose gradient for each sample is lost there; "
                "use use_reentrant=False"
            )
        return out

    return run


def _rows(value: Derived, forward: Forward) -> Any:
    if not value.dim() or value.shape[0] != 1 or not forward.batch_size:
        raise UnsupportedLayerError(
            f"a value computed from parameters, of shape {list(value.shape)}, is given to a reentrant "
            "checkpoint, which cannot tell whose its gradient is; use use_reentrant=False, or give it a "
            "leading dimension of size 1"
        )
    return value.source.interceptor.rows_of(value, forward)
