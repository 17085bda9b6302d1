"""A rollout worker whose prompts edit an image, which lies in the store by its digest."""

import hashlib

from shared.messages.contracts import FragmentFailed, Prompt, SourceImage
from shared.run.layout import sources_folder
from tests import examples
from tests.rollout.worker import RUN, Cluster

FILE = b"what the file of the image holds"
IMAGE = SourceImage(sha256=hashlib.sha256(FILE).hexdigest(), size=len(FILE))


async def generate(cluster: Cluster) -> None:
    await cluster.bus.publish(examples.task(prompt=Prompt(text="thicker", image=IMAGE)))


async def test_the_device_is_given_the_file_that_the_task_names(cluster: Cluster) -> None:
    await cluster.store.put(sources_folder(RUN), FILE, suffix="")
    await generate(cluster)
    [event] = await cluster.told("fragment_generated")
    assert cluster.device.sources == [FILE]
    assert event.prompt.image == IMAGE  # type: ignore[union-attr]


async def test_an_image_that_the_store_does_not_have_fails_its_fragment(cluster: Cluster) -> None:
    await generate(cluster)
    [event] = await cluster.told("fragment_failed")
    assert isinstance(event, FragmentFailed)
    assert "source image" in event.reason and "is not in the store" in event.reason
    assert cluster.device.sources == []
