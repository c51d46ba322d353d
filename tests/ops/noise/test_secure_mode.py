"""`FastPrivacyEngine(secure_mode=True)`, end to end."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine, clipping, ops
from fastclip.errors import ArgumentError, StepError
from fastclip.ops import noise as gaussian
from fastclip.ops import noise as noise_module
from fastclip.ops.dispatch import use_backend
from fastclip.ops.noise import SecureNoise, SeededNoise
from tests.ops.noise.laws import assert_standard_normal, assert_uncorrelated

ADAPTIVE = {
    "target_unclipped_quantile": 0.5, "clipbound_learning_rate": 0.2, "max_clipbound": 10.0,
    "min_clipbound": 0.01, "unclipped_num_std": 3.0,
}  # fmt: skip
MODES = ["fast", "hooks", "functorch", "ew"]


def start(secure: bool = True, width: int = 8, rows: int = 64, **kwargs: Any) -> tuple:
    """(engine, model, optimizer, loader); noise of multiplier 2 at C = 1 unless told otherwise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))
    data = TensorDataset(torch.randn(rows, 6), torch.randint(0, 3, (rows,)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Secure RNG turned off")
        engine = FastPrivacyEngine(secure_mode=secure, accountant="rdp")
    options = {"noise_multiplier": 2.0, "max_grad_norm": 1.0} | kwargs
    private = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=rows // 8, shuffle=True), **options,
    )  # fmt: skip
    return engine, *private


def train(model: nn.Module, optimizer: DPOptimizer, loader: DataLoader) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def noise_of_a_step(model: nn.Module, optimizer: DPOptimizer, rows: int = 8) -> Tensor:
    """Standardized noise of one step, over all parameters: (p.grad B - sum) / (sigma C)."""
    device = optimizer.params[0].device
    x, y = torch.randn(rows, 6, device=device), torch.randint(0, 3, (rows,), device=device)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    sums = [p.summed_grad for p in optimizer.params]
    optimizer.pre_step()
    sums = [p.summed_grad if s is None else s for p, s in zip(optimizer.params, sums, strict=True)]
    noise = [p.grad * 8 - s for p, s in zip(optimizer.params, sums, strict=True)]
    return torch.cat([n.flatten() for n in noise]) / 2.0


def watch(patch: pytest.MonkeyPatch, seen: Callable[[Tensor], Any]) -> None:
    """Show every tensor that secure noise has filled, in a loop for the CPU or in PyTorch; guarded."""
    real = gaussian.fill_normal

    def fill(out: Tensor, std: float, bits: Any, *, guarded: bool) -> None:
        assert guarded
        real(out, std, bits, guarded=guarded)
        seen(out)

    patch.setattr(gaussian, "fill_normal", fill)
    try:
        from fastclip.ops import host
    except ImportError:  # without loops
        return
    draw = host.draw

    def draw_and_show(outs: list[Tensor], std: float, guarded: bool, *rest: Any) -> None:
        assert guarded
        draw(outs, std, guarded, *rest)
        for out in outs:
            seen(out)

    patch.setattr(host, "draw", draw_and_show)


@pytest.mark.parametrize("clip", ["flat", "per_layer", "adaptive"])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains(mode: str, clip: str, monkeypatch) -> None:
    """Noise, counts and sampling come from the one source; nothing of torch's generators is used."""
    drawn: list[int] = []
    extra = ADAPTIVE if clip == "adaptive" else {}
    norms = {"max_grad_norm": [1.0] * 4} if clip == "per_layer" else {}
    rows = 512  # of which no draw of an eighth is empty
    engine, model, optimizer, loader = start(
        rows=rows, grad_sample_mode=mode, clipping=clip, **norms, **extra
    )
    assert optimizer.secure_mode
    assert optimizer.generator is None
    watch(monkeypatch, lambda out: drawn.append(out.numel()))
    state = torch.get_rng_state()
    batches = list(loader.batch_sampler)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(batches) == 8
    drawn_rows = len(batches[0])
    x, y = torch.randn(drawn_rows, 6), torch.randint(0, 3, (drawn_rows,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    state = torch.get_rng_state()
    optimizer.step()
    assert torch.equal(torch.get_rng_state(), state)
    sizes = [p.numel() for p in model.parameters()]
    assert sorted(drawn) == sorted(sizes + ([1] if clip == "adaptive" else []))
    train(model, optimizer, loader)
    assert 0 < engine.get_epsilon(1e-5) < 5


@pytest.mark.parametrize("mode", MODES)
def test_noise_of_whole_steps(mode: str) -> None:
    """The law, and independence of tensors and steps, of what the optimizer really adds."""
    _, model, optimizer, _ = start(width=20_000, grad_sample_mode=mode, poisson_sampling=False)
    first, second = noise_of_a_step(model, optimizer), noise_of_a_step(model, optimizer)
    assert_standard_normal(torch.cat([first, second]))
    assert_uncorrelated(first, second)
    head, tail = first[:60_000], first[120_000 + 20_000 : 120_000 + 20_000 + 60_000]
    assert_uncorrelated(head, tail)  # two weights


@pytest.mark.parametrize("secure", [True, False])
def test_no_warning_and_no_torchcsprng(secure: bool) -> None:
    """What is not secure is said by explain() and mechanism(), not at every start."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = FastPrivacyEngine(secure_mode=secure)
    assert engine.secure_mode is secure


@pytest.mark.parametrize("mode", MODES)
def test_a_generator_is_refused_as_opacus_refuses_it(mode: str) -> None:
    with pytest.raises(ValueError, match="Passing seed is prohibited in secure mode"):
        start(noise_generator=torch.Generator(), grad_sample_mode=mode)


@pytest.mark.parametrize("mode", ["fast", "hooks"])
def test_secure_mode_cannot_be_left(mode: str) -> None:
    _, model, optimizer, _ = start(grad_sample_mode=mode, poisson_sampling=False)
    source = optimizer.noise_source
    for change in (
        lambda: setattr(optimizer, "generator", torch.Generator()),
        lambda: setattr(optimizer, "secure_mode", False),
        lambda: setattr(optimizer, "noise_source", SeededNoise()),
        lambda: setattr(optimizer, "noise_source", SecureNoise(guarded=False)),
    ):
        with pytest.raises(ArgumentError, match="secure mode"):
            change()
    optimizer.generator = None  # what it is
    optimizer.secure_mode = True
    assert optimizer.noise_source is source
    noise_of_a_step(model, optimizer)


def test_secure_mode_can_be_entered() -> None:
    _, model, optimizer, _ = start(
        secure=False, noise_generator=torch.Generator(), poisson_sampling=False
    )
    with pytest.raises(ArgumentError, match="Passing seed is prohibited"):
        optimizer.secure_mode = True
    assert not optimizer.secure_mode
    optimizer.generator = None
    optimizer.secure_mode = True
    assert isinstance(optimizer.noise_source, SecureNoise)
    noise_of_a_step(model, optimizer)


def test_equal_seeds_repeat_a_run_only_without_secure_mode() -> None:
    def weights(secure: bool, seed: int) -> Tensor:
        _, model, optimizer, loader = start(secure)
        torch.manual_seed(seed)
        train(model, optimizer, loader)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(False, 1), weights(False, 1))
    assert not (weights(True, 1) == weights(True, 1)).all()


def test_a_restored_checkpoint_continues_no_stream() -> None:
    """Not through a state_dict, a pickle or a deep copy of the source."""
    own = {"clipping": clipping.adaptive(), "poisson_sampling": False}
    engine, model, optimizer, _ = start(**own)
    noise_of_a_step(model, optimizer)
    file = io.BytesIO()
    engine.save_checkpoint(path=file, module=model, optimizer=optimizer)
    streams = []
    for _ in range(2):
        other, restored, its, _ = start(**own)
        file.seek(0)
        other.load_checkpoint(path=file, module=restored, optimizer=its)
        torch.manual_seed(7)
        streams.append(noise_of_a_step(restored, its))
    assert not (streams[0] == streams[1]).any()
    source = optimizer.noise_source
    copies = [copy.deepcopy(source), copy.copy(source), pickle.loads(pickle.dumps(source))]
    assert all(kept.secure and kept.guarded for kept in copies)
    draws = torch.stack([s.normal_(torch.empty(100)) for s in (source, *copies)])
    assert len(draws.flatten().unique()) == draws.numel()


def test_physical_batches_and_both_kinds_of_loaders() -> None:
    engine, model, optimizer, loader = start()
    assert isinstance(loader.batch_sampler, UniformWithReplacementSampler)
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=3, optimizer=optimizer
    ) as it:
        train(model, optimizer, it)
    assert engine.accountant.history[0][2] == 8
    for mode in ("fast", "hooks"):
        engine, model, optimizer, loader = start(poisson_sampling=False, grad_sample_mode=mode)
        torch.manual_seed(0)
        first = list(loader.batch_sampler)
        torch.manual_seed(0)
        second = list(loader.batch_sampler)
        assert first != second
        assert sorted(sum(first, [])) == sorted(sum(second, [])) == list(range(64))  # noqa: RUF017
        train(model, optimizer, loader)


def test_the_same_loader_twice() -> None:
    """A second make_private of a loader that an engine has prepared already."""
    engine, model, optimizer, loader = start(poisson_sampling=False)
    for _ in range(3):
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=2.0,
            max_grad_norm=1.0, poisson_sampling=False,
        )  # fmt: skip
    train(model, optimizer, loader)


def test_the_seed_of_the_users_loader_does_not_draw_rows() -> None:
    def rows() -> list[list[int]]:
        torch.manual_seed(1)
        model = nn.Linear(2, 2)
        _, _, loader = FastPrivacyEngine(secure_mode=True).make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(
                TensorDataset(torch.randn(64, 2)), batch_size=8,
                generator=torch.Generator().manual_seed(1),
            ),
            noise_multiplier=1.0, max_grad_norm=1.0,
        )  # fmt: skip
        return list(loader.batch_sampler)

    assert rows() != rows()


def test_a_captured_graph_is_refused(monkeypatch) -> None:
    """A graph would replay one key's noise for ever."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(StepError, match="cannot be captured in a CUDA graph"):
        noise_module.check_not_captured(torch.device("cuda"))
    noise_module.check_not_captured(torch.device("cpu"))
    asked = []
    monkeypatch.setattr(noise_module, "check_not_captured", asked.append)
    SecureNoise().normal_(torch.empty(3))
    assert asked == [torch.device("cpu")]


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("out", [torch.zeros(9).half(), torch.zeros(8, 4)[:, ::2], torch.zeros(5)])
def test_the_guard_is_on_whatever_is_filled(out: Tensor, backend: str, monkeypatch) -> None:
    """Copied or in place; and what was copied from is erased."""
    seen = []

    def look(values: Tensor) -> None:
        seen.append(values)
        values.fill_(1.0)

    watch(monkeypatch, look)
    with use_backend(backend):
        SecureNoise().normal_(out)
    assert len(seen) == 1
    assert bool((out == 1).all())
    assert seen[0].data_ptr() == out.data_ptr() or not seen[0].any()


@pytest.mark.parametrize("std", [-1.0, float("nan"), float("inf")])
def test_a_std_that_is_none_is_refused(std: float) -> None:
    for source in (SecureNoise(), SeededNoise()):
        for draw in (
            lambda s: s.draw(torch.zeros(3), std),
            lambda s: ops.fill_normal(torch.zeros(3), std, s),
            lambda s: ops.noise_finalize([None], [torch.zeros(3)], std, 1.0, s),
        ):
            with pytest.raises(ArgumentError, match="expects a finite number >= 0"):
                draw(source)
    with pytest.raises(ArgumentError, match="expects a finite number >= 0"):
        SecureNoise().normal_(torch.zeros(3), std)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_noise_is_real(dtype: torch.dtype) -> None:
    out = torch.zeros(3, dtype=dtype)
    for draw in (
        lambda: SecureNoise().normal_(out),
        lambda: ops.fill_normal(out, 1.0, SeededNoise()),
        lambda: ops.noise_finalize([None], [out], 1.0, 1.0, SecureNoise()),
    ):
        with pytest.raises(TypeError, match="real floating-point tensor"):
            draw()


def test_whatever_the_default_device() -> None:
    _, model, optimizer, loader = start()
    rows = next(iter(loader))
    try:
        torch.set_default_device("meta")
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(rows[0]), rows[1]).backward()
        optimizer.step()
        assert len(list(loader.batch_sampler)) == 8
    finally:
        torch.set_default_device(None)


def test_an_error_of_the_source_is_not_hidden_by_another_backend(monkeypatch) -> None:
    """A kernel that refuses a draw must not be replaced by one that makes it."""
    from fastclip.ops import dispatch

    def refuses(*args: Any, **kwargs: Any) -> None:
        raise StepError("captured")

    monkeypatch.setitem(dispatch._STATE.kernels, "cuda", {"fill_normal": refuses})
    with dispatch.use_backend("cuda"), pytest.raises(StepError, match="captured"):
        ops.fill_normal(torch.empty(3), 1.0, SecureNoise())


# What mechanism() says of it


def test_what_is_said_to_be_secure_is_what_draws() -> None:
    """Not the engine's attribute, which anyone can set afterwards."""
    engine, _, optimizer, loader = start(secure=False)
    engine.secure_mode = True
    assert engine.mechanism().secure == ()
    optimizer.secure_mode = True  # from the next draw: but of the noise alone
    found = engine.mechanism()
    assert found.insecure == ("which samples are drawn",)
    assert len(found.secure) == 3

    engine, _, optimizer, loader = start(secure=True)
    engine.secure_mode = False
    assert engine.mechanism().insecure == ()
    loader.batch_sampler.secure = False
    assert engine.mechanism().insecure == ("which samples are drawn",)


def test_noise_that_is_cryptographic_but_not_guarded() -> None:
    engine, _, optimizer, _ = start(secure=False)
    optimizer.noise_source = SecureNoise(guarded=False)
    found = engine.mechanism()
    assert "noise of the gradients and of counts" in found.secure
    assert found.insecure == (
        "which samples are drawn",
        "the last bits of the noise, which could reveal sums",
    )


@pytest.mark.parametrize("secure", [True, False])
def test_a_random_order_in_secure_mode(secure: bool) -> None:
    engine, _, _, loader = start(secure=secure, poisson_sampling=False)
    assert ("which samples are drawn" in engine.mechanism().secure) is secure
    del loader
    assert ("which samples are drawn" in engine.mechanism().secure) is secure
