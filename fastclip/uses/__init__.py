"""A parameter is private where it is used: by whichever function, in whichever module."""

from fastclip.uses import (  # noqa: F401  (register)
    bags,
    cells,
    contraction,
    conv,
    elementwise,
    grouped,
    lookup,
    moves,
    norm,
    recurrent,
)
