"""Products, convolutions, normalization, attention, recurrent layers and losses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastclip.core.torch_names import memory_of
from fastclip.trace import attribution as at
from fastclip.trace.findings import IGNORED_LABELS
from fastclip.trace.law import changes_alongside
from fastclip.trace.memory import BY_VALUE, LEARNED, MOVED, ORDER, POSITIONS
from fastclip.trace.movement import mean_of
from fastclip.trace.operation import BY_VALUES, Operation, Out, rule


def _everything(call: Operation) -> list[Any]:
    return [at.everywhere(at.SEVERAL, x.dim()) for x in call.outs]


# Products


@rule(
    "mm", "bmm", "addmm", "baddbmm", "dot", "mv", "addmv", "vdot", "matmul", "linear",
    "mkldnn_linear", "_mkldnn_linear", "addbmm", "_addmm_activation",
)  # fmt: skip
def _product(call: Operation) -> list[Any] | None:
    name, bias = call.name, None
    if name in ("addmm", "baddbmm", "addmv", "_addmm_activation"):
        bias, a, b = call.args[:3]
    elif name == "addbmm":
        return None
    else:
        a, b = call.args[:2]
    if name in ("linear", "mkldnn_linear", "_mkldnn_linear"):
        return _linear(call)
    left, right = call.of(a), call.of(b)
    vector = b.dim() == 1
    if vector and right is not None:
        right = right.unsqueeze(-1)
    if a.dim() == 1 and left is not None:
        left = left.unsqueeze(0)
    found = at.joined(at.reduced(left, [-1]), at.reduced(right, [-2]))
    degree = 0 if at.is_mixed(found) and _sum_over_samples(left, right) else None
    if found is None:
        return [at.fitted(call.of(bias), call.outs[0].dim())]
    if vector:
        found = found.squeeze(-1)
    if a.dim() == 1:
        found = found.squeeze(0)
    if bias is not None and call.of(bias) is not None:
        found, degree = at.joined(found, at.fitted(call.of(bias), found.dim())), None
    return [Out(found, degree=degree)]


def _linear(call: Operation) -> list[Any] | None:
    x, weight, *bias = call.args
    if call.of(weight) is not None:
        return None
    found = at.reduced(call.of(x), [-1])
    return [
        at.joined(found, at.fitted(call.of(bias[0]), x.dim()))
        if bias and bias[0] is not None
        else found
    ]


def _sum_over_samples(left: at.Attribution, right: at.Attribution) -> bool:
    """Whether each term of a product's sums belongs to one sample."""
    if left is not None and not bool(
        (left == left.amax(list(range(left.dim() - 1)), keepdim=True)).all()
    ):
        return False
    over = None if left is None else left.amax(list(range(left.dim() - 1)))
    turned = None if right is None else right.movedim(-2, -1)
    also = None if turned is None else turned.amax(list(range(turned.dim() - 1)))
    terms = at.joined(over, also)
    return not at.is_mixed(terms)


@rule("_grouped_mm")
def _grouped(call: Operation) -> list[Any]:
    a, b = call.args[:2]
    if b.dim() == 3 and call.of(b) is None:
        return [Out(at.reduced(call.of(a), [-1]), BY_VALUE)]
    return _everything(call)


# Convolutions and images


@rule(
    "convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution", "miopen_convolution"
)
def _convolved(call: Operation) -> list[Any] | None:
    if call.of(call.args[1]) is not None or call.of(call.args[2]) is not None:
        return None
    found = call.of(call.args[0])
    return [at.reduced(found, range(1, found.dim()))]  # type: ignore[union-attr]


@rule("convolution_backward")
def _convolution_backward(call: Operation) -> list[Any] | None:
    g, x, weight = call.args[:3]
    if call.of(weight) is not None:
        return None
    dims = g.dim()
    of_g = at.reduced(call.of(g), range(1, dims))
    both = at.joined(of_g, at.reduced(call.of(x), range(1, dims)))
    several = both is not None and both.numel() > 1
    degree = 0 if both is not None and not at.is_mixed(both) else None
    of_weight = at.everywhere(at.SEVERAL, dims) if several else both
    of_bias = None if of_g is None else at.reduced(of_g).reshape(1)  # type: ignore[union-attr]
    found = [of_g, Out(of_weight, degree=degree), Out(of_bias, degree=degree)]
    return [f for f, wanted in zip(found, call.args[10], strict=True) if wanted]


