"""What `p.grad_sample` of a private parameter is after a pass: an error for whoever reads it.

Programs around Opacus read per-sample gradients between backward and step. None are kept here, and
`None` in their place would say so only by an error about `None`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, NoReturn

from torch import nn

from fastclip.errors import GradSampleError

_SAYS = (
    "p.grad_sample was read, but no per-sample gradients are kept; read optimizer.per_sample_norms and "
    "p.summed_grad, or make the model private with FastPrivacyEngine and grad_sample_mode='hooks'"
)


def _refuse(*args: Any, **options: Any) -> NoReturn:
    raise GradSampleError(_SAYS)


class NotKept:
    """In the place of per-sample gradients; false, and saved as an empty dict."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "<per-sample gradients are not kept>"

    def __reduce__(self) -> Any:
        return OrderedDict, ()  # which torch.load takes, as it does not take None's type

    def __deepcopy__(self, memo: dict[int, Any]) -> NotKept:
        return self

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse()

    @classmethod
    def __torch_function__(cls, *args: Any, **options: Any) -> NoReturn:
        _refuse()

    __len__ = __getitem__ = __iter__ = __neg__ = __abs__ = __float__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __pow__ = __matmul__ = __rmatmul__ = _refuse


NOT_KEPT = NotKept()


def show(parameters: Iterable[nn.Parameter], kept: NotKept | None = NOT_KEPT) -> None:
    """A pass has contributed, or what passes have left is cleared."""
    for p in parameters:
        p.grad_sample = kept  # type: ignore[attr-defined]
