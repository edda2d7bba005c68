"""Times of several things side by side, and the memory of one thing in a process of its own."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from multiprocessing import get_context

import torch
import transformers
from tqdm import tqdm


def interleaved(runs: dict[Hashable, Callable[[], float]], rounds: int, what: str) -> dict[Hashable, list[float]]:
    """Calls all `runs`, which return their seconds, once to warm up and then in turn for so many rounds: what slows the
    machine down for a while slows all of them."""
    taken = {name: [] for name in runs}
    with tqdm(total=(rounds + 1) * len(runs), desc=what) as bar:
        for number in range(rounds + 1):
            for name, run in runs.items():
                bar.set_postfix_str(" ".join(map(str, name)) if isinstance(name, tuple) else str(name))
                seconds = run()
                if number:
                    taken[name].append(seconds)
                bar.update()
    return taken


def timed(function: Callable[[], object], device: str) -> float:
    """Seconds of one call, on a GPU until it is really done."""
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def spread(seconds: list[float]) -> dict[str, float]:
    return {"median": statistics.median(seconds), "least": min(seconds), "most": max(seconds)}


def in_own_process(function: Callable, *args):
    """The result of `function(*args)` in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def added_memory(function: Callable[[], object], device: str) -> int:
    """Bytes that a call needed at its peak beyond what was held before; on a CPU, of the process's resident memory. (What was freed
    before and not given back is held: in a fresh process there is little of that.)"""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the highest point is from now on
    before = _resident("VmRSS")
    function()
    return _resident("VmHWM") - before


def _resident(what: str) -> int:
    """Bytes of resident memory by Linux's own account, now (`VmRSS`) or at most (`VmHWM`). (The maximum that `getrusage`
    reports is no good: a process has it from the one that started it.)"""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(what + ":"))


def machine(device: str) -> dict:
    """Where the numbers come from."""
    name = platform.processor() or platform.machine()
    if torch.device(device).type == "cuda":
        name = torch.cuda.get_device_name(device)
    elif os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            name = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), name)
    return {
        "processor": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "allocator": {name: value for name, value in os.environ.items() if name.startswith(("MALLOC_", "LD_PRELOAD"))},
        "date": date.today().isoformat(),
    }
