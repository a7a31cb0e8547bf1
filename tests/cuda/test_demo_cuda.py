"""`ooc demo --device cuda` over the fake: the same losses in core and within half of what a step needs."""

from __future__ import annotations

import pytest
import torch

from ooc.cli.main import main


def test_the_demo_tells_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device", "fake", "--budget", "8MiB", "--steps", "6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["in core, step 0", "in core, step 1"]
    assert "losses equal to the last bit: 6 of 6" in lines
    (held,) = (line for line in lines if line.startswith("tensors at the worst moment"))
    assert "held, budget 8.0 MiB" in held
    (planned,) = (line for line in lines if line.startswith("planned steps"))
    assert int(planned.split()[2]) >= 2, planned
    assert "moved out" in lines[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "--device tpu: there is no such device. Options: cpu, cuda"),
        (["--device", "cuda", "--model", "none"], "no model is called 'none'"),
        (["--device", "cuda", "--steps", "2"], "leaves no planned step"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_without_a_gpu_the_childs_words_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert main(["demo", "--device", "cuda", "--steps", "4"]) == 1
    assert "sees no CUDA device.\n  Options: ooc doctor --device cuda" in capsys.readouterr().err
