"""opacus.tests.grad_samples: every layer's cases, through make_private and one step."""

from types import SimpleNamespace

from tests.conformance import parts
from tests.conformance.per_sample import FastMode, OwnModes
from tests.conformance.substitution import FAST, OWN, cases, opacus_tests

_LAYERS = (
    "conv1d", "conv2d", "conv3d", "dp_multihead_attention", "dp_rnn", "embedding_bag", "embedding",
    "group_norm", "instance_norm1d", "instance_norm2d", "instance_norm3d", "layer_norm", "linear",
    "rms_norm", "sequence_bias",
)  # fmt: skip

for _layer in _LAYERS:
    _module = opacus_tests(f"grad_samples.{_layer}_test")
    _only = ["test_conv2d"] if _layer == "conv2d" else None  # its others are of Opacus' own parts
    globals().update(cases(_module, OWN, base=OwnModes))
    globals().update(cases(_module, FAST, base=FastMode, only=_only))

globals().update(
    cases(
        opacus_tests("grad_samples.conv2d_test"), FAST, suffix="_fast_module",
        only=["test_asymetric_dilation_and_kernel_size"], names={"GradSampleModule": parts.Module},
    )
)  # fmt: skip
globals().update(
    cases(
        opacus_tests("grad_samples.embedding_norm_sample_test"), FAST,
        names={
            "embedding_norm_sample": SimpleNamespace(
                compute_embedding_norm_sample=parts.embedding_norms
            )
        },
    )
)  # fmt: skip
