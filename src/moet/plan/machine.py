"""The hardware that a plan is for: named, written out, or this machine."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from moet.errors import ConfigError
from moet.plan.measured import assumption, gpu_table
from moet.plan.ranges import Range

GIB = 1 << 30
_GB_S = 1e9
_UNITS = {"": GIB, "G": GIB, "T": 1 << 40, "MiB": 1 << 20, "GiB": GIB, "TiB": 1 << 40}
_UNITS |= {"MB": 10**6, "GB": 10**9, "TB": 10**12}
# "2 × H200", "2× H200" and "H200×2"; the x of "rtx5090" multiplies nothing.
_COUNTED = (
    r"(?P<n>\d{1,2})\s*(?:[×*]\s*|x\s+)(?P<name>.+)",
    r"(?P<name>.+?)\s*(?:[×*]|(?<!rt)x)\s*(?P<n>\d+)",
)
_CUSTOM_HELP = (
    'Or write it out: --gpu "24GiB:1000GB/s" or, with its host link, "24GiB:1000GB/s:25GB/s".'
)


@dataclass(frozen=True)
class Gpu:
    """One GPU product.

    memory: bytes. bandwidth: of its memory as published, bytes/s. h2d: bytes/s from pinned host
    memory. tflops: dense BF16, or None. link: nvlink or pcie, to its neighbours. sm: compute
    capability × 10, or None. source: where the figures come from.
    """

    name: str
    memory: int
    bandwidth: float
    h2d: Range
    tflops: float | None
    link: str
    sm: int | None
    source: str

    @property
    def read(self) -> Range:
        """Bytes/s that a kernel which only reads gets."""
        return assumption("read_share").times(self.bandwidth)


@dataclass(frozen=True)
class Disk:
    """free: bytes, or None where it is not known. bandwidth: bytes/s of reading."""

    free: int | None
    bandwidth: Range


@dataclass(frozen=True)
class Machine:
    """What a plan is made for.

    gpu: of which there are `count`; None without one (count is 0 then). ram: bytes of host memory.
    ram_bandwidth: bytes/s. cores: for the CPU path. notes: what was assumed, in sentences.
    """

    gpu: Gpu | None
    count: int
    ram: int
    ram_bandwidth: Range
    cores: int
    disk: Disk
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        gib = f"{self.ram / GIB:.0f} GiB RAM"
        return f"{self.count} × {self.gpu.name}, {gib}" if self.gpu else f"no GPU, {gib}"


def known_gpus() -> list[str]:
    """Names that `--gpu` takes."""
    return list(gpu_table())


def find_gpu(name: str) -> Gpu | None:
    """A GPU of the table by a user's or a driver's name; None when it is not known.

    "5090", "RTX 5090" and "NVIDIA GeForce RTX 5090" are the same.
    """
    wanted = _words(name)
    best: tuple[int, str] | None = None
    for product in gpu_table():
        words = _words(product)
        memory = [word for word in words if word.endswith("gb")]
        key = [word for word in words if word not in ("rtx", "pcie", *memory)]
        if not all(word in wanted for word in key):
            continue
        if ("ada" in wanted) != ("ada" in words) or ("pro" in wanted and "pro" not in words):
            continue
        # A longer agreement wins: "H100 PCIe" over "H100", "A100 80GB" over "A100 40GB".
        score = 10 * len(key) + sum(word in wanted for word in words)
        score -= sum(word not in wanted for word in words if word in ("pcie", "40gb"))
        if best is None or score > best[0]:
            best = score, product
    return _from_table(best[1]) if best else None


def parse_gpus(text: str) -> tuple[Gpu, int]:
    """`NAME`, `NAME×n`, `n×NAME` or `24GiB:1000GB/s[:25GB/s][×n]`; also with x or *.

    Raises ConfigError that lists the known names.
    """
    name, count = _count(text.strip())
    if ":" in name:
        return _written_out(name), count
    gpu = find_gpu(name)
    if gpu is None:
        near = difflib.get_close_matches(name.upper(), [n.upper() for n in known_gpus()], 1, 0.4)
        guess = next((n for n in known_gpus() if near and n.upper() == near[0]), None)
        lead = f"Did you mean {guess!r}? " if guess else ""
        raise ConfigError(
            f"--gpu {name!r}: this GPU is not in the table.",
            f"{lead}Known: {', '.join(known_gpus())}. {_CUSTOM_HELP}",
        )
    return gpu, count


def parse_bytes(text: str, option: str) -> int:
    """`64`, `64GiB`, `2TB`: a number without a unit is GiB. Raises ConfigError naming `option`."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([GTM]?(?:iB|B)?)", text.strip())
    if match is None or match[2] not in _UNITS:
        raise ConfigError(
            f"{option} {text!r} is not a size.", "Write 64GiB, 2TB, or a number of GiB."
        )
    return int(float(match[1]) * _UNITS[match[2]])