@rule("_fft_r2c", "_fft_c2c", "_fft_c2r")
def _transformed(call: Operation) -> list[Any]:
    return [at.reduced(call.of(call.args[0]), call.args[1])]


_AXES = {"1d": 1, "2d": 2, "3d": 3}


@rule(
    "max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "adaptive_max_pool2d",
    "avg_pool3d", "max_pool3d_with_indices", "upsample_nearest2d", "upsample_bilinear2d",
    "upsample_bicubic2d", "_upsample_bicubic2d_aa", "upsample_nearest1d", "upsample_linear1d",
    "grid_sampler_2d", "avg_pool1d", "max_pool1d", "_upsample_bilinear2d_aa", "reflection_pad3d",
    "max_pool2d_with_indices_backward", "avg_pool2d_backward", "_adaptive_avg_pool2d_backward",
    "adaptive_max_pool2d_backward", "upsample_nearest2d_backward", "upsample_bilinear2d_backward",
    "upsample_bicubic2d_backward", "reflection_pad2d_backward", "upsample_nearest1d_backward",
    "upsample_linear1d_backward", "reflection_pad1d_backward", "replication_pad1d_backward",
    "replication_pad2d_backward", "_adaptive_avg_pool3d", "_adaptive_avg_pool3d_backward",
    "avg_pool3d_backward", "max_pool3d_with_indices_backward", "upsample_trilinear3d",
    "upsample_trilinear3d_backward", "upsample_nearest3d", "upsample_nearest3d_backward",
)  # fmt: skip
def _image(call: Operation) -> list[Any] | None:
    """Joins entries within the last axes, which are one image."""
    if call.kwargs.get("grad_input") is not None:
        return None
    axes = next(n for name, n in _AXES.items() if name in call.name)
    found: at.Attribution = None
    for x in call.operands:
        own = call.of(x)
        if own is not None and call.name == "grid_sampler_2d" and x is call.args[1]:
            own = at.reduced(own, range(1, own.dim()))
        if own is not None:
            found = at.joined(found, at.reduced(own, range(own.dim() - axes, own.dim())))
    return [found] * len(call.outs)


# Normalization


@rule(
    "native_layer_norm", "_fused_rms_norm", "native_layer_norm_backward", "_fused_rms_norm_backward"
)
def _layer_norm(call: Operation) -> list[Any] | None:
    x = call.args[0]
    if any(call.of(call.given.get(name)) is not None for name in ("weight", "bias")):
        return None
    axes = range(x.dim() - len(call.given["normalized_shape"]), x.dim())
    found: at.Attribution = None
    for y in call.operands:
        if y.dim() == x.dim():
            found = at.joined(found, at.reduced(call.of(y), axes))
    if not call.name.endswith("backward"):
        return [found] * len(call.outs)
    return _with_sums(call, found, x.shape)


@rule("native_group_norm", "native_group_norm_backward")
def _group_norm(call: Operation) -> list[Any] | None:
    x, found = call.args[0], None
    if any(call.of(call.given.get(name)) is not None for name in ("weight", "bias")):
        return None
    for y in call.operands:
        own = call.of(y)
        if own is not None:
            each = at.reduced(own, range(1, own.dim()))
            found = at.joined(found, each.reshape([-1] + [1] * (x.dim() - 1)))  # type: ignore[union-attr]
    if call.name.endswith("backward"):
        return _with_sums(call, found, x.shape)
    assert found is not None
    return [found if y.shape == x.shape else found.reshape(-1, 1) for y in call.outs]


def _with_sums(call: Operation, found: at.Attribution, shape: torch.Size) -> list[Any]:
    """Returns the input's gradient, and those of weights, which are sums over samples."""
    if found is None:
        return [None] * len(call.outs)
    degree = None if at.is_mixed(found) else 0
    summed = at.reduced(found).reshape(-1)[:1]  # type: ignore[union-attr]
    return [
        found if y.shape == shape else Out(summed.reshape([1] * y.dim()), degree=degree)
        for y in call.outs
    ]


