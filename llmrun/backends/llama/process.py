"""Starts the child process that runs llama.cpp, sends requests to it, and explains its crashes and errors.

The explanations come from llama.cpp's log, which says why a model failed to load, where its layers run, and what caused
an error of a GPU.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING, Any

from llmrun.backends.describe import threads_in_words
from llmrun.backends.llama.messages import FLAG_BYTES, SharedMemory, read_answer, request_line
from llmrun.backends.llama.saved_sequences import MemorySender
from llmrun.base import child_processes
from llmrun.base.errors import (
    BackendCrashed,
    DoesNotFit,
    LlmrunError,
    ModelFileError,
    UnsupportedModel,
    UsageError,
    shown,
)
from llmrun.base.machine.processor import NVIDIA_DRIVER

if TYPE_CHECKING:
    from llmrun.backends.llama.rpc_servers import RpcServer

_OFFLOADED = re.compile(r"offloaded (\d+/\d+) layers to GPU")
_LOG_PREFIX = re.compile(r"^(llama_\w+: |error loading model: )+")
_DEVICE = re.compile(r"using device \S+ \((.*)\) \([^()]*\) - (\d+) MiB free")


def refusal(path: str, reason: str, log: Sequence[str]) -> LlmrunError:
    """Return the error for a model that llama.cpp failed to load, based on the reason it gave and its log."""
    reason = _LOG_PREFIX.sub("", reason)
    sentence = f"llama.cpp cannot load this model: {path}: {shown(reason, 200)}"
    if "unknown model architecture" in reason or "unknown pre-tokenizer" in reason:
        return UnsupportedModel(
            sentence, hint="a newer llama-cpp-python may support it: pip install -U llama-cpp-python"
        )
    if "does not support split buffers" in reason:
        return UsageError(f"--split-mode row: {shown(reason, 200)}", hint="use --split-mode layer, the default")
    if "allocat" in reason or "out of memory" in reason:
        free = [f"{shown(name)} {int(megabytes):,} MiB" for name, megabytes in _DEVICE.findall("\n".join(log))]
        if free:
            return DoesNotFit(
                f"{sentence}; free GPU memory: {', '.join(free)}",
                hint="try --gpu-layers auto to offload only the layers that fit, or a smaller --ctx-size",
            )
        return DoesNotFit(sentence, hint="try a smaller --ctx-size, or a smaller model")
    return ModelFileError(sentence)


def placement_words(log: Sequence[str], threads: int) -> str:
    """Return where the layers run according to llama.cpp's log, such as "31/31 layers on NVIDIA H200, 2 threads"."""
    layers = offloaded(log)
    if not layers:
        return threads_in_words(threads)
    devices = " and ".join(shown(name) for name, _ in _DEVICE.findall("\n".join(log))) or "GPU"
    return f"{layers} layers on {devices}, {threads_in_words(threads)}"


def offloaded(log: Sequence[str]) -> str:
    """Return the number of offloaded layers and the total, such as "31/31", or "" if no layer is on a GPU."""
    layers = _OFFLOADED.search("\n".join(log))
    return layers[1] if layers and not layers[1].startswith("0/") else ""


REBUILD = "this build of llama.cpp is for other GPUs: `llmrun doctor` prints the command that builds it for this one"

# llama.cpp logs the cause of a GPU's error first. It then aborts with a message that names no cause.
_CAUSE = re.compile(r"^(?:CUDA|ROCm|MUSA) error: (.+)$", re.MULTILINE)
_VULKAN_CAUSE = re.compile(r"what\(\): +(vk::.+: Error\w+)$", re.MULTILINE)  # an uncaught exception
_INITIALIZING = re.compile(r"failed to initialize (?:CUDA|ROCm|MUSA): (.+)$", re.MULTILINE)
_NO_DEVICE = "no CUDA-capable device"
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_HIDE_ALL = ("", "-1")
_HIDING_FROM_VULKAN = "GGML_VK_VISIBLE_DEVICES"

