"""Details of one verifier held against another's: honest ones agree whatever their machine, and every lie is named."""

from __future__ import annotations

import copy
import dataclasses
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from environments.registry import make
from protocol import codec
from protocol.records import ACCEPT, Number, Outcome, RolloutDetail, Submission
from tests.judge_rig import BF16, TINY, Rig, make_rig, random_policy
from verifier import blocks, compare, evidence_rows, model, spot, statistics
from verifier import thresholds as noise_files
from verifier.compare import Difference, Rules, differences
from verifier.judge import Judgement, judge
from verifier.model import PolicyModel
from verifier.numbers import NUMBERS
from verifier.profiles import load_to_sample, load_to_verify

DATA = Path(__file__).parents[1] / "verifier" / "data"
ANYTHING = 1e12
LOUD = 5e-7
"""What a second verifier's noise adds to an fp32 proof's median on the loudest machine measured (an H200 beside this
CPU: 5.2e-7)."""


def wide(rig: Rig) -> Rig:
    """The same run with bounds that let everything through: here it is the numbers that are wanted."""
    manifest = rig.run.manifest
    lifted, bf16 = manifest.thresholds, manifest.bf16
    if bf16 is None:
        lifted = dataclasses.replace(
            lifted, proof_median=ANYTHING, proof_outliers=128, token_margin=ANYTHING, logprob=ANYTHING
        )
    else:
        every = ("chunk_mantissa", "rollout_mantissa", "token_margin", "margin_mean", "logprob", "logprob_mean")
        bf16 = dataclasses.replace(bf16, chunk_exponents=128, **dict.fromkeys(every, ANYTHING))
    run = dataclasses.replace(rig.run, manifest=dataclasses.replace(manifest, thresholds=lifted, bf16=bf16))
    return dataclasses.replace(rig, run=run)


def moved(nodes: torch.nn.Module, by: float) -> torch.nn.Module:
    """A model of which every weight is a little off."""
    other = copy.deepcopy(nodes)
    chance = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1 + by * torch.randn(weight.shape, generator=chance).to(weight.dtype))
    return other


@dataclasses.dataclass
class Made:
    """A run, and answers to its lease: an honest one and one of another model."""

    rig: Rig
    answers: dict[str, Submission]
    verifiers: dict[str, PolicyModel]
    """Of another kernel, and one with the noise of the loudest machine."""


def make_run(folder: Path, profile: str, tasks: int, samples: int, cap: int, loudness: float) -> Made:
    """`loudness`: relative error of every weight that gives `LOUD`."""
    policy = load_to_verify(folder, profile)
    nodes = policy.model if profile == "fp32" else load_to_sample(folder, profile).model
    bf16 = BF16 if profile == "bf16" else None
    rig = make_rig(policy, make("word"), tasks, samples, cap, (1,), bf16=bf16, generator=nodes)
    off = rig.answer(moved(nodes, 1e-5 if profile == "fp32" else 1e-2))
    loud = load_to_verify(folder, profile)
    loud.model = moved(loud.model, loudness)
    verifiers = {"eager": load_to_verify(folder, profile, attention="eager"), "loud": loud}
    return Made(rig, {"honest": rig.honest, "off": off}, verifiers)


