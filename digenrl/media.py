"""Images and videos as files."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

FRAMES_PER_SECOND = 16
EVEN = 2
"""Height and width of a video are multiples of it: its colours have half the resolution."""


def save(folder: Path, name: str, sample: npt.NDArray[np.uint8]) -> list[Path]:
    """An image (C, H, W) as PNG; a video (F, C, H, W) as mp4, with its frames beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    if sample.ndim == 3:
        return [_save_image(folder / f"{name}.png", sample)]
    frames = folder / name
    frames.mkdir(exist_ok=True)
    stills = [_save_image(frames / f"{n:04d}.png", frame) for n, frame in enumerate(sample)]
    return [_save_video(folder / f"{name}.mp4", sample), *stills]


def _save_image(path: Path, image: npt.NDArray[np.uint8]) -> Path:
    Image.fromarray(_rows(image)).save(path)
    return path


def _save_video(path: Path, video: npt.NDArray[np.uint8]) -> Path:
    import av

    height, width = (size - size % EVEN for size in video.shape[-2:])
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=FRAMES_PER_SECOND)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for image in video:
            rows = np.ascontiguousarray(_rows(image, gray=False)[:height, :width])
            for packet in stream.encode(av.VideoFrame.from_ndarray(rows, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


def _rows(image: npt.NDArray[np.uint8], *, gray: bool = True) -> npt.NDArray[np.uint8]:
    """(H, W) if it is gray and may be, otherwise (H, W, 3)."""
    if image.shape[0] == 1 and gray:
        return np.ascontiguousarray(image[0])
    rgb = np.repeat(image, 3, axis=0) if image.shape[0] == 1 else image
    return np.ascontiguousarray(rgb.transpose(1, 2, 0))
