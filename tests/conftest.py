"""Options and skips that all tests share."""

from __future__ import annotations

import os
import signal

import pytest
import torch

os.environ["OOC_PLAN_CACHE"] = "0"  # each test plans for itself, whatever ran before it


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="tests marked gpu fail, rather than skip, where there is no CUDA device",
    )


def pytest_configure() -> None:
    # A shell without job control starts what runs in the background with Ctrl-C ignored, and children inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None or torch.cuda.is_available():
        return
    reason = "torch sees no CUDA device"
    if item.config.getoption("--require-gpu"):
        pytest.fail(f"--require-gpu: {reason}", pytrace=False)
    pytest.skip(reason)
