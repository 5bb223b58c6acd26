"""``verl.utils.memory_utils`` as far as it concerns CUDA memory and the cache: same names, arguments and results."""

from __future__ import annotations

import logging

from steelyard.memory import cache

__all__ = ["aggressive_empty_cache", "get_memory_info", "log_memory_usage", "reset_memory_stats"]

logger = logging.getLogger(__name__)
_GB = 2**30  # verl's GB


def aggressive_empty_cache(force_sync: bool = True, max_retries: int = 3) -> None:
    """As ``steelyard.memory.aggressive_empty_cache``; what it freed goes to the log, as with verl."""
    report = cache.aggressive_empty_cache(force_sync, max_retries, api=cache.CUDA)
    if report.device is not None:
        logger.info(
            "cache of device %d emptied in %d attempts and %.3f s: %.2f GB reserved, %.2f GB allocated freed",
            report.device,
            report.attempts,
            report.seconds,
            report.freed_reserved / _GB,
            report.freed_allocated / _GB,
        )


def reset_memory_stats() -> None:
    """Let peaks and accumulated counts of the current device begin anew."""
    device = cache.current_device(cache.CUDA)
    if device is not None:
        cache.reset_peak(api=cache.CUDA)
        cache.CUDA.reset_accumulated_memory_stats(device)


def get_memory_info() -> dict[str, float]:
    """Memory of the current device in GB (2**30 bytes), under verl's keys; nothing where there is no device."""
    info = cache.memory_info(api=cache.CUDA)
    if info.device is None:
        return {}
    return {
        "total_memory_gb": info.total / _GB,
        "reserved_memory_gb": info.reserved / _GB,
        "allocated_memory_gb": info.allocated / _GB,
        "cached_memory_gb": (info.reserved - info.allocated) / _GB,
        "max_memory_allocated_gb": info.peak_allocated / _GB,
        "max_memory_reserved_gb": info.peak_reserved / _GB,
    }


def log_memory_usage(stage: str = "current") -> None:
    """Write what ``get_memory_info`` says to the log; nothing where there is no device."""
    info = get_memory_info()
    if info:
        parts = (f"{part} {info[f'{part}_memory_gb']:.2f} GB" for part in ("total", "allocated", "reserved", "cached"))
        logger.info("memory [%s]: %s", stage, ", ".join(parts))
