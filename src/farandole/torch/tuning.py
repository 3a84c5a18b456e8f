"""Tunes an optimizer's buckets while it trains: applies what a session of ``tune`` wants to try.

After each reducing pass the ranks note how long it took since the one before. When a trial is over
they exchange their times, in the same pass on all of them, and each comes to the same decision by
itself: the search depends on the times alone. A new plan is made there and then, and the results of
the pass are moved over to it, so a trial changes when gradients leave and with whom, and nothing of
what they are; unless the user allows a compression, which is then tried as well.

A rank that has joined exchanges nothing. So a trial ends only with a pass in which all ranks had
part; its guard says so to all. When ranks have been absent, the trial begins again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from typing import Any

import torch

from farandole.comm.fusion.plan import make_plan
from farandole.comm.group import Group
from farandole.core.clock import SYSTEM_CLOCK
from farandole.core.config import MIB
from farandole.torch.agreement import Agreed
from farandole.torch.channel import Channel
from farandole.torch.compression import Compression
from farandole.tune.record import Record, read_choice
from farandole.tune.search import Dimension, Setting, search
from farandole.tune.session import Session, Trial

BUCKET = "bucket_bytes"
FIRST = "first_bucket_bytes"
COMPRESSION = "compression"
"""Only where the user allows one."""

BUCKET_CHOICES = tuple(MIB * factor // 4 for factor in (1, 4, 16, 64, 256))
FIRST_CHOICES = tuple(MIB * factor // 16 for factor in (1, 4, 16, 64, 256))

_log = logging.getLogger(__name__)


def tuner_for(group: Group, channel: Channel) -> Tuner | None:
    """The first optimizer of all ranks is the one that is tuned, if any is."""
    tunes = group.settings.autotune and channel.order == 0
    return Tuner(group, f"tune/{channel.name}") if tunes else None


class Tuner:
    """Tunes the plan of one optimizer in ``group``; ``topic`` names its agreements."""

    def __init__(self, group: Group, topic: str) -> None:
        self.group = group
        self._topic = topic
        self._session: Session | None = None
        self._over = False
        self._record: Record | None = None
        self._setting: Setting = {}
        """What is to be in force; nothing before all ranks have met."""
        self._in_force: Setting = {}
        self._agreed: Agreed | None = None
        """The plan of the pass before."""
        self._absences = 0
        self._since = 0.0

    def after_pass(self, agreed: Agreed) -> Agreed:
        """A reducing pass with ``agreed`` is over; the plan for the next one, with its results."""
        if not self._over:
            self._observe(agreed)
        if agreed is not self._agreed or self._setting != self._in_force:
            agreed = self._put_in_force(agreed)
        self._agreed, self._absences = agreed, agreed.log.absences
        self._since = SYSTEM_CLOCK.now()
        return agreed

    def _observe(self, agreed: Agreed) -> None:
        session = self._session
        if session is None:
            if agreed.reducer.participants == self.group.size:
                self._begin(agreed)
        elif agreed is not self._agreed or agreed.log.absences != self._absences:
            session.restart_trial()
        elif session.note(self._lap(agreed)):
            self._end_trial(agreed, session)

    def _lap(self, agreed: Agreed) -> float:
        """Seconds since the pass before; on GPUs until this one's results are there."""
        for device in {each.device for each in agreed.parameters}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        return SYSTEM_CLOCK.now() - self._since

    def _put_in_force(self, agreed: Agreed) -> Agreed:
        setting = self._in_force = dict(self._setting)
        if not setting:
            return agreed
        name = str(setting.get(COMPRESSION, "none"))
        compression = agreed.terms.compression if name == "none" else getattr(Compression, name)
        return agreed.retuned(int(setting[BUCKET]), int(setting[FIRST]), compression)

    def _begin(self, agreed: Agreed) -> None:
        """Use what an earlier run has chosen, which rank 0 knows, or else begin to search."""
        settings, job = self.group.settings, _job(agreed)
        start: Setting = {
            BUCKET: agreed.proposal.bucket_bytes,
            FIRST: agreed.proposal.first_bucket_bytes,
        }
        dimensions = [
            Dimension(BUCKET, lambda best: _different(agreed, BUCKET, BUCKET_CHOICES, best)),
            Dimension(FIRST, lambda best: _different(agreed, FIRST, FIRST_CHOICES, best)),
        ]
        allowed = settings.autotune_compression
        if allowed != "none" and agreed.terms.compression is Compression.none:
            start[COMPRESSION] = "none"
            dimensions.append(Dimension(COMPRESSION, lambda best: [allowed]))
        path = settings.autotune_log if self.group.rank == 0 else None
        known = None if path is None else read_choice(path, job)
        said = self.group.agree(
            f"{self._topic}/begin", json.dumps(known).encode(), "begin of autotuning"
        )
        chosen = json.loads(said[0])
        self._agreed, self._in_force = agreed, start
        if _is_like(chosen, start):
            self._choose(chosen, "an earlier run")
            return
        if path is not None:
            self._record = Record(path, job, start)
        self._session = Session(
            search(dimensions, start),
            warm_up=settings.autotune_warmup_samples,
            steps=settings.autotune_steps_per_sample,
        )
        self._go_on(self._session)

    def _end_trial(self, agreed: Agreed, session: Session) -> None:
        if agreed.reducer.participants < self.group.size:
            session.restart_trial()
            return
        said = self.group.agree(
            f"{self._topic}/trial", json.dumps(session.times()).encode(), "end of a trial"
        )
        trial = session.judge([json.loads(each) for each in said])
        if trial.number > 0:
            self._tell(trial)
        self._go_on(session)

    def _go_on(self, session: Session) -> None:
        self._setting = session.setting
        if session.chosen is not None:
            if self._record is not None:
                self._record.choice(session.chosen)
            self._choose(session.chosen, "trials")

    def _choose(self, chosen: Setting, source: str) -> None:
        self._over = True
        self._setting = chosen
        if self.group.rank == 0:
            _log.info("autotune: from now on %s, by %s", _text(chosen), source)

    def _tell(self, trial: Trial) -> None:
        if self._record is not None:
            self._record.trial(trial)
        if self.group.rank == 0:
            shown = _text(trial.setting)
            _log.info("autotune: %.4f s a step with %s", trial.seconds, shown)


