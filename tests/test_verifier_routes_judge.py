"""Rollouts of mixture-of-experts models, judged: honest ones hold wherever experts are level, forged routes never."""

import dataclasses

import numpy as np
import pytest
import torch

from node.decode import DecodeRequest, decode
from node.engine import TransformersEngine, write_tokens
from protocol import codec
from protocol.engine import Generated, GenerateItem, GenerateRequest, LoadRequest
from protocol.records import ACCEPT, Rollout
from tests.judge_rig import make_rig, random_policy, reasons, tokens_of
from tests.moe_rig import FAMILIES, MARGIN, forging, moe_model, moe_policy, moe_rig, save_policy, with_margin
from verifier import fused, route_noise, toploc
from verifier.errors import VerifierError
from verifier.evidence_rows import fp32_rows
from verifier.judge import judge
from verifier.model import load_policy, prompt_ids
from verifier.replay import Routed, states_in_blocks
from verifier.statistics import measured, values
from verifier.thresholds import PROOF_GATE

torch.set_num_threads(1)
CAP = 24


@pytest.fixture(scope="module")
def rigs(tmp_path_factory):
    made = {}
    for family in FAMILIES:
        policy = moe_policy(tmp_path_factory.mktemp(family), family, 3)
        made[family] = moe_rig(policy, tasks=2, samples=2, cap=CAP)
    return made


def numbers(detail):
    return {number.name: number.value for number in detail.numbers}


def routes_of(rig, rollout):
    prompt = prompt_ids(rig.policy.tokenizer, rig.environment.task(rollout.task).prompt)
    return rig.policy.experts.decode(rollout.routes, len(prompt) + len(tokens_of(rollout)) - 1).copy()


