"""A CUDA machine for tests: several devices whose tensors are Python objects, and a record of what was called."""

GIB = 2**30


class StandIn:
    """Takes the place of ``torch.cuda``. A tensor is in use while its object lives, then cached until it is emptied."""

    def __init__(self, current=3, devices=4, total=80 * GIB, available=True):
        self.current, self.available, self.total = current, available, total
        self.allocated, self.cached = [0] * devices, [0] * devices
        self.peaks = [[0, 0] for _ in range(devices)]
        self.calls = []

    def tensor(self, size, device=None):
        return _Tensor(self, self.current if device is None else device, size)

    def note(self, device):
        now = (self.allocated[device], self.allocated[device] + self.cached[device])
        self.peaks[device] = [max(pair) for pair in zip(self.peaks[device], now, strict=True)]

    def _device(self, device):
        return self.current if device is None else device

    def is_available(self):
        return self.available

    def current_device(self):
        self.calls.append("current_device")
        return self.current

    def memory_allocated(self, device=None):
        return self.allocated[self._device(device)]

    def memory_reserved(self, device=None):
        device = self._device(device)
        return self.allocated[device] + self.cached[device]

    def max_memory_allocated(self, device=None):
        return self.peaks[self._device(device)][0]

    def max_memory_reserved(self, device=None):
        return self.peaks[self._device(device)][1]

    def reset_peak_memory_stats(self, device=None):
        device = self._device(device)
        self.calls.append(f"reset_peak {device}")
        self.peaks[device] = [0, 0]
        self.note(device)

    def reset_accumulated_memory_stats(self, device=None):
        self.calls.append(f"reset_accumulated {self._device(device)}")

    def mem_get_info(self, device=None):
        return self.total - self.memory_reserved(device), self.total

    def get_device_properties(self, device):
        return type("Properties", (), {"total_memory": self.total})

    def synchronize(self, device=None):
        self.calls.append(f"synchronize {self._device(device)}")

    def empty_cache(self):
        self.calls.append("empty_cache")
        self.cached = [0] * len(self.cached)


class _Tensor:
    def __init__(self, cuda, device, size):
        self.cuda, self.device, self.size, self.other = cuda, device, size, None
        cuda.allocated[device] += size
        cuda.note(device)

    def __del__(self):
        self.cuda.allocated[self.device] -= self.size
        self.cuda.cached[self.device] += self.size