def _different(agreed: Agreed, name: str, choices: Sequence[int], best: Setting) -> Sequence[int]:
    """Those of the sizes that make another plan than ``best`` and than each other."""

    def digest(setting: Setting) -> str:
        return make_plan(
            agreed.proposal.parameters,
            agreed.proposal.order,
            bucket_bytes=int(setting[BUCKET]),
            first_bucket_bytes=int(setting[FIRST]),
        ).digest

    seen = {digest(best)}
    different = []
    for choice in choices:
        key = digest({**best, name: choice})
        if key not in seen:
            seen.add(key)
            different.append(choice)
    return different


def _is_like(known: Any, setting: Setting) -> bool:
    """Whether what a file says is a setting of the same dimensions."""
    return (
        isinstance(known, dict)
        and known.keys() == setting.keys()
        and all(type(known[name]) is type(value) for name, value in setting.items())
        and min(known[BUCKET], known[FIRST]) >= 0
        and known.get(COMPRESSION, "none") in ("none", "fp16", "bf16")
    )


def _job(agreed: Agreed) -> str:
    """Short fingerprint of what a choice holds for: the model, the ranks and their hosts."""
    group = agreed.group
    model = [[each.shape, each.dtype, each.device] for each in agreed.proposal.parameters]
    hosts = list(group.topology.hosts)
    allowed = [group.settings.engine, group.settings.autotune_compression]
    said = json.dumps([model, [hosts.index(host) for host in hosts], allowed])
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def _text(setting: Setting) -> str:
    return ", ".join(f"{name} {value}" for name, value in setting.items())
