"""Several processes on one host, each with its share of the GPUs."""

import os
import socket
import subprocess


def visible():
    """The GPUs that a process sees here, as CUDA_VISIBLE_DEVICES lists them."""
    if chosen := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return chosen.split(",")
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    return [str(number) for number, _ in enumerate(listed.stdout.splitlines())]


def free_port():
    """A port of this host on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(command, count, *, gpus=None, **options):
    """Starts `command NUMBER COUNT PORT` for each number, as many GPUs for each as for the others.

    Args:
      command: list of str.
      count: processes.
      gpus: how many GPUs they have together; None is all of them, 0 is none.
      options: further ones of `subprocess.Popen`.
    """
    all_gpus, port = [] if gpus == 0 else visible()[:gpus], free_port()
    each, started = len(all_gpus) // count, []
    environment = options.pop("env", os.environ)
    for number in range(count):
        mine = ",".join(all_gpus[number * each : (number + 1) * each])
        own = environment | {"CUDA_VISIBLE_DEVICES": mine}
        asked = [*command, str(number), str(count), str(port)]
        started.append(subprocess.Popen(asked, env=own, **options))
    return started