def parse_disk(text: str) -> Disk:
    """`2TB`, `7GB/s` or `2TB:7GB/s`. Raises ConfigError."""
    free, bandwidth = None, assumption("disk_gb_s").times(_GB_S)
    for part in text.split(":"):
        if "/s" in part:
            bandwidth = Range.exactly(_rate(part, "--disk"))
        else:
            free = parse_bytes(part, "--disk")
    return Disk(free, bandwidth)


def host_bandwidth(cores: int) -> Range:
    """Bytes/s of reading host memory with `cores` cores."""
    each, most = assumption("ram_gb_s_per_core"), assumption("ram_gb_s_most")
    return Range(
        min(each.low * cores, most.low) * _GB_S,
        min(each.typical * cores, most.typical) * _GB_S,
        min(each.high * cores, most.high) * _GB_S,
    )


def pcie(generation: int, lanes: int) -> Range:
    """Bytes/s from pinned host memory: as measured on generation 5, halved for each before."""
    per_lane = assumption("pcie_gb_s_per_lane_gen5")
    return per_lane.times(_GB_S * lanes * 2.0 ** (generation - 5))


def _from_table(name: str) -> Gpu:
    entry = gpu_table()[name]
    return Gpu(
        name,
        entry["memory_mib"] << 20,
        entry["bandwidth"] * _GB_S,
        pcie(*entry["pcie"]),
        entry["bf16_tflops"],
        entry["link"],
        entry["sm"],
        entry["source"],
    )


def _words(name: str) -> list[str]:
    lowered = re.sub(r"(\d+)\s*(?:gib|gb)\b", r"\1gb", name.lower())
    lowered = re.sub(r"(rtx|pro)(?=\d)", r"\1 ", lowered)
    return [word for word in re.split(r"[^a-z0-9]+", lowered) if word]


def _count(text: str) -> tuple[str, int]:
    for pattern in _COUNTED:
        match = re.fullmatch(pattern, text, re.IGNORECASE)
        if match:
            count = int(match["n"])
            if not 1 <= count <= 1024:
                raise ConfigError(f"--gpu {text!r}: {count} GPUs.", "Write NAME×n with n ≥ 1.")
            return match["name"].strip(), count
    return text, 1


def _written_out(text: str) -> Gpu:
    fields = [field.strip() for field in text.split(":")]
    if len(fields) > 3:
        raise ConfigError(f"--gpu {text!r} has more than three fields.", _CUSTOM_HELP)
    memory = parse_bytes(fields[0], "--gpu")
    bandwidth = _rate(fields[1], "--gpu")
    h2d = Range.exactly(_rate(fields[2], "--gpu")) if len(fields) == 3 else pcie(4, 16)
    return Gpu(f"GPU of {text}", memory, bandwidth, h2d, None, "pcie", None, "as given")


def _rate(text: str, option: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([GTM])B/s", text.strip())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"{option}: {text!r} is not a bandwidth.", "Write 1000GB/s or 1.8TB/s.")
    return float(match[1]) * {"M": 1e6, "G": 1e9, "T": 1e12}[match[2]]
