"""Sessions on a GPU. What is there so far: a refusal that says why."""

from __future__ import annotations

import pytest

import ooc
from ooc.errors import DeviceUnavailable


@pytest.mark.gpu
def test_a_session_on_a_gpu_is_refused_until_it_is_there() -> None:
    with pytest.raises(DeviceUnavailable, match="there is a GPU, but torch's CUDA allocator is not connected"):
        ooc.Session("64MiB", device="cuda")
