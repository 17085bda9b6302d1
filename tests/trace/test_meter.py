"""What is measured of work on fake tensors."""

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from digenrl.trace.meter import Meter

ROWS, WIDTH = 4, 8
ROW_BYTES = 4 * WIDTH


def test_storages_count_once_until_they_are_freed() -> None:
    fakes = FakeTensorMode()
    meter = Meter(fakes)
    with fakes, meter:
        base = meter.live
        with meter.section(base) as section:
            kept = torch.zeros(ROWS, WIDTH)
            views = [kept.t(), kept[1:], kept.view(-1)]
            gone = kept + 1
            del gone
            more = kept * 2
        assert section.peak_bytes == 2 * ROWS * ROW_BYTES
        assert meter.live - base == 2 * ROWS * ROW_BYTES
        del kept, more
        assert meter.live - base == ROWS * ROW_BYTES  # a view keeps it
        del views
        assert meter.live == base


def test_arithmetic_is_counted_by_phase_and_type() -> None:
    fakes = FakeTensorMode()
    meter = Meter(fakes)
    with fakes, meter:
        layer = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
        inputs = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        with meter.section(meter.live) as section:
            layer(inputs).sum().backward()
            with torch.no_grad():
                layer(inputs)
    product = 2 * ROWS * WIDTH * WIDTH
    assert section.flops("forward") == section.flops("without_gradient") == {"bfloat16": product}
    assert section.flops("backward") == {"bfloat16": 2 * product}


def test_what_is_computed_again_belongs_to_the_backward_pass() -> None:
    fakes = FakeTensorMode()
    meter = Meter(fakes)
    with fakes, meter:
        layer = nn.Linear(WIDTH, WIDTH, bias=False)
        inputs = torch.zeros(ROWS, WIDTH, requires_grad=True)
        with meter.section(meter.live) as section:
            again = checkpoint(lambda x: layer(x).relu(), inputs, use_reentrant=False)
            assert isinstance(again, torch.Tensor)
            again.sum().backward()
    product = 2 * ROWS * WIDTH * WIDTH
    assert section.flops("backward") == {"float32": 3 * product}


def test_what_a_module_holds_and_what_is_on_the_host_count_as_nothing() -> None:
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    meter, real = Meter(fakes), torch.zeros(ROWS, WIDTH)
    with fakes:
        layer = nn.Linear(WIDTH, WIDTH, bias=False)
    meter.hold(layer)
    with fakes, meter:
        with meter.section(meter.live) as section:
            rows = real[1:3]
            made = rows @ layer.weight.t()
        assert section.peak_bytes == len(made) * ROW_BYTES


def test_values_that_are_read_are_answered() -> None:
    fakes = FakeTensorMode()
    with fakes, Meter(fakes):
        values = torch.zeros(ROWS)
        assert float(values.sum()) == 1.0
        assert bool(values.isfinite().all())
