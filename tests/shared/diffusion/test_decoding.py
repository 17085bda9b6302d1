"""Decoding beside the denoising steps of the next fragment: same bytes, and memory for both."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, repeat

import pytest
import torch
from torch import Tensor

from shared.devices.protocols import GeneratedFragment
from shared.diffusion.generation import GenerationInProgress, Generator
from shared.diffusion.loading.models import Conditions
from shared.diffusion.policy import LoadedPolicy
from shared.diffusion.sampling.decoding import SharedDevice
from shared.diffusion.sampling.tensors import pack
from shared.diffusion.weights.trained_weights import trained_tensors
from shared.errors import OutOfMemory
from tests.shared.diffusion.digits import RECIPE, adapter, task

WAIT_S = 20.0


@pytest.fixture(autouse=True)
def nothing_to_collect(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("sampling.decoding", "loading.device"):
        monkeypatch.setattr(f"shared.diffusion.{module}.release", lambda device: None)


@pytest.fixture
def beside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as thread:
        yield thread


class Decoder:
    """A decoder that begins when a test lets it, and lacks memory as often as the test says."""

    def __init__(self, policy: LoadedPolicy, patch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        self.shortages = 0
        self._whole = policy.model.decode
        patch.setattr(policy.model, "decode", self)

    def __call__(self, latents: Tensor) -> Tensor:
        self.begun.set()
        assert self.may_go_on.wait(WAIT_S)
        if self.shortages:
            self.shortages -= 1
            raise torch.OutOfMemoryError("tried to allocate 60 GiB")
        return self._whole(latents)


@pytest.fixture
def decoder(policy: LoadedPolicy, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    return Decoder(policy, monkeypatch)


def denoised(generator: Generator, group: int) -> GenerationInProgress:
    work = generator.begin(task(group))
    while not work.done:
        generator.advance(work)
    return work


def content(made: GeneratedFragment) -> tuple[bytes, bytes, str]:
    return made.trajectory, made.media, made.weights_digest


def straight(policy: LoadedPolicy, *groups: int) -> list[tuple[bytes, bytes, str]]:
    generator = Generator(RECIPE, policy)
    return [content(generator.generate(task(group))) for group in groups]


def test_a_fragment_is_the_same_whatever_the_device_does_beside(
    policy: LoadedPolicy, monkeypatch: pytest.MonkeyPatch, beside: ThreadPoolExecutor
) -> None:
    wanted = straight(policy, 0, 1)
    decoder, generator = Decoder(policy, monkeypatch), Generator(RECIPE, policy)
    old = pack(trained_tensors(policy.model.transformer))
    found: list[Future[GeneratedFragment]] = []
    first = denoised(generator, 0)
    generator.check_finished(first)
    found.append(beside.submit(generator.packed, first))
    assert decoder.begun.wait(WAIT_S)
    second = denoised(generator, 1)
    generator.load(adapter(policy, 2))  # a new version between two fragments
    third = generator.begin(task(2))
    generator.advance(third)
    decoder.may_go_on.set()
    found.append(beside.submit(generator.packed, second))
    assert [content(each.result(WAIT_S)) for each in found] == wanted
    generator.load(old)


def test_decoding_that_finds_no_memory_is_done_again_between_two_steps(
    policy: LoadedPolicy, decoder: Decoder, beside: ThreadPoolExecutor
) -> None:
    decoder.may_go_on.set()
    wanted = straight(policy, 0, 1)
    generator = Generator(RECIPE, policy)
    first = denoised(generator, 0)
    decoder.begun.clear()
    decoder.shortages = 4  # four samples together, two, one, and that one once more
    with generator._shared.step():  # a step of the next fragment is under way
        found = beside.submit(generator.packed, first)
        assert decoder.begun.wait(WAIT_S)
        while decoder.shortages:
            time.sleep(0.001)
        assert not found.done(), "it waits for the step to end"
    assert content(found.result(WAIT_S)) == wanted[0]
    assert content(generator.generate(task(1))) == wanted[1]


def test_what_cannot_be_decoded_alone_fails_and_nothing_else_does(
    policy: LoadedPolicy, decoder: Decoder, beside: ThreadPoolExecutor
) -> None:
    decoder.may_go_on.set()
    wanted = straight(policy, 1)
    generator = Generator(RECIPE, policy)
    first, second = denoised(generator, 0), generator.begin(task(1))
    decoder.shortages = 10**6
    found = beside.submit(generator.packed, first)
    while not second.done:
        generator.advance(second)
    with pytest.raises(OutOfMemory, match="decoding one sample"):
        found.result(WAIT_S)
    decoder.shortages = 0
    assert content(generator.finish(second)) == wanted[0]
    assert second.shortage is None, "and from then on as many samples at a time as before"


def test_a_step_that_finds_no_memory_beside_decoding_waits_for_it_and_is_not_halved(
    policy: LoadedPolicy,
    decoder: Decoder,
    monkeypatch: pytest.MonkeyPatch,
    beside: ThreadPoolExecutor,
) -> None:
    decoder.may_go_on.set()
    wanted = straight(policy, 0, 1)
    generator = Generator(RECIPE, policy)
    first = denoised(generator, 0)
    decoder.begun.clear()
    decoder.may_go_on.clear()
    found = beside.submit(generator.packed, first)
    assert decoder.begun.wait(WAIT_S)
    whole, rows = policy.model.velocity, list[int]()

    def velocity(x: Tensor, sigma: Tensor, told: Conditions, *, guidance: float) -> Tensor:
        rows.append(len(x))
        if generator._shared._decoding.locked():
            decoder.may_go_on.set()
            raise torch.OutOfMemoryError("tried to allocate 20 GiB")
        return whole(x, sigma, told, guidance=guidance)

    monkeypatch.setattr(policy.model, "velocity", velocity)
    assert content(generator.generate(task(1))) == wanted[1]
    assert content(found.result(WAIT_S)) == wanted[0]
    assert rows[:2] == [rows[0]] * 2 and generator._at_once.most is None


def test_seconds_in_which_a_device_does_two_things_count_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A step from 0 to 4, decoding from 1 to 6 beside it, a step from 6 to 7.
    times = chain([0.0, 1.0, 4.0, 6.0, 6.0, 7.0], repeat(7.0))
    monkeypatch.setattr("shared.diffusion.sampling.decoding.time.monotonic", lambda: next(times))
    device, seconds = SharedDevice(torch.device("cpu")), list[float]()
    step, decodes = device.counted(seconds.append), device.counted(seconds.append)
    step.__enter__()
    decodes.__enter__()
    step.__exit__(None, None, None)
    decodes.__exit__(None, None, None)
    with device.counted(seconds.append):
        pass
    assert seconds == [4.0, 2.0, 1.0]
