"""How the loss of a batch is composed of those of its rows: seen on a few of them, by gradients that C++ compares."""

from __future__ import annotations

import contextlib
import logging
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from brimful import _C, _random
from brimful._modules import entries_of, unwrapped
from brimful._process_end import is_out_of_memory, text_of
from brimful.sizer._draws_off import DrawsOff, drawn_states
from brimful.sizer._row_counts import ITEMS, ROWS, SUM, Rule, rules_of, tensors_by_place
from brimful.sizer._trim_check import _undisturbed

_FEW_ROWS = (4, 2)
_MOST_FAILURES = 3
_WAYS = ((True, False), (True, True), (False, True))  # in evaluation, with draws off
GIVEN = ("find", "rows", "sum", "whole")
_REMEDY = (
    "pass loss_rule='whole' to keep batches whole (a smaller one, and as much more accumulation, where memory runs "
    "out); take pair_step for a loss that compares rows; or say how it is composed, by loss_rule='rows' or 'sum', if "
    "what is compared here is not what is trained"
)


class _Drew(Exception):
    """Random numbers were drawn."""


class Found:
    """Of one kind of batch."""

    def __init__(self, name: str, rules: list[Rule]) -> None:
        self.number = zlib.crc32(name.encode()) or 1
        self.rules = rules
        total = next(i for i, rule in enumerate(rules) if rule.is_sum)
        self.evidence = _C._RuleEvidence(len(rules), total)
        self.agreeing: int | None = None  # to all ranks
        self.failures = 0
        self.way = 0  # of `_WAYS`


class Use:
    """Of one batch: the rule is known when its first piece runs, and the ranks have met."""

    def __init__(self, vote: _C._RuleVote, rules: Sequence[Rule], batch: Any, rows: int) -> None:
        self.vote = vote
        self._rules, self._batch, self._rows = rules, batch, rows
        self._whole: float | None = None
        self.whole = False

    @property
    def rule(self) -> Rule | None:
        """None: no rank knows."""
        return self._rules[self.vote.chosen] if self.vote.chosen >= 0 else None

    def share(self, piece: Any, rows: float) -> float:
        """Of the loss, or of what it counts, for a piece that has the share ``rows`` of the rows."""
        rule = self.rule
        if rule is None or rule.is_sum or rule.name == ROWS or rows == 1:
            return rows
        if self._whole is None:
            self._whole = rule.of(self._batch) or 0.0
        return (rule.of(piece) or 0.0) / self._whole if self._whole > 0 else rows

    def weighed(self, loss: Any, piece: Any, rows: int) -> Any:
        """What a sizer's ``loss_fn`` returns."""
        loss = require_plain(loss)
        rule = self.rule
        if rule is None or rule.name == ROWS:
            return loss
        if rule.is_sum:
            return loss * (self._rows / rows), rows / self._rows
        weight = rule.of(piece) or 0.0
        return (loss if weight > 0 else loss.nan_to_num()), weight


def require_plain(loss: Any) -> torch.Tensor:
    if type(loss) is tuple:
        raise ValueError(
            f"loss_fn says itself what a piece weighs (it returned: {len(loss)} values); return the loss alone, "
            "or leave loss_rule out"
        )
    plain: torch.Tensor = loss if isinstance(loss, torch.Tensor) else getattr(loss, "loss", loss)
    return plain


