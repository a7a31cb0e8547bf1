"""Sizes as text: what parses, what is refused and with which words, and what comes out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ooc.units import GIB, KIB, MIB, TIB, format_duration, format_nbytes, format_rate, parse_nbytes


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (1, 1),
        (4096, 4096),
        (np.int64(4096), 4096),
        ("4096", 4096),
        ("4096B", 4096),
        ("12GiB", 12 * GIB),
        ("12GB", 12 * 10**9),
        ("400MiB", 400 * MIB),
        ("400 mib", 400 * MIB),
        ("  64KiB ", 64 * KIB),
        ("3kB", 3000),
        ("2TiB", 2 * TIB),
        ("1.5GiB", 3 * GIB // 2),
        (".5MiB", MIB // 2),
        ("0.1MB", 100_000),
        ("0.3KiB", 307),
        ("9007199254740993B", 9007199254740993),
    ],
)
def test_sizes_that_parse(value: str | int, nbytes: int) -> None:
    assert parse_nbytes(value) == nbytes


@pytest.mark.parametrize("text", ["12G", "12g", "1.5 G"])
def test_a_bare_g_is_refused_with_both_options(text: str) -> None:
    with pytest.raises(ValueError, match=r"could mean two sizes. Options: '[\d.]+GiB' .* or '[\d.]+GB'"):
        parse_nbytes(text, what="budget")


@pytest.mark.parametrize("text", ["", "  ", "GiB", "nan", "inf", "1e9", "twelve", "1.2.3MiB", "5 XB", "1GiB2", "0x10"])
def test_garbage_is_refused_with_the_units(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a size\. Options: .*MiB"):
        parse_nbytes(text)


@pytest.mark.parametrize("value", [0, -1, -(2**40), "0", "0GiB", "0.0001B"])
def test_nothing_below_one_byte(value: str | int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        parse_nbytes(value)


@pytest.mark.parametrize("text", ["-1", "-400MiB", "+1GiB", "\u0661MiB"])
def test_signs_and_other_digits_are_not_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_nbytes(text)


def test_a_fraction_without_a_unit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'0.5' has a fraction but no unit"):
        parse_nbytes("0.5")


@pytest.mark.parametrize("value", [0.5, 1e9, float("nan"), True, None, [1]])
def test_other_types_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match="give bytes as an integer"):
        parse_nbytes(value, what="chunk size")  # type: ignore[arg-type]


def test_the_message_names_the_quantity_and_the_value() -> None:
    with pytest.raises(ValueError, match="window 'lots' is not a size"):
        parse_nbytes("lots", what="window")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1.0 KiB"),
        (96 * MIB, "96.0 MiB"),
        (3 * GIB // 2, "1.5 GiB"),
        (-3 * GIB // 2, "-1.5 GiB"),
        (MIB - 1, "1.0 MiB"),
        (GIB - 1, "1.0 GiB"),
        (1456 * MIB, "1.4 GiB"),
        (5 * TIB, "5.0 TiB"),
    ],
)
def test_format_nbytes(nbytes: int, text: str) -> None:
    assert format_nbytes(nbytes) == text


@given(st.integers(min_value=1, max_value=2**49))
def test_formatted_sizes_are_near_and_never_reach_1024(nbytes: int) -> None:
    number, unit = format_nbytes(nbytes).split()
    assert float(number) < 1024
    assert abs(parse_nbytes(f"{number}{unit}") - nbytes) <= nbytes * 0.05


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0, "0 s"),
        (1.2e-8, "12.0 ns"),
        (12.34e-6, "12.3 us"),
        (999.6e-6, "1.00 ms"),
        (0.00456, "4.56 ms"),
        (1.234, "1.23 s"),
        (59.96, "1 min 00 s"),
        (125, "2 min 05 s"),
        (-125, "-2 min 05 s"),
        (7260, "2 h 01 min"),
    ],
)
def test_format_duration(duration_s: float, text: str) -> None:
    assert format_duration(duration_s) == text


@pytest.mark.parametrize(
    ("bytes_per_s", "text"), [(3.4e9, "3.40 GB/s"), (412e6, "412 MB/s"), (999.9e6, "1.00 GB/s"), (12, "12.0 B/s")]
)
def test_format_rate(bytes_per_s: float, text: str) -> None:
    assert format_rate(bytes_per_s) == text
