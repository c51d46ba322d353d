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
    """Drop-in for `opacus.PrivacyEngine`: same calls, same guarantee, one ordinary backward pass.

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
        secure_mode: noise of gradients and counts, and sampling, from ChaCha20 under keys of the
            operating system, guarded against floating-point attacks (docs/secure_mode.md).
        planner: chooses how norms are computed, within its memory budget; `plan()` shows what it
            chose. The default keeps per-sample gradients where they are cheap.
    """

    _accountant: Ledger | None = None
    _warned_of_delta = False

    def __init__(
        self, *, accountant: str = "prv", secure_mode: bool = False, planner: Planner | None = None
    ) -> None:
        if secure_mode:
            require_cipher()
        opened = open_accountant(accountant)  # names the choices, where it is none
        with warnings.catch_warnings():
            # Opacus says so at every start; explain() and mechanism() do where it matters.
            warnings.filterwarnings("ignore", "Secure RNG turned off")
            super().__init__(accountant="rdp", secure_mode=False)
        self._accountant = keep_ledger(opened)  # not all versions of Opacus know all of its kinds
        self.secure_mode = secure_mode
        if planner is not None and not isinstance(planner, Planner):
            raise ArgumentTypeError(
                f"planner expects a fastclip.Planner or None, got {type(planner).__name__}"
            )
        self._planner = planner or Planner()
        self._runs: list[PrivateRun] = []
        self._count_noise = release.noise_of_counts(secure_mode)

    def make_private(  # type: ignore[override]
        self, *, module: nn.Module, optimizer: torch.optim.Optimizer, criterion: Any = None,
        data_loader: DataLoader, noise_multiplier: float,
        max_grad_norm: float | Sequence[float], batch_first: bool = True,
        loss_reduction: str = "mean", poisson_sampling: bool = True,
        clipping: str | Clipping = "flat", noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "fast", wrap_model: bool = True, rand_on_empty: bool = False,
        sample_rate: float | None = None, expected_batch_size: float | None = None,
        max_batch_size: int | None = None, unit_ids: Any = None,
        max_samples_per_unit: int | None = None, unit_reduction: str = "mean", views: int = 1,
        model_loss: str = "own", **kwargs: Any,
    ) -> tuple:  # fmt: skip
        """Make model, optimizer and data loader private.

        Args:
            module: the model, in training mode.
            optimizer: over this model's parameters.
            criterion: loss, whose reduction must be `loss_reduction`; returned (unchanged) only
                where grad_sample_mode is "ghost".
            data_loader: its length sets the sampling rate q = 1 / len(data_loader), and the number N
                of its samples the expected batch size B = N q, unless both are given: then epsilon
                does not take N for public.
            noise_multiplier: sigma, standard deviation of the noise over the sensitivity: the total
                that the accountant sees, of which count queries take their share; of the first step
                where the strategy has a noise schedule.
            max_grad_norm: (first) clipping threshold C; a list, one a parameter tensor, for
                "per_layer".
            batch_first: samples lie along axis 0 of the model's inputs; else along axis 1.
            loss_reduction: "mean" (over the physical batch) or "sum".
            poisson_sampling: draw every sample independently with rate q. Else samples are trained on in
                the loader's order, and accounted without amplification: each is in every pass. An
                IterableDataset needs False, a batch_size, and to bring a sample at most once in a
                step (on trust); every step is then recorded at q = 1, so that it needs no length:
                without one B is expected_batch_size, or the loader's batch_size.
            clipping: a strategy of fastclip.clipping, or the name of a preset, whose arguments are
                further keywords here; "flat" and the keywords of "adaptive" are Opacus'.
            noise_generator: drawn from as it is, for reproducible runs; not seeded as torch is.
            grad_sample_mode: "fast"; "ghost" is the same and returns the criterion too; Opacus'
                own modes ("hooks", "functorch", "ew", ...) take their gradients from Opacus' code.
            wrap_model: False intercepts the model in place and returns a handle with `cleanup()`.
            rand_on_empty: an empty batch becomes one placeholder sample, which contributes nothing.
            sample_rate: public q and B, of samples or units; give both.
            expected_batch_size: public q and B, of samples or units; give both.
            max_batch_size: most samples or units of a step; larger draws are cut at random, which
                accountant="pld" accounts for. None: as many as are drawn.
            unit_ids: whose every sample of the data set is, [samples]: a tensor, list, array, or
                the name of a column. Then all is said of units (patients), not of samples: q, B,
                clipping, epsilon.
            max_samples_per_unit: samples of a unit that a step takes at most, drawn at random;
            None: all.
            unit_reduction: a unit's gradient is the "mean" or the "sum" of its samples' gradients.
            model_loss: "per_sample" replaces mean cross entropies inside the model (a loss that
                transformers computes of labels), and in a criterion that is a module with a
                `reduction`, by the mean over samples of each sample's mean over its counted labels;
                a sample without any contributes 0. `num_items_in_batch` is ignored. Under
                torch.no_grad, and after `cleanup()`, the loss is the model's own. "own": always.
            views: K samples of the model's batch for each sample of the loader's, its views, next
                to each other (x.repeat_interleave(K, 0)): their mean gradient is clipped once
                (arXiv 2204.13650, section 3.2). All else, B and epsilon included, is said of
                samples, whatever K is.

        Returns:
            (model or handle, optimizer, data loader); with "ghost", (..., criterion, data loader).

        Raises:
            fastclip.errors.*: naming the module or keyword and the way out. Nothing is changed.

        Formal guarantee: every real step of the optimizer is a Gaussian mechanism with noise
        multiplier sigma on a Poisson sample of rate q; `get_epsilon` composes the steps taken, for
        neighbors that differ in one sample (or unit) that was added or removed, where q and B are given
        (else, and for poisson_sampling=False: one that is zeroed out, N being public).
        `mechanism()` says all of it.
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
        """`make_private` with the noise multiplier that a privacy budget affords.

        Args:
            data_loader: as in `make_private`.
            clipping: as in `make_private`.
            target_epsilon: the budget, spent after `epochs` passes; a guarantee as of `get_epsilon`.
            target_delta: the budget's other half, in (0, 1).
            epochs: number of passes, of 1 / q steps each; the loader draws exactly as many. A noise
                schedule is composed over all of them, and the noise multiplier found is that of its
                first step.
            reserve: (query, times) of counts of the training set, or of data that overlap it, which the
                budget is to cover, too. Nothing is paid yet: `count` and `prepay` do that.
            **options: everything else that `make_private` takes, and options of the accountant
                ("epsilon_tolerance", "alphas", "eps_error", ...); what the optimizer of one of Opacus'
                own modes takes goes to it.

        Returns:
            As `make_private`.
        """
        validation.check_loader(data_loader)
        validation.check_budget(target_epsilon, target_delta, epochs)
        clipping, options = named(clipping, new_keywords(options))
        drawn = {name: options[name] for name in SAMPLING if name in options}
        design = self.plan_sampling(data_loader, **drawn)
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

        Another one that is assigned takes over what was recorded so far, beside its own steps (an
        empty one of another mechanism accounts for the same run); steps go to it from now on.
        """
        assert self._accountant is not None
        return self._accountant

    @accountant.setter
    def accountant(self, value: IAccountant) -> None:
        self._accountant = succeeding(value, self._accountant)

    def get_epsilon(self, delta: float) -> float:
        """The (epsilon, delta) that all steps taken so far have spent.

        Formal guarantee: for neighbors that differ in one sample (or unit) that was added or removed,
        where q and B were given; else, and where samples were not drawn by Poisson sampling, in one that
        is zeroed out. `mechanism()` says which.

        Args:
            delta: in (0, 1), smaller than 1 / samples: the first that is not warns.

        Returns:
            epsilon; 0 before the first step, inf if a step had no noise.

        Raises:
            ArgumentError, ArgumentTypeError: for another delta, or a failure of the accountant's
                numerics.
        """
        found = spent(self.accountant, delta)
        for run in self._runs:
            self._check_delta("get_epsilon", float(delta), run.design)
        return found

    def _check_delta(self, call: str, delta: float, design: SamplingDesign) -> None:
        """Warn, once an engine, of a delta that lets a run publish one whole sample of N."""
        self._warned_of_delta = self._warned_of_delta or says_too_much(call, delta, design)

    def sample_epsilon(self, delta: float, rate: float | Tensor) -> float:
        """Epsilon, so far, for a sample of the last model made private that is drawn with its own rate.

        Formal guarantee: as of `get_epsilon`, for neighbors that differ in this sample. Steps of other
        models, and of checkpoints that were loaded, count at the rates that were recorded.

        Args:
            delta: in (0, 1).
            rate: q_i of the sample, of `engine.sampling.rates`.

        Raises:
            StepError: before make_private. ArgumentError: for a rate or delta out of range.
        """
        entries = self._last_run().releases.at_rate(self.accountant.history, rate)
        return epsilon(entries, delta, self.accountant.mechanism())

    def row_epsilon(self, delta: float, rate: float | Tensor) -> float:
        """The old name of `sample_epsilon`."""
        say("engine.row_epsilon has another name: use sample_epsilon.", DeprecationWarning)
        return self.sample_epsilon(delta, rate)

    def mechanism(self, *, delta: float | None = None, epochs: float | None = None) -> Mechanism:
        """What the last model made private guarantees, said exactly; print it, or `as_json()`.

        Args:
            delta: in (0, 1); None for that of `make_private_with_epsilon`.
            epochs: length of the whole run, in passes; None for that of `make_private_with_epsilon`.

        Returns:
            A `fastclip.engine.mechanism.Mechanism`: neighbors, privacy unit, sampling, noise by step,
            sensitivity, steps recorded and planned, epsilon, what is secure and what is trusted.

        Raises:
            StepError: before make_private. ArgumentError: for a delta or number of epochs out of range.
        """
        run = self._last_run()
        return mechanism_of(run, self.accountant, self.get_epsilon, delta, epochs)

    @property
    def sampling(self) -> SamplingDesign:
        """How the samples of the last model made private are drawn.

        Raises:
            StepError: before make_private.
        """
        return self._last_run().design

    def plan_sampling(
        self, data_loader: DataLoader, *, poisson_sampling: bool = True, **sampling: Any
    ) -> SamplingDesign:
        """How `make_private` would draw the samples of a loader; nothing is drawn or changed.

        Args:
            sampling: sample_rate, expected_batch_size, unit_ids, ... as for `make_private`.

        Raises:
            ArgumentError, ArgumentTypeError: it would refuse to.
        """
        request = Request(poisson_sampling=poisson_sampling, **new_keywords(sampling))
        plan = checked_plan(data_loader, request, secure=self.secure_mode, distributed=True)
        return plan.design

    def plan(self) -> NormPlan:
        """The trainable layers, how each one's norm is computed, and what it holds; print it.

        Shapes and methods are those of the last backward pass of the last model made private.
        """
        return self._last_run().plan()

    @overload
    def explain(self) -> Proof: ...

    @overload
    def explain(self, *, module: nn.Module, **setup: Any) -> Explanation: ...

    def explain(
        self, *, module: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None,
        data_loader: DataLoader | None = None, criterion: Any = None, delta: float | None = None,
        poisson_sampling: bool = True, loss_reduction: str = "mean", batch: Any = None,
        **sampling: Any,
    ) -> Explanation | Proof:  # fmt: skip
        """What `make_private` would do with these arguments; or, without any, what the traced steps of
        the last private model have shown. Print it.

        It names what is trained and frozen, layers without a rule of their own, whatever would be
        refused, and known traps: samples not drawn by Poisson sampling, a last incomplete batch, delta
        larger than 1 / N, losses that couple samples, noise that can be foreseen. Nothing is
        changed, and no data is looked at but `batch`.

        Args:
            module: the model, before `make_private`; None: the last one that was made private. The
                rest: as for `make_private`, as far as known.
            delta: that of the epsilon to be stated.
            batch: what the model is called with: a tensor, a tuple of arguments, a dictionary of
                keywords. A copy of the model is then run on a few of its samples, as in the first step:
                uses of parameters, refusals of coupled samples, and what that look costs are told, too.
            sampling: sample_rate, expected_batch_size, unit_ids, ... as for `make_private`.

        Returns:
            An Explanation, with `samples`, `frozen`, `slow`, `refused` and `traps`; without `module` a
            `fastclip.trace.findings.Proof`: the operations in which samples met, and what follows.

        Raises:
            StepError: without `module`, before make_private.
        """
        if module is None:
            return self._last_run().trace_log.proof
        return explain(
            Setup(
                module, optimizer, data_loader, criterion, delta, loss_reduction, self.secure_mode,
                batch, {"poisson_sampling": poisson_sampling, **new_keywords(sampling)},
            )
        )  # fmt: skip

    def set_groups(self, ids: Tensor, module: nn.Module | None = None) -> None:
        """Say which group each sample of the next backward pass belongs to.

        For strategies of groups, before every backward pass, on physical batches as on whole ones;
        other strategies ignore it, so a training loop may always call it. Ids that no backward pass
        has used are forgotten at the next real step.

        Args:
            ids: int64 [b], from 0 to num_groups - 1. On an accelerator the values are not looked
                at: a sample outside the range contributes nothing and counts nowhere.
            module: the private model whose pass comes next, where the engine has several.

        Raises:
            ArgumentError, ArgumentTypeError: for other values, shapes or types, or no such model.
        """
        set_groups(self._grad_states(), ids, module)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside contributes nothing: forward passes, wherever they are differentiated, and
        backward passes. Holds for the models of this engine, their methods and their parts.

        For adversarial inputs, saliency maps and the like: gradients of the inputs are exact, the
        parameters receive none.
        """
        with ExitStack() as stack:
            for grad_state in self._grad_states():
                stack.enter_context(grad_state.pause())
            yield

    def make_step(
        self, model: nn.Module, loss_function: Callable[..., Tensor], *,
        physical_batch: int | None = None, cuda_graph: bool = False, compile: bool = False,
    ) -> Step:  # fmt: skip
        """A function that trains on one batch, and may compile it whole, or replay it as CUDA graphs.

        Examples:
            >>> def losses(model, x, y):
            ...     return nn.functional.cross_entropy(model(x), y, reduction="none")
            >>> step = engine.make_step(model, losses, physical_batch=320, cuda_graph=True)
            >>> for x, y in loader:
            ...     loss = step(x, y)  # forward and backward
            ...     optimizer.step()
            ...     optimizer.zero_grad()

        Args:
            model: the private model (for wrap_model=False your own): what `loss_function` gets.
            loss_function: (model, *batch) -> the loss of each sample, [n]; the step takes their mean or
                sum, as `loss_reduction` says.
            physical_batch: samples that are run at once. A larger batch is run in parts, which one
                `optimizer.step()` releases; in a graph a smaller one is filled up with placeholder
                samples, which contribute nothing. None: the expected batch, for Poisson sampling with
                three standard deviations of its size, up to a multiple of 8; times `views`.
            cuda_graph: replay the device's work of a pass as CUDA graphs (docs/cuda_graphs.md); on a
                CPU it runs as it is, and says so once.
            compile: let inductor compile forward pass, loss, backward pass, norms and clipped sums
                whole (docs/compile.md). What cannot be compiled is said once, and runs as it is.

        Raises:
            ArgumentError: for another model, samples that do not lie along axis 0, or both cuda_graph
                and compile.
        """
        grad_states = [
            grad_state for run in self._runs if (grad_state := run.grad_state) is not None
        ]
        return make_step(
            grad_states, model, loss_function, physical_batch=physical_batch, cuda_graph=cuda_graph,
            compile=compile,
        )  # fmt: skip

    def count(
        self, query: CountQuery, *, groups: Any, measures: Mapping[str, Any] | None = None,
        unit_ids: Any = None,
    ) -> NoisyCounts:  # fmt: skip
        """A noisy answer to a count query, such as correct predictions by subgroup, paid for first.

        Formal guarantee: as of `fastclip.counts.CountQuery`. The answer is in the ledger (and its file)
        before it is drawn. Counts of the training set, and of data sets that may hold some of its
        people, are in `get_epsilon`; those of other people are in a line of their own, which
        `privacy_by_data_set` states. The model may be any that this engine has trained: for the people
        of the training set an answer about others follows from released weights.

        Args:
            query: what is counted, of whom, with how much noise.
            groups: the number of each sample's group, [samples]; where groups overlap (disjoint=False),
                True or False, [samples, groups].
            measures: of each measure but "samples" 0 or 1 (False or True) for each sample,
                [samples]. None where "samples" is the only one.
            unit_ids: of each sample, where query.unit is "unit", as for make_private.

        Returns:
            A `fastclip.counts.NoisyCounts`. On several ranks all call this together with all of the
            data, and get one answer.

        Raises:
            ArgumentError, ArgumentTypeError: for other values, shapes or types, or a query that the
                ledger cannot take; nothing is spent. StepError: it cannot be recorded.
        """
        ranks = self._ranks("count")
        exact = release.exact_counts(release.check_query(query), groups, measures, unit_ids, ranks)
        release.pay(query, 1, self.accountant, self._trained_units, ranks)
        return release.draw(query, exact, self._count_noise, self.accountant, ranks)

    def prepay(self, query: CountQuery, times: int) -> PaidCounts:
        """Pay for several answers of one query at once, so that the cost is known before the first.

        Args:
            query: of the answers.
            times: how many, at least 1.

        Returns:
            A `fastclip.counts.PaidCounts`, whose `count` draws them one by one.

        Raises:
            As `count`.
        """
        ranks, times = self._ranks("prepay"), whole("times", times, 1)
        release.pay(release.check_query(query), times, self.accountant, self._trained_units, ranks)
        return PaidCounts(query, times, self._count_noise, self.accountant, ranks)

    def privacy_by_data_set(self, delta: float) -> PrivacyByDataSet:
        """What the people of each data set have spent: the training set, and others that were counted.

        Args:
            delta: in (0, 1), of each line.

        Returns:
            A `fastclip.counts.PrivacyByDataSet`; print it.

        Raises:
            ArgumentError, ArgumentTypeError: as `get_epsilon`.
        """
        return lines_of(self.accountant, delta)

    def write_ahead(self, path: Any) -> None:
        """Keep the ledger in a file, too: each step is on the disk before it is released.

        A run that is killed, or goes on from an older checkpoint, counts every step that it has taken:
        what the file holds is counted at once. On several ranks all of them call this, after
        make_private, with a path under which all of them see the same file; the first one writes. It
        costs one fsync a step, on several ranks one small exchange, too.

        Formal guarantee: whatever kills the process, the file holds every released step. A step that
        cannot be written (the disk is full; the file was closed, moved, replaced or touched; this is a
        copy or a fork) is a StepError and not released, until another file is named or none is kept.

        Args:
            path: of the file, which is made if it is not there; one for each run. None: keep none any
                more, and let somebody else have the file.

        Raises:
            ArgumentError: the engine keeps a file already; this one is damaged, no ledger, of steps that
                this accountant cannot compose, or is being written by somebody else; ranks see
                different files. The engine goes on as before, and the file is left as it is.
            OSError: it cannot be opened or made.
            StepError: it cannot be written.
        """
        keep_in_file(self.accountant, path, self._ranks("write_ahead"))

    def save_checkpoint(self, *, path: Any, module: nn.Module, **options: Any) -> None:  # type: ignore[override]
        """Save what `load_checkpoint` goes on from; on several ranks the first one writes.

        The file is whole whenever it is there: an old one stays until the new one is written. Its keys
        and tensors are those of the model in one process, so that any number of ranks can load it;
        where parameters are spread (fully_shard), all ranks gather them, and come here together.

        Args:
            As in Opacus.

        Raises:
            ArgumentError: it would hold other things than tensors and plain values, which could not be
                loaded; an old file stays.
        """
        ranks = self._runs[-1].state.ranks if self._runs else None
        writes = ranks is None or ranks.number == 0
        save_checkpoint(self.accountant, writes=writes, path=path, module=module, **options)

    def load_checkpoint(
        self, *, path: Any, module: nn.Module, optimizer: Any = None, noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None, module_load_dict_kwargs: dict[str, Any] | None = None,
        torch_load_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Go on from `save_checkpoint`, Opacus' own files included.

        What this engine has recorded itself stays: a model that is set back in the middle of a run
        has been seen further on. Steps of the same run count once, all others are added. Files hold
        tensors and plain values; nothing in them is run (`torch_load_kwargs={"weights_only": False}`
        trusts a file that holds more).

        Args:
            As in Opacus; objects that are given get the state that the file holds for them.

        Returns:
            The rest of the file.

        Raises:
            ArgumentError: if the file is damaged, does not say what its run has spent, or was
                accounted by another mechanism; nothing is loaded.
        """
        return load_checkpoint(
            self.accountant, path=path, module=module, optimizer=optimizer,
            noise_scheduler=noise_scheduler, grad_clip_scheduler=grad_clip_scheduler,
            module_load_dict_kwargs=module_load_dict_kwargs, torch_load_kwargs=torch_load_kwargs,
        )  # fmt: skip

    def run_state(self, *, module: nn.Module, optimizer: Any) -> RunState:
        """The run for torch.distributed.checkpoint, which saves each rank's part by that rank.

        Examples:
            >>> state = {"private run": engine.run_state(module=model, optimizer=optimizer)}
            >>> torch.distributed.checkpoint.save(state, checkpoint_id=folder)
            >>> torch.distributed.checkpoint.load(state, checkpoint_id=folder)  # on any number of ranks

        Args:
            module: as make_private returned them.
            optimizer: as make_private returned them.

        Raises:
            ArgumentTypeError: for another optimizer.
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
        """Raise for modules that are not supported, naming their path and a fix."""
        validation.check_training(module)
        validation.check_module(module)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """A copy of the model with what does not train as it is replaced (BatchNorm); validated.

        The model, wherever its classes were defined, is left as it was; what is tied stays tied.

        Raises:
            UnsupportedModuleError: for a layer without a replacement, naming the way out.
        """
        fixed = compatible(module)
        validation.check_training(fixed)
        validation.check_module(fixed)
        return fixed

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the ledger, and no model, samples or rates: what was released goes on elsewhere."""
        return {**self.__dict__, "_runs": []}

    def __deepcopy__(self, memo: dict[int, Any]) -> FastPrivacyEngine:
        """A copy goes on in the same ledger, where copied optimizers record, too."""
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
        """Who trains the model that was made private last; the first of them writes what all have."""
        ranks = self._runs[-1].state.ranks if self._runs else None
        check_who_writes(ranks, call)
        return ranks

    @property
    def _trained_units(self) -> frozenset[str]:
        return frozenset(run.design.unit for run in self._runs)

    def _last_run(self) -> PrivateRun:
        if not self._runs:
            raise StepError(
                "this is told of models in the fast mode, and this engine has made none of these "
                "private: call make_private first, and omit grad_sample_mode; get_epsilon counts the "
                "steps of Opacus' own modes, too"
            )
        return self._runs[-1]

    def _grad_states(self) -> list[GradientState]:
        """Of the models that are private, and in use."""
        self._last_run()
        return [grad_state for run in self._runs if (grad_state := run.grad_state) is not None]