@pytest.fixture(scope="module", params=["fp32", "bf16", "fp32 long", "bf16 long"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    profile, _, long = request.param.partition(" ")
    if not long:
        return make_run(TINY, profile, 3, 8, 9, 5e-7)
    folder = tmp_path_factory.mktemp("long")
    random_policy(folder, 1)
    return make_run(folder, profile, 1, 6, 120, 1.5e-7)


@pytest.fixture
def one_row_at_a_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def switch() -> None:
        monkeypatch.setattr(model, "_PREFILL_TOKENS", 1)
        monkeypatch.setattr(blocks, "_CACHED_TOKENS", 1)

    return switch


def judged(rig: Rig, answer: Submission, policy: PolicyModel) -> Judgement:
    return judge(rig.run, rig.lease, codec.encode(answer), policy, rig.environment)


def by_task(rig: Rig, said: Judgement, ours: Judgement, **changes: object) -> Iterator[list[Difference]]:
    """What is compared, group by group and over the whole."""
    rules = dataclasses.replace(Rules.of(rig.run.manifest, rig.lease), **changes)
    every = range(len(ours.details))
    for group in [*compare.by_task(every, rig.lease.samples), every]:
        yield differences({i: said.details[i] for i in group}, {i: ours.details[i] for i in group}, rules)


def test_honest_verifiers_agree_on_whatever_machine_about_whatever_node(
    made: Made, one_row_at_a_time: Callable[[], None]
) -> None:
    rig = wide(made.rig)
    own, found = {}, []
    for kind, answer in made.answers.items():
        own[kind] = judged(rig, answer, made.rig.policy)
        assert {outcome.outcome for outcome in own[kind].outcomes} == {ACCEPT}
        found += [(kind, name, judged(rig, answer, policy)) for name, policy in made.verifiers.items()]
    if made.rig.limbs == 2:
        (loud,) = [one for kind, name, one in found if (kind, name) == ("honest", "loud")]
        assert 0.5 * LOUD < values(loud, "proof_median")[-1] < 2 * LOUD
    one_row_at_a_time()
    torch.set_num_threads(2)
    try:
        found += [(kind, "by rows", judged(rig, answer, made.rig.policy)) for kind, answer in made.answers.items()]
    finally:
        torch.set_num_threads(1)
    for kind, name, theirs in found:
        share = 1.0 if name == "loud" else 0.5  # of the others no audit is ever in doubt
        for wrong in by_task(made.rig, theirs, own[kind], share=share):
            assert wrong == [], (kind, name)
        assert theirs.details != own[kind].details, "they are not the same to the bit: something was compared"


@pytest.mark.parametrize("sign", [1, -1])
def test_every_number_that_a_row_reads_is_compared(made: Made, sign: int) -> None:
    """A validator that adds to it, or takes from it, in every rollout: enough to condemn its owner, or to shield it."""
    rig = wide(made.rig)
    ours = judged(rig, made.answers["off"], made.rig.policy)
    have = {number.name for number in ours.details[0].numbers}
    read = {name for names in statistics.READS.values() for name in names} & have
    assert read == have & NUMBERS.keys() - {
        "proof_outliers", "token_margin", "logprob_error", "exponents",
        *({"margin_sum", "tokens_not_first"} - read),
    }  # fmt: skip
    lies = {"proof_median": 4e-6, "mantissa_mean": 0.9, "tokens_not_first": 3.0, "mismatch_kl": 0.025}
    for name in sorted(have & NUMBERS.keys() - {"proof_outliers", "exponents"}):
        lie = sign * lies.get(name, 0.01)
        said = dataclasses.replace(ours, details=[changed(detail, name, lie) for detail in ours.details])
        first, *_ = by_task(made.rig, said, ours)
        assert {one.number for one in first} == {name}, name


def changed(detail: RolloutDetail, name: str, by: float) -> RolloutDetail:
    numbers = tuple(Number(n.name, n.value + by if n.name == name else n.value) for n in detail.numbers)
    return dataclasses.replace(detail, numbers=numbers)


def details(x: float = 0.8, count: int = 8, texts: int | None = None, **more: float) -> dict[int, RolloutDetail]:
    """Rollouts of one task with nine tokens each, of so many different texts."""
    numbers = {"mantissa_mean": x, "margin_sum": 0.0, "tokens_not_first": 0.0, **more}
    listed = tuple(Number(name, value) for name, value in numbers.items())
    logprobs = struct.pack("<9f", *[-1.0] * 9)
    return {i: RolloutDetail(logprobs, 1.0, listed, bytes([i % (texts or count)]) * 16) for i in range(count)}


RULES = Rules(3e-4, 3e-6, 4, 1e-4, 1e-5, pure=True, read=frozenset({"mantissa_mean", "previous_nearer"}))


def test_what_happens_once_by_chance_is_allowed_once_and_not_in_every_rollout() -> None:
    """A point at the edge of a proof may stand for anything, in one verifier's eyes and not in the other's."""
    ours = details()
    once = ours | {3: details(0.8 + 1.3)[3]}
    assert differences(once, ours, RULES) == []
    assert [one.position for one in differences(once | {4: details(2.1)[4]}, ours, RULES)] == [4], "the furthest"
    (everywhere,) = differences(details(1.0), ours, RULES)
    assert everywhere.number == "mantissa_mean" and "over 8 rollouts" in everywhere.message
    assert differences(details(0.8 + 0.15), ours, RULES) == []
    two_ways = {i: details(0.8 + 0.25 * (1 if i % 2 else -1))[i] for i in range(8)}
    assert differences(two_ways, ours, RULES), "what cancels is no better"


def test_rollouts_with_the_same_text_have_the_same_accident_once() -> None:
    same = details(texts=1)
    assert differences(details(0.8 + 1.3, texts=1), same, RULES) == []
    assert differences(details(0.8 + 1.3, texts=2), details(texts=2), RULES)


@pytest.mark.parametrize(
    ("spoil", "number"),
    [
        (lambda one: None, "logprobs"),
        (lambda one: dataclasses.replace(one, logprobs=one.logprobs[:-4]), "logprobs"),
        (lambda one: dataclasses.replace(one, logprobs=struct.pack("<9f", *[-1.01] * 9)), "logprobs"),
        (lambda one: dataclasses.replace(one, logprobs=struct.pack("<9f", *[float("nan")] * 9)), "logprobs"),
        (lambda one: dataclasses.replace(one, reward=0.5), "reward"),
        (lambda one: dataclasses.replace(one, digest=b"x" * 16), "digest"),
        (lambda one: dataclasses.replace(one, numbers=one.numbers[1:]), "mantissa_mean"),
        (lambda one: dataclasses.replace(one, numbers=()), "mantissa_mean"),
        (lambda one: dataclasses.replace(one, numbers=(*one.numbers, one.numbers[1])), "margin_sum"),
        (lambda one: changed(one, "margin_sum", float("nan")), "margin_sum"),
        (lambda one: changed(one, "margin_sum", float("inf")), "margin_sum"),
        (lambda one: changed(one, "margin_sum", 1e300), "margin_sum"),
        (lambda one: dataclasses.replace(one, numbers=(*one.numbers, Number("proof_median", 0.0))), "proof_median"),
        (
            lambda one: dataclasses.replace(one, numbers=(*one.numbers, Number("previous_nearer", 1.0))),
            "previous_nearer",
        ),
    ],
)
def test_what_no_honest_verifier_writes_is_a_difference(spoil: Callable, number: str) -> None:
    ours = details()
    (found,) = differences(ours | {2: spoil(ours[2])}, ours, RULES)
    assert (found.position, found.number) == (2, number)


def test_a_number_that_this_release_does_not_know_and_no_row_reads_is_the_validators_own_business() -> None:
    ours = details()
    newer = {i: dataclasses.replace(one, numbers=(*one.numbers, Number("of_later", 7.0))) for i, one in ours.items()}
    older = {i: dataclasses.replace(one, digest=b"") for i, one in ours.items()}
    assert differences(newer, ours, RULES) == differences(older, ours, RULES) == []


def test_rewards_may_differ_where_scoring_is_not_pure() -> None:
    ours = details()
    other = {i: dataclasses.replace(one, reward=0.9) for i, one in ours.items()}
    assert len(differences(other, ours, RULES)) == 8
    assert differences(other, ours, dataclasses.replace(RULES, pure=False)) == []


def test_what_tolerances_leave_to_a_liar_condemns_nobody_of_eight_long_answers() -> None:
    """The most that may be added to every rollout of a group, on top of the honest mean, is below the rows' bound."""
    bf16 = noise_files.bf16_thresholds(noise_files.read(DATA / "noise-smollm2-bf16.json"))
    fp32 = noise_files.thresholds(noise_files.read(DATA / "noise-smollm2.json"))
    noise = evidence_rows.noise_of_preset("tiny")
    classes = evidence_rows.read_classes(DATA / "classes-smollm2.json")
    rows = [*evidence_rows.bf16_rows(noise, bf16), *evidence_rows.fp32_rows(fp32, classes)]
    tokens, count = 128, 8
    rules = Rules(fp32.logprob, fp32.proof_median, 4, 0.0, 0.0, pure=True, read=frozenset())
    seen = set()
    for row in rows:
        if row.statistic not in ("proof_median", "mantissa_mean", "margin_rate", "mismatch_k3"):
            continue  # counts, and what is between 0 and 2: tied to the reward or to the sign
        (name,) = statistics.READS[row.statistic]
        honest = 2e-7 if name == "proof_median" else noise[row.statistic].clipped
        over = tokens if row.statistic.endswith("_rate") else 1
        may = rules.tolerances({"tokens_not_first": 2.0, name: honest}, tokens)[name]
        assert honest + (may.jump / count + may.noise) / over < row.honest, row.statistic
        seen.add(name)
    assert {"proof_median", "mantissa_mean", "margin_sum"} <= seen


# --- accusations ----------------------------------------------------------------------------------------------------


def upload(rig: Rig, answer: Submission, policy: PolicyModel) -> spot.Upload:
    import zstandard

    raw = codec.encode(answer)
    return spot.Upload(rig.run, rig.lease, zstandard.compress(raw), len(raw), policy, rig.environment)


def word(judgement: Judgement) -> spot.Word:
    return spot.Word(7, judgement.outcomes, judgement.details)


def accused(rig: Rig, answer: Submission, said: spot.Word, policy: PolicyModel) -> list:
    found = spot.confirm(upload(rig, answer, policy), range(len(said.outcomes)), [said])
    return spot.contradictions(said, found, upload(rig, answer, policy))


def limited(rig: Rig, **limits: float) -> Rig:
    """The same run with its bounds somewhere else."""
    manifest = rig.run.manifest
    if manifest.bf16 is None:
        manifest = dataclasses.replace(manifest, thresholds=dataclasses.replace(manifest.thresholds, **limits))
    else:
        manifest = dataclasses.replace(manifest, bf16=dataclasses.replace(manifest.bf16, **limits))
    return dataclasses.replace(rig, run=dataclasses.replace(rig.run, manifest=manifest))


def values(judgement: Judgement, name: str) -> list[float]:
    return sorted(number.value for one in judgement.details for number in one.numbers if number.name == name)


def test_no_honest_validator_is_accused_whichever_bound_a_node_puts_its_work_on(made: Made) -> None:
    """Every bound in turn lies where half of the node's rollouts are, so that rounding decides about some of them. The
    coordinator's machine is another kernel, and then the loudest one, and each accuses nobody."""
    answer = made.answers["off"]
    lifted = wide(made.rig)
    seen = judged(lifted, answer, made.rig.policy)
    if made.rig.run.manifest.bf16 is None:
        bounds = {"proof_median": "proof_median", "logprob": "logprob_error"}
    else:
        bounds = {"chunk_mantissa": "mantissa_mean", "token_margin": "token_margin", "logprob": "logprob_error"}
    split = 0
    for bound, name in bounds.items():
        every = values(seen, name)
        rig = limited(lifted, **{bound: every[len(every) // 2]})
        said = judged(rig, answer, made.rig.policy)
        split += len({outcome.outcome for outcome in said.outcomes}) == 2
        for policy in made.verifiers.values():
            assert accused(rig, answer, word(said), policy) == [], bound
            theirs = judged(rig, answer, policy)
            assert accused(rig, answer, word(theirs), made.rig.policy) == [], bound
    assert split >= 2, "there were rollouts on both sides of a bound"


def accepting(judgement: Judgement) -> spot.Word:
    """It says that everything holds."""
    return spot.Word(7, [Outcome(ACCEPT, "holds")] * len(judgement.outcomes), judgement.details)


def test_who_accepts_what_is_rejected_by_more_than_verifiers_differ_by_is_accused(made: Made) -> None:
    """In bf16 nodes are a thousand times as noisy as verifiers: one 1.3 times over a bound is no doubt."""
    answer, lifted = made.answers["off"], wide(made.rig)
    seen = judged(lifted, answer, made.rig.policy)
    if made.rig.run.manifest.bf16 is None:
        rig = limited(lifted, proof_median=values(seen, "proof_median")[-1] / 2.5)
    else:
        rig = limited(lifted, logprob=values(seen, "logprob_error")[-1] / 1.3)
    found = accused(rig, answer, accepting(seen), made.verifiers["eager"])
    assert {one.reason for one in found} == {"proof-mismatch" if made.rig.limbs == 2 else "logprob-mismatch"}


def test_who_rejects_what_holds_by_more_than_verifiers_differ_by_is_accused(made: Made) -> None:
    said = judged(made.rig, made.rig.honest, made.rig.policy)
    rejecting = spot.Word(7, [Outcome(1, "proof-mismatch")] * len(said.outcomes), [RolloutDetail(b"", 0.0, ())])
    found = accused(made.rig, made.rig.honest, rejecting, made.verifiers["eager"])
    if made.rig.limbs == 2:
        assert len(found) == len(said.outcomes)
    assert found and {(one.outcome, one.reason) for one in found} == {(ACCEPT, "holds")}