@rule(
    "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
    "cudnn_batch_norm", "_batch_norm_with_update", "native_batch_norm_backward",
    "batch_norm_backward", "cudnn_batch_norm_backward",
)  # fmt: skip
def _batch_norm(call: Operation) -> list[Any] | None:
    given, found = call.given, None
    training = given.get("training", given.get("train", given.get("update", True)))
    for x in call.operands:
        if x.dim() > 1:
            found = at.joined(found, call.of(x))
    weights = [call.of(given.get(name)) for name in ("weight", "bias")]
    stats = [call.of(given.get(name)) for name in ("running_mean", "running_var")]
    if any(own is not None for own in weights):
        return None
    order = _channels_differ(call, found)
    if not training:
        for own in stats:
            if own is not None:
                found = at.joined(found, own.reshape([1, -1] + [1] * (call.outs[0].dim() - 2)))
    if found is None:
        return [None] * len(call.outs)
    if not training:
        summed = at.reduced(found, [0, *range(2, found.dim())]).reshape(-1)  # type: ignore[union-attr]
        return [Out(found, order) if x.dim() > 1 else Out(summed, degree=0) for x in call.outs]
    each = at.reduced(found, [0, *range(2, found.dim())])
    assert each is not None
    for name in ("running_mean", "running_var"):
        if isinstance(given.get(name), Tensor):
            call.tracer.memory.write(given[name], call.tracer.made(each.reshape(-1), LEARNED))
    return [Out(each if x.dim() > 1 else each.reshape(-1), order) for x in call.outs]


def _channels_differ(call: Operation, found: at.Attribution) -> int:
    """Returns ORDER if channels hold samples and constants of channels differ between them."""
    if found is None or found.dim() < 2 or found.shape[1] == 1:
        return 0
    call.by_values = True
    names = ("weight", "bias", "running_mean", "running_var")
    of_channels = [x for name in names if isinstance(x := call.given.get(name), Tensor)]
    shape = [1, -1] + [1] * (found.dim() - 2)
    changes = (
        changes_alongside(x.view(shape), found, call.shadow(x))
        for x in of_channels if call.of(x) is None and x.numel()
    )  # fmt: skip
    return ORDER * any(changes)


# Attention and recurrent layers


@rule(
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math",
)  # fmt: skip
def _attention(call: Operation) -> list[Any]:
    found = at.reduced(call.of(call.args[0]), [-1])
    for x in call.args[1:3]:
        found = at.joined(found, at.reduced(call.of(x), [-1, -2]))
    mask = call.given.get("attn_mask", call.given.get("attn_bias"))
    if call.of(mask) is not None:
        found = at.joined(found, at.fitted(at.reduced(call.of(mask), [-1]), call.args[0].dim()))
    assert found is not None
    return [
        found
        if x.dim() == found.dim()
        else found.squeeze(-1)
        if x.dim() == found.dim() - 1
        else None
        for x in call.outs
    ]


@rule(
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
)
def _attention_backward(call: Operation) -> list[Any]:
    found: at.Attribution = None
    for x in call.operands:
        if x.dim() == 4:
            found = at.joined(found, at.reduced(call.of(x), [-1, -2]))
    return [found if x.dim() == 4 else None for x in call.outs]


@rule("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward")
def _recurrent(call: Operation) -> list[Any] | None:
    """Inputs and outputs are [t, b, d], also of a layer with `batch_first`; states are [b, d]."""
    forward = call.name == "mkldnn_rnn_layer"
    weights, states = call.args[1:5], ((1, 2) if forward else (5, 6))
    if any(call.of(x) is not None for x in weights):
        return None
    found: at.Attribution = None
    for x in call.operands:
        own = call.of(x)
        if own is not None and x.dim() in (2, 3):
            along = x.dim() - 2
            others = [d for d in range(x.dim()) if d != along]
            found = at.joined(found, at.reduced(own, others).reshape(-1))  # type: ignore[union-attr]
    if found is None:
        return None
    mixed, out = at.reduced(found), []
    for k, x in enumerate(call.outs):
        if x.dim() == 3:
            out.append(found.reshape(1, -1, 1))
        elif k in states:
            out.append(found.reshape(-1, 1))
        else:
            out.append(mixed.reshape([1] * x.dim()))  # type: ignore[union-attr]
    return out


