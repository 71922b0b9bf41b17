"""Continuous batching: jobs queue, their prompts are computed, their sequences are decoded.

    waiting --prefill--> ScoreJob: answered
                     \\-> SampleJob: ready --a row is free--> decoding --stop or length--> answered

One `step` is one prefill pass over the waiting jobs and one decoding step over all rows. Everything
here is synchronous and belongs to one thread; `engine.py` drives it. It runs in torch's inference
mode, so its tensors must not be written outside that mode.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from rookery.embedded.decode import DecodeBatch
from rookery.embedded.prefill import CachedPrompt, Prefill
from rookery.embedded.sampling import (
    StopSearch,
    TextDeltas,
    TokenDraw,
    draw,
    logprobs_of,
    penalise,
    top_logprobs,
    uniform,
)
from rookery.errors import EngineError
from rookery.slots import Segment, SlotRows, SlottedModel
from rookery.types import (
    Completion,
    CompletionDelta,
    FinishReason,
    KeptTokens,
    SampleRequest,
    Score,
    ScoreRequest,
    TopLogprobs,
)

__all__ = ["Batcher", "Job", "SampleJob", "ScoreJob"]

_HEAD_ROWS = 128
"""Rows per computation of logits: 128 rows of a 50k vocabulary are 25 MB."""

_HEAD_BLOCK = 4
"""Rows per adapter block in the head, for adapters of the head."""


@dataclass(slots=True, eq=False)
class ScoreJob:
    """A score request in flight; `result` is set when it is answered."""

    request: ScoreRequest
    prompt: CachedPrompt
    result: Score | EngineError | None = None
    is_second_try: bool = False

    def restart(self) -> None:
        """Reset the job, to start over in an empty batcher."""
        self.prompt = CachedPrompt(tokens=self.prompt.tokens, slot=self.prompt.slot)
        self.result, self.is_second_try = None, True


@dataclass(slots=True, eq=False)
class SampleJob:
    """A sample request in flight, with its sequences; `result` is set when it is answered."""

    request: SampleRequest
    prompt: CachedPrompt
    max_tokens: int
    completions: dict[int, Completion] = field(default_factory=dict)
    texts: dict[int, TextDeltas] = field(default_factory=dict)
    """Streamed text of each completion; kept on restart, so that nothing is streamed twice."""
    num_started: int = 0
    result: tuple[Completion, ...] | EngineError | None = None
    is_second_try: bool = False

    def restart(self) -> None:
        """Reset the job, to start over in an empty batcher."""
        self.prompt = CachedPrompt(tokens=self.prompt.tokens, slot=self.prompt.slot)
        self.completions, self.num_started = {}, 0
        self.result, self.is_second_try = None, True


Job = ScoreJob | SampleJob


@dataclass(slots=True, eq=False)
class _Sequence:
    """One sample of a job during decoding."""

    job: SampleJob
    index: int
    stops: StopSearch
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[TopLogprobs] = field(default_factory=list)
    kept: list[bytes] = field(default_factory=list)


class Batcher:
    """Advances all jobs in flight on one model."""

    def __init__(
        self,
        model: SlottedModel,
        *,
        detokenize: Callable[[Sequence[int]], str],
        max_rows: int,
        prefill_tokens: int,
        cache_tokens: int,
    ) -> None:
        self.prefill = Prefill(model, cache_tokens=cache_tokens)
        self.num_decoded = 0
        self._model = model
        self._detokenize = detokenize
        self._prefill_tokens = prefill_tokens
        self._max_rows = max_rows
        self._divisor = 1
        """Divisor of rows and prefill tokens: 2 while a job is on its second try, else 1."""
        self._decode = DecodeBatch(model, max_rows=max_rows)
        self._waiting: list[Job] = []
        self._ready: list[SampleJob] = []
        self._decoding: list[_Sequence] = []
        """In row order."""
        self._answered: list[Job] = []
        self._deltas: list[tuple[SampleJob, CompletionDelta]] = []

    def take_deltas(self) -> list[tuple[SampleJob, CompletionDelta]]:
        """Return and clear the new deltas of requests that have `on_delta`."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def _add(self, jobs: Sequence[Job]) -> None:
        """Queue jobs, sorted so that shared prefixes are computed close in time."""
        self._waiting.extend(sorted(jobs, key=lambda job: job.prompt.tokens))
        self.prefill.stats.requested_tokens += sum(len(job.prompt.tokens) for job in jobs)

    def _drop(self, jobs: Sequence[Job]) -> None:
        """Remove jobs, wherever they are, and release their prompts."""
        gone = set(map(id, jobs))
        for row in reversed(range(len(self._decoding))):
            if id(self._decoding[row].job) in gone:
                self._remove_row(row)
        self._waiting = [job for job in self._waiting if id(job) not in gone]
        self._ready = [job for job in self._ready if id(job) not in gone]
        for job in jobs:
            self.prefill.release(job.prompt)

    @torch.inference_mode()
    def reset(self) -> None:
        """Forget all jobs and prefixes, and free the memory that grew with them."""
        self._waiting, self._ready, self._decoding = [], [], []
        self._decode = DecodeBatch(self._model, max_rows=self._max_rows)
        self.prefill.set_cut(self.prefill.cut)

    @torch.inference_mode()
    def retry(self, jobs: Sequence[Job]) -> None:
        """Recover from short memory: restart these jobs, forget everything else, and halve rows and
        prefill tokens until they are done. Their answers do not change."""
        self._divisor = 2
        self.reset()
        for job in jobs:
            job.restart()
        self._waiting = sorted(jobs, key=lambda job: job.prompt.tokens)

    @torch.inference_mode()
    def clear(self) -> None:
        """Forget every prefix that no job uses."""
        self.prefill.clear()

    @torch.inference_mode()
    def forget(self, slot: int) -> None:
        """Forget the prefixes of a slot that no job uses."""
        self.prefill.forget(slot)

    @torch.inference_mode()
    def set_cut(self, cut: int) -> None:
        """Move the border between trunk and branches; waiting prompts start over."""
        for job in self._waiting:
            self.prefill.release(job.prompt)
            job.prompt.num_planned = 0
        self.prefill.set_cut(cut)

    @property
    def _num_free(self) -> int:
        return max(0, max(1, self._max_rows // self._divisor) - len(self._decoding))

    def _jobs(self) -> list[Job]:
        return [*self._waiting, *self._ready, *(sequence.job for sequence in self._decoding)]

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._ready or self._decoding)

    @torch.inference_mode()
    def step(self, added: Sequence[Job], dropped: Sequence[Job]) -> list[Job]:
        """Add and drop jobs, advance all others once, and return the answered ones.

        An answered job holds no memory and no row.
        """
        self._answered = []
        if self._divisor > 1 and not any(job.is_second_try for job in self._jobs()):
            self._divisor = 1
        self._add(added)
        if dropped:
            self._drop(dropped)
        if self._waiting:
            self.prefill.advance(
                [job.prompt for job in self._admissible()],
                budget=max(1, self._prefill_tokens // self._divisor),
            )
            self._finish_prefill()
        self._start_sequences()
        if self._decoding:
            self._decode_once()
        failed = [job for job in self._answered if isinstance(job.result, EngineError)]
        if failed:
            self._drop(failed)
        return self._answered

    def _admissible(self) -> list[Job]:
        """Return the waiting jobs to compute now: all scores, and samples that will get rows."""
        room = self._num_free - len(self._ready)
        jobs: list[Job] = []
        for job in self._waiting:
            if isinstance(job, SampleJob):
                if room <= 0:
                    continue
                room -= job.request.params.n
            jobs.append(job)
        return jobs

    def _finish_prefill(self) -> None:
        done = [job for job in self._waiting if job.prompt.is_planned]
        self._waiting = [job for job in self._waiting if not job.prompt.is_planned]
        self._ready.extend(job for job in done if isinstance(job, SampleJob))
        scores = [job for job in done if isinstance(job, ScoreJob)]
        for job, score in zip(scores, self._score(scores), strict=True):
            self.prefill.release(job.prompt)
            job.result = score
            self._answered.append(job)

    def _score(self, jobs: Sequence[ScoreJob]) -> list[Score | EngineError]:
        """Compute the scores of all jobs, with one head computation over their rows."""
        parts: list[torch.Tensor] = []
        slots: list[int | None] = []
        wanted: list[tuple[int, ...]] = []
        for job in jobs:
            request = job.request
            after_end = bool(request.labels or request.top_logprobs)
            hidden = self.prefill.hidden(job.prompt, request.start - 1)
            parts.append(hidden if after_end else hidden[:-1])
            slots.extend([job.prompt.slot] * len(parts[-1]))
            wanted.extend([(token,) for token in request.tokens[request.start :]])
            wanted += [request.labels] if after_end else []
        num_top = max((job.request.top_logprobs for job in jobs), default=0)
        rows = iter(self._head(parts, slots, wanted, num_top))
        return [
            _make_score(job.request, [next(rows) for _ in part])
            for job, part in zip(jobs, parts, strict=True)
        ]

    def _head(
        self,
        parts: Sequence[torch.Tensor],
        slots: Sequence[int | None],
        wanted: Sequence[tuple[int, ...]],
        num_top: int,
    ) -> list[tuple[tuple[float, ...], TopLogprobs]]:
        """Return per row the log-probabilities of its wanted tokens, and the likeliest tokens."""
        if not slots:
            return []
        hidden = torch.cat(list(parts))
        readings: list[tuple[tuple[float, ...], TopLogprobs]] = []
        for first in range(0, len(hidden), _HEAD_ROWS):
            chunk = slice(first, first + _HEAD_ROWS)
            logits = self._logits(hidden[chunk], slots[chunk])
            width = max(1, *(len(tokens) for tokens in wanted[chunk]))
            padded = [[*t, *[0] * (width - len(t))] for t in wanted[chunk]]
            values = logprobs_of(logits, torch.tensor(padded, device=logits.device)).tolist()
            norms = torch.logsumexp(logits, dim=-1) if num_top else logits[:, 0]
            for row, tokens in enumerate(wanted[chunk]):
                top = top_logprobs(logits[row], norms[row], num_top)
                readings.append((tuple(values[row][: len(tokens)]), top))
        return readings

    def _logits(self, hidden: torch.Tensor, slots: Sequence[int | None]) -> torch.Tensor:
        rows_by_slot: dict[int, list[int]] = {}
        for row, slot in enumerate(slots):
            if slot is not None:
                rows_by_slot.setdefault(slot, []).append(row)
        segments = [Segment(slot=s, rows=r, block=_HEAD_BLOCK) for s, r in rows_by_slot.items()]
        plan = SlotRows(segments, num_rows=len(slots), device=hidden.device) if segments else None
        return self._model.logits(hidden, rows=plan)

    def _start_sequences(self) -> None:
        """Assign free rows to ready jobs and sample their first tokens."""
        started: list[_Sequence] = []
        num_free = self._num_free
        while self._ready and len(started) < num_free:
            job = self._ready[0]
            stops = StopSearch(job.request.params.stop, detokenize=self._detokenize)
            started.append(_Sequence(job=job, index=job.num_started, stops=stops))
            job.num_started += 1
            if job.num_started == job.request.params.n:
                self._ready.pop(0)
        if not started:
            return
        last = [self.prefill.hidden(s.job.prompt, len(s.job.prompt.tokens) - 1) for s in started]
        logits = self._logits(torch.cat(last), [s.job.prompt.slot for s in started])
        draws = self._draw(logits, started)
        for sequence, drawn in zip(started, draws, strict=True):
            if not self._append(sequence, drawn):
                cache = self.prefill.keys_and_values(sequence.job.prompt)
                self._decode.add(cache, slot=sequence.job.prompt.slot)
                self._decoding.append(sequence)
        for job in {id(s.job): s.job for s in started}.values():
            if job.num_started == job.request.params.n:
                self.prefill.release(job.prompt)

    def _decode_once(self) -> None:
        sequences = list(self._decoding)
        logits = self._decode.step([s.tokens[-1] for s in sequences])
        self.num_decoded += len(sequences)
        draws = self._draw(logits, sequences)
        for row in reversed(range(len(sequences))):
            if self._append(sequences[row], draws[row]):
                self._remove_row(row)

    def _remove_row(self, row: int) -> None:
        moved = self._decode.remove(row)
        self._decoding[row] = self._decoding[moved]
        self._decoding.pop()

    def _draw(self, logits: torch.Tensor, sequences: Sequence[_Sequence]) -> list[TokenDraw]:
        params = [s.job.request.params for s in sequences]
        if any(one.penalties is not None for one in params):
            logits = logits.clone()
            for row, sequence in zip(logits, sequences, strict=True):
                if (penalties := sequence.job.request.params.penalties) is not None:
                    prompt = sequence.job.request.prompt
                    penalise(row, penalties, prompt=prompt, drawn=sequence.tokens)
        uniforms = [uniform(s.job.request.params.seed, s.index, len(s.tokens)) for s in sequences]
        return draw(logits, params, uniforms)

    def _append(self, sequence: _Sequence, drawn: TokenDraw) -> bool:
        """Add a token to a sequence; return whether the sequence has ended."""
        job = sequence.job
        if drawn.logprob != drawn.logprob:
            if job.result is None:
                job.result = EngineError(
                    f"{job.request.model.served_name} gives NaN logits: its weights overflow."
                )
                self._answered.append(job)
            return True
        sequence.tokens.append(drawn.token)
        sequence.logprobs.append(drawn.logprob)
        sequence.tops.append(drawn.top)
        sequence.kept.append(drawn.kept)
        reason, text = self._finish(sequence)
        if job.request.on_delta is not None:
            self._record_delta(sequence, reason, text)
        if reason is None:
            return False
        job.completions[sequence.index] = Completion(
            model=job.request.model,
            tokens=tuple(sequence.tokens),
            logprobs=tuple(sequence.logprobs),
            text=text,
            finish_reason=reason,
            top_logprobs=tuple(sequence.tops) if job.request.params.top_logprobs else (),
            kept=_kept(sequence.kept) if any(sequence.kept) else (),
        )
        if len(job.completions) == job.request.params.n and job.result is None:
            job.result = tuple(job.completions[i] for i in range(job.request.params.n))
            self._answered.append(job)
        return True

    def _record_delta(self, sequence: _Sequence, reason: FinishReason | None, text: str) -> None:
        """Record the delta of the last token; if the sequence ends, `text` is its whole text."""
        job, params = sequence.job, sequence.job.request.params
        new = TextDeltas(params.stop, detokenize=self._detokenize)
        deltas = job.texts.setdefault(sequence.index, new)
        if len(sequence.tokens) <= deltas.num_tokens:
            return
        delta = CompletionDelta(
            sample=sequence.index,
            tokens=(sequence.tokens[-1],),
            logprobs=(sequence.logprobs[-1],),
            text=deltas.add(sequence.tokens, ended=None if reason is None else text),
            finish_reason=reason,
            top_logprobs=(sequence.tops[-1],) if params.top_logprobs else (),
        )
        self._deltas.append((job, delta))

    def _finish(self, sequence: _Sequence) -> tuple[FinishReason | None, str]:
        """Return why the sequence ends now (None if it continues), and its text."""
        params = sequence.job.request.params
        token = sequence.tokens[-1]
        is_eos = not params.ignore_eos and token in self._model.shape.eos_tokens
        if is_eos or token in params.stop_tokens:
            return "stop", self._detokenize(sequence.tokens[:-1])
        text = sequence.stops.find(sequence.tokens)
        if text is not None:
            return "stop", text
        if len(sequence.tokens) >= sequence.job.max_tokens:
            return "length", self._detokenize(sequence.tokens)
        return None, ""


def _kept(rows: Sequence[bytes]) -> KeptTokens:
    return KeptTokens(ends=tuple(accumulate(len(row) // 4 for row in rows)), data=b"".join(rows))


def _make_score(
    request: ScoreRequest, rows: Sequence[tuple[tuple[float, ...], TopLogprobs]]
) -> Score | EngineError:
    after_end = bool(request.labels or request.top_logprobs)
    prompt_rows = rows[:-1] if after_end else rows
    score = Score(
        model=request.model,
        logprobs=tuple(values[0] for values, _ in prompt_rows),
        label_logprobs=rows[-1][0] if after_end else (),
        top_logprobs=tuple(top[: request.top_logprobs] for _, top in rows)
        if request.top_logprobs
        else (),
    )
    if any(x != x for x in (*score.logprobs, *score.label_logprobs)):
        return EngineError(f"{request.model.served_name} gives NaN logits: its weights overflow.")
    return score
