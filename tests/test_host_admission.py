"""Who may connect: the counting alone, with a clock of our own."""

from hypothesis import given
from hypothesis import strategies as st

from protocol.admission import (
    CHARGES_PER_ADDRESS,
    DEFAULT_PER_ADDRESS,
    MAX_HALF_OPEN_PER_ADDRESS,
    PAUSE_S,
    Admission,
    Blocked,
    address_group,
)
from protocol.held import SHARE, HeldBytes


def admit(admission: Admission, group: str) -> bool:
    """A connection whose handshake has ended."""
    if not admission.admit(group):
        return False
    admission.handshake_ended(group)
    return True


def test_one_address_holds_its_share_and_others_the_rest():
    admission = Admission(100, None, lambda: 0.0)
    assert sum(admit(admission, "203.0.113.7") for _ in range(100)) == DEFAULT_PER_ADDRESS
    assert sum(admit(admission, "203.0.113.8") for _ in range(100)) == 100 - DEFAULT_PER_ADDRESS
    admission.release("203.0.113.7")
    assert admit(admission, "198.51.100.1")
    assert not admit(admission, "203.0.113.7")


def test_loopback_has_no_share_unless_one_is_set():
    admission = Admission(100, None, lambda: 0.0)
    assert sum(admit(admission, "127.0.0.1") for _ in range(200)) == 100
    admission = Admission(100, 2, lambda: 0.0)
    assert sum(admit(admission, "127.0.0.1") for _ in range(200)) == 2


def test_handshakes_in_progress_have_a_share_of_their_own():
    admission = Admission(100, None, lambda: 0.0)
    assert sum(admission.admit("203.0.113.7") for _ in range(100)) == MAX_HALF_OPEN_PER_ADDRESS
    admission.handshake_ended("203.0.113.7")
    assert admission.admit("203.0.113.7")


def test_charges_pause_an_address_for_a_while_and_never_loopback():
    now = [0.0]
    admission = Admission(100, None, lambda: now[0])
    for _ in range(CHARGES_PER_ADDRESS - 1):
        admission.charge("203.0.113.7")
    assert admit(admission, "203.0.113.7")
    admission.charge("203.0.113.7")
    assert not admit(admission, "203.0.113.7")
    assert admit(admission, "203.0.113.8")
    now[0] += PAUSE_S
    assert admit(admission, "203.0.113.7")
    for _ in range(2 * CHARGES_PER_ADDRESS):
        admission.charge("127.0.0.1")
    assert admit(admission, "127.0.0.1")


def test_old_charges_are_forgotten_and_addresses_without_end_are_not_kept():
    now = [0.0]
    admission = Admission(100, None, lambda: now[0])
    for _ in range(2 * CHARGES_PER_ADDRESS):
        admission.charge("203.0.113.7")
        now[0] += 2
    assert admit(admission, "203.0.113.7")
    for n in range(10_000):
        admission.charge(f"10.{n >> 8}.{n & 255}.1")
    assert len(admission._charges) <= 4096


def test_an_ipv6_machine_counts_by_its_network():
    assert address_group("2001:db8:1:2:3::4") == address_group("2001:db8:1:2:ffff::") == "2001:db8:1:2::/64"
    assert address_group("::ffff:203.0.113.7") == "203.0.113.7"
    assert address_group("::1") == "::/64"


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "127.0.0.1"]), st.booleans()), max_size=200))
def test_slots_are_given_back_whatever_the_order(steps):
    admission, held = Admission(20, 5, lambda: 0.0), []
    for group, leave in steps:
        if leave and held:
            admission.release(held.pop(0))
        elif admit(admission, group):
            held.append(group)
        assert admission.connections == len(held) <= 20
        assert all(held.count(g) <= 5 for g in held)
    for group in held:
        admission.release(group)
    assert (admission.connections, admission._open, admission._half_open) == (0, {}, {})


def test_blocked_addresses_get_no_slot_whoever_they_are() -> None:
    admission = Admission(100, None, lambda: 0.0)
    admission.block(["203.0.113.0/24", "2001:db8:1::/48", "127.0.0.9"])
    for address in ("203.0.113.7", "2001:db8:1:2::3", "::ffff:203.0.113.9", "127.0.0.9"):
        assert not admission.admit(address_group(address)), address
    for address in ("203.0.114.7", "2001:db8:2::1", "127.0.0.1"):
        assert admission.admit(address_group(address)), address
    admission.block([])
    assert admission.admit("203.0.113.7"), "an address that is unblocked is like any other"
    assert not Blocked(["203.0.113.7"]).covers("no address")


def test_one_address_holds_a_quarter_of_the_bytes_and_the_reserve_stays_for_small_ones() -> None:
    held = HeldBytes(64, 16)
    assert sum(held.take("203.0.113.7", 1, small=False) for _ in range(100)) == 64 // SHARE
    assert not held.take("203.0.113.7", 1, small=True), "its share is its share, of whatever size"
    assert all(held.take(f"198.51.100.{n}", 16, small=False) for n in (1, 2))
    assert not held.take("198.51.100.3", 1, small=False), "48 of 64: the rest is for small ones"
    assert held.take("198.51.100.3", 16, small=True)
    assert not held.take("198.51.100.4", 1, small=True)
    held.give_back("203.0.113.7", 16)
    assert held.take("203.0.113.7", 4, small=True)
    assert HeldBytes(64, 0).take("127.0.0.1", 64, small=False), "behind loopback are this machine's own processes"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.booleans())))
def test_what_is_given_back_was_held(steps) -> None:
    held, mine = HeldBytes(64, 16), []
    for group, size, small in steps:
        if held.take(group, size, small=small):
            mine.append((group, size))
        assert held.total == sum(size for _, size in mine) <= 64
    for group, size in mine:
        held.give_back(group, size)
    assert (held.total, held._of) == (0, {})