@rule("_pack_padded_sequence", "_pack_padded_sequence_backward", by_values=True)
def _packed(call: Operation) -> list[Any]:
    """Moves samples by their lengths; each entry keeps its sample."""
    x = call.args[0]
    found = call.func(at.expanded(call.of(x), x.shape).double() + 1, *call.args[1:], **call.kwargs)
    if isinstance(found, Tensor):  # padding of a sequence belongs to its sample
        time = 1 if call.args[3] else 0
        return [Out(at.reduced(at.compressed(found.to(at.KIND) - 1), [time]), drop=MOVED)]
    lengths = [
        call.shadow(y) for y in call.args[1:] if isinstance(y, Tensor) and call.of(y) is not None
    ]
    given, moved = call.args[1], MOVED
    if lengths:
        call.tracer.read("lengths of packed sequences", lengths)
    elif bool((given != given[:1]).any()):  # by which Python may choose parts of the batch
        call.tracer.memory.lengths_read = True
    else:
        call.tracer.report.by_value.append("one length for all samples")
        moved = 0
    return [Out(at.compressed(found[0].to(at.KIND) - 1), moved), None]


# Tables


@rule("embedding")
def _looked_up(call: Operation) -> list[Any] | None:
    table, index = call.args[:2]
    if call.of(table) is not None:
        return None
    if call.flags(index) & POSITIONS:
        return [Out(at.everywhere(at.SEVERAL, call.outs[0].dim()), drop=POSITIONS)]
    return [call.of(index).unsqueeze(-1)]  # type: ignore[union-attr]


@rule("embedding_dense_backward")
def _embedding_backward(call: Operation) -> list[Any]:
    index = call.of(call.args[1])
    found = at.joined(call.of(call.args[0]), None if index is None else index.unsqueeze(-1))
    degree = None if at.is_mixed(found) else 0
    return [Out(at.reduced(found).reshape(-1)[:1].reshape(1, 1), degree=degree)]  # type: ignore[union-attr]


def _bag_axes(call: Operation, numbers: int) -> Tensor | None:
    """Returns the bag of each index, if that is constant."""
    offsets = call.args[2]
    if call.of(offsets) is not None or offsets.is_meta:
        return None
    return torch.searchsorted(offsets, torch.arange(numbers, device="cpu"), right=True) - 1


@rule("_embedding_bag", "_embedding_bag_forward_only", by_values=True)
def _bags(call: Operation) -> list[Any] | None:
    table, index, offsets = call.args[:3]
    bags = _bag_axes(call, index.numel())
    if call.of(table) is not None or bags is None:
        return None
    own = at.joined(call.of(index), call.of(call.given["per_sample_weights"]))
    full = at.expanded(own, index.shape).contiguous()
    start = torch.full([call.outs[0].shape[0]], at.NONE, dtype=at.KIND, device="cpu")
    found = at.scattered(start, 0, bags, full, True)[:, None]
    sizes = torch.bincount(bags, minlength=len(start))[: len(offsets)]
    order = ORDER if len(sizes) > 1 and at.differs(sizes, found[: len(offsets), 0]) else 0
    return [Out(found, order), *[None] * 2, found if call.outs[3].dim() > 1 else found.reshape(-1)]


@rule("_embedding_bag_backward", "_embedding_bag_dense_backward")
def _bags_backward(call: Operation) -> list[Any]:
    found = at.reduced(
        at.joined(
            at.reduced(call.of(call.args[0])), at.fitted(at.reduced(call.of(call.args[1])), 2)
        )
    )
    assert found is not None
    degree = None if at.is_mixed(call.of(call.args[0])) else 0
    return [Out(found.reshape([1] * x.dim()), degree=degree) for x in call.outs]


@rule("_weight_norm_interface_backward", "_weight_norm_interface")
def _weights(call: Operation) -> list[Any]:
    """Handles weights, which all have one attribution."""
    found: at.Attribution = None
    for x in call.operands:
        own = call.of(x)
        found = at.joined(found, None if own is None else at.reduced(own).reshape(-1)[:1])  # type: ignore[union-attr]
    assert found is not None
    return [found.reshape([1] * x.dim()) for x in call.outs]


@rule("_trilinear")
def _three_factors(call: Operation) -> list[Any]:
    """Handles a sum over axes of a product of three, each with new axes."""
    given, found = call.given, None
    dims = call.args[0].dim() + len(given["expand1"])
    for name in ("1", "2", "3"):
        own = call.of(given[f"i{name}"])
        if own is not None:
            for axis in sorted(given[f"expand{name}"]):
                own = own.unsqueeze(axis)
            found = at.joined(found, own)
    found = at.reduced(found, [axis % dims for axis in given["sumdim"]], keep=False)
    return [found]


