"""Private names of torch's compilers that fastclip needs; others are in fastclip.core.torch_names.

Dynamo takes longer to import than torch. It is not imported before something is compiled.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

R = TypeVar("R", bound=Callable[..., Any])

is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)
"""Whether torch.export traces; always False before torch 2.7."""


_compiler: Callable[[], Any] = getattr(
    torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: False
)


def is_compiled() -> bool:
    """Whether torch.compile traces the running code, or may: True if torch does not say."""
    return torch.compiler.is_dynamo_compiling() or _compiler() is not None


def pass_over(run: R) -> R:
    """Decorator: torch.compile does not begin to trace here. It may begin in called functions, and
    continues if it traces already."""
    code = run.__code__  # type: ignore[attr-defined]
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "skip_code"):  # before torch 2.7
        frames.skip_code(code)
    else:
        skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, default))
    return run


def ends_graph(run: R) -> R:
    """Decorator: as `pass_over`, and if torch.compile traces already, its graph ends."""
    run._torchdynamo_disable = True  # type: ignore[attr-defined]
    return pass_over(run)


pass_over(is_compiled)


def disable_dynamo(run: R) -> R:
    """Decorator: torch.compile runs this function, and those it calls, unchanged. It does not import
    dynamo, and costs one check if nothing is compiled."""
    apart = _disable_dynamo(run, True)

    @functools.wraps(run)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return (apart if is_compiled() else run)(*args, **kwargs)

    return cast(R, pass_over(inner))


def can_compile() -> bool:
    """Whether anything can have been compiled: dynamo is imported."""
    return "torch._dynamo" in sys.modules


def graphs_made() -> int:
    """Returns how many graphs torch.compile has made in this process."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def run_eagerly() -> Callable[[], None]:
    """Lets compiled functions run eagerly from now on: under a mode dynamo would mark them as never to
    be compiled.

    Returns:
        A function that ends this.
    """
    if not can_compile() or not hasattr(torch.compiler, "set_stance"):  # before torch 2.6
        return lambda: None
    from torch._dynamo import eval_frame

    eager: Any = torch.compiler.set_stance("force_eager")

    def end() -> None:
        if eval_frame._stance is eager.stance:  # no other stance was set meanwhile
            eval_frame._set_stance(eager.prev)

    return end


def as_written(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function or method that torch.compile has compiled, or itself."""
    if isinstance(function, MethodType):
        return MethodType(as_written(function.__func__), function.__self__)
    found: Any = getattr(function, "_torchdynamo_orig_callable", None)
    # functools.wraps copies the attributes of a compiled function
    given: Any = found if found is getattr(function, "__wrapped__", None) else None
    return given or function  # type: ignore[no-any-return]


def is_one_graph(compiled: Any) -> bool:
    """Whether a compiled module may have no graph breaks (fullgraph=True)."""
    fullgraph = getattr(compiled.dynamo_ctx, "fullgraph", None)
    if fullgraph is not None:
        return fullgraph
    # torch 2.6 remembers it only by the class of the frame converter.
    made = getattr(compiled.dynamo_ctx.callback, "_torchdynamo_orig_callable", None)
    return type(made).__name__ == "ConvertFrameAssert"


def compile_graph(graph: Any, inputs: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """Compiles a graph of aten operators with inductor, for such inputs, with eager random numbers."""
    from torch import _inductor  # which takes a second

    compiled: Any = _inductor.compile(graph, [*inputs], options={"fallback_random": True})
    return compiled  # type: ignore[no-any-return]
