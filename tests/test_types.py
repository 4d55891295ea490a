"""SamplingParams and Request: the rules users know, each refusal naming field, value and range."""

import math

import pytest

from octavo.errors import InvalidRequest
from octavo.types import Request, RequestOutputKind, SamplingParams

REFUSED = [
    ("n", 0), ("n", 1.5), ("n", True), ("n", 16385),
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", "1"), ("temperature", None),
    ("top_p", 0.0), ("top_p", 1.1), ("top_p", -1),
    ("top_k", -2), ("top_k", 1.0),
    ("min_p", -0.1), ("min_p", 1.1),
    ("presence_penalty", 2.1), ("frequency_penalty", -2.1),
    ("repetition_penalty", 0), ("repetition_penalty", -1),
    ("seed", 2**64), ("seed", 1.0), ("seed", "0"),
    ("stop", ""), ("stop", ["a", ""]), ("stop", [1]), ("stop", 5),
    ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("stop_token_ids", 5),
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "5"), ("max_tokens", True),
    ("min_tokens", -1), ("min_tokens", 17),
    ("logprobs", -2), ("logprobs", "five"), ("logprobs", 2.5), ("logprobs", [1]),
    ("prompt_logprobs", -2),
    ("allowed_token_ids", []), ("allowed_token_ids", [-1]),
    ("logit_bias", {-1: 5}), ("logit_bias", {"a": 1}), ("logit_bias", {5: "x"}), ("logit_bias", [5]),
    ("bad_words", [""]), ("bad_words", [3]),
    ("output_kind", "delta"),
]  # fmt: skip


@pytest.mark.case("LEN-01", "LP-06", "SMP-08")
@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_a_value_outside_its_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})
    assert name in str(caught.value)
    assert "must be" in str(caught.value)
    assert caught.value.param == name
    assert caught.value.status == 400


@pytest.mark.case("SMP-07")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400])
@pytest.mark.parametrize(
    "name",
    ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"],
)
def test_numbers_that_are_not_finite_are_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=name):
        SamplingParams(**{name: {5: value} if name == "logit_bias" else value})


def test_temperature_zero_is_greedy_and_switches_filters_off() -> None:
    params = SamplingParams(temperature=1e-6, top_p=0.5, top_k=3, min_p=0.1)
    assert params.greedy
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, 0, 0.0)
    with pytest.raises(InvalidRequest, match="n=2"):
        SamplingParams(temperature=0, n=2)


def test_tiny_temperatures_are_raised(caplog: pytest.LogCaptureFixture) -> None:
    assert SamplingParams(temperature=0.001).temperature == 0.01
    assert "0.001" in caplog.text


def test_values_take_one_form() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[3, 3, 1], top_k=-1, seed=-1, logprobs=True, logit_bias={"7": 300})
    assert params.stop == ("x",)
    assert params.stop_token_ids == (3, 1)
    assert (params.top_k, params.seed, params.logprobs) == (0, None, 1)
    assert params.logit_bias == {7: 100.0}
    assert SamplingParams(seed=0).seed == 0
    assert SamplingParams(max_tokens=None).max_tokens is None


def test_stop_strings_need_text() -> None:
    with pytest.raises(InvalidRequest, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_an_unknown_keyword_names_the_nearest_known_one() -> None:
    with pytest.raises(TypeError, match="'temprature'.*'temperature'"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]


def test_keywords_of_other_engines_are_taken_when_harmless(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="octavo")
    assert SamplingParams(best_of=1, use_beam_search=False) == SamplingParams()  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="beam search"):
        SamplingParams(use_beam_search=True)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="it is called structured_outputs"):
        SamplingParams(guided_decoding={"json": "{}"})  # type: ignore[call-arg]


def test_stop_ids_join_the_model_s_own_unless_ignored() -> None:
    params = SamplingParams(stop_token_ids=[5])
    assert Request("a", (1,), params, frozenset({2})).stop_token_ids == {2, 5}
    ignoring = SamplingParams(stop_token_ids=[5], ignore_eos=True)
    assert Request("a", (1,), ignoring, frozenset({2})).stop_token_ids == {5}


def test_output_kind_is_kept() -> None:
    assert SamplingParams(output_kind=RequestOutputKind.DELTA).output_kind is RequestOutputKind.DELTA
