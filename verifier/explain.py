"""What each reason code means, in plain words: what happened, why it counts, what an honest operator should do.

`verifier explain REASON` prints one, `verifier explain` lists all. Every member of `ReasonCode` has an entry (a test
says so), so a refusal never leaves anybody with a bare word.

Not covered: the numbers of one case; `verifier audit RUN --rollout ID` shows those.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import ReasonCode, UsageError


@dataclass(frozen=True)
class Explanation:
    """Three short texts for people."""

    meaning: str
    evidence: str
    action: str


_TRANSPORT = "It is held against the connection it came over, never against the key it names: anybody can send it."
_RETRY = "Nothing is held against anybody."
_DETERMINISTIC = (
    "Every machine that repeats the check gets the same answer, and a second validator, drawn independently, must "
    "repeat it before the node is suspended."
)

EXPLANATIONS: dict[ReasonCode, Explanation] = {
    # arrival
    ReasonCode.MALFORMED: Explanation(
        "The bytes are no record of the expected shape.",
        _TRANSPORT,
        "Update headwater on both sides. If it goes on, a proxy in between changes the bytes. In a run's directory the "
        "file was damaged: restore it from a copy.",
    ),
    ReasonCode.OVERSIZE: Explanation(
        "A record or body is longer than its bound, so it was not read further.",
        _TRANSPORT,
        "Nothing our own software sends is over a bound: update it, or look at the engine that made the output.",
    ),
    ReasonCode.BAD_SIGNATURE: Explanation(
        "The signature is not the named key's over these bytes, or the key may not sign this kind of message.",
        _TRANSPORT,
        "If your own messages are refused, the key file was replaced: compare `node id` with the id you joined with.",
    ),
    ReasonCode.WRONG_RUN: Explanation(
        "The message, or the archive that is audited, belongs to another run than the one that was asked for.",
        "Of a message: " + _TRANSPORT[0].lower() + _TRANSPORT[1:] + " Of an archive: a run's id is the hash of its "
        "first manifest, so nobody can make another run that has it.",
        "Use one --home per run, and join with the share code of this run. Auditors: whoever gave you this archive "
        "gave you that of another run; ask for the one whose code you hold.",
    ),
    ReasonCode.WRONG_KIND: Explanation(
        "A validly signed message of one kind was presented as another kind.",
        _TRANSPORT,
        "Update headwater; if you wrote your own client, sign each message under its own kind.",
    ),
    ReasonCode.WRONG_AUDIENCE: Explanation(
        "The message is addressed to somebody else.",
        _TRANSPORT,
        "Join again, so that both sides know each other's current keys.",
    ),
    ReasonCode.STALE_SEQUENCE: Explanation(
        "A message with this number, or a higher one, was already seen: this one is a repetition.",
        _TRANSPORT,
        "Do not run two nodes with one --home, and do not restore an old copy of it: start a new identity instead.",
    ),
    ReasonCode.EXPIRED: Explanation(
        "The message is outside its time, by the coordinator's corrected clock.",
        _RETRY,
        "Usually nothing: the node corrects its clock and sends again. Check the network if it goes on.",
    ),
    ReasonCode.UNSUPPORTED_VERSION: Explanation(
        "The message speaks a major version of the protocol that is not spoken here.",
        _RETRY,
        "Install the release the run's operator names.",
    ),
    ReasonCode.UPGRADE_REQUIRED: Explanation(
        "The node's version is older than the run accepts.",
        _RETRY,
        "Upgrade with the command in the message; finished work is still accepted.",
    ),
    ReasonCode.NOT_JOINED: Explanation(
        "The key has not joined this run.",
        _RETRY,
        "Start `node join` again; a node does this by itself after the coordinator was restarted from a backup.",
    ),
    ReasonCode.NOT_GRANTED: Explanation(
        "The role (validator, trainer, or a relay with children) needs the operator's grant, and this key has none.",
        _RETRY,
        "Send your `node id` to the run's operator.",
    ),
    ReasonCode.SUSPENDED: Explanation(
        "Trust in this key has ended: two validators, drawn independently, found the same fault in its work, or the "
        "ledger holds other proof (results kept back, a relay's false stamp, a key that the root withdrew). It gets no "
        "more leases.",
        "The ledger names the verdicts or the proof; anybody can repeat them offline.",
        "`node status` names the reason; `verifier explain` says what it means. For a verdict, run `verifier audit` on "
        "the archive with your rollout's id and read which check failed. Use the exact weights, dtype and sampling the "
        "manifest names; then join with a new identity, or ask the operator.",
    ),
    ReasonCode.UNKNOWN_LEASE: Explanation(
        "No lease has this id.",
        _RETRY,
        "Ask for a new lease. After a coordinator's loss of its ledger, keep your receipts: they are still honoured.",
    ),
    ReasonCode.NOT_OWNER: Explanation(
        "The lease or job belongs to another key.",
        _TRANSPORT,
        "Submit only what was leased to this identity; do not share one --home between machines.",
    ),
    ReasonCode.LEASE_CLOSED: Explanation(
        "The lease expired or was given up before the submission came; its tasks went to another node.",
        _RETRY + " Leases that are dropped again and again feed a test for withheld results.",
        "If it happens often, the machine or its uplink is too slow: lower the engine's capacity, or --max-up.",
    ),
    ReasonCode.LENGTH_MISMATCH: Explanation(
        "The bytes are longer or shorter than was announced.",
        _TRANSPORT,
        "Usually a broken connection: the node sends again. Otherwise update headwater.",
    ),
    ReasonCode.HASH_MISMATCH: Explanation(
        "The bytes are not the ones whose hash was signed or announced.",
        "Bytes changed on the way or on the disk. Whoever holds the file has to explain it; nobody can produce other "
        "bytes with the same hash.",
        "In transit: it is fetched again by itself. In an archive: restore the file from a copy and check the disk.",
    ),
    ReasonCode.CONFLICTING_SUBMISSION: Explanation(
        "A second, different submission came for one lease. The first one stays.",
        "Both are signed by the lease's owner, so nobody else can have made the contradiction.",
        "Never run two nodes with one --home. The node keeps a submission until its receipt is on disk, so that a "
        "retry sends the same bytes.",
    ),
    ReasonCode.BUSY: Explanation(
        "The coordinator's queues or quotas are full.", _RETRY, "Nothing: the node waits as told and tries again."
    ),
    ReasonCode.TOO_SLOW: Explanation(
        "The upload came slower than 16 KiB a second, or its header took over 10 seconds.",
        _RETRY,
        "Check the uplink; raise --max-up if you limited it.",
    ),
    ReasonCode.UNKNOWN_JOB: Explanation(
        "No verification job with this id waits for this validator: it was drawn again, or is already decided.",
        _RETRY,
        "Nothing: ask for the next job. If it happens often, the validator is too slow.",
    ),
    ReasonCode.UNREACHABLE: Explanation(
        "A peer or address could not be reached.",
        _RETRY,
        "Check that the address is right and that outgoing connections are allowed, then try again.",
    ),
    ReasonCode.DEADLINE: Explanation(
        "Something that was awaited did not come in time; the message names it.",
        _RETRY,
        "Look at the process or peer that is named.",
    ),
    ReasonCode.QUOTA: Explanation(
        "This key, or this address, already has as much unverified work waiting as the run allows.",
        _RETRY + " Work is cheap to send and dear to check, so what nobody has checked yet is bounded for each sender.",
        "Nothing: the node waits as told and sends again once validators have caught up. A key whose rollouts were "
        "accepted may have more waiting. Several machines behind one address share its part.",
    ),
    ReasonCode.KEY_REVOKED: Explanation(
        "The run's root key has withdrawn this key. What it signs from the named ledger entry on counts for nothing.",
        "The withdrawal is a link of the manifest chain, signed by the root; everybody who has the chain sees it.",
        "Ask the run's operator why. An operator whose machine was taken over makes a new key on a clean machine and "
        "asks for a new grant; a node joins with a new identity.",
    ),
    ReasonCode.EVIDENCE_UNKNOWN: Explanation(
        "The run's manifest sums up a number of its rollouts that this version of headwater does not know.",
        "The list of such numbers is part of the protocol (docs/protocol.md); a row that half of the members can't "
        "compute would condemn by the word of the other half.",
        "Take the version that the run was opened with. Whoever opens a run leaves out rows of other profiles.",
    ),
    ReasonCode.EVIDENCE_BOUNDS: Explanation(
        "A row of evidence in the run's manifest, or in an update of it, can't be summed up by.",
        "0 < honest < clip, 0 < bet < 1 and a bar that an honest node crosses less than once in a million rollouts: "
        "anything else never rises or bans at random.",
        "The run's operator opens runs with rows made by rule (`trainer init`), or withdraws the row (`trainer key "
        "withdraw`).",
    ),
    ReasonCode.EVIDENCE_TOO_STRICT: Explanation(
        "A row of evidence in the run's manifest, or in an update of it, would suspend nodes that pass every check.",
        "Its honest mean lies below what the thresholds beside it let honest machines have, or only one kind of "
        "machine was ever measured.",
        "The run's operator loosens the row in the update that changes the thresholds, or withdraws it before "
        "(`trainer key withdraw`).",
    ),
    ReasonCode.USAGE: Explanation(
        "A command, path or configuration is wrong; the message names it.", _RETRY, "Change what the message names."
    ),
    ReasonCode.INTERNAL: Explanation(
        "A fault in headwater itself.",
        _RETRY,
        "Keep the log and report it; the ledger makes sure that nothing with a receipt is lost.",
    ),
    # verdicts: accept
    ReasonCode.HOLDS: Explanation(
        "Every check held: the lease's task, the proof of the model's computation, the forced tokens, the "
        "log-probabilities, the ending and the reward.",
        "A validator recomputed all of it from the published weights; an audit can do it again.",
        "Nothing. The rollout may be trained on.",
    ),
    # verdicts: reject
    ReasonCode.FORMAT: Explanation(
        "The submission is not one rollout of this lease after another, with one log-probability per token and numbers "
        "that are finite.",
        "It catches bytes that are no answer at all. Their sender signed the hash of exactly these. " + _DETERMINISTIC,
        "Update headwater, or correct the engine: one output per request, as many log-probabilities as tokens.",
    ),
    ReasonCode.WRONG_TASK: Explanation(
        "The rollouts are not the tasks and samples the lease names, each once.",
        "It catches nodes that send honest rollouts of easier tasks, that repeat one that went well, or that put "
        "another lease's in its place: rewards would rise without a better policy. " + _DETERMINISTIC,
        "Return exactly what was leased, in its order. Our node does this by itself; look at your own changes.",
    ),
    ReasonCode.TOKEN_RANGE: Explanation(
        "A token id is outside the model's vocabulary.",
        "The leased policy cannot have sampled such a token; it catches the crudest garbage, before any model runs. "
        + _DETERMINISTIC,
        "Check that the engine uses the tokenizer and vocabulary of the policy directory it was given.",
    ),
    ReasonCode.TERMINATION: Explanation(
        "The rollout does not end where the run's rules say: at its first stop token, or else at the lease's cap.",
        "It catches answers cut off where they looked good, and text after the end that a reward might read. "
        + _DETERMINISTIC,
        "Give the engine the stop tokens and the cap of the request, and no others.",
    ),
    ReasonCode.PROOF_MALFORMED: Explanation(
        "A proof is missing, cut, doubled or not of the form every chunk of 32 tokens must have.",
        "The engine builds proofs by a fixed rule from its own states; an honest one cannot have this form. It catches "
        "invented proofs before any model runs. " + _DETERMINISTIC,
        "Update headwater, or correct the engine: exactly ceil(tokens / 32) chunks, over the states that produced the "
        "sampled tokens.",
    ),
    ReasonCode.PROOF_MISMATCH: Explanation(
        "The proof commits to other hidden states than the leased policy has on these tokens.",
        "It catches stale weights (those of an earlier step, kept to save the download), a smaller model, quantised "
        "weights, another prompt (a rollout sent twice), and garbage: random tokens, for which nobody has the states. "
        "All differ far more than honest machines do; the bound is several times the honest noise measured for this "
        "run. A long rollout is read in blocks, and no further than the first that fails. In a bf16 run one rollout "
        "shows 4-bit weights, missing layers and fp8 weights, but seldom int8 ones, a quantised cache or weights a few "
        "steps old: those are added up over a node's rollouts. " + _DETERMINISTIC,
        "Load the published weights of the lease's step, in the run's dtype, without quantisation, TF32 or a quantised "
        "cache. Run `verifier calibrate` on the machine: above the bound it must not join.",
    ),
    ReasonCode.TOKEN_NOT_FORCED: Explanation(
        "A token is not the one that the policy and the lease's seed force.",
        "Sampling is a fixed function of weights and seed. It catches greedy decoding, another temperature, the best "
        "of several samples, one edited token, and a cheaper model's answer, even with proofs made afterwards by the "
        "right weights: each picks other tokens than the seed does. The margin is far above honest noise. In a bf16 "
        "run, where rounding decides between tokens that are nearly level, it is a margin beyond any honest one, or "
        "the sum of a rollout's margins; smaller ones are added up over a node's rollouts. " + _DETERMINISTIC,
        "Sample with the seed and temperature of the request, from the full distribution. Do not use greedy decoding, "
        "top-p, top-k, penalties, or a cheaper model to generate.",
    ),
    ReasonCode.LOGPROB_MISMATCH: Explanation(
        "A claimed log-probability differs from the policy's by more than the run's bound.",
        "It catches invented log-probabilities and those of another model or temperature: they steer the training "
        "step, and wrong ones can push the model in a chosen direction. A bf16 run trains on the claimed ones, so "
        "their sum over a rollout has a bound too, and what lies below it is added up over a node's rollouts. "
        + _DETERMINISTIC,
        "Report log_softmax(logits / temperature) of the raw float32 logits, without the sampling noise.",
    ),
    ReasonCode.ROUTES_MALFORMED: Explanation(
        "The list of experts that came with the rollout is not one entry for each token and layer, with different ids "
        "in rising order; or the model has no experts, and a list came.",
        "The engine writes down what its routers chose; an honest one cannot have this form. It is refused before any "
        "model runs. " + _DETERMINISTIC,
        "Update headwater, or correct the engine: the experts of the whole prompt and of every sampled token but the "
        "last, layer by layer.",
    ),
    ReasonCode.ROUTES_FORGED: Explanation(
        "The rollout names experts that the policy's routers do not choose: one that was left out beats one that was "
        "taken by more than the run's bound, or too many choices are not the routers' own.",
        "Between experts that are level within rounding an honest machine may take either, so a validator follows the "
        "node's choice there, in as many places as rounding makes. It catches choices beyond that: always the same "
        "expert to save memory, fewer distinct ones to save time, the choices of other weights, or every level pair "
        "turned as the node likes, even with proofs made under them. " + _DETERMINISTIC,
        "Let the model's own routers choose, from the published weights and their correction bias, in the run's dtype. "
        "Run `verifier calibrate` on the machine: above the bound it must not join.",
    ),
    ReasonCode.REWARD_MISMATCH: Explanation(
        "The claimed reward is not the one the environment gives for these tokens.",
        "It catches rewards that were made up: the reward is a pure function of task and text, and the text follows "
        "from the tokens. " + _DETERMINISTIC,
        "Use the environment of this release, and score the text that the tokens decode to. The environment's hash is "
        "in the manifest.",
    ),
    # evidence about a member
    ReasonCode.DROPPED_RESULTS: Explanation(
        "The leases this key gave up, or sent too late to be learned from, hold clearly worse rewards than those it "
        "returned: it kept back what did badly.",
        "Lost leases were done again by other nodes under the same seeds, so their rewards are known; what did not "
        "come back whole counts for the key. Losing more of the long answers is allowed for. The chance that a node "
        "which loses leases for other reasons looks like this is below one in ten million, however often one looks. "
        "Everybody with the archive can compute the number again, and when a validator is found to be wrong the "
        "coordinator does, without it.",
        "Return what was leased, in time, whatever its reward, and let leases fail only for reasons that have nothing "
        "to do with it, as time and memory have. If the engine dies on odd answers, repair it before you join with a "
        "new identity.",
    ),
    ReasonCode.POOLED_EVIDENCE: Explanation(
        "No single rollout of this key fails a check, but the numbers that validators measured on all of them are "
        "larger, summed up, than an honest node's ever get: its weights or cache are rounded more than the run allows, "
        "it chooses among tokens that are nearly level, or it works with an older policy.",
        "The ledger names the hypothesis and the number; the bar, the honest mean and the measurement behind them are "
        "in the manifest. The sum clears the bar without the numbers of any one validator, so that no single one can "
        "frame a node, and only while other nodes of the run do not show the same. Everybody with the archive can "
        "compute the number again. It is taken back when a validator whose numbers it read is found to be wrong, or "
        "its row of the manifest is withdrawn or loosened; the sum that is left may suspend again.",
        "Use the exact weights, dtype, cache and sampling that the manifest names: no quantised cache, no other "
        "temperature, the newest policy. Run `verifier calibrate` on the machine and compare with the manifest's row "
        "before you join with a new identity.",
    ),
    ReasonCode.RELAY_LIED: Explanation(
        "A relay signed that it sent bytes which are not the ones the origin signed for this shard.",
        "Both signatures are in the ledger: the origin's over the right hash and the relay's over another one. Nobody "
        "but the relay can have made the second. Its child took the shard from another source, so no weights changed.",
        "Check the relay's disk and memory, and that it runs an unchanged release: ours hashes each shard before it "
        "signs. Then join with a new identity.",
    ),
    ReasonCode.VALIDATOR_WRONG: Explanation(
        "A validator accepted a rollout that the run's rules reject, or rejected one that holds, each by more than two "
        "verifiers may differ by; or it handed over other numbers than the run's model gives.",
        "The coordinator checked a drawn share of the rollouts itself, this one twice, in two processes. The ledger "
        "names verdict, rollout and number, so anybody can make the check again. The validator's verdicts count no "
        "more: what they alone let in and no batch had taken was judged again, and whoever was suspended on them was "
        "heard again.",
        "Run `verifier audit RUN` on another machine. If it calls the accusation false, the coordinator's machine is "
        "at fault. If not, look at the validator's memory and release before its operator joins with a new key.",
    ),
    # verdicts: inconclusive
    ReasonCode.REWARD_UNDECIDED: Explanation(
        "The reward could not be decided: the environment ran out of time or memory.",
        "No evidence: it is neither trained on nor held against the node.",
        "Nothing. It is tried again with higher limits.",
    ),
    ReasonCode.VALIDATOR_FAILED: Explanation(
        "The validator itself failed: missing weights, no memory, or an environment it does not have.",
        "No evidence: it says nothing about the rollout or its node.",
        "Operators of validators: read the log of the one that is named. Nodes: nothing.",
    ),
    # ledger and archive
    ReasonCode.LEDGER_BROKEN: Explanation(
        "The ledger contradicts itself: an entry, a signed tree head or the rules of the fold do not hold.",
        "Only the coordinator's key can sign entries and heads, so a rewritten past shows against any head that "
        "somebody kept.",
        "Auditors: compare with another copy of the archive, and keep the signed heads. Operators: restore from a "
        "backup; nodes present their receipts again.",
    ),
    ReasonCode.LEDGER_LOCKED: Explanation(
        "Another process writes this ledger; there is one writer a run.",
        _RETRY,
        "Stop the process that the message names, or wait until it has ended.",
    ),
    ReasonCode.SHARD_MISMATCH: Explanation(
        "A shard of the weights is not the one whose hash the origin signed.",
        "Nobody can make other bytes with that hash, so the copy is damaged or was replaced.",
        "Pullers fetch it from another source by themselves. In an archive: restore the file from a copy.",
    ),
    ReasonCode.RECORD_MISSING: Explanation(
        "A file or record that the ledger names is not there.",
        "The ledger promised it. Without the bytes, nobody can check what rests on them.",
        "Copy the whole run directory, or restore the file; `verifier audit` names it.",
    ),
    ReasonCode.VERDICT_WRONG: Explanation(
        "A stored verdict differs from what its own inputs give when they are checked again.",
        "The inputs are all in the archive and bound by hashes; the validator signed its answer. " + _DETERMINISTIC,
        "Operators: withdraw the validator's grant and have its other verdicts checked. Validators: check memory, "
        "precision settings and release, and calibrate again.",
    ),
    ReasonCode.BATCH_WRONG: Explanation(
        "A batch holds something that the ledger does not support: a rollout that was not accepted, is too old, "
        "appears twice, differs from what was verified, or was altered on purpose under one of the operator's own keys "
        "to see what validators say. Or a row of `metrics.jsonl` says something else of a step than its batch does.",
        "The batch file and the ledger entry are both the trainer's own; recomputing it from verified rollouts gives "
        "other bytes.",
        "Operators: training after this batch does not rest on verified rollouts; go back to the checkpoint before it. "
        "A row alone is a wrong curve: believe the batches.",
    ),
    ReasonCode.DRAW_WRONG: Explanation(
        "A verification job went to another validator than the draw gives, or one that had to be drawn is missing.",
        "Who judges what follows from a secret that the ledger bound before the work came in and revealed after it was "
        "judged. Another result means that somebody chose.",
        "Auditors: do not rely on the verdicts that came of it without deriving them again. Operators: only changed "
        "software or a ledger edited by hand does this; run an unchanged release.",
    ),
    ReasonCode.DRAW_NOT_REVEALED: Explanation(
        "The secret behind a period's draws was never shown, so nobody can tell whether validators were drawn or "
        "chosen.",
        "The coordinator promised it by a hash in the ledger, and reveals it once the period's last verdict is in.",
        "Auditors: derive the period's verdicts again; that part needs no secret. Operators: restart `trainer serve` "
        "on the run, which reveals what is due; a lost `draws.secret` can't be made good.",
    ),
    ReasonCode.HEADS_CONFLICT: Explanation(
        "The coordinator signed two heads of the ledger that can't both be true: it showed different pasts to "
        "different people.",
        "Both heads carry its signature, and no log can contain both. Anybody who has the two envelopes can check it.",
        "Keep both files: they are the proof. Stop working for the run, tell its other members, ask the operator. A "
        "restore from a backup must be announced by the root key.",
    ),
    ReasonCode.PROMISE_BROKEN: Explanation(
        "The archive's ledger does not hold what a receipt or a signed head promised: the entry is another one, or "
        "the ledger ends before it.",
        "A receipt is given only once the entry is on the coordinator's disk, and carries its signature: what was "
        "promised can be left out of a ledger only by writing it anew, or by cutting it off.",
        "Keep the file, it is the proof, and ask for the whole archive of the run. If that does not hold it either, "
        "show both to the run's operator and to its other members.",
    ),
    ReasonCode.MANIFEST_FORKED: Explanation(
        "The run's root key signed two different updates of the manifest for one place: two sets of rules, or of keys.",
        "Nobody but the root key can sign an update, each names the one before by hash and takes the next number, and "
        "no chain can hold both.",
        "Ask the holder of the root key which one is meant, and why there are two. Operators: sign updates only with "
        "`trainer key`, in one run directory, and never from an older copy of it.",
    ),
    ReasonCode.ORIGIN_FORKED: Explanation(
        "The run's origin signed two different things for one place: two roots for one step, or two records of one "
        "shard.",
        "Both carry a signature of the origin's key, and nobody else can make either. Members that got different ones "
        "work with different weights, and a relay that stamped the one could be accused with the other: a relay "
        "accused so did not lie.",
        "Members keep both records and stop taking weights in. Ask the run's operator; if the origin's key was stolen, "
        "the root must revoke it: trainer key rotate, then trainer key revoke.",
    ),
    ReasonCode.ACCUSATION_FALSE: Explanation(
        "The ledger accuses a relay of a lie, or a validator of a wrong verdict, and it is not so.",
        "Of a relay the proof is its own signature beside the origin's over other bytes: anybody can compare the two. "
        "Of a validator it is the rollout itself, which anybody can check again. The coordinator must do either before "
        "it writes the entry, so this is the coordinator's fault, and nobody else's.",
        "Auditors: do not hold it against the member. Operators: changed software writes such an entry, or a machine "
        "that computes wrongly; run an unchanged release and test the memory.",
    ),
    # engine
    ReasonCode.ENGINE_REFUSED: Explanation(
        "The engine refused a request.", _RETRY, "Read the engine's message; the lease goes to another node."
    ),
    ReasonCode.ENGINE_FAILED: Explanation(
        "The engine failed or ended during a request.",
        _RETRY,
        "Read the engine's log; most often it ran out of memory. The lease goes to another node.",
    ),
    ReasonCode.WRONG_POLICY: Explanation(
        "The engine holds another policy than the request names.",
        _RETRY,
        "Nothing: the node loads the right one and asks again. If it goes on, restart the engine.",
    ),
}


def explain(word: str) -> Explanation:
    """The explanation of a reason code.

    Raises:
        UsageError: no such code; the message lists those that begin alike.
    """
    try:
        return EXPLANATIONS[ReasonCode(word)]
    except ValueError as exc:
        close = [code.value for code in ReasonCode if word and code.value.startswith(word[:3])]
        hint = f"did you mean {', '.join(close)}?" if close else "`verifier explain` lists them all"
        raise UsageError(f"there is no reason code {word!r}; {hint}") from exc
