"""Routes: what Transformers' routers choose, recorded, written down, and measured against a claim."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from node.decode import DecodeRequest, decode
from protocol import codec
from protocol.errors import ReasonCode
from protocol.limits import MAX_ROUTES_BYTES, submission_raw_bound
from protocol.manifest import ModelSpec, Routing, routes_bound
from shardcast.layout import layout_of_safetensors
from tests.moe_rig import FAMILIES, moe_model, moe_policy, save_policy
from trainer.config import LearnerSection
from trainer.learner import DTYPES
from trainer.update import Policy
from verifier import fused, route_noise
from verifier.errors import CalibrationError, PolicyError, RouteError
from verifier.model import ARCHITECTURES, load_policy
from verifier.replay import Routed, states_in_blocks
from verifier.routes import Experts, shortfalls
from verifier.routing import DENSE, routing_of
from verifier.thresholds import ROUTES_NOT_FIRST, route_thresholds

torch.set_num_threads(1)
SMALL = moe_model("glm4", 0)


def requests_of(count, tokens, seed=0):
    rng = np.random.default_rng(seed)
    return [
        DecodeRequest(tuple(rng.integers(2, 64, rng.integers(1, 20)).tolist()), bytes([i]) * 32, tokens)
        for i in range(count)
    ]


def decoded(policy, requests, batch):
    return decode(policy.model, requests, temperature=1.0, stop_tokens=(1,), batch_rows=batch)


def routed(policy, request, output):
    positions = len(request.prompt) + len(output.tokens) - 1
    return Routed(request.prompt, np.asarray(output.tokens), policy.experts.decode(output.routes, positions))


# --- what Transformers' routers do: these fail when they change -------------------------------------------------------


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_a_routers_own_choice_changes_nothing(family, normalised):
    model = moe_model(family, 1, norm_topk_prob=normalised)
    experts = Experts.of(model)
    ids = torch.randint(0, 64, (3, 20), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(20).expand(3, -1)
    with experts.recorded() as recording:
        plain = fused.start(model, 20).run(ids, positions, None)
    own = recording.take(3)
    real = np.ones((3, 20), dtype=np.bool_)
    with experts.replayed(own.copy(), real, 0.0) as replay:
        again = fused.start(model, 20).run(ids, positions, None)
    assert float((plain - again).abs().max()) < 1e-5 < 1 < float(plain.abs().max())
    assert replay.worst()[0].tolist() == [0.0] * 3, "a router's own choice never falls short"
    other = own.copy()
    other[1, 7, 0] = [e for e in range(16) if e not in own[1, 7, 0]][:4]
    with experts.replayed(other, real, math.inf) as replay:
        changed = fused.start(model, 20).run(ids, positions, None)
    short, column, layer = (one.tolist() for one in replay.worst())
    assert (column[1], layer[1]) == (7, 0) and short[1] > 0.01 and short[0] == short[2] == 0
    assert float((changed - plain)[1, 7:].abs().max()) > 1e-2 > float((changed - plain)[[0, 2]].abs().max())
    with experts.replayed(other, real, 1e-3) as replay:
        spared = fused.start(model, 20).run(ids, positions, None)
    assert float((spared - plain).abs().max()) < 1e-5, "beyond the margin it is measured and not followed"
    assert replay.worst()[0][1] == pytest.approx(short[1], rel=1e-4)
    assert not any(gate._forward_hooks for gate in experts._gates), "nothing stays on the model"


@pytest.mark.parametrize("family", FAMILIES)
def test_shortfalls_find_what_rounding_can_do_and_no_more(family):
    """Scores that are off by up to e make a router choose what falls short by up to 2 e (4 e by sums of two)."""
    groups, taken = (4, 2) if family == "glm4-groups" else (1, 1)
    generator = torch.Generator().manual_seed(2)
    scores, off = torch.rand(4000, 16, generator=generator), 0.05
    noisy = scores + off * (2 * torch.rand(4000, 16, generator=generator) - 1)
    model = moe_model(family, 0)
    gate = Experts.of(model)._gates[0]
    with torch.no_grad():
        gate.weight.zero_()[:, :16].fill_diagonal_(1.0)
        if family != "qwen3":
            gate.e_score_correction_bias.zero_()
    logits = noisy if family == "qwen3" else torch.logit(noisy.clamp(0.001, 0.999))
    with torch.inference_mode():
        chosen = gate(torch.cat([logits, torch.zeros(4000, 32)], dim=1))[2]
    short = shortfalls(scores, chosen, groups, taken)
    limit = 2 * off if groups == 1 else 4 * off
    assert float(short.max()) <= limit + 1e-2 and float((short > 0).float().mean()) > 0.1
    assert float(shortfalls(noisy.clamp(0.001, 0.999), chosen, groups, taken).max()) <= 1e-6
    worst = scores.topk(4, largest=False).indices
    assert float(shortfalls(scores, worst, groups, taken).min()) > 0


def test_of_two_level_groups_either_may_have_been_taken():
    """Experts of group 0 alone were taken. Whether group 1 or 2 was the other one can't be seen: they are level."""
    scores = torch.tensor([[0.9, 0.8, 0.5, 0.45, 0.6, 0.35, 0.1, 0.1]])  # sums of two: 1.7, 0.95, 0.95, 0.2
    assert float(shortfalls(scores, torch.tensor([[0, 1]]), 4, 2)) <= 0
    assert float(shortfalls(scores, torch.tensor([[0, 4]]), 4, 2)) == pytest.approx(0.2), "0.8 was left out"
    assert float(shortfalls(scores, torch.tensor([[0, 6]]), 4, 2)) == pytest.approx(0.75), "group 3 is 0.75 behind"
    assert float(shortfalls(scores, torch.tensor([[0, 2, 4]]), 4, 2)) == math.inf, "three groups"


