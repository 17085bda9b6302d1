"""Converts images and videos to files."""

from io import BytesIO
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

FRAMES_PER_SECOND = 16
SIZE_MULTIPLE = 2
"""Factor of a video's height and width, since its colours have half the resolution."""

Pixels = npt.NDArray[np.uint8]


def save(folder: Path, name: str, sample: Pixels) -> list[Path]:
    """Write an image (C, H, W) as PNG, or a video (F, C, H, W) as mp4 together with its frames."""
    folder.mkdir(parents=True, exist_ok=True)
    if sample.ndim == 3:
        return [_write(folder / f"{name}.png", as_png(sample))]
    frames = folder / name
    frames.mkdir(exist_ok=True)
    stills = [_write(frames / f"{n:04d}.png", as_png(frame)) for n, frame in enumerate(sample)]
    return [_write(folder / f"{name}.mp4", as_mp4(sample)), *stills]


def as_png(image: Pixels) -> bytes:
    """Encode an image (C, H, W), gray or in colour."""
    file = BytesIO()
    Image.fromarray(_rows(image)).save(file, format="PNG")
    return file.getvalue()


def from_png(data: bytes) -> Pixels:
    """Decode an image (C, H, W) that `as_png` has encoded."""
    rows = np.asarray(Image.open(BytesIO(data)), dtype=np.uint8)
    return rows[None] if rows.ndim == 2 else np.ascontiguousarray(rows.transpose(2, 0, 1))


def as_mp4(video: Pixels) -> bytes:
    """Encode a video (F, C, H, W) without an odd row or column at the edge."""
    import av

    file = BytesIO()
    height, width = (size - size % SIZE_MULTIPLE for size in video.shape[-2:])
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=FRAMES_PER_SECOND)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for image in video:
            rows = np.ascontiguousarray(_rows(image, gray=False)[:height, :width])
            for packet in stream.encode(av.VideoFrame.from_ndarray(rows, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return file.getvalue()


def _write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _rows(image: Pixels, *, gray: bool = True) -> Pixels:
    """Convert (C, H, W) to (H, W) if it is gray and ``gray`` allows it, otherwise to (H, W, 3)."""
    if image.shape[0] == 1 and gray:
        return np.ascontiguousarray(image[0])
    rgb = np.repeat(image, 3, axis=0) if image.shape[0] == 1 else image
    return np.ascontiguousarray(rgb.transpose(1, 2, 0))