@rule("col2im")
def _columns_back(call: Operation) -> list[Any]:
    """Adds patches of an image, [b, channels of patches, patches]."""
    own = at.reduced(call.of(call.args[0]), [-1, -2])
    assert own is not None
    return [
        at.fitted(own.unsqueeze(-1), call.outs[0].dim())
        if call.outs[0].dim() == 4
        else own.unsqueeze(-1)
    ]  # type: ignore[union-attr]


# Losses


@rule("nll_loss_forward", "nll_loss2d_forward", "nll_loss_backward", "nll_loss2d_backward")
def _classes(call: Operation) -> list[Any]:
    """Handles a mean over the weights of counted labels, which is constant if no label is ignored."""
    given = call.given
    x, y = given["self"], given["target"]
    axis = 1 if x.dim() > 1 else 0
    own = at.joined(at.reduced(call.of(x), [axis], keep=False), call.of(y))
    assert own is not None
    order = _numbered(call, own, y, given.get("grad_output"))
    if call.of(given["weight"]) is not None:
        return _everything(call)
    mean = given["reduction"] == 1
    uneven = mean and call.of(y) is not None and _counts_differ(call, y, given)
    counted = at.reduced(call.of(y))
    # The labels of one sample, of which some may be ignored.
    own_labels = counted is not None and not at.is_mixed(counted)
    if mean and counted is not None and not (uneven or own_labels):
        call.tracer.guarded_labels.add(memory_of(y))
        call.tracer.report.guards.add(IGNORED_LABELS)
        call.tracer.report.constant_labels.add(_constant_labels(call, y, given["ignore_index"]))
    if call.name.endswith("backward"):
        return [replace(_classes_backward(call, own.unsqueeze(axis), uneven), add=order)]
    if given["reduction"] == 0:
        return [Out(own, order), None]
    whole = at.reduced(own).reshape([])  # type: ignore[union-attr]
    learned = call.flags(x) & LEARNED
    count = (
        Out(counted.reshape([]), call.flags(y), exact=True)  # type: ignore[union-attr]
        if uneven or own_labels
        else None
    )
    if uneven:
        return [Out(whole, learned | order), count]
    degree = None
    if at.is_mixed(whole) and not at.is_mixed(own):
        degree = mean_of(call, own) if mean else 0
    return [Out(whole, order, degree=degree), count]


def _numbered(call: Operation, own: at.Attribution, *constants: Any) -> int:
    """Returns ORDER if one of these constants differs between samples."""
    call.by_values = True
    changes = own is not None and any(
        isinstance(x, Tensor) and call.of(x) is None and changes_alongside(x, own, call.shadow(x))
        for x in constants
    )
    return ORDER if changes else 0


def _counts_differ(call: Operation, y: Tensor, given: dict[str, Any]) -> bool:
    """Whether labels are ignored or class weights differ: the count then depends on the batch."""
    if given["weight"] is not None or y.is_meta:
        return True
    return bool(
        ((y == given["ignore_index"]) & (at.expanded(call.of(y), y.shape) != at.NONE)).any()
    )


def _constant_labels(call: Operation, y: Tensor, ignored: int) -> int:
    """Returns how many constant ignored labels each sample has; 0 if that number differs between
    samples."""
    owners = at.expanded(call.of(y), y.shape)
    count, samples = int((y == ignored).sum()), owners[owners >= 0].unique().numel()
    return 0 if count % max(samples, 1) else count // max(samples, 1)


def _classes_backward(call: Operation, own: Tensor, uneven: bool) -> Out:
    g = call.given["grad_output"]
    found = call.of(g)
    if call.given["reduction"] == 0:
        return Out(
            at.joined(own, None if found is None else found.unsqueeze(1 if own.dim() > 1 else 0))
        )
    joined = at.joined(own, None if found is None else found.reshape([1] * own.dim()))
    if not uneven:
        return Out(joined)
    count = call.given["total_weight"]
    of_count = call.of(count)
    if of_count is not None and not at.is_mixed(of_count):  # labels of one sample
        return Out(at.joined(joined, of_count.reshape([1] * own.dim())))
    positive = not count.is_meta and bool((count > 0).all())
    y = call.given["target"]
    learned = call.flags(call.given["weight"]) | call.flags(y) & LEARNED
    if not positive or at.is_mixed(joined) or learned:
        return Out(at.everywhere(at.SEVERAL, own.dim()))
    call.tracer.report.guards.add("positive factor")
    return Out(joined, factor=hash(("factor", call.tracer.memory.serial(count), 0)))


