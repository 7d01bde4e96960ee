"""One row a process of a run: who it is, how it is, what it does, and what it waits for. Pure.

    coordinator
    learner
    origin
    └ relay-1            whoever pulls weights hangs below the one it pulls from
      └ relay-2
        ├ node-1

Health is what can be told from outside: `alive` (heard from lately), `loading` (started, not heard from yet), `quiet`
(was heard from, is not now), `gone` (ended, and should not have), `left` (ended as it should), `off` (the run does not
go on), `unknown` (the coordinator, who would know, is silent).

Not covered: how rows look (`trainer.screen`); reading files (`trainer.picture`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from protocol.commands import printable, several
from trainer.news import in_words
from trainer.picture import Picture, Process
from trainer.spans import length

STALE_S = 5.0
"""status.json is written once a second; a coordinator that has not for this long is called quiet."""

COMING_S = 20.0
"""After its start, a coordinator has not heard from everybody yet, and nobody is called quiet for it."""

QUIET_BEATS = 3
"""A member is called quiet when this many heartbeats are missing; under load one or two come late."""

_LATER = ("joins later, when another has left", "joins later")
"""Of a demo's dishonest nodes: only a few are in the run at a time."""

ROLE_ORDER = {"coordinator": 0, "learner": 1, "origin": 2, "relay": 3, "inference": 4, "validator": 5}


@dataclass(frozen=True)
class Row:
    """One line of the tree. `doing` and `fate` hold the same in fewer and fewer words: what fits is shown."""

    key: str
    name: str
    role: str
    health: str
    doing: tuple[str, ...]
    standing: str = ""
    """Of inference nodes: `probation`, `active`, `paused` or `suspended`."""
    step: int | None = None
    accepted: int | None = None
    rejected: int | None = None
    outvoted: int | None = None
    """A validator's: rollouts of which two others found the opposite."""
    sent: int | None = None
    """Bytes: weights sent on (origin, relays), rollouts sent up (inference)."""
    quiet_s: float = 0.0
    parent: str = ""
    """`key` of the one it pulls weights from."""
    dishonest: bool = False
    branch: str = ""
    """Tree characters before the name."""
    fate: tuple[str, ...] = ()
    """Of dishonest and suspended nodes: what became of them."""


def rows(picture: Picture) -> list[Row]:
    """Every process and member, unordered."""
    joined = [_member(picture, node) for node in picture.status.get("nodes", [])]
    known = {row.name for row in joined}
    waiting = [
        _not_joined(picture, name, process)
        for name, process in picture.processes.items()
        if name not in known and process.role in ("relay", "inference", "validator")
    ]
    later = [
        Row(name, name, "inference", "off", _LATER, dishonest=True, fate=_LATER)
        for name in sorted(picture.kinds)
        if name not in known and name not in picture.processes
    ]
    return [_coordinator(picture), _learner(picture), _origin(picture), *joined, *waiting, *later]


def tree(found: Iterable[Row]) -> list[Row]:
    """Rows in the order they are shown, with their branches drawn: who pulls from whom."""
    listed = sorted(found, key=_order)
    keys = {row.key for row in listed}
    relays = [row.key for row in listed if row.role == "relay"]
    below: dict[str, list[Row]] = {}
    for row in listed:
        if row.role in ("coordinator", "learner", "origin"):
            continue
        parent = row.parent if row.parent in keys and row.parent != row.key else ""
        if not parent:
            parent = relays[-1] if relays and row.role != "relay" else "origin"
        below.setdefault(parent, []).append(row)
    out = [row for row in listed if row.role in ("coordinator", "learner")]

    placed: set[str] = set()

    def add(row: Row, branch: str, indent: str) -> None:
        out.append(replace(row, branch=branch))
        placed.add(row.key)
        children = [child for child in below.pop(row.key, []) if child.key not in placed]
        for child in children:
            last = child is children[-1]
            add(child, indent + ("└ " if last else "├ "), indent + ("  " if last else "│ "))

    for row in listed:
        if row.role == "origin":
            add(row, "", "")
    for orphan in [row for group in list(below.values()) for row in group]:  # a circle, or an origin nobody names
        if orphan.key not in placed:
            add(orphan, "", "")
    return out


def _order(row: Row) -> tuple[int, list[int | str]]:
    """Role first, then names as a person orders them: node-9 before node-10."""
    parts = re.split(r"(\d+)", row.name)
    return ROLE_ORDER.get(row.role, 9), [int(part) if part.isdigit() else part for part in parts]


# --- the operator's three ----------------------------------------------------------------------------------------


def over(picture: Picture) -> bool:
    """The run does not go on: finished, or its coordinator was stopped."""
    return picture.status.get("phase") in ("finished", "stopped")


def silent(picture: Picture) -> bool:
    """The coordinator should write and does not: killed, stopped by force, or starved."""
    age = picture.status_age
    return not over(picture) and age is not None and age > STALE_S


