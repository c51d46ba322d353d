"""FastPrivacyEngine: opacus.PrivacyEngine with exact clipping in one backward pass."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, overload

import torch
from opacus import PrivacyEngine
from opacus.accountants import IAccountant
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fastclip._moved import lifted, new_keywords
from fastclip.accounting.checkpoint import RunState, load_checkpoint, save_checkpoint
from fastclip.accounting.epsilon import epsilon, open_accountant, spent
from fastclip.accounting.ledger import Ledger, keep_ledger, succeeding
from fastclip.accounting.ledger_file import keep_in_file
from fastclip.backward.state import GradientState
from fastclip.clipping import Clipping
from fastclip.clipping.resolve import named
from fastclip.core.building import compile_missing
from fastclip.core.checks import whole
from fastclip.core.overrides import METHODS, Preparation, check_reached, own_method
from fastclip.counts import release
from fastclip.counts.lines import PrivacyByDataSet, lines_of
from fastclip.counts.query import CountQuery
from fastclip.counts.release import NoisyCounts, PaidCounts
from fastclip.data.design import SamplingDesign
from fastclip.data.plan import SAMPLING, Request, checked_plan
from fastclip.data.resume import load_sampling, save_sampling
from fastclip.data.sampling import Sampling
from fastclip.distributed.checkpoints import model_of
from fastclip.distributed.processes import check_who_writes, reported_to_ranks
from fastclip.distributed.ranks import Ranks
from fastclip.engine import validation
from fastclip.engine.explanation import Explanation, Setup, explain
from fastclip.engine.mechanism import Mechanism
from fastclip.engine.opacus_modes.modes import make_by_opacus
from fastclip.engine.run import (
    FAST_MODES,
    PrivacyRequest,
    PrivateRun,
    make_fast,
    mechanism_of,
    noise_for,
    says_too_much,
    set_groups,
)
from fastclip.engine.step import Step, make_step
from fastclip.engine.validation import compatible
from fastclip.errors import ArgumentTypeError, StepError, say
from fastclip.ops.planner import NormPlan, Planner
from fastclip.ops.random import require_cipher
from fastclip.trace.findings import Proof


class FastPrivacyEngine(PrivacyEngine):
    """Drop-in replacement for `opacus.PrivacyEngine` that needs one standard backward pass.

    The calls and the guarantee are those of Opacus.

    Examples:
        >>> engine = FastPrivacyEngine()
        >>> model, optimizer, loader = engine.make_private(
        ...     module=model, optimizer=optimizer, data_loader=loader,
        ...     noise_multiplier=1.0, max_grad_norm=1.0)
        >>> for x, y in loader:
        ...     optimizer.zero_grad()
        ...     criterion(model(x), y).backward()
        ...     optimizer.step()
        >>> engine.get_epsilon(delta=1e-5)

    Args:
        accountant: "prv" (default), "pld", "rdp" or "gdp".
        secure_mode: draws noise and samples from ChaCha20 under keys of the operating system, and
            guards noise against floating-point attacks (docs/secure_mode.md).
        planner: chooses how norms are computed, within its memory budget. `plan()` shows the choice.
            The default keeps per-sample gradients where they are cheap.
    """

    _accountant: Ledger | None = None
    _warned_of_delta = False

    def __init__(
        self, *, accountant: str = "prv", secure_mode: bool = False, planner: Planner | None = None
    ) -> None:
        if secure_mode:
            require_cipher()
        opened = open_accountant(accountant)  # names the choices, if it is none of them
        with warnings.catch_warnings():
            # Opacus warns at every start; explain() and mechanism() say so where it matters.
            warnings.filterwarnings("ignore", "Secure RNG turned off")
            super().__init__(accountant="rdp", secure_mode=False)
        self._accountant = keep_ledger(opened)  # not all versions of Opacus know all of its kinds
        self.secure_mode = secure_mode
        if planner is not None and not isinstance(planner, Planner):
            raise ArgumentTypeError(
                f"planner expects a fastclip.Planner or None, got {type(planner).__name__}."
            )
        self._planner = planner or Planner()
        self._runs: list[PrivateRun] = []
        self._count_noise = release.noise_of_counts(secure_mode)

    def make_private(  # type: ignore[override]
        self, *, module: nn.Module, optimizer: torch.optim.Optimizer, criterion: Any = None,
        data_loader: DataLoader, noise_multiplier: float,
        max_grad_norm: float | Sequence[float], batch_first: bool = True,
        loss_reduction: str = "mean", poisson_sampling: bool | None = None,
        clipping: str | Clipping = "flat", noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "fast", wrap_model: bool = True, rand_on_empty: bool = False,
        sampling: str | Sampling | None = None,
        sample_rate: float | None = None, expected_batch_size: float | None = None,
        max_batch_size: int | None = None, unit_ids: Any = None,
        max_samples_per_unit: int | None = None, unit_reduction: str = "mean", views: int = 1,
        model_loss: str = "own", **kwargs: Any,
    ) -> tuple:  # fmt: skip
        """Make model, optimizer and data loader private.

        Args:
            module: the model, in training mode.
            optimizer: holds parameters of this model.
            criterion: loss, whose reduction must be `loss_reduction`. It is returned unchanged, and
                only if grad_sample_mode is "ghost".
            data_loader: its length sets the sampling rate q = 1 / len(data_loader). Its number N of
                samples sets the expected batch size B = N q. If you give both q and B, epsilon does
                not treat N as public.
            noise_multiplier: sigma, the standard deviation of the noise over the sensitivity. It is the
                total that the accountant sees, count queries included. With a noise schedule it is that
                of the first step.
            max_grad_norm: (first) clipping threshold C. For "per_layer" a list with one threshold per
                parameter tensor.
            batch_first: samples lie along axis 0 of the model's inputs; otherwise along axis 1.
            loss_reduction: "mean" (over the physical batch) or "sum".
            sampling: "poisson" draws every sample independently with rate q in each step. "allocation"
                puts every sample into one step of each pass, chosen uniformly, at a lower epsilon;
                `Allocation(times=k)` into k steps. "loader" takes samples in the loader's order, each
                in every pass, accounted for without amplification. An IterableDataset needs it and a
                batch_size, and must bring a sample at most once per step (not checked). Every step
                is then recorded at q = 1, and no length is needed. Without a length B is
                expected_batch_size, or the loader's batch_size.
            poisson_sampling: Opacus' argument. True is sampling="poisson", False is "loader".
            clipping: a strategy of fastclip.clipping, or the name of a preset. Arguments of the preset
                are further keywords here. "flat" and the keywords of "adaptive" are those of Opacus.
            noise_generator: generator of the noise, for reproducible runs. fastclip does not seed it.
            grad_sample_mode: "fast"; "ghost" does the same and also returns the criterion. Opacus' own
                modes ("hooks", "functorch", "ew", ...) take their gradients from Opacus' code.
            wrap_model: False intercepts the model in place and returns a handle with `cleanup()`.
            rand_on_empty: an empty batch becomes one placeholder sample, which contributes nothing.
            sample_rate: public q, of samples or units. Give expected_batch_size too.
            expected_batch_size: public B, of samples or units. Give sample_rate too.
            max_batch_size: most samples or units per step. Larger sampled batches are truncated at
                random, which accountant="pld" accounts for. None: no limit.
            unit_ids: privacy unit of each sample in the data set, [samples]: a tensor, list, array, or
                the name of a column. Then q, B, clipping and epsilon refer to units (patients).
            max_samples_per_unit: most samples of a unit per step, drawn at random. None: all.
            unit_reduction: a unit's gradient is the "mean" or the "sum" of its samples' gradients.
            model_loss: "own" keeps the losses of the model. "per_sample" replaces mean cross entropies
                in the model (such as the losses of transformers), and in a criterion that is a module
                with a `reduction`. The new loss is the mean over samples of each sample's mean over its
                counted labels. A sample without counted labels contributes 0. `num_items_in_batch` is
                ignored. Under torch.no_grad, and after `cleanup()`, the loss is the model's own.
            views: K. The model's batch holds K views of each sample of the loader, next to each other
                (x.repeat_interleave(K, 0)). Their mean gradient is clipped once (arXiv 2204.13650,
                section 3.2). B and epsilon refer to samples, whatever K is.

        Returns:
            (model or handle, optimizer, data loader); with "ghost", (..., criterion, data loader).

        Raises:
            fastclip.errors.*: naming the module or keyword, with a suggested fix. Nothing is changed.

        Formal guarantee: every real step of the optimizer is a Gaussian mechanism with noise
        multiplier sigma on a Poisson sample of rate q, or on a batch of a random allocation.
        `get_epsilon` composes the steps taken. If q and B are given, neighbors differ in one sample (or
        unit) that was added or removed. Otherwise, and in the loader's order, one is zeroed out and N
        is public. `mechanism()` states all of it.
        """
        arguments = lifted({name: value for name, value in locals().items() if name != "self"})
        check_reached(self, FastPrivacyEngine)
        mechanism = self.accountant.mechanism()
        with reported_to_ranks(module if grad_sample_mode in FAST_MODES else None):
            request = PrivacyRequest.checked(self.secure_mode, mechanism, **arguments)
        with Preparation(self) as making:
            ours: dict[str, Any] = {"ledger": lambda: self.accountant, "validate": self.validate}
            if request.fast:
                compile_missing()
                made, releases = make_fast(request, making, planner=self._planner, **ours)
                run = PrivateRun.of(made[0].grad_state, releases, made[-1], request.planned)
                self._runs = [*(each for each in self._runs if each.counts), run]
            else:
                made = make_by_opacus(request, making, **ours)
        return made

    def make_private_with_epsilon(  # type: ignore[override]
        self, *, data_loader: DataLoader, target_epsilon: float, target_delta: float,
        epochs: float, clipping: str | Clipping = "flat",
        reserve: Sequence[tuple[CountQuery, int]] = (), **options: Any,
    ) -> tuple:  # fmt: skip
        """Calls `make_private` with the noise multiplier that fits a privacy budget.

        Args:
            data_loader: as in `make_private`.
            clipping: as in `make_private`.
            target_epsilon: the budget, spent after `epochs` passes. The guarantee is that of
                `get_epsilon`.
            target_delta: delta of the budget, in (0, 1).
            epochs: number of passes, of 1 / q steps each. The loader draws exactly as many batches. A
                noise schedule is composed over all of them, and the noise multiplier found is that of
                its first step.
            reserve: (query, times) of counts that the budget should also cover, of the training set or
                of data that overlap it. `count` and `prepay` pay for them later.
            **options: everything else that `make_private` takes, and options of the accountant
                ("epsilon_tolerance", "alphas", "eps_error", ...). In Opacus' own modes, options of the
                optimizer go to it.

        Returns:
            As `make_private`.
        """
        validation.check_loader(data_loader)
        validation.check_budget(target_epsilon, target_delta, epochs)
        clipping, options = named(clipping, new_keywords(options))
        sampling = {name: options[name] for name in SAMPLING if name in options}
        design = self.plan_sampling(data_loader, **sampling)
        self._check_delta("make_private_with_epsilon", target_delta, design)
        known = {"epsilon_tolerance", *inspect.signature(self.accountant.get_epsilon).parameters}
        noise_multiplier = noise_for(
            self.accountant, design, clipping, (target_epsilon, target_delta), epochs,
            release.reserved(reserve, self.accountant),
            {name: value for name, value in options.items() if name in known},
        )  # fmt: skip
        return self.make_private(
            data_loader=data_loader, noise_multiplier=noise_multiplier, clipping=clipping,
            **{name: value for name, value in options.items() if name not in known},
        )  # fmt: skip

    @property
    def accountant(self) -> Ledger:
        """Opacus' accountant of every step that was taken under this engine.

        You can assign another one. It takes over the steps recorded so far, in addition to its own, and
        records all later steps. An empty accountant of another mechanism accounts for the same run.
        """
        assert self._accountant is not None
        return self._accountant

    @accountant.setter
    def accountant(self, value: IAccountant) -> None:
        self._accountant = succeeding(value, self._accountant)

    def get_epsilon(self, delta: float) -> float:
        """The epsilon that all steps taken so far have spent, at `delta`.

        Formal guarantee: if q and B were given, neighbors differ in one sample (or unit) that was added
        or removed. Otherwise, and without Poisson sampling, one is zeroed out. `mechanism()` says which.

        Args:
            delta: in (0, 1), smaller than 1 / N. The first larger one gives a warning.

        Returns:
            epsilon; 0 before the first step, inf if a step had no noise.

        Raises:
            ArgumentError, ArgumentTypeError: delta is out of range, or the accountant's numerics fail.
        """
        found = spent(self.accountant, delta)
        for run in self._runs:
            self._check_delta("get_epsilon", float(delta), run.design)
        return found

    def _check_delta(self, call: str, delta: float, design: SamplingDesign) -> None:
        """Warn once per engine if delta lets a run publish one whole sample of N."""
        self._warned_of_delta = self._warned_of_delta or says_too_much(call, delta, design)

    def sample_epsilon(self, delta: float, rate: float | Tensor) -> float:
        """Epsilon so far for one sample with a sampling rate of its own, in the last private model.

        Formal guarantee: that of `get_epsilon`, for neighbors that differ in this sample. Steps of other
        models and of loaded checkpoints count at their recorded rates.

        Args:
            delta: in (0, 1).
            rate: q_i of the sample, of `engine.sampling.rates`.

        Raises:
            StepError: before make_private. ArgumentError: rate or delta is out of range.
        """
        entries = self._last_run().releases.at_rate(self.accountant.history, rate)
        return epsilon(entries, delta, self.accountant.mechanism())

    def row_epsilon(self, delta: float, rate: float | Tensor) -> float:
        """The old name of `sample_epsilon`."""
        say("engine.row_epsilon is deprecated. Use engine.sample_epsilon.", DeprecationWarning)
        return self.sample_epsilon(delta, rate)

    def mechanism(self, *, delta: float | None = None, epochs: float | None = None) -> Mechanism:
        """The exact guarantee of the last private model; print it, or keep `as_json()`.

        Args:
            delta: in (0, 1); None for that of `make_private_with_epsilon`.
            epochs: length of the whole run, in passes; None for that of `make_private_with_epsilon`.

        Returns:
            A `fastclip.engine.mechanism.Mechanism`, with bounds on any attack.

        Raises:
            StepError: before make_private. ArgumentError: delta or epochs is out of range.
        """
        run = self._last_run()
        return mechanism_of(run, self.accountant, self.get_epsilon, delta, epochs)

    @property
    def sampling(self) -> SamplingDesign:
        """The sampling design of the last private model.

        Raises:
            StepError: before make_private.
        """
        return self._last_run().design

    def plan_sampling(self, data_loader: DataLoader, **sampling: Any) -> SamplingDesign:
        """The sampling design that `make_private` would use for a loader; nothing is drawn or changed.

        Args:
            data_loader: as for `make_private`.
            sampling: sampling, sample_rate, expected_batch_size, unit_ids, ... as for `make_private`.

        Raises:
            ArgumentError, ArgumentTypeError: `make_private` would raise the same.
        """
        request = Request(**new_keywords(sampling))
        plan = checked_plan(data_loader, request, secure=self.secure_mode, distributed=True)
        return plan.design

    def plan(self) -> NormPlan:
        """The trainable layers, how their norms are computed, and the memory they hold; print it.

        Shapes and methods are those of the last backward pass of the last private model.
        """
        return self._last_run().plan()

    @overload
    def explain(self) -> Proof: ...

    @overload
    def explain(self, *, module: nn.Module, **setup: Any) -> Explanation: ...

    def explain(
        self, *, module: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None,
        data_loader: DataLoader | None = None, criterion: Any = None, delta: float | None = None,
        loss_reduction: str = "mean", batch: Any = None, **sampling: Any,
    ) -> Explanation | Proof:  # fmt: skip
        """Explains what `make_private` would do with these arguments. Print the result.

        Without arguments it reports what the traced steps of the last private model have shown.

        It names trained and frozen layers, layers without a rule, errors that `make_private` would
        raise, and known traps. Traps are samples not drawn by Poisson sampling, an incomplete last
        batch, delta larger than 1 / N, losses that couple samples, and predictable noise. Nothing is
        changed, and no data is read except `batch`.

        Args:
            module: the model, before `make_private`. None: the last private one.
            optimizer: as for `make_private`, as are the other arguments; give what you know.
            delta: the delta at which you will state epsilon.
            batch: input of the model: a tensor, a tuple of arguments, or a dictionary of keywords. A
                copy of the model then runs on a few of its samples, as in the first step. The result
                also covers uses of parameters, coupled samples, and the cost of this dry run.
            sampling: sampling, sample_rate, unit_ids, ... as for `make_private`.

        Returns:
            An Explanation, with `rows`, `frozen`, `slow`, `errors` and `traps`. Without `module` a
            `fastclip.trace.findings.Proof`: the operations in which samples met, and the conclusion.

        Raises:
            StepError: without `module`, before make_private.
        """
        if module is None:
            return self._last_run().trace_log.proof
        return explain(
            Setup(
                module, optimizer, data_loader, criterion, delta, loss_reduction, self.secure_mode,
                batch, new_keywords(sampling),
            )
        )  # fmt: skip

    def set_groups(self, ids: Tensor, module: nn.Module | None = None) -> None:
        """Sets the group of each sample of the next backward pass.

        Strategies of groups need it before every backward pass, on physical batches too. Other
        strategies ignore it, so a training loop may always call it. Ids that no backward pass has used
        are dropped at the next real step.

        Args:
            ids: int64 [b], from 0 to num_groups - 1. On an accelerator the values are not checked: a
                sample outside the range contributes nothing and is not counted.
            module: the private model of the next pass, if the engine has several.

        Raises:
            ArgumentError, ArgumentTypeError: for other values, shapes or types, or no such model.
        """
        set_groups(self._grad_states(), ids, module)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which forward and backward passes of this engine's models contribute nothing.

        A forward pass inside contributes nothing, wherever it is differentiated. This also holds for
        methods and submodules of the models. Use it for adversarial inputs or saliency maps: gradients
        of the inputs are exact, and the parameters receive none.
        """
        with ExitStack() as stack:
            for grad_state in self._grad_states():
                stack.enter_context(grad_state.pause())
            yield

    def make_step(
        self, model: nn.Module, loss_function: Callable[..., Tensor], *,
        physical_batch: int | None = None, cuda_graph: bool = False, compile: bool = False,
        deterministic: bool = False,
    ) -> Step:  # fmt: skip
        """Returns a function that trains on one batch, optionally compiled or replayed as CUDA graphs.

        Examples:
            >>> def losses(model, x, y):
            ...     return nn.functional.cross_entropy(model(x), y, reduction="none")
            >>> step = engine.make_step(model, losses, physical_batch=320, cuda_graph=True)
            >>> for x, y in loader:
            ...     loss = step(x, y)  # forward and backward
            ...     optimizer.step()
            ...     optimizer.zero_grad()

        Args:
            model: the private model that `loss_function` gets (with wrap_model=False your own).
            loss_function: (model, *batch) -> one loss per sample, [n]. The step takes their mean or sum,
                as `loss_reduction` says.
            physical_batch: samples that run at once. A larger batch runs in parts, which one
                `optimizer.step()` releases. In a graph a smaller batch is filled with placeholder
                samples, which contribute nothing. None: the expected batch size (for Poisson sampling
                plus three standard deviations), times `views`, rounded up to a multiple of 8.
            cuda_graph: replay the device's work of a pass as CUDA graphs (docs/cuda_graphs.md). On a
                CPU the step runs without one, and warns once.
            compile: let inductor compile forward pass, loss, backward pass, norms and clipped sums
                whole (docs/compile.md). A step that cannot be compiled warns once and runs as it is.
            deterministic: fill smaller batches, so every pass has one size (docs/threat_model.md).

        Raises:
            ArgumentError: another model, samples that do not lie along axis 0, or two of cuda_graph,
                compile and deterministic.
        """
        return make_step(
            self._grad_states() if self._runs else [], model, loss_function, compile=compile,
            physical_batch=physical_batch, cuda_graph=cuda_graph, deterministic=deterministic,
        )  # fmt: skip

    def count(
        self, query: CountQuery, *, groups: Any, measures: Mapping[str, Any] | None = None,
        unit_ids: Any = None,
    ) -> NoisyCounts:  # fmt: skip
        """Answers a count query with noise, such as correct predictions per subgroup, and pays for it.

        Formal guarantee: that of `fastclip.counts.CountQuery`. The answer is in the ledger (and its
        file) before it is drawn. `get_epsilon` includes counts of the training set, and of data sets
        that may hold some of its people. Counts of other people have a line of their own, which
        `privacy_by_data_set` states. The model may be any that this engine has trained. For the people
        of the training set, an answer about others is post-processing of released weights.

        Args:
            query: what is counted, in which data set, with how much noise.
            groups: the group of each sample, [samples]. If groups overlap (disjoint=False), True or
                False, [samples, groups].
            measures: 0 or 1 (False or True) per sample, [samples], for each measure except "samples".
                None if "samples" is the only one.
            unit_ids: as for make_private, if query.unit is "unit".

        Returns:
            A `fastclip.counts.NoisyCounts`. On several ranks all call this together with all of the
            data, and get one answer.

        Raises:
            ArgumentError, ArgumentTypeError: wrong values, shapes or types, or a query that the ledger
                cannot take; nothing is spent. StepError: the answer cannot be recorded.
        """
        ranks = self._ranks("count")
        exact = release.exact_counts(release.check_query(query), groups, measures, unit_ids, ranks)
        release.pay(query, 1, self.accountant, self._trained_units, ranks)
        return release.draw(query, exact, self._count_noise, self.accountant, ranks)

    def prepay(self, query: CountQuery, times: int) -> PaidCounts:
        """Pays for several answers of one query at once, before the first is drawn.

        Args:
            query: as for `count`.
            times: number of answers, at least 1.

        Returns:
            A `fastclip.counts.PaidCounts`, whose `count` draws them one by one.

        Raises:
            As `count`.
        """
        ranks, times = self._ranks("prepay"), whole("times", times, 1)
        release.pay(release.check_query(query), times, self.accountant, self._trained_units, ranks)
        return PaidCounts(query, times, self._count_noise, self.accountant, ranks)

    def privacy_by_data_set(self, delta: float) -> PrivacyByDataSet:
        """The privacy spent per data set: the training set, and others that were counted.

        Args:
            delta: in (0, 1), the same for each line.

        Returns:
            A `fastclip.counts.PrivacyByDataSet`; print it.

        Raises:
            ArgumentError, ArgumentTypeError: as `get_epsilon`.
        """
        return lines_of(self.accountant, delta)

    def write_ahead(self, path: Any) -> None:
        """Keeps the ledger in a file too, and writes each step to disk before it is released.

        A run that is killed, or resumes from an older checkpoint, then counts every step that it has
        taken. Steps that the file holds already are counted at once. On several ranks all call this
        after make_private, with a path under which all see the same file; the first rank writes. The
        cost is one fsync per step, and on several ranks one small exchange.

        Formal guarantee: whatever kills the process, the file holds every released step. A step that
        cannot be written raises a StepError and is not released, until you name another file or none.
        This happens if the disk is full, if the file was closed, moved, replaced or touched, and in a
        copy or a fork.

        Args:
            path: path of the file, one per run. The file is created if it does not exist. None: stop
                writing, and release the file.

        Raises:
            ArgumentError: the engine keeps a file already; this one is damaged or no ledger; this
                accountant cannot compose its steps; another process writes it; or ranks see different
                files. Engine and file are unchanged.
            OSError: the file cannot be opened or created.
            StepError: the file cannot be written.
        """
        keep_in_file(self.accountant, path, self._ranks("write_ahead"))

    def save_checkpoint(self, *, path: Any, module: nn.Module, **options: Any) -> None:  # type: ignore[override]
        """Saves a checkpoint for `load_checkpoint`; on several ranks the first one writes.

        The file is always complete: an old one stays until the new one is written. Its keys and tensors
        are those of the model in one process, and any number of ranks can load it. If parameters are
        sharded (fully_shard), all ranks gather them and must call this together.

        Args:
            As in Opacus.

        Raises:
            ArgumentError: the file would hold objects other than tensors and plain values, which could
                not be loaded. An old file stays.
        """
        ranks = self._runs[-1].state.ranks if self._runs else None
        writes = ranks is None or ranks.number == 0
        save_checkpoint(self.accountant, writes=writes, path=path, module=module, **options)

    def load_checkpoint(self, *, path: Any, module: nn.Module, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """Resumes from a file of `save_checkpoint`, or of Opacus.

        Steps that this engine has recorded stay recorded, even if the model returns to an earlier state:
        the later weights have been seen. Steps of the same run count once, all others are added. Files
        hold tensors and plain values, and loading runs no code. To load a file that you trust and that
        holds more, pass `torch_load_kwargs={"weights_only": False}`.

        Args:
            As in Opacus. Objects that you pass get the state that the file holds for them.

        Returns:
            The rest of the file.

        Raises:
            ArgumentError: the file is damaged, lacks the privacy spent, or was accounted for by another
                mechanism. Nothing is loaded.
        """
        return load_checkpoint(self.accountant, path=path, module=module, **options)

    def save_sampling(self, path: Any) -> None:
        """Saves where the pass over the data stands, to continue it in another process.

        The file is deleted before the next step, whose batch must not be drawn again. It tells which
        samples are in which batch, and only its owner may read it. Each rank has a file of its own.

        Raises:
            StepError: secure mode keeps no state, or the loader's own sampler draws.
        """
        run = self._last_run()
        save_sampling(path, run.releases, run.loader(), run.state.ranks)

    def load_sampling(self, path: Any) -> None:
        """Continues a saved pass: the next one over the loader hands out the batches that were left.

        Call it after make_private and `load_checkpoint`.

        Raises:
            ArgumentError: there is no such file, or data, sampling or ledger differ.
        """
        run = self._last_run()
        load_sampling(path, run.releases, run.loader(), run.state.ranks)

    def run_state(self, *, module: nn.Module, optimizer: Any) -> RunState:
        """The state of the run for torch.distributed.checkpoint, where each rank saves its own part.

        Examples:
            >>> state = {"private run": engine.run_state(module=model, optimizer=optimizer)}
            >>> torch.distributed.checkpoint.save(state, checkpoint_id=folder)
            >>> torch.distributed.checkpoint.load(state, checkpoint_id=folder)  # on any number of ranks

        Args:
            module: as make_private returned it.
            optimizer: as make_private returned it.

        Raises:
            ArgumentTypeError: another optimizer.
        """
        return RunState(self.accountant, model_of(module), optimizer)

    def is_compatible(
        self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None
    ) -> bool:
        """Whether `validate` accepts the module."""
        try:
            self.validate(module=module, optimizer=optimizer, data_loader=data_loader)
        except (ValueError, TypeError):
            return False
        return True

    def validate(
        self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None
    ) -> None:
        """Raises an error for modules that are not supported, with their path and a suggested fix."""
        validation.check_training(module)
        validation.check_module(module)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """A validated copy of the model in which unsupported layers such as BatchNorm are replaced.

        The model is unchanged, wherever its classes were defined. Tied parameters stay tied.

        Raises:
            UnsupportedModuleError: a layer has no replacement. The message suggests a fix.
        """
        fixed = compatible(module)
        validation.check_training(fixed)
        validation.check_module(fixed)
        return fixed

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the ledger, and no model, samples or rates."""
        return {**self.__dict__, "_runs": []}

    def __deepcopy__(self, memo: dict[int, Any]) -> FastPrivacyEngine:
        """A copy shares the ledger, where copied optimizers record too."""
        twin = memo[id(self)] = type(self).__new__(type(self))
        if self._accountant is not None:
            memo[id(self._accountant)] = self._accountant
        twin.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return twin

    # Opacus' own methods, which subclasses override
    _prepare_model, _prepare_data_loader, _prepare_optimizer, _prepare_criterion = map(
        own_method, METHODS
    )

    # Its runs

    def _ranks(self, call: str) -> Ranks | None:
        """The ranks that train the last private model; the first of them writes files."""
        ranks = self._runs[-1].state.ranks if self._runs else None
        check_who_writes(ranks, call)
        return ranks

    @property
    def _trained_units(self) -> frozenset[str]:
        return frozenset(run.design.unit for run in self._runs)

    def _last_run(self) -> PrivateRun:
        if not self._runs:
            raise StepError(
                "This call needs a private model in the fast mode, and the engine has none. Call "
                "make_private first, without grad_sample_mode.",
                doc="unsupported-options",
            )
        return self._runs[-1]

    def _grad_states(self) -> list[GradientState]:
        """Gradient states of the models that are private and in use."""
        self._last_run()
        return [grad_state for run in self._runs if (grad_state := run.grad_state) is not None]