def test_what_is_no_number_falls_short_without_end():
    model = moe_model("qwen3", 1)
    experts = Experts.of(model)
    with torch.no_grad():
        experts._gates[1].weight[3] = math.nan
    ids, real = torch.zeros(1, 4, dtype=torch.long), np.ones((1, 4), dtype=np.bool_)
    claimed = np.tile(np.arange(4, dtype=np.uint8), (1, 4, 3, 1))
    with experts.replayed(claimed, real, math.inf) as replay:
        fused.start(model, 4).run(ids, torch.arange(4)[None], None)
    assert replay.worst()[0].tolist() == [math.inf]


@pytest.mark.parametrize(
    "other",
    [{"n_group": 3, "topk_group": 1}, {"n_group": 16, "topk_group": 8}, {"n_group": 8, "topk_group": 1}],
    ids=["uneven", "too many ways", "too few experts inside"],
)
def test_groups_that_cannot_be_checked_are_refused(tmp_path, other):
    save_policy(moe_model("glm4", 0), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | other
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PolicyError, match="groups"):
        load_policy(tmp_path)


# --- the wire form ----------------------------------------------------------------------------------------------------


def test_the_wire_form_is_one_sequence_of_bytes():
    experts = Experts.of(moe_model("glm4", 0))
    assert experts.routing == Routing(layers=2, experts=16, per_token=4)
    ids = np.array([[[7, 0, 15, 3], [1, 2, 3, 4]], [[4, 3, 2, 1], [15, 14, 13, 12]]])
    raw = experts.encode(ids)
    assert f"`{raw.hex()}`" in (Path(__file__).parent.parent / "docs" / "protocol.md").read_text()
    assert experts.decode(raw, 2).tolist() == np.sort(ids, axis=-1).tolist()
    assert experts.encode(experts.decode(raw, 2)) == raw and experts.decode(b"", 0).shape == (0, 2, 4)


@pytest.mark.parametrize(
    ("raw", "positions"),
    [
        ("", 1), ("0003070f010203", 1), ("0003070f0102030400", 1), ("0003070f01020304", 0), ("0003070f01020304", 2),
        ("0003071001020304", 1), ("0003070f010203ff", 1), ("0003030f01020304", 1), ("0307000f01020304", 1),
    ],
)  # fmt: skip
def test_other_bytes_are_refused(raw, positions):
    with pytest.raises(RouteError) as caught:
        Experts.of(moe_model("glm4", 0)).decode(bytes.fromhex(raw), positions)
    assert caught.value.code is ReasonCode.ROUTES_MALFORMED


SOME = st.sets(st.integers(0, 17), min_size=4, max_size=4).map(sorted).map(bytes)


@settings(max_examples=1000, deadline=None)
@given(raw=st.one_of(st.binary(max_size=48), st.lists(SOME, max_size=6).map(b"".join)), positions=st.integers(0, 3))
def test_property_any_bytes_are_routes_in_their_one_form_or_refused(raw, positions):
    experts = Experts.of(SMALL)
    try:
        ids = experts.decode(raw, positions)
    except RouteError:
        return
    assert ids.shape == (positions, 2, 4) and experts.encode(ids) == raw
    assert all(len(set(one)) == 4 and max(one) < 16 for one in ids.reshape(-1, 4).tolist())


