"""The refusal of a model whose samples are not independent."""

from __future__ import annotations

from fastclip.errors import BatchSizeError


class Coupled(BatchSizeError):
    """What one sample has somewhere follows from other rows."""

    of = ""
    """What it follows from."""


OTHERS, HOW_MANY, NUMBER = "another sample's row", "the number of rows", "its number in the batch"
"""What one sample must not depend on."""


def coupled(where: str, cause: object = None, of: str = OTHERS, *, of_all: bool = False) -> Coupled:
    """The refusal.

    Args:
        where: it shows. cause: the operation in which samples met, and its line, if that is known.
        of: what it depends on. of_all: it is given one number of all samples.
    """
    hint = "; with a mean of losses, apply it to the rows' losses before the mean" if of_all else ""
    if str(cause).startswith("_unique"):  # E(ids.unique())[inverse]
        hint = "; look the ids up directly, not those of the batch made unique"
    by = f" ({cause})" if cause is not None else ""
    error = Coupled(
        f"{where}: what one sample has there depends on {of}{by}, so no per-sample gradient exists; let "
        f"every row of the batch be computed from itself alone{hint}"
    )
    error.of = of
    return error
