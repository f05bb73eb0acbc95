"""The training step of a benchmark, and the batch that stays on the device: the most that any loader can reach."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fastdata.errors import UsageError
from fastdata.task import Loader, Task, load_object

if TYPE_CHECKING:
    from fastdata.ranks import Ranks

MODELS = ("resnet18", "resnet50", "vit_b_16")
"""torchvision models by name; anything else is ``package.module:factory``, called without arguments."""
CLASSES = 1000
RUN_AHEAD_STEPS = 2
"""Steps that the host may launch before the device has finished the oldest: enough to keep the device busy, few enough
that the loop feels a late batch."""

WAIT_HIDDEN = (
    f"in training on a GPU the host runs up to {RUN_AHEAD_STEPS} steps ahead, so that a wait may hide behind the GPU's"
    " work: the share of the ceiling tells what waiting costs"
)
"""Why a row has no share of time spent in waiting for data."""


def synchronise(device: str) -> None:
    """Wait until the device has finished all that it was given; "cpu" has always.

    On a GPU it may spin: for the ends of windows, not for their inside.
    """
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(device)


class Trainer:
    """Runs SGD steps of a model: bf16 weights and images on a GPU (float32 on the CPU), channels_last."""

    def __init__(self, model: str, device: str, *, compiled: bool, ranks: Ranks) -> None:
        """Build the model on the device.

        Args:
            model: One of `MODELS` or ``package.module:factory``.
            device: "cpu" or "cuda:N".
            compiled: Whether to apply ``torch.compile``.
            ranks: With more than one, gradients are averaged by DistributedDataParallel.
        """
        import torch

        self._device = device
        self._dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
            torch.backends.cudnn.benchmark = True
        torch.manual_seed(0)
        network = build_model(model).to(device=device, dtype=self._dtype, memory_format=torch.channels_last).train()
        if ranks.world_size > 1:
            network = torch.nn.parallel.DistributedDataParallel(network)
        self._network: Any = torch.compile(network) if compiled else network
        self._optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)
        self._loss = torch.nn.CrossEntropyLoss()
        self._running: deque[Any] = deque()
        self._facts = {
            "model": model,
            "compiled": compiled,
            "weights": str(self._dtype).removeprefix("torch."),
            "memory_format": "channels_last",
            "optimizer": "SGD, momentum 0.9",
        }

    def step(self, batch: Any) -> None:
        """Launch one step on a batch; waits while more than `RUN_AHEAD_STEPS` steps run.

        Labels are taken modulo the model's outputs, and 0 where there are none or many a sample: the time of a step
        does not depend on them.
        """
        import torch

        images, labels = batch
        output = self._network(images.to(dtype=self._dtype, memory_format=torch.channels_last))
        if labels is None or labels.ndim != 1:
            labels = torch.zeros(len(images), dtype=torch.int64, device=images.device)
        loss = self._loss(output, labels.remainder(output.shape[1]))
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._device.startswith("cuda"):
            event = torch.cuda.Event(blocking=True)  # otherwise waiting for it spins, and counts as CPU time
            event.record()
            self._running.append(event)
            if len(self._running) > RUN_AHEAD_STEPS:
                self._running.popleft().synchronize()

    def describe(self) -> dict[str, Any]:
        """Return model, precision and optimizer, for the row."""
        return dict(self._facts)


def check_model(name: str) -> None:
    """Check a model's name without building it.

    Raises:
        UsageError: No model has this name.
    """
    if ":" not in name and name not in MODELS:
        raise UsageError("--model", f"{name!r}", "one of " + ", ".join(MODELS) + ', or "package.module:factory"')


def build_model(name: str) -> Any:
    """Return a new model.

    Raises:
        UsageError: No model has this name.
    """
    check_model(name)
    if ":" in name:
        return load_object(name)()
    import torchvision

    return getattr(torchvision.models, name)(num_classes=CLASSES)


class _OneBatch:
    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._batch


def cached_batch(task: Task) -> Loader:
    """Return a loader whose one batch of noise already lies on the device."""
    import torch

    device, dtype = torch.device(task.device), getattr(torch, task.dtype)
    shape = (task.batch_size, 3, task.size, task.size)
    noise = torch.randint(256, shape, device=device) if task.dtype == "uint8" else torch.randn(shape, device=device)
    images = noise.to(dtype=dtype, memory_format=torch.channels_last)
    labels = torch.randint(CLASSES, (task.batch_size,), device=device)
    facts = {
        "source": "one batch on the device",
        "order": "none",
        "samples": task.batch_size,
        "workers": 0,
        "prefetch": 0,
    }
    return Loader(_OneBatch((images, labels)), ready_batches=0, facts=facts)