# CUDA's descriptions of errors, in order of precedence, with the advice for each.
_ADVICE = (
    (r"no kernel image|device kernel image is invalid|unsupported toolchain", REBUILD),
    (
        r"driver version is insufficient|unsupported display driver|forward compatibility",
        "update NVIDIA's driver and restart the machine, or rebuild llama.cpp with an older CUDA toolkit",
    ),
    (
        r"CUDA.*out of memory|^out of memory|: out of memory",
        "check with nvidia-smi which programs use the GPU's memory; try fewer --gpu-layers, or a smaller --ctx-size",
    ),
    (r"busy or unavailable", "check with nvidia-smi which program uses the GPU; until it ends, use --backend cpu"),
    (
        r"launch failure|illegal|misaligned|ECC|NVLink|hardware|timed out|unknown error|unable to determine",
        "the GPU may have failed: look for Xid in the kernel's log; until the GPU works again, use --backend cpu",
    ),
    (r"^the variable ", "unset the variable to use the GPU"),
    (r"^Vulkan has no driver for", "list the devices with `vulkaninfo --summary`; they are numbered from 0"),
    (r"^Vulkan has no driver", "install a Vulkan driver, such as mesa-vulkan-drivers on Debian and Ubuntu"),
    (
        r"^Vulkan's drivers found no GPU",
        "check with `vulkaninfo --summary` which drivers work; on Linux, your user may have to be in the group render",
    ),
    (
        r"^Vulkan: .*OutOf(?:Device|Host)Memory",
        "close other programs that use the GPU; try fewer --gpu-layers, or a smaller --ctx-size",
    ),
    (r"^Vulkan: ", "the GPU or its driver may have failed: check the kernel's log, or use --backend cpu"),
    (
        r"libcuda\.so\S* cannot open",
        "install NVIDIA's driver, or rebuild llama.cpp with -DGGML_CUDA_NO_VMM=on to use it without a driver",
    ),
    (
        r"libcu(?:blas|blasLt|dart)\.so\S* cannot open",
        "install cuBLAS and the CUDA runtime of this version, or add their folder to LD_LIBRARY_PATH",
    ),
)


def gpu_error(output: str) -> str:
    """Return the cause of the last GPU error in llama.cpp's output, or "" if there is none."""
    causes = _CAUSE.findall(output) or [f"Vulkan: {what}" for what in _VULKAN_CAUSE.findall(output)]
    return causes[-1].strip() if causes else ""


def advice_for(cause: str) -> str:
    """Return what to do about a GPU error or a missing CUDA library, or "" for other errors."""
    return next((advice for pattern, advice in _ADVICE if re.search(pattern, cause)), "")


def why_no_gpu(log: str, vulkan: bool | None = None) -> str:
    """Return why a build with GPU support found no GPU, given llama.cpp's log, or "" if unknown.

    Without a driver, CUDA reports that the driver is too old, which is not returned because it is misleading.

    vulkan  whether Vulkan started, or None if this build of llama.cpp does not use it
    """
    from llmrun.base.machine.energy import nvidia_cards  # llama.cpp's process starts faster without it

    failed = _INITIALIZING.search(log)
    has_driver = NVIDIA_DRIVER.exists() or bool(nvidia_cards())
    if failed is not None and has_driver and _NO_DEVICE not in failed[1]:
        return failed[1].strip()
    if vulkan is not None:
        numbers = os.environ.get(_HIDING_FROM_VULKAN)
        if numbers is None:
            return "Vulkan's drivers found no GPU" if vulkan else "Vulkan has no driver"
        hiding = f"the variable {_HIDING_FROM_VULKAN} is '{numbers}'"
        return hiding if vulkan else f"Vulkan has no driver for these devices: {hiding}"
    for name in _HIDING:
        value = os.environ.get(name)
        if value is not None and (has_driver or value in _HIDE_ALL):
            return f"the variable {name} is '{value}'"
    return ""


_WORKER = "backends.llama.worker"
_KEPT_BYTES = 64 << 10  # how much of the end of stderr to keep, because it contains the reason for a crash
_EXIT_S = 5.0  # how long to wait for the process to exit
_STOP_S = 20.0  # how long to wait for the current work to stop; a GPU may be in the middle of a long prefill
_LOOK_MS = 500  # how often to look at the stop flag while RPC servers compute
_PIECE_BYTES = 1 << 20  # maximum size of one write
# These are the forms in which llama.cpp and the C++ library report a fatal error.
_REASON = re.compile(
    r"GGML_ASSERT\(.*|[\w-]+\.(?:cpp|c|cu|m):\d+: (?!GGML_ASSERT).*|.*what\(\):.*|.*CUDA error.*|.*: error: .*"
)


