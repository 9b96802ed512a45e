"""What stands in for CUDA graphs on a CPU: a step's operators, replayed on the memory that they used, without Python.

As on a device, a recording holds addresses, shapes and Python's numbers. What reads a value on the host, gives a shape
that depends on values, makes a tensor of Python's numbers or copies between devices cannot be recorded. Recordings
share the memory of what they compute on the way, at its worst: before a replay all of it is garbage, in each of them.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvlab.streams import ThreadStreams

NOT_RECORDED = {"item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "lift_fresh"}


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Recording(TorchDispatchMode):
    """The operators of a step with the tensors that they read and gave."""

    def __init__(self):
        super().__init__()
        self.calls = []

    @classmethod
    def _should_skip_dynamo(cls):
        """Torch's own way to leave its compiler, which takes seconds to import, out of this."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(tensor.dtype == torch.bool for tensor in tensors(args[1:]))
        if name in NOT_RECORDED or by_mask:
            raise RuntimeError(f"{func} is not permitted while a graph is recorded")
        out = func(*args, **kwargs)
        if len({tensor.device for tensor in tensors((args, kwargs, out))}) > 1:
            raise RuntimeError(f"{func} between host and device is not permitted while a graph is recorded")
        given = {place(tensor) for tensor in tensors((args, kwargs))}
        own = [
            tensor for tensor in tensors(out) if place(tensor) not in given
        ]  # the others: views, or written in place
        self.calls.append((func, args, kwargs, out, own))
        return out

    def spoil(self):
        """NaN in every float, and in whole numbers what no index or position can be."""
        for *_, own in self.calls:
            for tensor in own:
                tensor.fill_(torch.nan if tensor.dtype.is_floating_point or tensor.dtype.is_complex else -1)

    def replay(self):
        for func, args, kwargs, out, own in self.calls:
            new = dict(zip(map(id, tensors(out)), tensors(func(*args, **kwargs)), strict=True))
            for tensor in own:
                tensor.copy_(new[id(tensor)])


def place(tensor):
    """Where its bytes are; a packed weight has no storage that could be asked, and no views."""
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage()._cdata


class StandInRecorder:
    """A `kvlab.streams.Recorder`. Counts: `recordings`, `replays`."""

    def __init__(self):
        self.recordings, self.replays = [], 0

    def __call__(self, step):
        step()
        recording = Recording()
        with recording:
            out = step()
        self.recordings.append(recording)

        def replay():
            self.replays += 1
            with torch.inference_mode():  # as a device does, it writes whatever tensor has the memory
                for each in self.recordings:
                    each.spoil()
                recording.replay()
            return out

        return replay


class RecordingStreams(ThreadStreams):
    """A CPU's streams that record: `stand_in`."""

    def __init__(self):
        super().__init__()
        self.stand_in = StandInRecorder()

    def recorder(self):
        return self.stand_in
