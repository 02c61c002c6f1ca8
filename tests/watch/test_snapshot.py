"""What is sent of a snapshot, and of the next one only what is new."""

import json
import math
from dataclasses import replace

from snapshots import NOW, STATES, finished, training

from paceline.watch.snapshot import Series, changes, to_text


def test_the_same_snapshot_again_sends_nothing():
    assert changes(training(), training()) == {}


def test_a_grown_curve_is_sent_from_its_first_new_point():
    before = training()
    loss = before.series["loss"]
    grown = Series([*loss.steps, 1250], [*loss.values, 2.5], [*loss.times, NOW])
    told = changes(before, replace(before, series={**before.series, "loss": grown}))
    assert told == {"curves": {"series": {"loss": {"from": 124, "steps": [1250], "values": [2.5], "times": [NOW]}}}}


def test_a_thinned_curve_is_sent_from_the_first_point_that_differs():
    before = replace(training(), series={"loss": Series([1, 2, 3, 4], [4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0])})
    after = replace(before, series={"loss": Series([1, 2, 4], [4.0, 3.0, 1.0], [1.0, 2.0, 4.0])})
    assert changes(before, after)["curves"]["series"]["loss"] == {
        "from": 2,
        "steps": [4],
        "values": [1.0],
        "times": [4.0],
    }


def test_a_curve_that_is_cut_or_gone_is_told():
    before = replace(training(), series={"a": Series([1, 2], [1.0, 2.0], [0.0, 1.0]), "b": Series([1], [1.0], [0.0])})
    after = replace(before, series={"a": Series([1], [1.0], [0.0])})
    told = changes(before, after)["curves"]["series"]
    assert told == {"a": {"from": 1, "steps": [], "values": [], "times": []}, "b": None}


def test_of_parts_only_those_that_changed_are_sent():
    assert set(changes(training(), finished())["parts"]) == {"ranks", "hosts", "events", "attempts"}


def test_what_is_no_number_goes_out_as_null():
    series = {"loss": Series([1, 2], [math.nan, 1.23456789], [0.0, 1.0])}
    message = changes(None, replace(training(), series=series, loss=math.inf))
    sent = json.loads(to_text(message), parse_constant=lambda word: word)
    assert (sent["head"]["loss"], sent["curves"]["series"]["loss"]["values"]) == (None, [None, 1.2345679])


def test_every_state_can_be_sent_and_a_name_that_is_no_utf8_too():
    for state in STATES.values():
        assert json.loads(to_text(changes(None, state(NOW))))["head"]["state"] == state(NOW).state
    assert json.loads(to_text({"name": "caf\udce9"})) == {"name": "caf?"}