def reproved(rig, rollout, routes_PYK):
    """The rollout with other routes, its proofs and log-probabilities re-made from one prefill through them."""
    prompt = prompt_ids(rig.policy.tokenizer, rig.environment.task(rollout.task).prompt)
    tokens = tokens_of(rollout)
    ids = torch.tensor([[*prompt, *tokens[:-1]]])
    with rig.policy.experts.replayed(routes_PYK[None], np.ones(ids.shape, dtype=np.bool_), np.inf), torch.no_grad():
        states = fused.start(rig.policy.model, ids.shape[1]).run(ids, torch.arange(ids.shape[1])[None], None)
        states_NH = states[0, len(prompt) - 1 :]
        logprobs = torch.log_softmax(rig.policy.logits(states_NH), -1)[torch.arange(len(tokens)), tokens]
    return dataclasses.replace(
        rollout,
        logprobs=logprobs.numpy().astype("<f4").tobytes(),
        proofs=tuple(toploc.build_proofs(states_NH.numpy())),
        routes=rig.policy.experts.encode(routes_PYK),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_honest_rollouts_hold_whatever_was_decoded_beside_them(rigs, family):
    rig = rigs[family]
    for batch in (1, 8, 32):
        judged = rig.judge(rig.answer(batch_rows=batch))
        assert reasons(judged) == ["holds"] * 4
        assert all(0 <= numbers(detail)["route_shortfall"] <= MARGIN for detail in judged.details)
        assert all(len(d.logprobs) == len(r.logprobs) for d, r in zip(judged.details, rig.honest.rollouts, strict=True))


# --- near ties ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def level(tmp_path_factory):
    """Experts 2i and 2i + 1 are level but for rounding, for every token; what they compute is not alike. Of three that
    are taken one comes without its twin."""
    model = moe_model("qwen3", 8, num_experts_per_tok=3)
    with torch.no_grad():
        for layer in model.model.layers:
            weight = layer.mlp.gate.weight
            weight[1::2] = weight[0::2] + 2e-8 * torch.randn(8, 48)
    policy = load_policy(save_policy(model, tmp_path_factory.mktemp("level")))
    return moe_rig(policy, tasks=2, samples=4, cap=32)


def test_level_experts_hold_with_their_routes_and_fail_without(level):
    """The node decodes token by token, the verifier all at once: they take different ones of two level experts."""
    rollouts = level.honest.rollouts
    judged = level.judge(level.honest)
    assert reasons(judged) == ["holds"] * 8
    shortfalls = [numbers(detail)["route_shortfall"] for detail in judged.details]
    assert 0 < max(shortfalls) <= MARGIN, "the verifier's own choice differs somewhere"

    sequences = [
        (prompt_ids(level.policy.tokenizer, level.environment.task(one.task).prompt), tokens_of(one))
        for one in rollouts
    ]
    own = [one.states_NH for one in level.policy.prefill(sequences)]
    limits = level.run.manifest.thresholds
    failed = [
        any(not chunk.median <= limits.proof_median or chunk.outliers > limits.proof_outliers for chunk in chunks)
        for chunks in toploc.verify_many(own, [one.proofs for one in rollouts], PROOF_GATE)
    ]
    assert sum(failed) >= 4, "through the verifier's own experts most honest proofs fail"


def test_a_calibration_on_level_experts_lets_as_many_choices_be_others_as_it_saw(level):
    """A model whose experts come in twins: honest nodes turn thousands of choices, and no bound on their number or row
    may hold it against them."""
    rollouts = [
        Routed(prompt_of(level, one), np.asarray(tokens_of(one)), routes_of(level, one))
        for one in level.honest.rollouts
    ]
    made = route_noise.measure(level.policy, rollouts, model="twins", machine="here")
    assert made.measured_not_first > 8 and made.measured_not_first_rate > 0.01
    assert made.not_first_rate == pytest.approx(min(1.0, 5 * made.measured_not_first / made.measured_choices))
    again = under(level, **{name: getattr(made, name) for name in ("margin", "not_first", "not_first_rate")})
    assert reasons(again.judge(level.honest)) == ["holds"] * 8
    assert fp32_rows(level.run.manifest.thresholds, routes=made) == ()
    bare = under(level, not_first=8, not_first_rate=0.0)
    assert "routes-forged" in reasons(bare.judge(level.honest))


def test_without_a_margin_level_experts_are_refused(level):
    """The margin in the manifest decides, and nothing else."""
    strict = with_margin(level, 0.0)
    assert "routes-forged" in reasons(strict.judge(strict.honest))


# --- free choices -------------------------------------------------------------------------------------------------


def within(margin):
    """The fifth expert for the fourth wherever they are that near: all that the margin alone would let pass."""

    def choose(layer, logits):
        top = logits.topk(5)
        chosen = top.indices[:, :4].clone()
        near = top.values[:, 3] - top.values[:, 4] < 0.8 * margin
        chosen[near, 3] = top.indices[near, 4]
        return chosen

    return choose


def under(rig, **limits):
    """The same run and seeds under other limits of routes."""
    manifest = rig.run.manifest
    manifest = dataclasses.replace(manifest, routes=dataclasses.replace(manifest.routes, **limits))
    return dataclasses.replace(rig, run=dataclasses.replace(rig.run, manifest=manifest))


def test_choices_inside_the_margin_are_counted_bounded_and_pooled(rigs):
    """A forger that uses every near tie, and proves and records it all: the margin alone accepts all it does."""
    margin = 2e-2
    rig = with_margin(rigs["qwen3"], margin)
    steered = rig.answer(forging(rig.policy.model, within(margin)))
    honest, judged = rig.judge(rig.honest), rig.judge(steered)
    assert reasons(honest) == reasons(judged) == ["holds"] * 4
    assert {one.tokens for one in steered.rollouts} != {one.tokens for one in rig.honest.rollouts}, "it chose the text"
    taken = [numbers(detail)["routes_not_first"] for detail in judged.details]
    assert [numbers(detail)["routes_not_first"] for detail in honest.details] == [0.0] * 4 and min(taken) >= 1
    for rollout, detail in zip(steered.rollouts, judged.details, strict=True):
        assert numbers(detail)["route_choices"] == len(rollout.routes) / 4

    found, own = (values("route_rate", measured(one.verdict_details(), one.outcomes, 2)) for one in (judged, honest))
    assert len(found) == 2 and min(found) > 0 and own == [0.0, 0.0], "one number a task"

    most = max(taken)
    assert reasons(under(rig, not_first=int(most), not_first_rate=0.0).judge(steered)) == ["holds"] * 4
    strict = under(rig, not_first=int(most) - 1, not_first_rate=0.0).judge(steered)
    assert [reason == "routes-forged" for reason in reasons(strict)] == [one == most for one in taken]
    share = (most - 0.5) / max(numbers(detail)["route_choices"] for detail in judged.details)
    assert "routes-forged" in reasons(under(rig, not_first=0, not_first_rate=share).judge(steered))
    assert reasons(under(rig, not_first=0, not_first_rate=0.0).judge(rig.honest)) == ["holds"] * 4


def test_choices_are_counted_once_however_a_rollout_is_read(rigs, monkeypatch):
    """In blocks, with prompts shared or alone: each position and layer counts once."""
    margin = 2e-2
    rig = moe_rig(rigs["qwen3"].policy, tasks=1, samples=6, cap=70, margin=margin)
    steered = rig.answer(forging(rig.policy.model, within(margin)))

    def taken(submission):
        judged = rig.judge(submission)
        assert reasons(judged) == ["holds"] * 6
        return [numbers(detail)["routes_not_first"] for detail in judged.details]

    at_once = taken(steered)
    monkeypatch.setattr("verifier.blocks.BLOCK", 32)
    assert taken(steered) == at_once
    monkeypatch.setattr("verifier.replay._CACHED_TOKENS", 1)
    assert taken(steered) == at_once and max(at_once) > 0


# --- forged routes ------------------------------------------------------------------------------------------------


def always_the_same(layer, logits):
    """Never loads more than four experts."""
    return torch.arange(4).expand(len(logits), -1)


def of_other_weights(layer, logits):
    """What routers of another policy might choose."""
    return (logits @ torch.randn(16, 16, generator=torch.Generator().manual_seed(layer))).topk(4).indices


def next_best(layer, logits):
    """The fifth for the fourth."""
    return logits.topk(5).indices[:, [0, 1, 2, 4]]


@pytest.mark.parametrize("how", [always_the_same, of_other_weights, next_best])
@pytest.mark.parametrize("family", FAMILIES)
def test_forged_routes_are_refused_though_everything_else_follows_from_them(rigs, family, how):
    """The forger samples, proves and records through the experts it likes: without the margin nothing would show."""
    rig = rigs[family]
    forged = forging(rig.policy.model, how)
    judged = rig.judge(rig.answer(forged))
    assert reasons(judged) == ["routes-forged"] * 4
    assert all(numbers(detail)["route_shortfall"] > 100 * MARGIN for detail in judged.details)
    if family != "glm4-groups":  # two groups hold few of such choices, whatever the margin
        blind = with_margin(rig, 1e9, forged)
        assert reasons(blind.judge(blind.honest)) == ["holds"] * 4


@pytest.mark.parametrize("where", ["prompt", "tokens"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_expert_of_one_token_is_found(rigs, family, where):
    """With proofs re-made under it, and in the prompt as well: its keys and values are read by all that follows."""
    rig = rigs[family]
    rollout = max(rig.honest.rollouts, key=lambda one: len(one.tokens))
    position = rig.honest.rollouts.index(rollout)
    routes = routes_of(rig, rollout)
    at = 1 if where == "prompt" else len(routes) - 2
    routes[at, 1] = np.sort([*routes[at, 1, 1:], next(e for e in range(16) if e not in routes[at, 1])])
    rollouts = list(rig.honest.rollouts)
    rollouts[position] = reproved(rig, rollout, routes)
    judged = rig.judge(dataclasses.replace(rig.honest, rollouts=tuple(rollouts)))
    assert [o.reason for i, o in enumerate(judged.outcomes) if i != position] == ["holds"] * 3
    assert judged.outcomes[position].reason == "routes-forged"
    found = numbers(judged.details[position])
    assert (found["route_at"], found["route_layer"]) == (at, 1) and found["route_shortfall"] > MARGIN


def test_equal_tokens_through_other_experts_are_read_for_themselves(rigs):
    """One honest rollout twice, the second time with forged routes: each has its own prefill and its own reason."""
    rig = rigs["qwen3"]
    honest = rig.honest.rollouts[0]
    routes = routes_of(rig, honest)
    routes[-1, 0] = np.sort([*routes[-1, 0, 1:], next(e for e in range(16) if e not in routes[-1, 0])])
    for twin, reason in ((honest, "token-not-forced"), (reproved(rig, honest, routes), "routes-forged")):
        assert rig.only(1, dataclasses.replace(twin, sample=1)) == reason


def test_the_margin_in_the_manifest_decides(rigs):
    """A choice that falls short by a known amount, and changes no token: refused just below it, believed just above."""
    rig = rigs["qwen3"]
    rollout = rig.honest.rollouts[0]
    routes = routes_of(rig, rollout)
    found = []
    for at in range(4):
        for expert in set(range(16)) - set(routes[at, 2].tolist()):
            trial = routes.copy()
            trial[at, 2] = np.sort([expert, *routes[at, 2, 1:]])
            one = Routed(prompt_of(rig, rollout), np.asarray(tokens_of(rollout)), trial)
            for _ in states_in_blocks(rig.policy, [one], 1e9, lambda _: True):
                pass
            found.append((one.shortfall, len(found), trial))
    shortfall, _, trial = min(found)
    assert shortfall > MARGIN
    forged = reproved(rig, rollout, trial)
    for margin, reason in ((0.9 * shortfall, "routes-forged"), (1.1 * shortfall, "holds")):
        manifest = dataclasses.replace(
            rig.run.manifest, routes=dataclasses.replace(rig.run.manifest.routes, margin=margin)
        )
        run = dataclasses.replace(rig.run, manifest=manifest)  # under the same id: the same tokens are forced
        raw = codec.encode(dataclasses.replace(rig.honest, rollouts=(forged, *rig.honest.rollouts[1:])))
        judged = judge(run, rig.lease, raw, rig.policy, rig.environment)
        assert reasons(judged) == [reason, *["holds"] * 3]


def prompt_of(rig, rollout):
    return tuple(prompt_ids(rig.policy.tokenizer, rig.environment.task(rollout.task).prompt))


def test_honest_routes_with_another_proof_are_a_wrong_proof(rigs):
    rig = rigs["qwen3"]
    other = rig.honest.rollouts[1]
    assert rig.only(0, dataclasses.replace(rig.honest.rollouts[0], proofs=other.proofs)).startswith("proof-")


# --- malformed ----------------------------------------------------------------------------------------------------


def _flip(at, value):
    return lambda raw: raw[:at] + bytes([value]) + raw[at + 1 :]


MALFORMED = {
    "none": lambda raw: b"",
    "one short": lambda raw: raw[:-1],
    "one long": lambda raw: raw + b"\0",
    "a position short": lambda raw: raw[:-12],
    "a position long": lambda raw: raw + raw[-12:],
    "out of range": _flip(3, 16),
    "far out of range": _flip(-1, 255),
    "twice": lambda raw: raw[:1] + raw[:1] + raw[2:],
    "falling": lambda raw: raw[3::-1] + raw[4:],
    "all the same": lambda raw: bytes(len(raw)),
    "vast": lambda raw: raw * 10,
}


@pytest.mark.parametrize("how", MALFORMED)
def test_malformed_routes_are_refused_before_any_model_runs(rigs, how, monkeypatch):
    rig = rigs["qwen3"]
    rollout = rig.honest.rollouts[2]
    assert rig.only(2, dataclasses.replace(rollout, routes=MALFORMED[how](rollout.routes))) == "routes-malformed"
    rollouts = [dataclasses.replace(one, routes=MALFORMED[how](one.routes)) for one in rig.honest.rollouts]

    def refuse(*_):
        raise AssertionError("a model ran")

    monkeypatch.setattr(fused, "start", refuse)
    judged = rig.judge(dataclasses.replace(rig.honest, rollouts=tuple(rollouts)))
    assert reasons(judged) == ["routes-malformed"] * 4


def test_routes_of_a_dense_model_are_malformed(tmp_path):
    policy = random_policy(tmp_path, 1)
    rig = make_rig(policy, moe_environment(), 1, 2, 8, (1,))
    assert rig.only(0, dataclasses.replace(rig.honest.rollouts[0], routes=b"\0")) == "routes-malformed"


def moe_environment():
    from environments.registry import make

    return make("word")


def test_routes_over_any_answer_fail_the_whole_submission(rigs):
    rig = rigs["qwen3"]
    rollouts = tuple(dataclasses.replace(one, routes=bytes(1 << 20)) for one in rig.honest.rollouts)
    assert reasons(rig.judge(dataclasses.replace(rig.honest, rollouts=rollouts))) == ["format"] * 4


def test_any_bytes_as_routes_have_a_reason(rigs):
    """Bytes of the right length, drawn at random: whatever they are, a typed reason and nothing else."""
    rig = rigs["glm4-groups"]
    rng = np.random.default_rng(5)
    seen = set()
    for kind in range(12):
        rollouts = []
        for one in rig.honest.rollouts:
            count = len(one.routes) // 4
            if kind % 3 == 0:
                raw = rng.bytes(len(one.routes))
            else:  # well formed: four different experts each
                raw = np.sort(np.argsort(rng.random((count, 16)), axis=1)[:, :4], axis=1).astype(np.uint8).tobytes()
            rollouts.append(dataclasses.replace(one, routes=raw))
        seen |= set(reasons(rig.judge(dataclasses.replace(rig.honest, rollouts=tuple(rollouts)))))
    assert seen == {"routes-malformed", "routes-forged"}


def test_experts_of_no_weight_are_refused_and_crash_nothing(tmp_path):
    """Softmax weights of the claimed experts underflow to 0 of 0: not followed, so no verifier gives up over them."""
    model = moe_model("qwen3", 9)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.mul_(300.0)
    rig = moe_rig(load_policy(save_policy(model, tmp_path)), tasks=1, samples=1, cap=12, margin=1e-2)
    (rollout,) = rig.honest.rollouts
    routes = np.sort((routes_of(rig, rollout) + 5) % 16, axis=-1)
    with rig.policy.experts.replayed(routes[None], np.ones((1, len(routes)), dtype=np.bool_), np.inf):
        ids = torch.tensor([[*prompt_of(rig, rollout), *tokens_of(rollout)[:-1]]])
        states = fused.start(rig.policy.model, ids.shape[1]).run(ids, torch.arange(ids.shape[1])[None], None)
    assert not torch.isfinite(states).all(), "followed, they would be no numbers"
    forged = dataclasses.replace(rollout, routes=rig.policy.experts.encode(routes))
    assert reasons(rig.judge(dataclasses.replace(rig.honest, rollouts=(forged,)))) == ["routes-forged"]


def test_a_rollout_is_read_no_further_than_the_block_of_its_forgery(rigs, monkeypatch):
    monkeypatch.setattr("verifier.blocks.BLOCK", 32)
    long = moe_rig(rigs["qwen3"].policy, tasks=1, samples=6, cap=70)
    assert reasons(long.judge(long.honest)) == ["holds"] * 6
    position, rollout = max(enumerate(long.honest.rollouts), key=lambda pair: len(pair[1].tokens))
    count = len(tokens_of(rollout))
    assert count > 64
    for token, read in ((0, 32), (40, 64)):
        routes = routes_of(long, rollout)
        at = len(routes) - count + 1 + token
        routes[at, 0] = [e for e in range(16) if e not in routes[at, 0]][:4]
        rollouts = list(long.honest.rollouts)
        rollouts[position] = reproved(long, rollout, routes)
        judged = long.judge(dataclasses.replace(long.honest, rollouts=tuple(rollouts)))
        assert judged.outcomes[position].reason == "routes-forged"
        found = numbers(judged.details[position])
        assert (found["tokens_read"], found["route_at"], found["route_layer"]) == (read, at, 0)


# --- who must act -------------------------------------------------------------------------------------------------


def test_a_manifest_of_other_experts_is_an_error_of_the_run(rigs, tmp_path):
    rig = rigs["qwen3"]
    raw = codec.encode(rig.honest)
    model = rig.run.manifest.model
    for change in (
        {"model": dataclasses.replace(model, routing=None)},
        {"model": dataclasses.replace(model, routing=dataclasses.replace(model.routing, layers=2))},
        {"routes": None},
    ):
        run = dataclasses.replace(rig.run, manifest=dataclasses.replace(rig.run.manifest, **change))
        with pytest.raises(VerifierError):
            judge(run, rig.lease, raw, rig.policy, rig.environment)


# --- through an engine --------------------------------------------------------------------------------------------


def test_an_engine_hands_routes_over_with_its_outputs(tmp_path):
    directory = save_policy(moe_model("glm4", 3), tmp_path / "p")
    rig = moe_rig(load_policy(directory), tasks=2, samples=1, cap=CAP)
    engine = TransformersEngine()
    engine.load(LoadRequest(str(directory), 0, 0, bytes(32)))
    from protocol.seeds import sampling_seed

    items = tuple(
        GenerateItem(
            str(task),
            write_tokens(tuple(prompt_ids(rig.policy.tokenizer, rig.environment.task(task).prompt))),
            sampling_seed(rig.run.id, rig.lease.nonce, task, 0),
            CAP,
        )
        for task in rig.lease.tasks
    )
    generated = engine.generate(GenerateRequest(bytes(32), 1.0, (1,), items), lambda: False)
    outputs = codec.decode(Generated, codec.encode(generated)).outputs
    assert [o.routes for o in outputs] == [r.routes for r in rig.honest.rollouts]
    rollouts = tuple(
        Rollout(task, 0, o.tokens, o.logprobs, o.finish, honest.reward, o.proofs, o.routes)
        for task, o, honest in zip(rig.lease.tasks, outputs, rig.honest.rollouts, strict=True)
    )
    judged = rig.judge(dataclasses.replace(rig.honest, rollouts=rollouts))
    assert [o.outcome for o in judged.outcomes] == [ACCEPT] * 2


# --- at length ----------------------------------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize("family", ["qwen3", "glm4"])
def test_a_hundred_honest_rollouts_of_128_tokens_hold(tmp_path, family):
    """100 fresh prompts in each of three ways to decode; every check but the reward's, which is another's."""
    policy = moe_policy(tmp_path, family, 11, num_hidden_layers=2)
    rig = moe_rig(policy, tasks=1, samples=1, cap=128)
    limits = rig.run.manifest.thresholds
    rng = np.random.default_rng(12)
    for batch, count in ((1, 20), (8, 100), (32, 100)):
        requests = [
            DecodeRequest(tuple(rng.integers(2, 64, rng.integers(2, 40)).tolist()), rng.bytes(32), 128)
            for _ in range(count)
        ]
        outputs = decode(policy.model, requests, temperature=1.0, stop_tokens=(), batch_rows=batch)
        rollouts = [
            Routed(r.prompt, np.asarray(o.tokens), policy.experts.decode(o.routes, len(r.prompt) + 127))
            for r, o in zip(requests, outputs, strict=True)
        ]
        states = {}
        for pieces in states_in_blocks(policy, rollouts, MARGIN, lambda _: True):
            states |= {i: states_NH.numpy() for i, _, states_NH in pieces}
        assert max(one.shortfall for one in rollouts) <= MARGIN
        assert max(one.not_first for one in rollouts) <= 1, "one in 100,000 choices or fewer"
        proofs = toploc.build_many([one.states_NH for one in outputs])
        for chunks in toploc.verify_many([states[i] for i in range(count)], proofs, PROOF_GATE):
            assert all(c.median <= limits.proof_median and c.outliers <= limits.proof_outliers for c in chunks)