class LossRules:
    """``inputs_of(batch)`` has the entries by which rows may count; ``gradients``: False where only losses matter."""

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        splitter: _C.Splitter,
        given: str = "find",
        *,
        keepers: Sequence[tuple[Callable[[], Any], Callable[[Any], object]]] = (),
        inputs_of: Callable[[Any], Any] = lambda batch: batch,
        gradients: bool = True,
    ) -> None:
        if given not in GIVEN:
            raise ValueError(
                f"loss_rule is one of {', '.join(map(repr, GIVEN))} (loss_rule: {given!r})"
            )
        self._models = [unwrapped(model) for model in models]
        self._splitter, self._given, self._gradients = splitter, given, gradients
        self._inputs_of = inputs_of
        self._keepers = [
            _random.KEEPER,
            *keepers,
        ]
        self._kinds: dict[Any, Found] = {}

    @property
    def finds(self) -> bool:
        return self._given == "find"

    def use(
        self,
        batch: Any,
        loss_of: Callable[[Any], Any],
        *,
        gives_items: bool = False,
        ignored: Sequence[int] = (),
    ) -> Use:
        """``loss_of(piece)`` is the loss of any rows. Raises ValueError for one that is that of no pieces."""
        rows = self._splitter.rows_of(batch)
        if self._given != "find":
            return self._as_given(batch, rows, gives_items)
        found = self._found(batch, rows, gives_items, ignored)
        evidence = found.evidence
        began, runs = time.perf_counter(), 0.0
        if found.failures < _MOST_FAILURES and not evidence.refuses:
            runs = self._look(found, batch, rows, loss_of)
        if evidence.refuses:
            raise self._refused(found)
        agreeing = evidence.agreeing if evidence.knows else found.agreeing or 0
        vote = _C._RuleVote(
            kind=found.number,
            agreeing=agreeing & (found.agreeing or agreeing) or agreeing,
            knows=evidence.knows or found.agreeing is not None,
            names=[rule.name for rule in found.rules],
            runs=round(runs),
            ms=1e3 * (time.perf_counter() - began) if runs > 0 else 0.0,
        )
        return Use(vote, found.rules, self._inputs_of(batch), rows)

    def learn(self, use: Use) -> None:
        """After the step: what all ranks have agreed on."""
        if use.vote.knows and use.vote.chosen >= 0:
            for found in self._kinds.values():
                if found.rules is use._rules:
                    found.agreeing = use.vote.agreeing

    def _as_given(self, batch: Any, rows: int, gives_items: bool) -> Use:
        rule = {"sum": Rule(ITEMS if gives_items else SUM, None)}.get(self._given)
        rules = [rule or Rule(ROWS, lambda _: torch.ones(rows))]
        vote = _C._RuleVote(kind=1, agreeing=1, knows=True, names=[self._given])
        use = Use(vote, rules, self._inputs_of(batch), rows)
        use.whole = self._given == "whole"
        return use

    def _found(self, batch: Any, rows: int, gives_items: bool, ignored: Sequence[int]) -> Found:
        entries = tensors_by_place(self._inputs_of(batch))
        kind = (
            tuple((name, str(t.dtype), t.dim()) for name, t in entries.items()),
            any(model.training for model in self._models),
            gives_items,
            tuple(ignored),
            len(entries) > 0 and tuple(t.dim() > 0 and len(t) == rows for t in entries.values()),
        )
        if kind not in self._kinds:
            rules = rules_of(entries, rows, ignored, gives_items)
            if all(rule.is_sum for rule in rules):  # of no tensors: rows are cut otherwise
                rules.insert(0, Rule(ROWS, lambda _: torch.ones(1)))
            self._kinds[kind] = Found(repr(kind), rules)
        return self._kinds[kind]

    def _look(self, found: Found, batch: Any, rows: int, loss_of: Callable[[Any], Any]) -> float:
        """Tries a few rows, if that may say more. Returns the forwards and backwards of four rows that it took."""
        evidence = found.evidence
        if evidence.is_done or (found.agreeing or 0).bit_count() == 1:
            return 0.0
        entries = tensors_by_place(self._inputs_of(batch))
        counts = torch.ones(len(found.rules), rows, dtype=torch.float64)
        for number, rule in enumerate(found.rules):
            if evidence.agreeing >> number & 1 and rule.name != ROWS and not rule.is_sum:
                counts[number] = rule.rows(entries, rows)
        if evidence.window(counts, _FEW_ROWS[0]) is None:
            return 0.0
        runs, why = 0.0, "memory ran out for 2 rows"
        for gradients in (True, False) if self._gradients else (False,):
            for most in _FEW_ROWS:
                window = evidence.window(counts, most)
                if window is None:
                    continue
                try:
                    while (
                        window is not None
                    ):  # twice where rules are left that differ on other rows
                        trial = partial(
                            self._try_once, found, counts, window, batch, loss_of, gradients
                        )
                        runs += self._try(found, trial)
                        window = evidence.window(counts, most) if evidence.knows else None
                    return runs
                except Exception as error:
                    runs += 1.0
                    if not is_out_of_memory(error):
                        why, found.way = text_of(error), 0
                        break
        self._give_up(found, why)
        return runs

    def _give_up(self, found: Found, why: str) -> None:
        found.failures += 1
        if found.failures > 1:
            return
        logging.getLogger("brimful").warning(
            "how the loss is composed could not be seen on a few rows (%s); pieces are weighted as it is known "
            "from other ranks or batches, else by rows; pass loss_rule='rows', 'sum' or 'whole' if that is so",
            why,
        )

    def _try(self, found: Found, trial: Callable[[bool, bool], None]) -> float:
        """In evaluation, without draws; or as in training, where only that returns a loss."""
        runs = 0.0
        while True:
            evaluating, draws_off = _WAYS[found.way]
            try:
                runs += 2.0 if found.evidence.knows else 3.0
                with _silenced(self._models):
                    trial(evaluating, draws_off)
                return runs
            except _Drew:
                found.way = 1
            except Exception as error:
                if is_out_of_memory(error) or found.way == 2:
                    raise
                found.way = 2
            runs -= 2.0 if not found.evidence.knows else 1.0  # it ended in its first forward

    def _try_once(
        self,
        found: Found,
        counts: torch.Tensor,
        window: tuple[int, int, int],
        batch: Any,
        loss_of: Callable[[Any], Any],
        gradients: bool,
        evaluating: bool,
        draws_off: bool,
    ) -> None:
        parameters = list(
            dict.fromkeys(p for m in self._models for p in m.parameters() if p.requires_grad)
        )
        every = [p for model in self._models for p in model.parameters()]
        device = next((p.device for p in parameters or every), torch.device("cpu"))

        def loss(piece: Any) -> Any:
            if draws_off:
                return require_plain(loss_of(piece))
            before = drawn_states(device)
            result = require_plain(loss_of(piece))
            if drawn_states(device) != before:
                raise _Drew
            return result

        eager = torch.compiler.set_stance("force_eager")
        with eager, _undisturbed(self._models, evaluating=evaluating) as dtypes:
            _C._try_loss(
                evidence=found.evidence,
                counts=counts,
                window=window,
                batch=batch,
                loss_fn=loss,
                around=DrawsOff() if draws_off else contextlib.nullcontext(),  # type: ignore[no-untyped-call]
                parameters=parameters,
                entries=entries_of(self._models),
                device=device,
                keepers=self._keepers,
                splitter=self._splitter,
                gradients=gradients and len(parameters) > 0,
                seed=1.0,
                coarsest_epsilon=lambda: max((torch.finfo(d).eps for d in dtypes), default=0.0),
            )

    def _refused(self, found: Found) -> ValueError:
        evidence = found.evidence
        if not evidence.repeats:
            return ValueError(
                "the loss of the same rows is another one when they run again, which does not show how it is composed "
                f"(relative distance of its gradients: {evidence.repeat_distance:.2g}, of rounding: "
                f"{evidence.tolerance:.2g}); draw random numbers from torch's, Python's or NumPy's own generators and "
                "keep no state between calls; or say by loss_rule='rows' or 'sum' how it is composed"
            )
        near = sorted(zip(evidence.distances, (rule.name for rule in found.rules), strict=True))
        plain = [(d, name) for d, name in near if name in (ROWS, SUM, ITEMS)]
        shown = [*plain, *(pair for pair in near if pair not in plain)][:4]
        distances = ", ".join(f"{name}: {distance:.2g}" for distance, name in shown)
        return ValueError(
            "the loss of a batch is that of its pieces by no rule that is known, as one that compares rows is not "
            f"(relative distances of gradients: {distances}; of rounding: {evidence.tolerance:.2g}); {_REMEDY}"
        )


@contextlib.contextmanager
def _silenced(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Hooks on gradients of parameters, which may count or send them, are not called."""
    kept = []
    for parameter in dict.fromkeys(p for model in models for p in model.parameters()):
        hooks = parameter._backward_hooks
        if hooks:
            kept.append((hooks, dict(hooks)))
            hooks.clear()
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.update(before)
