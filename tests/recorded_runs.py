"""Run records of FedTAR made by code, of the very events that a run writes.

Four sites of which one did not join: ``hospital-north`` always takes part; ``hospital-south`` has nobody at the last
step (it abstains) and too few test reports there; ``<b>clinic & "east"</b>`` is absent once and refused once.
"""

import json
import math
import random
from pathlib import Path

from fedtar_flare.methods.fedtar.events import Alphas, Outer, Residual
from fedtar_flare.record import events
from fedtar_flare.record.events import Scores, SiteScores
from fedtar_flare.record.log import RunRecord

NORTH, SOUTH, EAST, WEST = "hospital-north", "hospital-south", '<b>clinic & "east"</b>', "hospital-west"
SITES = sorted((NORTH, SOUTH, EAST))
RUN_ID = "20260301-101500-0a1b2c3d"


def write_run(
    folder, *, rounds=3, time_steps=3, sites=SITES, min_cell=5, until="end", first_round=1, generic=False, content=False
) -> Path:
    """Write ``rounds.jsonl`` into ``folder``.

    ``until`` is ``start``, ``warm-start``, ``step`` (in the middle of the last round), ``rounds`` (no end event) or
    ``end``; ``generic``: with scores of the shared adapter alone; ``content``: with scores of what the reports say.
    """
    drawn = random.Random(7)
    record = RunRecord(folder)
    alpha = [1 / time_steps] * time_steps
    record.write(_start(rounds, time_steps, sites, min_cell, first_round))
    record.write(Alphas(alpha=alpha, first_round=first_round))
    if until == "start":
        return folder
    _evaluate(record, first_round - 1, 0.0, sites, time_steps, min_cell, generic, content)
    if until == "warm-start":
        return folder
    logits = [0.0] * time_steps
    for r in range(first_round, rounds + 1):
        progress = r / rounds
        for t in range(1, time_steps + 1):
            _step(record, drawn, r, t, alpha[t - 1], sites, time_steps)
            if until == "step" and r == rounds and t == 1:
                return folder
        logits = [value + drawn.gauss(0.12 * (t - time_steps / 2), 0.04) for t, value in enumerate(logits)]
        moved = [math.exp(value) / sum(map(math.exp, logits)) for value in logits]
        losses = {site: 0.4 + (1.8 + 0.2 * i) * math.exp(-2.2 * progress) for i, site in enumerate(sites)}
        validated = {site: events.SiteValidation(validation_loss=loss, n=9) for site, loss in losses.items()}
        record.write(events.Validation(round=r, loss=sum(losses.values()) / len(losses), sites=validated))
        t_numbers = {site: [drawn.gauss(0, 1) for _ in range(time_steps)] for site in sites}
        left_out = {EAST: "it did not receive every step of this round"} if r == 2 and EAST in sites else {}
        outer = {"psi_grad_norm": 0.02 * math.exp(-progress), "alpha_before": alpha, "alpha_after": moved}
        record.write(Outer(round=r, t_numbers=t_numbers, left_out=left_out, **outer))
        alpha = moved
        _evaluate(record, r, progress, sites, time_steps, min_cell, generic, content)
    if until == "end":
        record.write(events.End(time="2026-03-01T10:19:12Z", seconds=252.4, status="completed"))
    return folder


def edit(folder: Path, kind: str, at: int | None = None, **values: object) -> None:
    """Set fields of all events of one kind (of one round) in a record, also such that no writer would write."""
    path = folder / "rounds.jsonl"
    read = [json.loads(line) for line in path.read_text().splitlines()]
    wanted = [event["event"] == kind and at in (None, event.get("round")) for event in read]
    changed = [event | values if this else event for event, this in zip(read, wanted, strict=True)]
    path.write_text("".join(json.dumps(event) + "\n" for event in changed))


def _start(rounds, time_steps, sites, min_cell, first_round) -> events.Start:
    counts = {}
    for i, site in enumerate(sites):
        train = [_visits(site, t, time_steps) for t in range(1, time_steps + 1)]
        counts[site] = {"train": train, "validation": [5] * time_steps, "test": _test_reports(site, i, time_steps)}
    sizes = {"tensors": 96, "parameters": 71_680, "bytes": 286_720}
    exchange = events.Exchange(**sizes, full_parameters=1_985_408, full_bytes=7_941_632)
    settings = {"num_rounds": rounds, "time_steps": time_steps, "alpha_form": "softmax", "min_sites": 1}
    about = {"method": "fedtar", "run_id": RUN_ID, "time": "2026-03-01T10:15:00Z", "settings": settings}
    about |= {"model": {"preset": "small", "parameters": 1_985_408, "license": "Apache-2.0"}, "min_cell": min_cell}
    about |= {"versions": {"fedtar_flare": "0.1.0", "torch": "2.15.0", "python": "3.11.7"}, "sites": sites}
    about |= {"absent": {WEST: "no answer within 60 s"}, "counts": counts, "exchange": exchange}
    return events.Start(**about, time_steps=time_steps, rounds=rounds, first_round=first_round)