def _coordinator(picture: Picture) -> Row:
    status, process = picture.status, picture.processes.get("coordinator")
    step = int(status.get("step") or 0) if status else None
    health, quiet = "alive", 0.0
    doing: tuple[str, ...] = (f"starts run {status.get('run', '')[:16]}", "starts")
    if process is not None and process.exit_code is not None:
        health, doing = _ended(process)
    elif not status:
        health, doing = _loading(picture, process, picture.onward)
    elif over(picture):
        health, doing = "off", (str(status["phase"]),)
    elif silent(picture):
        quiet = picture.status_age or 0.0
        health, doing = "quiet", (f"has written nothing for {length(quiet)}", f"silent for {length(quiet)}", "silent")
    elif status.get("nodes"):
        rollouts = status.get("rollouts", {})
        leases, pending = status.get("leases_open", 0), rollouts.get("pending", 0)
        doing = (
            f"{several(leases, 'lease')} out, {several(pending, 'rollout')} to be checked",
            f"{several(leases, 'lease')}, {pending} to check",
            f"{pending} to check",
        )
    return Row("coordinator", "coordinator", "coordinator", health, doing, step=step, quiet_s=quiet)


def _learner(picture: Picture) -> Row:
    process, sft = picture.processes.get("learner"), picture.sft
    busy = bool(picture.rows or sft)
    step = picture.step if busy else None
    health = "alive"
    doing: tuple[str, ...] = ("makes the first checkpoint", "first checkpoint")
    ready = int(picture.status.get("batches") or 0) > picture.step
    if picture.steps and picture.step >= picture.steps:
        health, doing = "left", ("done: every step is learned", "done")
    elif process is not None and process.exit_code is not None:
        health, doing = _ended(process)
    elif picture.learner_alive is False and not silent(picture):
        health, doing = "gone", (f"has ended; go on: trainer learn {picture.run_dir}/run.toml", "has ended")
        if over(picture):
            health, doing = "off", ("stopped",)
    elif not busy:
        health, doing = _loading(picture, process, f"trainer learn {picture.run_dir}/run.toml")
        if picture.learner_alive:
            health = "alive" if process is None else health
    elif not picture.rows and sft and not sft.get("done"):
        doing = (f"stage one: step {sft.get('step')} of {sft.get('steps')}", "stage one")
    elif ready:
        doing = (f"learns from batch {picture.step}", "learns")
    elif picture.status:
        doing = (f"waits for batch {picture.step}", "waits for a batch")
    return Row("learner", "learner", "learner", health, doing, step=step)


def _origin(picture: Picture) -> Row:
    process = picture.processes.get("origin")
    published = picture.status.get("step") if _has_weights(picture) else None
    health = "alive"
    doing: tuple[str, ...] = ("waits for the first checkpoint", "waits for weights")
    if process is not None and process.exit_code is not None:
        health, doing = _ended(process)
    elif picture.origin_alive is None and process is None and over(picture):
        health, doing = "off", ("stopped",)
    elif picture.origin_alive is None:  # its file goes when it stops in good order
        health, doing = _loading(picture, process, f"shardcast publish {picture.run_dir}")
    elif picture.origin_alive is False and process is None:
        health, doing = "gone", (f"has ended; go on: shardcast publish {picture.run_dir}", "has ended")
    elif published is not None:
        newer = picture.step > int(published)
        doing = (
            (f"publishes step {picture.step}", "publishes")
            if newer
            else (f"serves step {published}", f"step {published}")
        )
    return Row("origin", "origin", "origin", health, doing, step=published, sent=picture.sent.get("origin"))


def _has_weights(picture: Picture) -> bool:
    return bool(picture.rows) or picture.status.get("phase") not in (None, "", "starting", "waiting for weights")


# --- members ------------------------------------------------------------------------------------------------------


def _member(picture: Picture, node: Mapping[str, Any]) -> Row:
    name, role = printable(str(node["name"])), str(node["role"])
    samples = role == "inference"
    standing = str(node["state"]) if samples else ""
    process = picture.processes.get(str(node["name"]))
    health, quiet, doing = "alive", 0.0, _activity(node)
    heard = node.get("last_seen_s")
    if process is not None and process.exit_code is not None:
        health, doing = _ended(process)
    elif over(picture):
        health, doing = "off", ("",)
    elif silent(picture):
        health, doing = "unknown", ("the coordinator, who would know, is silent", "unknown")
    elif heard is None and picture.now - float(picture.status.get("began") or 0.0) < COMING_S:
        health, doing = "loading", ("joins", "joins")
    elif heard is None:
        health, doing = "quiet", ("not heard from since the coordinator started", "not heard from yet")
    elif float(heard) > QUIET_BEATS * float(picture.status.get("heartbeat_s") or 2.0):
        health, quiet = "quiet", float(heard) + (picture.status_age or 0.0)
        doing = (f"nothing heard for {length(quiet)}", f"quiet for {length(quiet)}", "quiet")
    return Row(
        key=str(node["key"]),
        name=name,
        role=role,
        health=health,
        doing=doing,
        standing=standing,
        step=int(node.get("step") or 0),
        accepted=int(node["accepted"]) if samples else None,
        rejected=int(node["rejected"]) if samples else None,
        outvoted=int(node.get("outvoted") or 0) if role == "validator" else None,
        sent=_sent(picture, node),
        quiet_s=quiet,
        parent=str(node.get("parent") or ""),
        dishonest=node["key"] in picture.dishonest or (role == "inference" and node["name"] in picture.kinds),
        fate=_fate(node),
    )


