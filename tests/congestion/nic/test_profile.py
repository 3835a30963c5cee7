"""Profiles: what may be loaded, what is refused and in which words."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from congestion.nic.profile.file import build_profile, load_profile
from congestion.nic.profile.parameters import PARAMETERS
from netlayer.config.file import example
from netlayer.errors import ConfigError
from tests.congestion.nic.changes import EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_good_and_say_their_name(name):
    assert load_profile(example(f"profiles/{name}")).name == name


def test_nothing_given_is_the_common_lossless_default():
    profile = build_profile({})
    assert profile.traffic.tos == 106
    assert profile.pfc.priorities == [3]
    assert (profile.cnp.dscp, profile.cnp.priority) == (48, 6)
    assert not profile.dcqcn


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"trafic": {}}, "trafic: unknown key; did you mean traffic?"),
        ({"dscp": 26}, "dscp: unknown key; did you mean traffic.dscp or cnp.dscp?"),
        ({"retransmission": {"timout": 18}}, "retransmission.timout: unknown key; did you mean timeout?"),
        ({"dcqcn": {"rp_ai_rat": 5}}, "dcqcn.rp_ai_rat: unknown key; did you mean rp_ai_rate?"),
        ({"dcqcn": {"np_cnp_dscp": 48}}, "dcqcn.np_cnp_dscp: unknown key; it is cnp.dscp here"),
        ({"dcqcn": {"rp_ai_rate": 0}}, "dcqcn.rp_ai_rate = 0: must be 1..131071 Mb/s; the NIC's default is 5"),
        ({"dcqcn": {"rp_ai_rate": 5.0}}, "dcqcn.rp_ai_rate = 5.0: must be a whole number; give 1..131071 Mb/s"),
        ({"dcqcn": {"rp_clamp_tgt_rate": 2}}, "dcqcn.rp_clamp_tgt_rate = 2: must be true or false"),
        ({"dcqcn": {"rp_gd": "11"}}, "dcqcn.rp_gd = 11: must be a whole number"),
        ({"dcqcn": 5}, "dcqcn = 5: must be a valid table of keys"),
        ({"traffic": {"dscp": 64}}, "traffic.dscp = 64: must be less than or equal to 63"),
        ({"traffic": {"priority": True}}, "traffic.priority = True: must be a valid integer"),
        ({"retransmission": {"retry_cnt": 13}}, "retransmission.retry_cnt = 13: must be less than or equal to 7"),
        ({"retransmission": {"timeout": 0}}, "retransmission.timeout = 0: must be greater than or equal to 1"),
        ({"law": "cubic"}, "law = cubic: must be 'dcqcn'"),
        ({"name": "a; rm"}, "name = a; rm: must match pattern"),
        ({"pfc": {"priorities": [2]}}, "omits traffic.priority = 3"),
        ({"pfc": {"priorities": [3, 3]}}, "names a priority twice"),
        ({"link_pause": True}, "stops every priority, pfc.priorities = [3] some"),
        ({"law": "none", "dcqcn": {"rp_gd": 11}}, "has no effect under law = none"),
        ({"dcqcn": {"rp_max_rate": 10, "rp_min_rate": 11}}, "dcqcn.rp_min_rate = 11: is above rp_max_rate = 10"),
        ({"switch": {"kmin_bytes": 2, "kmax_bytes": 1}}, "switch.kmin_bytes = 2: is above switch.kmax_bytes = 1"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tree, message):
    with pytest.raises(ConfigError) as caught:
        build_profile(tree)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@given(st.sampled_from(sorted(PARAMETERS)), st.integers(-(2**40), 2**40))
def test_a_parameter_is_accepted_within_its_range_alone(name, value):
    known = PARAMETERS[name]
    if known.low <= value <= known.high:
        assert build_profile({"dcqcn": {name: value}}).dcqcn == {name: value}
    else:
        with pytest.raises(ConfigError, match="must be"):
            build_profile({"dcqcn": {name: value}})


_LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=8)


@settings(max_examples=40)
@given(st.recursive(_LEAVES, lambda one: st.lists(one) | st.dictionaries(st.text(max_size=8), one), max_leaves=5))
def test_any_other_tree_is_refused_in_our_words(tree):
    try:
        build_profile({"dcqcn": tree, "pfc": tree} if not isinstance(tree, dict) else tree)
    except ConfigError as exc:
        said = str(exc)
    else:
        said = ""
    assert "\n" not in said


def test_a_key_of_several_lines_is_refused_in_one():
    with pytest.raises(ConfigError, match=r"\Aa b: unknown key[^\n]+\Z"):
        build_profile({"a\nb": None})


@pytest.mark.parametrize("text", ["a = ", "[", "\x00", "dcqcn = " + "[" * 5_000])
def test_what_is_no_toml_is_refused(text, tmp_path):
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(ConfigError, match="is not TOML"):
        load_profile(tmp_path / "p.toml")


def test_files_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no such file; examples/profiles/ has some"):
        load_profile(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_profile(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"name = '\xff'")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_profile(tmp_path / "latin.toml")
