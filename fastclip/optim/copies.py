"""What may not be copied: whoever holds the sums and the noise of a private run."""

from __future__ import annotations

from typing import Any, SupportsIndex

from fastclip.errors import StepError


class NotCopied:
    """An optimizer that refuses `copy.copy`, `copy.deepcopy` and `pickle`.

    A copy would hold the same sums, release them once more and write to the same ledger. (Made by
    torch's own rules for optimizers it would, besides, change `step` of the whole class.)
    """

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise StepError(
            f"{type(self).__name__} cannot be copied or pickled: the copy would release the same sums "
            "a second time, and be accounted for once; save optimizer.state_dict(), or "
            "engine.save_checkpoint(...) with model and accountant, and load it where it is needed"
        )
