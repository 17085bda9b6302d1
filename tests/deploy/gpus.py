"""GPUs that are faked for a container: device nodes, a driver's program that lists them, and a
torch that tries them. A worker on such a GPU waits for ever where it imports torch."""

import json
from pathlib import Path

from tests.deploy.lab import docker

MAJOR = 195
"""Number of NVIDIA's driver in its device nodes."""
NVIDIA_SMI = """#!/bin/sh
for node in /dev/nvidia[0-9]*; do
    gpu=${node#/dev/nvidia}
    if [ "$1" = -L ]; then echo "GPU $gpu: NVIDIA H200 (UUID: GPU-$gpu)"
    else echo "$gpu, GPU-$gpu, NVIDIA H200, 143771"; fi
done
"""
TORCH = f"""
import os, sys, time, types

if "serve" in sys.argv:
    time.sleep(3600)
__version__, Tensor, OutOfMemoryError = "faked", object, MemoryError
GPU = types.SimpleNamespace(type="cuda", name="NVIDIA H200", major=9, minor=0)
cuda = types.SimpleNamespace(
    mem_get_info=lambda device: (1 << 37, 1 << 37), get_device_properties=lambda index: GPU)
device = lambda kind, index: GPU

class ones:
    def __init__(self, *shape, device):
        gpu = int(os.environ["CUDA_VISIBLE_DEVICES"])
        assert os.stat(f"/dev/nvidia{{gpu}}").st_rdev == os.makedev({MAJOR}, gpu)

    __matmul__ = sum = item = lambda self, *others: self
"""
LIST_WORKERS = r"""
import contextlib, json, pathlib, re
gpus = {}
for each in pathlib.Path("/proc").glob("[0-9]*"):
    with contextlib.suppress(OSError):  # it has ended
        words = (each / "cmdline").read_text().split("\0")
        variables = "\0" + (each / "environ").read_text()
        if "serve" in words:
            found = re.findall("\0CUDA_VISIBLE_DEVICES=([^\0]*)", variables)
            gpus.setdefault(words[words.index("--worker") + 1], []).extend(found)
print(json.dumps(gpus))
"""


def fake_gpus(folder: Path, count: int) -> Path:
    """Return a compose file that gives the container `host` this number of GPUs."""
    driver = folder / "driver"
    driver.mkdir(exist_ok=True)
    (driver / "nvidia-smi").write_text(NVIDIA_SMI)
    (driver / "nvidia-smi").chmod(0o755)
    (driver / "torch.py").write_text(TORCH)
    nodes = [driver / f"nvidia{gpu}" for gpu in range(count)]
    made = "; ".join(f"mknod -m 666 {each} c {MAJOR} {gpu}" for gpu, each in enumerate(nodes))
    docker(
        "run", "--rm", "--network=none", "--user=0", "--entrypoint=sh",
        f"--volume={folder}:{folder}", "digenrl-host", "-c", f"rm -f {driver}/nvidia[0-9]*; {made}",
    )  # fmt: skip
    file = folder / f"gpus-{count}.yml"
    path = "/driver:/opt/venv/bin:/usr/bin:/bin"
    file.write_text(
        "services: { host: { deploy: !reset null, "
        f"devices: {json.dumps([f'{each}:/dev/{each.name}' for each in nodes])}, "
        f"volumes: ['{driver}:/driver:ro'], "
        f"environment: {{ PATH: '{path}', PYTHONPATH: '/driver:/app', DIGENRL_STARTER: 'off' }}"
        " } }\n"
    )
    return file


def workers_in(container: str) -> dict[str, list[str]]:
    """Return CUDA_VISIBLE_DEVICES of each process of each worker in a container."""
    gpus: dict[str, list[str]] = json.loads(docker("exec", container, "python", "-c", LIST_WORKERS))
    return gpus
