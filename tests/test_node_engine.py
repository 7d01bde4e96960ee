"""The engine process and the dishonest ones, through their real sockets, against the verifier's own judge."""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard

from environments.registry import make
from node.decode import Decoded, DecodeRequest, GenerationCancelledError, decode
from node.engine import TransformersEngine, read_tokens, write_tokens
from node.errors import NodeError
from node.join import known_profile, require_profile
from node.upload import compress
from protocol import codec
from protocol.engine import (
    EngineClient,
    EngineInfo,
    Generated,
    GenerateItem,
    GenerateRequest,
    InfoRequest,
    Loaded,
    LoadRequest,
)
from protocol.errors import EngineError, ReasonCode
from protocol.records import ACCEPT, FINISH_EOS, FINISH_LENGTH, REJECT, Lease, Rollout, Submission
from protocol.seeds import sampling_seed
from tests.archive_builder import Chain, make_manifest
from verifier import toploc
from verifier.judge import judge_upload
from verifier.logprobs import token_logprobs
from verifier.model import load_policy, prompt_ids
from verifier.sampling import choose, gumbel_noise

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "trainer" / "data" / "tiny"
ROOT_HASH = b"r" * 32
STOP = (1,)
ENVIRONMENT = make("word", {"transform": "reverse"})


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def policy():
    return load_policy(TINY, root=ROOT_HASH)


@pytest.fixture(scope="module")
def run():
    manifest = make_manifest(environments=(ENVIRONMENT.spec(),))
    thresholds = replace(
        manifest.thresholds, proof_median=3e-6, proof_outliers=4, proof_gate=2.0**-14, token_margin=1e-4, logprob=1e-4
    )
    sampling = replace(manifest.sampling, max_new_tokens=9, stop_tokens=STOP)
    return Chain(replace(manifest, thresholds=thresholds, sampling=sampling)).run


