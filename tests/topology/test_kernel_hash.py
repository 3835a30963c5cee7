import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topology.ecmp.hashing import Headers
from topology.probe import kernel_hash
from topology.probe.kernel_hash import FibField, choose, multipath_hash


def _headers(src: int = 0x0A00_0101, dst: int = 0x0A00_0D02, ports: range = range(49152, 49156)) -> Headers:
    count = len(ports)
    return Headers(
        np.full(count, src, dtype=np.uint32), np.full(count, dst, dtype=np.uint32), np.array(ports, dtype=np.uint16)
    )


def test_siphash_has_its_published_values() -> None:
    key = (0x0706050403020100, 0x0F0E0D0C0B0A0908)
    none, one, two = (np.frombuffer(bytes(range(8 * n)), dtype="<u8")[None, :] for n in range(3))
    digests = [int(kernel_hash._siphash24(words, key)[0]) for words in (none, one, two)]
    assert digests == [0x726FDB47DD0E0E31, 0x93F5F5799A932462, 0x3F2ACC7F57C29BDB]


def test_hashes_are_those_that_linux_6_18_was_seen_to_choose_by() -> None:
    # The namespaces test holds every flow of a network against the model; these are the model's values then.
    assert multipath_hash(_headers(), seed=7).tolist() == [376654239, 1926656939, 273872065, 1212720509]
    assert multipath_hash(_headers(), seed=7, policy=0).tolist() == [1890021874, 1890021874, 1890021874, 1890021874]
    assert multipath_hash(_headers(), seed=7, policy=3, fields=FibField.SRC_PORT).tolist() == [
        360772172,
        204505217,
        1101718163,
        1437895298,
    ]


def test_both_directions_hash_alike() -> None:
    there, back = _headers(), _headers(src=0x0A00_0D02, dst=0x0A00_0101)
    assert (multipath_hash(there, seed=9) == multipath_hash(back, seed=9)).all()


@pytest.mark.parametrize(
    ("field", "other"),
    [
        (FibField.SRC_IP, {"src": 0x0A00_0105}),
        (FibField.DST_IP, {"dst": 0x0A00_0D09}),
        (FibField.SRC_PORT, {"ports": range(9, 13)}),
    ],
)
def test_only_chosen_fields_count(field: FibField, other: dict[str, int | range]) -> None:
    flows, changed = _headers(), _headers(**other)  # type: ignore[arg-type]
    rest = kernel_hash.LAYER4 & ~field
    assert (multipath_hash(flows, 3, 3, rest) == multipath_hash(changed, 3, 3, rest)).all()
    assert (multipath_hash(flows, 3, 3, field) != multipath_hash(changed, 3, 3, field)).all()


@given(st.lists(st.integers(1, 256), min_size=1, max_size=40))
def test_every_member_owns_its_part_of_the_range(weights: list[int]) -> None:
    edges = [round((1 << 31) * sum(weights[: i + 1]) / sum(weights)) for i in range(len(weights))]
    last = np.array(edges, dtype=np.uint32) - 1
    assert choose(last, weights).tolist() == list(range(len(weights)))
    assert choose(np.array([0, *last[:-1] + 1], dtype=np.uint32), weights).tolist() == list(range(len(weights)))


def test_another_seed_is_another_choice_and_so_cures_polarisation() -> None:
    flows = _headers(ports=range(49152, 49152 + 4000))
    first = choose(multipath_hash(flows, 1), (1, 1))
    for seed, used in ((1, 1), (2, 2)):
        second = choose(multipath_hash(flows, seed), (1, 1))
        assert len(np.unique(second[first == 0])) == used


@pytest.mark.parametrize(
    ("seed", "policy", "message"), [(0, 1, "seed = 0"), (1 << 32, 1, "seed"), (1, 2, "policy = 2")]
)
def test_what_is_not_modelled_is_refused(seed: int, policy: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        multipath_hash(_headers(), seed, policy)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weights"):
        choose(np.zeros(1, dtype=np.uint32), (1, 0))