class LlamaProcess:
    """A child process that runs llama.cpp with one model at a time.

    Only `ask`, `settle`, `stop` and `kill` are thread-safe.
    """

    def __init__(self, worker: str = _WORKER) -> None:
        """Start the process, which runs the module `llmrun.WORKER`. Raises LlmrunError if that fails."""
        self.memory = SharedMemory.create()
        self.transfers = MemorySender()
        self._flag = self.memory.map(FLAG_BYTES)
        try:
            self._process = _start_worker(worker, self.memory, self.transfers)
        except OSError as error:
            self.memory.close()
            self.transfers.close()
            raise LlmrunError(f"cannot start a process for llama.cpp: {sys.executable}: {error.strerror}") from error
        self.transfers.child_started()
        self.rpc_servers: Sequence[RpcServer] = ()  # the servers to which llama.cpp is connected
        self._lost: str | None = None  # after a crash, which RPC server caused it, in words, or "" if none did
        self._requests = 0
        self._idle = True
        self._asking = threading.RLock()
        self._unread = b""
        self._stderr_tail = b""
        self._listener = threading.Thread(target=self._listen, args=(self._process.stderr,), daemon=True)
        self._listener.start()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def last_words(self) -> str:
        """The end of the output of llama.cpp, which says why it died."""
        return self._stderr_tail.decode(errors="replace")

    def ask(
        self, operation: str, doing: str, *, progress: Callable[[float], None] | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Send a request and return its answer. Thread-safe: requests of other threads wait.

        doing  a description of the work for error messages, such as "loading m.gguf"

        Raises BackendCrashed. On any other interruption, such as Ctrl-C, this stops the work and waits until it has
        stopped before it raises.
        """
        with self._asking:
            try:
                self._idle = False
                answer = self.answer(self.tell(operation, **fields), doing, progress)
                self._idle = True
                return answer
            except LlmrunError:
                raise
            except BaseException:
                self._wait_until_idle(doing)
                raise

    def settle(self, doing: str) -> None:
        """Wait until no request is running.

        A request may still be running if the user pressed Ctrl-C during it and again while `ask` waited for it to stop.
        This never raises BackendCrashed, because the next request will.
        """
        if not self._idle:
            with self._asking:
                if not self._idle:
                    self._wait_until_idle(doing)

    def tell(self, operation: str, **fields: Any) -> int:
        """Send a request and return its number, which `answer` needs.

        KeyboardInterrupt can truncate a request at any point. Each request therefore starts with a newline, so that the
        worker can skip an incomplete request before it. Answers that no caller is waiting for are skipped as well.
        """
        self._requests += 1
        number = self._requests
        line = b"\n" + request_line(operation, number, fields)
        descriptor = _pipe(self._process.stdin).fileno()
        with contextlib.suppress(BrokenPipeError):  # The process has died; `answer` will report it.
            written = 0
            while written < len(line):
                written += os.write(descriptor, line[written : written + _PIECE_BYTES])
        return number

    def answer(self, number: int, doing: str, progress: Callable[[float], None] | None = None) -> dict[str, Any]:
        """Wait for the answer to the request with this number. Raises BackendCrashed."""
        while True:
            answer = self._next_answer(doing)
            if answer.get("number") != number:
                continue
            if "broken" in answer:
                reinstall = f"reinstall it: {sys.executable} -m pip install --force-reinstall llama-cpp-python"
                raise LlmrunError(
                    f"llama-cpp-python does not work: {shown(answer['broken'], 300)}",
                    hint=advice_for(answer["broken"]) or reinstall,
                )
            if "progress" not in answer:
                return answer
            if progress is not None:
                progress(answer["progress"])

    def stop(self) -> None:
        """Stop the forward pass that is running, or the next one. Can be called from any thread or signal handler."""
        self._flag[0] = 1

    @property
    def stopping(self) -> bool:
        return self._flag[0] != 0

    def clear_stop(self) -> None:
        self._flag[0] = 0

    def kill(self) -> None:
        """Kill the process. Can be called from any thread. Waiting calls of `answer` raise BackendCrashed."""
        self._process.kill()

    def close(self) -> None:
        """End the process. This is idempotent."""
        try:
            if self._process.returncode is None:
                self.stop()
                if self._process.stdin is not None:
                    self._process.stdin.close()
                self._end()
        finally:
            self._process.kill()  # This has no effect unless the wait for the exit was interrupted.
            self._process.wait()
            self._listener.join(_EXIT_S)
            for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
                if pipe is not None:
                    pipe.close()
            self.memory.close()
            self.transfers.close()

    def _wait_until_idle(self, doing: str) -> None:
        """Stop the current work and wait until it has stopped. Kill the process if that takes longer than _STOP_S.

        If the wait itself is interrupted, the stop flag stays set, so the pass still ends.
        """
        self.stop()
        kill_timer = threading.Timer(_STOP_S, self.kill)
        kill_timer.daemon = True
        kill_timer.start()
        try:
            with contextlib.suppress(BackendCrashed):  # The next request will report the crash.
                self.answer(self.tell("rest"), doing)
            self.clear_stop()
            self._idle = True
        finally:
            kill_timer.cancel()

    def _end(self) -> int:
        """Wait for the process to exit, and kill it if that takes longer than _EXIT_S. Returns its exit status."""
        try:
            return self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _next_answer(self, doing: str) -> dict[str, Any]:
        descriptor = _pipe(self._process.stdout).fileno()
        while b"\n" not in self._unread:
            if self.rpc_servers:
                self._wait_for_servers(descriptor)
            data = os.read(descriptor, 1 << 16)
            if not data:
                raise self._crashed(doing)
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return read_answer(line)

    def _wait_for_servers(self, descriptor: int) -> None:
        """Wait until the process has answered or ended. Kill it if it does not stop within _STOP_S of `stop`.

        While llama.cpp waits for an RPC server, it does not look at the stop flag, and a server can be stuck forever.
        On Windows, waiting for a pipe has no time limit, so this does nothing there.
        """
        if sys.platform == "win32":
            return
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        since: float | None = None
        while not waiting.poll(_LOOK_MS):
            if not self.stopping:
                since = None
            elif since is None:
                since = time.monotonic()
            elif time.monotonic() - since > _STOP_S:
                names = " and ".join(server.name for server in self.rpc_servers)
                self._lost = f"gave up waiting for the RPC server{'s' if len(self.rpc_servers) > 1 else ''} {names}"
                self.kill()

    def _crashed(self, doing: str) -> BackendCrashed:
        status = self._end()
        self._listener.join(_EXIT_S)
        reasons = _REASON.findall(self.last_words)
        if self.rpc_servers and (reasons or self._lost):
            from llmrun.backends.llama.rpc_servers import LOST_HINT, lost_connection

            if self._lost is None:
                self._lost = lost_connection(self.rpc_servers, reasons[-1])
            if self._lost:
                return BackendCrashed(f"{self._lost} while {doing}", hint=LOST_HINT)
        cause = gpu_error(self.last_words)
        reason = cause or (reasons[-1].strip() if reasons else "")
        why = f": {shown(reason, 200)}" if reason else ""
        return BackendCrashed(
            f"llama.cpp died while {doing}: {child_processes.ending(status)}{why}",
            hint=advice_for(cause) or "try the CPU engine, which may support this model: --backend cpu",
        )

    def _listen(self, pipe: IO[bytes]) -> None:
        while data := os.read(pipe.fileno(), 1 << 16):
            self._stderr_tail = (self._stderr_tail + data)[-_KEPT_BYTES:]


def _start_worker(worker: str, memory: SharedMemory, transfers: MemorySender) -> subprocess.Popen[bytes]:
    """Start the worker in its own process group.

    The terminal sends Ctrl-C to all processes in the foreground group. If the worker were in that group, it could be
    interrupted while it is starting.
    """
    return subprocess.Popen(
        child_processes.command(worker, memory.handle, transfers.handle),
        bufsize=0,  # With a buffer, closing the pipe would have to flush it, which blocks if the worker hangs.
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=memory.inherited + transfers.inherited,
        **child_processes.in_own_group(),
        # Without GGML_NO_BACKTRACE, llama.cpp attaches a debugger to itself when it crashes.
        env={**child_processes.environment(), "GGML_NO_BACKTRACE": "1"},
    )


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None or pipe.closed:
        raise LlmrunError("the process that runs llama.cpp has been closed")
    return pipe