def test_more_than_256_experts_have_two_bytes_each(tmp_path):
    policy = moe_policy(tmp_path, "qwen3", 2, num_experts=300, num_hidden_layers=1)
    assert policy.experts.routing == Routing(1, 300, 4) and policy.experts.routing.bytes_per_position == 8
    assert policy.experts.encode(np.array([[[299, 0, 256, 5]]])).hex() == "0000050000012b01"
    (request,) = requests_of(1, 20)
    (output,) = decoded(policy, [request], 1)
    one = routed(policy, request, output)
    assert one.routes_PYK.max() > 255
    for _ in states_in_blocks(policy, [one], 1e-4, lambda _: True):
        pass
    assert one.shortfall <= 1e-4


def test_the_bound_of_an_answer_grows_only_where_the_model_has_experts():
    dense = ModelSpec("Qwen3ForCausalLM", "float32", bytes(32), 4096, ())
    sparse = ModelSpec("Qwen3MoeForCausalLM", "float32", bytes(32), 4096, (), Routing(48, 128, 8))
    assert routes_bound(dense) == 0 and routes_bound(sparse) == 48 * 8 * 4096
    assert submission_raw_bound(8, 100, routes_bound(sparse)) - submission_raw_bound(8, 100) == 16 * 48 * 8 * 4096
    vast = ModelSpec("Qwen3MoeForCausalLM", "float32", bytes(32), 1 << 31, (), Routing(65535, 65536, 65535))
    assert routes_bound(vast) == MAX_ROUTES_BYTES
    old = codec.encode(dense)
    assert codec.decode(ModelSpec, old) == dense and codec.decode(ModelSpec, codec.encode(sparse)) == sparse


