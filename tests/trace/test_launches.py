"""Kernels that a host launches: what a call of the network takes of it."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from digenrl.trace.meter import Meter
from digenrl.trace.runs import TraceSetting, trace
from shared.devices.chunks import Chunk
from tests.trace.test_shipped import recipe_of


def test_views_and_new_memory_launch_nothing() -> None:
    fakes = FakeTensorMode()
    meter = Meter(fakes)
    with fakes, meter:
        layer = nn.Linear(8, 8)
        with meter.section(meter.live) as section, torch.no_grad():
            tokens = torch.empty(2, 4, 8)
            first, _ = layer(tokens).unflatten(-1, (2, 4)).transpose(1, 2).chunk(2)
            first.add_(1)
    assert section.launches == 2


@pytest.mark.night
def test_guidance_of_unlike_texts_takes_one_call_of_the_full_size_network() -> None:
    setting = TraceSetting(fragment=1, chunks=(Chunk(1, 1),))
    found = trace(recipe_of("qwen-image"), setting, is_published=True, say=lambda _: None)
    assert found.denoise[-1].launches <= 9_000
    assert found.training.passes[-1].launches <= 36_000
