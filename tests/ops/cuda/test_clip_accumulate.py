"""The kernels of clip_accumulate, built for the host and for the GPU, under the reference's contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastclip import ops
from fastclip.ops.dispatch import backend_of, use_backend
from tests.ops.test_clip_accumulate import ClipContract, assert_same, drawn


class KernelContract(ClipContract):
    """What the kernels promise beyond it."""

    def test_results_do_not_depend_on_alignment(self) -> None:
        """Which thread takes a number depends on its index alone."""
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            (g,) = drawn(5, [(9000,)], dtype, self.device)
            memory = torch.empty(5 * 9000 + 1, dtype=dtype, device=self.device)
            moved = memory[1:].view(5, 9000).copy_(g)
            assert moved.data_ptr() % 16
            assert_same(self.clip([moved], 1.1), self.clip([g], 1.1))

    def test_negative_views(self) -> None:
        """Their memory holds the numbers with the other sign."""
        gradients = drawn(5, [(40,), (8, 3, 3)], torch.float32, self.device)
        images = gradients[1].to(memory_format=torch.channels_last)
        negative = [torch._neg_view(g) for g in (gradients[0], images)]
        sums, norms = self.clip(negative, 1.1)
        expected, as_well = self.clip([-gradients[0], -images], 1.1)
        assert torch.equal(norms, as_well)
        assert all(torch.equal(x, y) for x, y in zip(sums, expected, strict=True))


class TestHost(KernelContract):
    """The kernels' source as loops on the host: what FASTCLIP_BACKEND=cuda does with CPU tensors."""

    def clip(self, grad_samples: Any, thresholds: Any) -> tuple[list[Tensor], Tensor]:
        with use_backend("cuda"):
            found = ops.clip_accumulate(grad_samples, thresholds)
            assert backend_of("clip_accumulate", torch.device("cpu")) == ("cuda", "launched")
        return found

    def test_layout_of_the_sums(self) -> None:
        """Samples that are dense in another order are not copied: their sum has their strides."""
        (images,) = drawn(4, [(8, 5, 5)], torch.float32)
        images = images.to(memory_format=torch.channels_last)
        (total,), _ = self.clip([images], 1.1)
        assert total.stride() == images.stride()[1:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
class TestGPU(KernelContract):
    """The kernels."""

    device = "cuda"

    def clip(self, grad_samples: Any, thresholds: Any) -> tuple[list[Tensor], Tensor]:
        found = ops.clip_accumulate(grad_samples, thresholds)
        assert backend_of("clip_accumulate", torch.device("cuda")) == ("cuda", "launched")
        return found

    def test_like_the_host(self) -> None:
        gradients = drawn(70, [(70000,), (3, 5), (257,)], torch.float32)
        sums, norms = self.clip([g.cuda() for g in gradients], 1.1)
        with use_backend("cuda"):
            expected, sizes = ops.clip_accumulate(gradients, 1.1)
        torch.testing.assert_close(norms.cpu(), sizes, rtol=1e-6, atol=0)
        for mine, other in zip(sums, expected, strict=True):
            torch.testing.assert_close(mine.cpu(), other, rtol=1e-5, atol=1e-6)

    def test_captured(self) -> None:
        """In a CUDA graph, replayed with other gradients and another threshold on the device."""
        gradients = drawn(6, [(5000,), (3, 5)], torch.float32, self.device)
        c = torch.tensor(1.1, dtype=torch.float64, device=self.device)
        self.clip(gradients, c)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = ops.clip_accumulate(gradients, c)
        for factor in (1.0, 0.5):
            for g in gradients:
                g.mul_(factor)
            c.mul_(factor)
            graph.replay()
            assert_same(found, self.clip(gradients, c))

    def test_does_not_wait(self) -> None:
        gradients = drawn(6, [(5000,), (3, 5)], torch.float32, self.device)
        c = torch.tensor([1.1, 0.3], device=self.device)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.clip(gradients, c)
            self.clip(gradients, [1.1, 0.3])
        finally:
            torch.cuda.set_sync_debug_mode(before)