# --- recording and replay ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_records_what_one_pass_over_everything_chooses(tmp_path, family):
    policy = moe_policy(tmp_path, family, 3)
    requests = requests_of(4, 16)
    requests.append(DecodeRequest(requests[0].prompt, b"x" * 32, 1))  # a shared prompt, and a rollout of one token
    alone, together = decoded(policy, requests, 1), decoded(policy, requests, 8)
    assert [one.tokens for one in alone] == [one.tokens for one in together]
    assert [one.routes for one in alone] == [one.routes for one in together]
    for request, output in zip(requests, together, strict=True):
        ids = torch.tensor([[*request.prompt, *output.tokens[:-1]]])
        with policy.experts.recorded() as recording:
            fused.start(policy.model, ids.shape[1]).run(ids, torch.arange(ids.shape[1])[None], None)
        assert output.routes == policy.experts.encode(recording.take(1)[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_replay_gives_the_states_of_one_pass(tmp_path, family, monkeypatch):
    """In blocks, with prompts of several lengths side by side, some shared."""
    monkeypatch.setattr("verifier.blocks.BLOCK", 32)
    policy = moe_policy(tmp_path, family, 4)
    requests = [*requests_of(5, 100), DecodeRequest(requests_of(1, 0)[0].prompt, b"y" * 32, 70)]
    outputs = decoded(policy, requests, 8)
    rollouts = [routed(policy, r, o) for r, o in zip(requests, outputs, strict=True)]
    parts = {i: [] for i in range(len(rollouts))}
    for pieces in states_in_blocks(policy, rollouts, 1e-4, lambda _: True):
        for i, at, states_NH in pieces:
            assert at == sum(map(len, parts[i]))
            parts[i].append(states_NH.clone())
    for i, output in enumerate(outputs):
        assert rollouts[i].shortfall <= 1e-4
        assert np.abs(torch.cat(parts[i]).numpy() - output.states_NH).max() < 5e-5


def test_the_margin_follows_from_a_measurement(tmp_path):
    policy = moe_policy(tmp_path, "qwen3", 3)
    requests = requests_of(8, 24)
    rollouts = [routed(policy, r, o) for r, o in zip(requests, decoded(policy, requests, 4), strict=True)]
    made = route_noise.measure(policy, rollouts, model="tiny", machine="here")
    assert made.measured_choices == 3 * sum(one.positions for one in rollouts) and made.machine == "here"
    assert 0 < made.measured_scores < 2e-5 and made.measured_shortfall <= 2 * made.measured_scores
    assert made.margin == max(2e-5, 10 * made.measured_scores)
    told = TOLD | {"scores": 0.0}
    assert route_thresholds(**told).margin == 2e-5
    assert route_thresholds(**told | {"shortfall": 1e-4}).margin == pytest.approx(5e-4)
    for wrong in ({"scores": 1.1e-4}, {"shortfall": math.nan}, {"rollouts": 0}, {"choices": 0}, {"mean": math.nan}):
        with pytest.raises(CalibrationError):
            route_thresholds(**told | wrong)


TOLD = {
    "model": "tiny", "machine": "here", "rollouts": 5, "choices": 100_000, "shortfall": 0.0, "scores": 4e-6,
    "mean": 4e-7, "level": 4e-3, "not_first": 0,
}  # fmt: skip


def test_how_many_choices_may_be_others_follows_from_noise_and_level_pairs():
    """4 level pairs a unit of score: at a mean error of 4e-7 one choice in 600,000 turns. The margin admits five times
    the noise, so as many more may."""
    made = route_thresholds(**TOLD)
    assert made.measured_not_first_rate == pytest.approx(1.6e-6)
    assert made.margin == pytest.approx(4e-5) and made.not_first_rate == pytest.approx(8e-6)
    assert made.not_first == ROUTES_NOT_FIRST and made.measured_not_first == 0
    quiet = route_thresholds(**TOLD | {"scores": 4e-7, "mean": 4e-8})
    assert quiet.margin == 2e-5, "the floor admits 25 times the noise"
    assert quiet.not_first_rate == pytest.approx(25 * quiet.measured_not_first_rate)
    seen = route_thresholds(**TOLD | {"not_first": 30})
    assert (seen.measured_not_first_rate, seen.not_first_rate) == (pytest.approx(3e-4), pytest.approx(1.5e-3))
    assert route_thresholds(**TOLD | {"not_first": 99_000}).not_first_rate == 1.0


def test_leads_are_by_how_much_a_choice_beats_the_next_best_one():
    experts = Experts.of(SMALL)
    scores = torch.tensor([[[0.4, 0.1, 0.3, 0.2]]]).repeat(1, experts.routing.layers, 1)
    scores = torch.cat([scores, torch.full((*scores.shape[:2], experts.routing.experts - 4), -1.0)], dim=-1)
    k = experts.routing.per_token
    own = scores.topk(k, dim=-1)
    lead = experts.lead(scores, own.indices.numpy())
    nearest = scores.sort(descending=True, dim=-1).values
    assert torch.allclose(lead, nearest[..., k - 1] - nearest[..., k])
    other = torch.cat([own.indices[..., :-1], scores.topk(k + 1, dim=-1).indices[..., k:]], dim=-1)
    assert bool((experts.lead(scores, other.numpy()) <= 0).all())


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_class_keeps_in_float32_is_stored_and_held_so(tmp_path, dtype):
    model = moe_model("glm4", 6)
    save_policy(model, tmp_path, dtype)
    stored = {entry.name: entry.dtype for entry in layout_of_safetensors(tmp_path / "model.safetensors").tensors}
    bias, weight = "model.layers.1.mlp.gate.e_score_correction_bias", "model.layers.1.mlp.gate.weight"
    assert stored[bias].lower() in ("f32", "float32") and stored[bias] == stored[weight]
    policy = load_policy(tmp_path, dtype)
    held = policy.model.state_dict()
    assert torch.equal(held[bias], model.state_dict()[bias]) and held[bias].abs().max() > 0
    assert held[weight].dtype == torch.float32 and torch.equal(held[weight], model.state_dict()[weight])
    assert held["model.layers.1.mlp.experts.down_proj"].dtype == dtype
    other = moe_model("glm4", 7)
    save_policy(other, tmp_path / "next", dtype)
    policy.load_weights(tmp_path / "next")
    assert torch.equal(policy.model.state_dict()[bias], other.state_dict()[bias])


@pytest.mark.parametrize("family", ["qwen3", "glm4"])
def test_a_learner_publishes_every_tensor_in_the_dtype_it_was_stored_in(tmp_path, family):
    """From the layout that the manifest names: what another machine loads is what the learner has, biases included."""
    directory = save_policy(moe_model(family, 6), tmp_path / "base", torch.bfloat16)
    storage = {spec.name: DTYPES[spec.dtype] for spec in layout_of_safetensors(directory / "model.safetensors").tensors}
    learner = Policy(load_policy(directory).model, LearnerSection(), storage, 1.0)
    if family == "glm4":
        assert sorted(set(storage.values()), key=str) == [torch.bfloat16, torch.float32]
        learner.model.model.layers[1].mlp.gate.e_score_correction_bias.add_(0.123456789)
    with torch.no_grad():
        learner.model.model.layers[1].mlp.gate.weight.add_(0.01)
    save_policy(learner.model, tmp_path / "next")  # the configuration and the tokenizer
    save_file(learner.weights(), tmp_path / "next" / "model.safetensors")
    again = load_policy(tmp_path / "next", weights=torch.bfloat16).model.state_dict()
    for name, tensor in learner.weights().items():
        assert torch.equal(again[name], tensor.float()), name
        assert storage[name] == torch.bfloat16 or torch.equal(again[name], learner.model.state_dict()[name])


@pytest.mark.parametrize("change", ["missing", "bfloat16", "shape", "unknown"])
def test_buffers_are_checked_like_parameters(tmp_path, change):
    policy = load_policy(save_policy(moe_model("glm4", 6), tmp_path))
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    tensors = load_file(tmp_path / "model.safetensors")
    if change == "missing":
        del tensors[name]
    elif change == "unknown":
        tensors["model.layers.0.mlp.gate.e_score_correction_bias"] = torch.zeros(16)
    else:
        tensors[name] = tensors[name].bfloat16() if change == "bfloat16" else torch.zeros(17)
    save_file(tensors, tmp_path / "model.safetensors")
    why = "does not hold this model's tensors" if change in ("missing", "unknown") else "another shape or dtype"
    for load in (lambda: load_policy(tmp_path), lambda: policy.load_weights(tmp_path)):
        with pytest.raises(PolicyError, match=why):
            load()


def test_configurations_as_published_are_understood(tmp_path):
    """The published Qwen3-MoE names its experts, and GLM4-MoE its head size, by words that `to_dict` does not have."""
    save_policy(moe_model("qwen3", 0), tmp_path / "q")
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    config["num_experts"] = config.pop("num_local_experts")
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    assert load_policy(tmp_path / "q").experts.routing.experts == 16
    save_policy(moe_model("glm4", 0, head_dim=16), tmp_path / "g")
    assert load_policy(tmp_path / "g").model.model.layers[0].self_attn.q_proj.out_features == 4 * 16


@pytest.mark.parametrize("family", [*FAMILIES, "sparse step", "dense layers"])
def test_a_configuration_says_which_routing_its_model_has(tmp_path, family):
    other = {"sparse step": {"decoder_sparse_step": 2}, "dense layers": {"mlp_only_layers": [1]}}.get(family, {})
    directory = save_policy(moe_model(family if family in FAMILIES else "qwen3", 0, **other), tmp_path)
    routing = routing_of(json.loads((directory / "config.json").read_text()))
    assert routing == load_policy(directory).experts.routing
    assert routing_of({"architectures": ["LlamaForCausalLM"]}) is None


@pytest.mark.parametrize("where", ["router", "layer"])
def test_a_model_whose_router_is_not_known_is_refused_by_name_and_not_taken_for_dense(tmp_path, monkeypatch, where):
    """Transformers' next release, or a class that somebody adds to the architectures and forgets here: its choices of
    experts would be the node's, and no proof would say so."""
    import verifier.routes

    directory = save_policy(moe_model("qwen3", 0), tmp_path)
    if where == "router":
        monkeypatch.setattr(verifier.routes, "_KINDS", {"Glm4MoeTopkRouter": verifier.routes._Sigmoid})
        why = "layer 0 of Qwen3MoeForCausalLM has Qwen3MoeSparseMoeBlock with the router Qwen3MoeTopKRouter"
    else:
        model = moe_model("qwen3", 0, mlp_only_layers=[0, 1, 2])
        directory = save_policy(model, tmp_path)
        monkeypatch.setattr(verifier.routes, "_DENSE", ("LlamaMLP",))
        why = "layer 0 of Qwen3MoeForCausalLM has Qwen3MoeMLP"
    with pytest.raises(PolicyError, match=f"{why}, of which this software knows no choice of experts"):
        load_policy(directory)


def test_an_architecture_that_is_not_known_has_no_routing_to_put_into_a_manifest():
    for name in ("MixtralForCausalLM", "Qwen2MoeForCausalLM"):
        with pytest.raises(ValueError, match=name):
            routing_of({"architectures": [name], "num_local_experts": 8})
    assert {*DENSE, "Qwen3MoeForCausalLM", "Glm4MoeForCausalLM"} == set(ARCHITECTURES)


def test_a_dense_model_has_no_experts(tmp_path):
    from tests.judge_rig import random_policy

    policy = random_policy(tmp_path, 1)
    assert policy.experts is None
    (output,) = decoded(policy, requests_of(1, 5), 1)
    assert output.routes == b""
