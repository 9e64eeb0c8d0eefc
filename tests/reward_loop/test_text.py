"""Target texts, the edit distance and the score made of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_omni.reward_loop.item import ScoreError
from verl_omni.reward_loop.text import edit_distance, normalised, quoted_text, target_text, text_score

texts = st.text(alphabet="abAB é", max_size=8)


def slow_distance(a: str, b: str) -> int:
    """The definition, written as it stands."""
    if not a or not b:
        return len(a) + len(b)
    replaced = slow_distance(a[1:], b[1:]) + (a[0] != b[0])
    return min(replaced, slow_distance(a[1:], b) + 1, slow_distance(a, b[1:]) + 1)


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [("kitten", "sitting", 3), ("", "", 0), ("", "abc", 3), ("abc", "", 3), ("flaw", "lawn", 2), ("ab", "ba", 2)],
)
def test_known_distances(a, b, distance):
    assert edit_distance(a, b) == distance


@given(st.text(alphabet="ab", max_size=5), st.text(alphabet="abc", max_size=5))
def test_the_distance_is_the_recursive_definition(a, b):
    assert edit_distance(a, b) == slow_distance(a, b)


@given(texts, texts, texts)
def test_the_distance_is_a_metric(a, b, c):
    assert (edit_distance(a, b) == 0) == (a == b)
    assert edit_distance(a, b) == edit_distance(b, a)
    assert edit_distance(a, c) <= edit_distance(a, b) + edit_distance(b, c)


@given(texts, texts)
def test_the_distance_is_bounded_by_the_lengths(a, b):
    assert abs(len(a) - len(b)) <= edit_distance(a, b) <= max(len(a), len(b))


@given(texts, texts.filter(str.strip))
def test_the_score_is_its_formula(read, target):
    r, t = normalised(read), normalised(target)
    expected = max(0.0, 1 - edit_distance(r, t) / len(t))
    assert text_score(read, target) == pytest.approx(expected)
    assert text_score(read, target, ignore_extra_text=True) == pytest.approx(1.0 if t in r else expected)


@pytest.mark.parametrize(
    ("read", "score"),
    [
        ("HELLO 42", 1.0),
        ("hello42", 1.0),
        ("h e l l o\n42", 1.0),
        ("ＨＥＬＬＯ 42", 1.0),
        ("HELLO 43", 6 / 7),
        ("HELLO", 5 / 7),
        ("xHELLO 42", 6 / 7),
        ("", 0.0),
        ("quite another text than that", 0.0),
    ],
)
def test_scores_of_hello_42(read, score):
    assert text_score(read, "HELLO 42") == pytest.approx(score)


@pytest.mark.parametrize(
    ("prompt", "quoted"),
    [
        ('a sign that says "OPEN"', "OPEN"),
        ("a sign that says “New York”", "New York"),
        ("ein Schild „Offen“ am Tor", "Offen"),
        ("une affiche «Ouvert»", "Ouvert"),
        ("a sign that says 'OPEN'", "OPEN"),
        ("the cat's sign says 'it's open' today", "it's open"),
        ("a sign that says ‘it’s open’", "it’s open"),
        ("the dog's sign 'no' says \"yes\"", "yes"),
        ('"TOP" above "BOTTOM"', "TOP BOTTOM"),
        ('an empty "" and a "full" one', "full"),
        ("the dogs' bowls and the cats' toys", None),
        ("it's a cat", None),
        ("a cat", None),
    ],
)
def test_the_quoted_part_of_a_prompt(prompt, quoted):
    assert quoted_text(prompt) == quoted


def test_the_ground_truth_goes_before_the_quotes():
    assert target_text('says "OPEN"', None) == "OPEN"
    assert target_text('says "OPEN"', "CLOSED") == "CLOSED"


def test_a_prompt_without_target_is_an_error_that_says_what_to_write():
    with pytest.raises(ScoreError, match=r"'a cat' has no text in quotes and no ground_truth; write .* double quotes"):
        target_text("a cat", None)
    with pytest.raises(ScoreError, match="is empty"):
        target_text('says "OPEN"', " ")