def _visits(site: str, t: int, time_steps: int) -> int:
    return 0 if site == SOUTH and t == time_steps else max(6, 34 - 9 * (t - 1) - len(site) % 5)


def _test_reports(site: str, i: int, time_steps: int) -> list[int]:
    return [9, *[7 - i % 3] * (time_steps - 2), 3 if site == SOUTH else 6][:time_steps]


def _step(record, drawn, r, t, alpha, sites, time_steps) -> None:
    abstained, absent, refused, taking = {}, {}, {}, {}
    if SOUTH in sites and t == time_steps:
        abstained[SOUTH] = f"0 training visit(s) at step {t}"
    if EAST in sites and (r, t) == (1, 2):
        absent[EAST] = "no answer within 60 s"
    if EAST in sites and (r, t) == (2, 1):
        refused[EAST] = "tensor base_model.model.decoder.x.lora_A.weight holds a value that is not finite"
    if (r, t) == (2, time_steps):  # a step that nobody answered
        reason = "the site could not train (data at the site cannot be used)"
        absent = {site: reason for site in sites if site not in abstained}
    answered = [site for site in sites if site not in abstained | absent | refused]
    distance = r - 1 + t / time_steps
    update = 1.9 * math.exp(-0.5 * distance) + 0.1 * drawn.random() if answered else 0.0
    for i, site in enumerate(answered):
        loss = 0.3 + (2.2 + 0.3 * i) * math.exp(-0.9 * distance) + 0.1 * drawn.random()
        samples = _visits(site, t, time_steps)
        taking[site] = events.SiteUpdate(samples=samples, train_loss=loss, seconds=6.0 + i, bytes_up=286_720)
    size = {"bytes_down": 286_720 * len(sites), "bytes_up": 286_720 * len(taking), "seconds": 8.0 if taking else 0.0}
    others = {"abstained": abstained, "absent": absent, "refused": refused}
    record.write(events.Step(round=r, step=t, update_norm=update, skipped=not taking, sites=taking, **others, **size))
    record.write(Residual(round=r, step=t, alpha=alpha, residual_norm=alpha * update))


def _cell(n: int, good: float, min_cell: int) -> Scores:
    if n < min_cell:
        return {"n": n}
    scores = {"n": n} | {f"bleu_{k}": 0.08 + good * (0.9 - 0.05 * k) for k in range(1, 5)}
    scores |= {"rouge_l": 0.2 + 0.6 * good, "cider": 0.4 + 7.5 * good, "token_loss": 2.4 - 2.0 * good}
    scores |= {"finding_f1": 0.15 + 0.7 * good if good or n > 6 else None, "finding_f1_known": 0.2 + 0.6 * good}
    return scores | {"finding_f1_new": 0.5 * good, "finding_recall_new": 0.4 * good}


def _content(good: float) -> Scores:
    scores = {"presence_f1": 0.6 + 0.3 * good, "side_accuracy": 0.9, "degree_accuracy": 0.3 + 0.3 * good}
    scores |= {"change_accuracy": 0.5 * good if good else None, "change_coverage": 0.3 + 0.5 * good if good else None}
    scores |= {"ctrate_rules_f1": 0.3 + 0.5 * good, "finding_change_micro_f1": 0.3 + 0.3 * good}
    scores |= {"contradictions": 0.3 - 0.2 * good, "identical_share": 0.8 - 0.7 * good}
    return scores | {"mismatched_share": 0.45 - 0.4 * good, "length_ratio": 0.55 + 0.4 * good}


def _scores(personal, progress, sites, time_steps, min_cell, content) -> dict[str, SiteScores]:
    scores = {}
    for i, site in enumerate(sites):
        counts = _test_reports(site, i, time_steps)
        good = personal * (0.95 - 0.12 * (i % 5)) * progress ** (0.5 + 0.3 * i)
        steps = {t: _cell(n, good * (1 - 0.07 * t), min_cell) for t, n in enumerate(counts, 1)}
        every, more = _cell(sum(n for n in counts if n >= min_cell), good * 0.88, min_cell), {}
        if content:
            finding = {"n": 6.0 + i, "recall": 0.9 - 0.5 * good, "named": 7.0, "precision": 0.95 - 0.1 * good}
            new = {"fibrosis": {"n": 5.0 - i, "recall": 0.7 * good}}
            more["findings"] = {"known": dict.fromkeys(("emphysema", "nodule_left"), finding), "new": new}
            more["references"] = {"identical_share": 0.1, "contradictions": 0.2}
            more["certainty"] = {"0": (40, 30), "50": (32, 28 - i), "90": (16, 16)} if personal == 1 else {}
        scores[site] = SiteScores(steps=steps, all=every | (_content(good) if content else {}), **more)
    return scores


def _evaluate(record, r, progress, sites, time_steps, min_cell, generic, content) -> None:
    about = (progress, sites, time_steps, min_cell, content)
    personal, alone = _scores(1.0, *about), _scores(0.8, *about) if generic else {}
    record.write(events.Evaluation(round=r, sites=personal, generic=alone))