def _sent(picture: Picture, node: Mapping[str, Any]) -> int | None:
    if node["role"] == "relay":  # its own count where its home lies in the run directory, else what it reports
        return picture.sent.get(str(node["name"])) or int(node.get("bytes_sent") or 0) or None
    return int(node["bytes_up"]) if node["role"] == "inference" and "bytes_up" in node else None


def _activity(node: Mapping[str, Any]) -> tuple[str, ...]:
    """What it waits for, where the coordinator knows that it does; else what it last said it does."""
    waits = printable(str(node.get("waits_for") or ""))
    activity = printable(str(node.get("activity") or ""))
    outvoted = int(node.get("outvoted") or 0)
    if outvoted:  # whatever else it does: it is wrong, or two others are
        told = f"outvoted on {several(outvoted, 'rollout')}"
        return f"{told} by two other validators: {activity or waits}", f"{told}; {activity or waits}", told, "outvoted"
    queue, took = int(node.get("open_jobs") or 0), node.get("verdict_s")
    if queue > 1 and activity.startswith("judging"):
        pace = f", {float(took):.1f} s each" if took is not None else ""
        return f"{activity}; {queue - 1} more to do{pace}", f"{activity}; {queue - 1} more", activity, "judging"
    if waits and (not activity or activity.startswith(("waiting", "starting"))):
        thing = waits.removesuffix(" to check").split(" ")[-1]  # rollouts, verdict, weights, lease
        return f"waits for {waits}", f"waits: {waits}", f"waits: {thing}", "waits"
    return activity, activity.split(" ")[0]


def _fate(node: Mapping[str, Any]) -> tuple[str, ...]:
    """What became of a node that is dishonest or suspended, in plain words; fewer in each next alternative."""
    accepted, rejected = int(node["accepted"]), int(node["rejected"])
    judged = accepted + rejected + int(node.get("inconclusive") or 0)
    reason = printable(str(node.get("reason") or ""))
    words = printable(in_words(reason))
    if node["state"] == "suspended":
        coded = f"{words} ({reason})" if words != reason else words
        if not rejected:  # what it did is not in its rollouts
            return f"caught: {coded}", f"caught: {reason}", reason, "caught"
        full = f"caught: {rejected} of {judged} rollouts rejected; {coded}"
        return full, f"caught: {rejected} of {judged}, {reason}", f"caught: {reason}", reason, "caught"
    if node["state"] == "paused":
        return (
            f"{rejected} rejected ({reason}); no leases until a second validator has looked",
            f"{rejected} rejected, a second validator looks",
            "a second validator looks",
            "paused",
        )
    if judged:
        return (
            f"{accepted} of {judged} accepted, not caught so far",
            f"{accepted} accepted so far",
            f"{accepted} accepted",
        )
    if str(node.get("waits_for") or "").endswith("verdict"):
        return "its first rollouts are being checked", "is being checked"
    return "joined; no rollouts of it yet", "no rollouts yet"


def _not_joined(picture: Picture, name: str, process: Process) -> Row:
    engine = picture.processes.get(f"{name}-engine")
    if process.exit_code is not None:
        health, doing = _ended(process)
    elif engine is not None and engine.exit_code is not None:
        health, doing = "gone", (f"its engine has ended (exit code {engine.exit_code})", "engine has ended")
    else:
        health, doing = _loading(picture, process, "")
    return Row(name, name, process.role, health, doing, dishonest=name in picture.kinds, fate=doing)


def _ended(process: Process) -> tuple[str, tuple[str, ...]]:
    if process.exit_code == 0:
        return "left", ("has left the run", "has left")
    code = process.exit_code or 0
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return "gone", (f"gone ({how}): restart it as logs/commands.txt says", f"gone ({how})", "gone")


def _loading(picture: Picture, process: Process | None, command: str) -> tuple[str, tuple[str, ...]]:
    if process is None and picture.onward.startswith("trainer demo"):
        return "off", ("not started; it starts with the whole demo", "not started")
    if process is None:
        return "off", (f"not started; start it with: {command}", f"start: {command}", "not started")
    since = length(max(0.0, picture.now - process.since))
    return "loading", (f"loads its libraries, {since} so far", f"loads libraries, {since}", f"loads, {since}", "loads")


def loading(found: Iterable[Row]) -> list[str]:
    """Names of those that were started and not heard from yet."""
    return [row.name for row in found if row.health == "loading"]