BY_VALUES.update(
    ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "_batch_norm_with_update")
)
BY_VALUES.update(
    ("nll_loss_forward", "nll_loss2d_forward", "nll_loss_backward", "nll_loss2d_backward")
)


@rule(
    "mse_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "multi_margin_loss",
    "smooth_l1_loss", "huber_loss", "soft_margin_loss", "l1_loss", "multilabel_margin_loss_forward",
)  # fmt: skip
def _loss(call: Operation) -> list[Any] | None:
    given, (x, y) = call.given, call.args[:2]
    if call.name == "multilabel_margin_loss_forward":
        own = at.joined(
            at.reduced(call.of(x), [-1], keep=False), at.reduced(call.of(y), [-1], keep=False)
        )
        return None if given["reduction"] == 0 else [*_over_samples(call, own), call.of(y)]
    own = at.joined(call.of(x), call.of(y))
    if call.name == "multi_margin_loss":
        own = at.joined(at.reduced(call.of(x), [-1], keep=False), call.of(y))
    for name in ("pos_weight", "weight"):
        held = call.of(given.get(name))
        if held is not None:
            if given[name].shape != x.shape:
                return _everything(call)
            own = at.joined(own, held)
    return _over_samples(call, own, _numbered(call, own, *call.operands))


def _over_samples(call: Operation, own: at.Attribution, order: int = 0) -> list[Any]:
    reduction = call.given["reduction"]
    if reduction == 0:
        return [Out(own, order)]
    whole = at.reduced(own).reshape([])  # type: ignore[union-attr]
    degree = None
    if at.is_mixed(whole) and not at.is_mixed(own):
        degree = mean_of(call, own) if reduction == 1 else 0
    return [Out(whole, order, degree=degree)]


@rule(
    "mse_loss_backward", "binary_cross_entropy_backward", "smooth_l1_loss_backward",
    "huber_loss_backward", "soft_margin_loss_backward",
)  # fmt: skip
def _loss_backward(call: Operation) -> list[Any]:
    found: at.Attribution = None
    dims = call.outs[0].dim()
    for x in call.operands:
        found = at.joined(found, at.fitted(call.of(x), max(dims, x.dim())))
    return [Out(found, _numbered(call, found, *call.operands))]


@rule("multi_margin_loss_backward", "multilabel_margin_loss_backward")
def _margins_backward(call: Operation) -> list[Any]:
    """Handles labels and gradients, which have the scores' batch axis or none."""
    given, dims = call.given, call.outs[0].dim()
    found = at.reduced(call.of(given["self"]), [-1])
    for x in (given["target"], given["grad_output"], given.get("is_target")):
        own = call.of(x)
        if own is not None and isinstance(x, Tensor) and x.dim():
            own = at.reduced(own, [-1]) if own.dim() == dims else own.unsqueeze(-1)
        found = at.joined(found, own)
    return [Out(found, _numbered(call, found, given["target"]))]


@rule("_ctc_loss", "_ctc_loss_backward")
def _connectionist(call: Operation) -> list[Any] | None:
    """Handles CTC losses: sequences lie along axis 1 of scores and axis 0 of labels."""
    backward = call.name.endswith("backward")
    scores, labels = call.args[1 if backward else 0], call.args[2 if backward else 1]
    found = at.reduced(call.of(scores), [0, 2]) if scores.dim() == 3 else None
    flat = None if found is None else found.reshape(-1)
    for x in (labels, *(call.args[:1] if backward else ())):
        own = call.of(x)
        if own is None:
            continue
        if x.dim() == 1 and x is labels:
            return None
        flat = at.joined(flat, at.reduced(own, range(1, own.dim())).reshape(-1))  # type: ignore[union-attr]
    if flat is None:
        return None
    if backward:
        return [flat.reshape(1, -1, 1)]
    return [flat, flat.reshape(-1, 1, 1)]
