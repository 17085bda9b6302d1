"""Runs worlds in containers of Debian 12 (Python 3.11) and 13 (3.13), and compares their logs.

python -m tests.world.containers IMAGE_OF_12 IMAGE_OF_13 [SEEDS]     images have python3 with venv

Each has another PYTHONHASHSEED. What is in git is installed; PIP_FIND_LINKS, PIP_CERT and
SSL_CERT_FILE are passed on.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.paths import ROOT

PROGRAM = """
import sys
from tests.world.sweep import run_seed
print(sys.version.split()[0], file=sys.stderr)
for seed in range(int(sys.argv[1])):
    print(seed, run_seed(seed).digest, flush=True)
"""
INSTALL = (
    "mkdir /digenrl && cd /digenrl && tar -x && python3 -m venv /venv && "
    "/venv/bin/pip install -q -c constraints.txt uv >&2 && /venv/bin/uv pip install -q --python "
    "/venv/bin/python ${PIP_FIND_LINKS:+--find-links $PIP_FIND_LINKS} -c constraints.txt "
    "-c requirements.lock -e '.[dev]' >&2 && exec /venv/bin/python -c "
)


def logs(image: str, hash_seed: int, num_seeds: int) -> list[str]:
    """Return seeds and digests of their logs, as they are in a container of ``image``."""
    passed = {"PYTHONHASHSEED": str(hash_seed), "OMP_NUM_THREADS": "1"}
    mounted: set[str] = set()
    for name in ("PIP_FIND_LINKS", "PIP_CERT", "SSL_CERT_FILE"):
        if name in os.environ:
            passed[name] = os.environ[name]
            mounted |= {f"--volume={passed[name]}:{passed[name]}:ro"}
    given = [part for name, value in passed.items() for part in ("--env", f"{name}={value}")]
    shell = f'{INSTALL} "$0" {num_seeds}'
    run = [
        "docker",
        "run",
        "--rm",
        "--interactive",
        "--network=host",
        *given,
        *sorted(mounted),
        image,
    ]
    tree = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True)
    ran = subprocess.run(
        [*run, "sh", "-c", shell, PROGRAM], input=tree.stdout, stdout=subprocess.PIPE, check=True
    )
    return ran.stdout.decode().splitlines()


def main(old: str, new: str, num_seeds: str = "200") -> int:
    with ThreadPoolExecutor(2) as pool:
        olds, news = pool.map(logs, (old, new), (1, 2), (int(num_seeds),) * 2)
    other = [line for line in olds if line not in news]
    sys.stdout.write(f"{len(olds)} and {len(news)} worlds; other logs: {other or 'none'}\n")
    return 1 if other or len(olds) != len(news) else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
