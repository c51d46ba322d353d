"""What is trained beside the private model: its gradient comes of the same rows, and nobody clips it.

A criterion with weights of its own (centres of classes, a temperature), or a part in front of the
private model, is trained by another optimizer on gradients that are neither clipped nor noised. They
are no parameters of the model, so no hook of ours is on them; the graph of the loss tells.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from fastclip._torch import current_task
from fastclip.backward.loss_graph import running_roots
from fastclip.errors import ParameterLeakError
from fastclip.graph import above_private, takes_part
from fastclip.samples.calls import Forward
from fastclip.samples.inputs import tensors_of

OUTSIDE = (
    "make one module of it and the model and give that to make_private, freeze it "
    "(requires_grad_(False)), detach what is computed of it, or give its own loss its own backward(); "
    "where this loss trains only that (a GAN's generator, through its discriminator), wrap the whole "
    "pass in `with engine.paused():`"
)


class Outside:
    """Looks, as a backward pass opens, for leaves that may be trained and are not the private model's.

    It is a gradient that is refused: a leaf that only makes a checkpoint run gets none.
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Outside:
        return Outside()

    def __reduce__(self) -> Any:
        return Outside, ()

    def check(self, forward: Forward, *known: Container[nn.Parameter]) -> None:
        """Let no gradient come to anything else in the pass that has begun.

        Args:
            forward: the call whose output the gradient has reached.
            known: parameters that are guarded by hooks of their own.

        Raises:
            ParameterLeakError: one has come already; later ones raise it as they come.
        """
        for handle in self._handles:
            handle.remove()
        self._handles = []
        roots = running_roots()
        nodes = deque([] if roots is None else roots.nodes)
        if forward.inputs is not None:
            inputs = (x for x in tensors_of(forward.inputs) if x.requires_grad)
            nodes.extend(get_gradient_edge(x).node for x in inputs)
        for node in above_private(nodes):
            leaf = getattr(node, "variable", None)
            if leaf is None or any(leaf in some for some in known):
                continue
            if _is_trained(leaf, forward.batch_size) and takes_part(node):
                kind = "parameter" if isinstance(leaf, nn.Parameter) else "tensor"
                what = f"a {kind} of shape {list(leaf.shape)}"
                refuse = partial(_refuse, what, current_task())
                refuse(leaf.grad)  # what lies between the model and the loss has had its turn
                self._handles.append(leaf.register_hook(refuse))


def _refuse(what: str, task: int, gradient: Tensor | None) -> None:
    if gradient is not None and current_task() == task:  # else the pass has failed long ago
        raise ParameterLeakError(
            f"{what} outside the private model is trained by this loss, on a gradient that is neither "
            f"clipped nor noised: {OUTSIDE}"
        )


def _is_trained(leaf: Tensor, rows: int | None) -> bool:
    """A tensor with an entry for each row is a batch, whose gradient is its rows' own; values that
    are computed from private parameters have a guard of their own."""
    if isinstance(leaf, nn.Parameter):
        return True
    return type(leaf) is Tensor and rows is not None and rows not in leaf.shape