class Engine:
    """A started engine program with one connection."""

    def __init__(self, folder: Path, *command: str) -> None:
        self.socket = folder / "e.sock"
        self.process = subprocess.Popen(
            [sys.executable, *command, "--socket", str(self.socket), "--threads", "1"], cwd=folder
        )

    async def connect(self) -> EngineClient:
        return await EngineClient.connect(str(self.socket), 60)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(10)
        finally:
            self.process.kill()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One engine process for the tests that leave it standing: starting one costs seconds."""
    started = Engine(tmp_path_factory.mktemp("engine"), "-m", "node.engine")
    yield started
    assert started.stop() == 0


@pytest.fixture
def engine(tmp_path):
    """An engine process that the test may end."""
    started = Engine(tmp_path, "-m", "node.engine")
    yield started
    started.stop()


def make_lease(run, number: int, tasks: int = 4, samples: int = 4) -> Lease:
    return Lease(
        lease_id=bytes([number]) * 16,
        manifest=run.id,
        epoch=0,
        step=0,
        root=ROOT_HASH,
        environment=ENVIRONMENT.digest,
        nonce=bytes([number]) * 32,
        tasks=tuple(range(100 * number, 100 * number + tasks)),
        samples=samples,
        max_new_tokens=9,
        duration_ms=60_000,
        max_bytes=1 << 20,
    )


def request_for(run, lease: Lease, tokenizer) -> GenerateRequest:
    items = tuple(
        GenerateItem(
            f"{lease.lease_id.hex()}:{task}:{sample}",
            write_tokens(tuple(prompt_ids(tokenizer, ENVIRONMENT.task(task).prompt))),
            sampling_seed(run.id, lease.nonce, task, sample),
            lease.max_new_tokens,
        )
        for task in lease.tasks
        for sample in range(lease.samples)
    )
    return GenerateRequest(ROOT_HASH, run.manifest.sampling.temperature, STOP, items)


async def work(client: EngineClient, run, lease: Lease, policy, deadline_s: float = 60) -> bytes:
    """One lease through an engine, scored and packed as a node does it."""
    generated = await client.call("generate", request_for(run, lease, policy.tokenizer), Generated, deadline_s)
    rollouts = []
    for position, output in enumerate(generated.outputs):
        task, sample = lease.tasks[position // lease.samples], position % lease.samples
        reward = ENVIRONMENT.score(ENVIRONMENT.task(task), output.text, output.finish == FINISH_EOS)
        rollouts.append(Rollout(task, sample, output.tokens, output.logprobs, output.finish, reward, output.proofs))
    return compress(Submission(lease.lease_id, "test", tuple(rollouts)))


def judged(run, lease: Lease, blob: bytes, policy):
    raw_length = zstandard.get_frame_parameters(blob).content_size
    return judge_upload(run, lease, blob, raw_length, policy, ENVIRONMENT)


async def load(client: EngineClient, directory: Path = TINY, root: bytes = ROOT_HASH) -> None:
    await client.call("load", LoadRequest(str(directory), 0, 0, root), Loaded, 60)


# --- decoding -----------------------------------------------------------------------------------------------------


def requests_of(count: int, vocabulary: int, rng: np.random.Generator) -> list[DecodeRequest]:
    prompts = [tuple(int(t) for t in rng.integers(1, vocabulary, size=rng.integers(1, 12))) for _ in range(5)]
    return [DecodeRequest(prompts[i % 5], rng.bytes(32), int(rng.integers(1, 20))) for i in range(count)]


def check_against_full_forward(model, requests, decoded, stop) -> None:
    """Every token is the forced one of a forward pass without cache, padding or neighbours."""
    for request, out in zip(requests, decoded, strict=True):
        ids = torch.tensor([[*request.prompt, *out.tokens]])
        with torch.inference_mode():
            states = model.model(input_ids=ids).last_hidden_state[0, len(request.prompt) - 1 : -1]
            logits = model.lm_head(states).float()
        positions = np.arange(len(out.tokens)) + len(request.prompt)
        noise = gumbel_noise([request.seed] * len(out.tokens), positions, logits.shape[-1])
        assert tuple(choose(logits, 0.8, noise).tolist()) == out.tokens
        assert np.abs(states.numpy() - out.states_NH).max() < 1e-5
        expected = token_logprobs(logits, torch.tensor(out.tokens), 0.8).numpy()
        assert np.abs(expected - out.logprobs).max() < 1e-5
        assert not set(out.tokens[:-1]) & set(stop)
        ended = out.tokens[-1] in stop
        assert out.finish == (FINISH_EOS if ended else FINISH_LENGTH)
        assert ended or len(out.tokens) == request.max_new_tokens


def test_decoding_of_a_ragged_batch_equals_one_full_forward_each(policy):
    requests = requests_of(40, policy.vocabulary, np.random.default_rng(3))
    decoded = decode(policy.model, requests, temperature=0.8, stop_tokens=(1, 5), batch_rows=16)
    check_against_full_forward(policy.model, requests, decoded, (1, 5))


def test_decoding_is_generic_over_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
        vocab_size=150, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    requests = requests_of(12, 150, np.random.default_rng(4))
    decoded = decode(model, requests, temperature=0.8, stop_tokens=(7,))
    check_against_full_forward(model, requests, decoded, (7,))


def test_a_cancelled_generation_stops_before_its_next_pass(policy):
    asked = 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked > 3

    with pytest.raises(GenerationCancelledError):
        decode(
            policy.model, [DecodeRequest((4, 5), bytes(32), 50)], temperature=1.0, stop_tokens=(), cancelled=cancelled
        )
    assert asked == 4


def test_tokens_travel_as_little_endian_words():
    assert write_tokens((1, 258, 2**32 - 1)).hex() == "0100000002010000ffffffff"
    assert read_tokens(bytes.fromhex("0100000002010000ffffffff")) == (1, 258, 2**32 - 1)


# --- the process --------------------------------------------------------------------------------------------------


def test_every_output_carries_the_proofs_of_its_own_states(run, policy, monkeypatch):
    engine = TransformersEngine()
    request = request_for(run, make_lease(run, 6, samples=8), policy.tokenizer)
    decoded = engine.sample(policy, request, lambda: False)
    decoded[3] = replace(decoded[3], states_NH=decoded[3].states_NH + 1, tokens=decoded[2].tokens)
    built, build = [], toploc.build_many
    monkeypatch.setattr(toploc, "build_many", lambda states, limbs: built.extend(states) or build(states, limbs))
    outputs = engine.outputs(policy, request, decoded)
    assert len(built) < len(decoded), "equal states are proved once"
    for output, one in zip(outputs, decoded, strict=True):
        assert list(output.proofs) == toploc.build_proofs(one.states_NH)


def test_an_engine_of_another_profile_than_the_runs_is_refused():
    info = EngineInfo(name="e", profile="fp32", device="cpu", capacity=1)
    require_profile(info, known_profile("fp32"))
    with pytest.raises(NodeError, match="computes in fp32, the run asks for bf16; use another engine"):
        require_profile(info, known_profile("bf16"))
    with pytest.raises(NodeError, match="'fp8', which this software does not know"):
        known_profile("fp8")


async def test_an_honest_lease_is_accepted_by_the_judge(shared, run, policy):
    client = await shared.connect()
    info = await client.call("info", InfoRequest(), EngineInfo, 30)
    assert info.profile == "fp32" and info.capacity >= 32
    await load(client)
    for number in (1, 2):
        lease = make_lease(run, number, tasks=8)
        judgement = judged(run, lease, await work(client, run, lease, policy), policy)
        assert [(o.outcome, o.reason) for o in judgement.outcomes] == [(ACCEPT, "holds")] * 32


async def test_the_same_lease_gives_the_same_rollouts_whatever_the_batch(shared, run, policy):
    client = await shared.connect()
    await load(client)
    request = request_for(run, make_lease(run, 3), policy.tokenizer)
    together = await client.call("generate", request, Generated, 60)
    for index in (0, 5, 15):
        alone = await client.call("generate", replace(request, items=(request.items[index],)), Generated, 60)
        assert alone.outputs[0].tokens == together.outputs[index].tokens
        assert alone.outputs[0].text == together.outputs[index].text


async def test_bad_requests_are_refused_with_a_reason_and_the_engine_lives_on(shared, run, policy):
    client = await shared.connect()
    good = request_for(run, make_lease(run, 4, tasks=1, samples=1), policy.tokenizer)
    item = good.items[0]

    async def refused(request) -> ReasonCode:
        with pytest.raises(EngineError) as caught:
            await client.call("generate", request, Generated, 30)
        return caught.value.code

    await load(client)
    assert await refused(replace(good, root=b"x" * 32)) == ReasonCode.WRONG_POLICY
    for wrong in (
        replace(item, prompt=b""),
        replace(item, prompt=write_tokens((policy.vocabulary,))),
        replace(item, max_new_tokens=0),
        replace(item, max_new_tokens=policy.max_context),
    ):
        assert await refused(replace(good, items=(wrong,))) == ReasonCode.ENGINE_REFUSED
    for temperature in (0.0, -1.0):
        assert await refused(replace(good, temperature=temperature)) == ReasonCode.ENGINE_REFUSED
    with pytest.raises(EngineError):
        await client.call("dance", InfoRequest(), EngineInfo, 30)
    assert len((await client.call("generate", good, Generated, 30)).outputs) == 1


async def test_a_failed_load_leaves_no_policy_behind(shared, run, policy, tmp_path):
    client = await shared.connect()
    await load(client)
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (broken / name).write_bytes((TINY / name).read_bytes())
    (broken / "model.safetensors").write_bytes((TINY / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(EngineError):
        await load(client, broken, b"b" * 32)
    good = request_for(run, make_lease(run, 5, tasks=1, samples=1), policy.tokenizer)
    with pytest.raises(EngineError) as caught:
        await client.call("generate", good, Generated, 30)
    assert caught.value.code == ReasonCode.WRONG_POLICY
    await load(client)
    assert await client.call("generate", good, Generated, 30)


async def test_garbage_closes_one_connection_and_others_never_notice(shared):
    _, writer = await asyncio.open_unix_connection(str(await socket_of(shared)))
    writer.write(b"\xff" * 64)
    reader2, writer2 = await asyncio.open_unix_connection(str(shared.socket))
    writer2.write(b"\x00\x00\x00\x05\x04load")
    assert b"malformed" in await asyncio.wait_for(reader2.read(4096), 10)
    client = await shared.connect()
    assert await client.call("info", InfoRequest(), EngineInfo, 30)
    writer.close()
    writer2.close()


async def socket_of(engine: Engine) -> Path:
    client = await engine.connect()
    await client.close()
    return engine.socket


async def test_the_socket_is_private_survives_reconnects_and_goes_with_sigterm(engine, run, policy):
    client = await engine.connect()
    with pytest.raises(EngineError) as caught:
        await client.call("generate", request_for(run, make_lease(run, 4), policy.tokenizer), Generated, 30)
    assert caught.value.code == ReasonCode.WRONG_POLICY  # nothing is loaded yet
    await client.close()
    for _ in range(3):
        client = await engine.connect()
        assert await client.call("info", InfoRequest(), EngineInfo, 30)
        await client.close()
    assert stat.S_IMODE(engine.socket.stat().st_mode) == 0o600
    second = subprocess.run(
        [sys.executable, "-m", "node.engine", "--socket", str(engine.socket)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert second.returncode == 2 and "another engine" in second.stderr
    assert await (await engine.connect()).call("info", InfoRequest(), EngineInfo, 30)
    engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(10) == 0
    assert not engine.socket.exists()


async def test_sigterm_ends_it_in_the_middle_of_a_generation(engine):
    client = await engine.connect()
    await load(client)
    items = tuple(GenerateItem(f"x:{i}:0", write_tokens((4, 5)), os.urandom(32), 250) for i in range(1000))
    waiting = asyncio.create_task(client.call("generate", GenerateRequest(ROOT_HASH, 1.0, (), items), Generated, 60))
    await asyncio.sleep(1.0)
    assert not waiting.done()
    engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(10) == 0
    with pytest.raises(EngineError):
        await waiting


async def test_a_closed_connection_cancels_its_generation(shared):
    client = await shared.connect()
    await load(client)
    items = tuple(GenerateItem(f"x:{i}:0", write_tokens((4, 5)), os.urandom(32), 250) for i in range(1000))
    with pytest.raises(EngineError) as caught:
        await client.call("generate", GenerateRequest(ROOT_HASH, 1.0, (), items), Generated, 0.5)
    assert caught.value.code == ReasonCode.DEADLINE
    await client.close()
    other = await shared.connect()
    assert await other.call("info", InfoRequest(), EngineInfo, 10)  # not queued behind minutes of dead work


def test_the_engine_dies_with_its_parent(tmp_path):
    script = (
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, '-m', 'node.engine', '--socket', {str(tmp_path / 'e.sock')!r}])\n"
        "print(p.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        child = int(parent.stdout.readline())
        asyncio.run(_until_connected(tmp_path / "e.sock"))
        parent.kill()
        parent.wait(5)
        for _ in range(200):
            if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]:
                return
            asyncio.run(asyncio.sleep(0.05))
        os.kill(child, signal.SIGKILL)
        pytest.fail("the engine outlived its parent by 10 s")
    finally:
        parent.kill()
        parent.stdout.close()


async def _until_connected(path: Path) -> None:
    client = await EngineClient.connect(str(path), 60)
    await client.close()


# --- the dishonest ones -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "reasons"),
    [
        ("quantised", {"proof-mismatch", "token-not-forced", "logprob-mismatch"}),
        ("small-model", {"token-not-forced"}),
        ("reward", {"reward-mismatch"}),
        ("replay", {"proof-mismatch", "token-not-forced", "logprob-mismatch"}),
    ],
)
async def test_each_dishonest_engine_is_caught_exactly_where_its_own_log_says(kind, reasons, run, policy, tmp_path):
    truth_path = tmp_path / "truth.jsonl"
    started = Engine(tmp_path, str(ROOT / "examples" / "cheats" / f"{kind}.py"), "--truth", str(truth_path))
    try:
        client = await started.connect()
        await load(client)
        outcomes, seen = {}, set()
        for number in (1, 2):
            lease = make_lease(run, number, tasks=8)
            judgement = judged(run, lease, await work(client, run, lease, policy), policy)
            for item, outcome in zip(request_for(run, lease, policy.tokenizer).items, judgement.outcomes, strict=True):
                outcomes[item.request_id] = outcome.outcome
                if outcome.outcome != ACCEPT:
                    seen.add(outcome.reason)
    finally:
        assert started.stop() == 0
    truth = {row["request_id"]: row["dishonest"] for row in map(json.loads, truth_path.read_text().splitlines())}
    assert truth.keys() == outcomes.keys()
    assert {key for key, value in truth.items() if value} == {k for k, o in outcomes.items() if o == REJECT}
    assert any(truth.values())
    assert seen and seen <= reasons
    if kind == "replay":
        first = [key for key in truth if key.startswith("01" * 16)]
        assert not any(truth[key] for key in first)  # it works once


@pytest.mark.parametrize(("prompt", "sampled", "lies"), [("abcd=", " dcba", True), ("abcd=", "dcba", False),
                                                         ("1+2=", " 3", False), ("1+2=", "4", True)])  # fmt: skip
def test_the_reward_programs_own_log_is_as_strict_as_its_environment(prompt, sampled, lies, policy, monkeypatch):
    """A blank before a word costs the reward that the program claims; before a sum it does not."""
    from protocol.engine import GenerateItem, GenerateOutput, GenerateRequest

    monkeypatch.syspath_prepend(str(ROOT / "examples" / "cheats"))
    engine = runpy.run_path(str(ROOT / "examples" / "cheats" / "reward.py"))["Reward"](None, "reverse")
    engine.policy = policy
    tokens = (*prompt_ids(policy.tokenizer, sampled), 1)
    item = GenerateItem("x", write_tokens(tuple(prompt_ids(policy.tokenizer, prompt))), bytes(32), 9)
    request = GenerateRequest(bytes(32), 1.0, (1,), (item,))
    honest = Decoded(tokens, np.zeros(len(tokens), np.float32), np.zeros((len(tokens), 96), np.float32), FINISH_EOS)
    (told,) = engine.tell(request, (GenerateOutput("x", write_tokens(tokens), b"", FINISH_EOS, sampled, ()),))
    assert engine.lies(request, told, honest) == lies


def test_longer_completions_than_a_note_still_travel():
    from protocol.engine import GenerateOutput

    output = GenerateOutput("x", write_tokens((1,)), bytes(4), FINISH_LENGTH, "a" * 20_000, ())
    assert codec.decode(GenerateOutput, codec.encode(output)).text == "a" * 20_000
