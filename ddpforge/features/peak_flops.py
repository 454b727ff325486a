"""Peak speeds of devices, from their data sheets: dense floating-point operations per second by dtype."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["PEAKS", "Peak", "peak_of"]


@dataclass(frozen=True)
class Peak:
    """Dense operations per second, in units of 1e12; None for a dtype without units of its own.

    `product` is a pattern for the name that the driver has for the device. bf16, fp16 and fp8 are with float32 sums,
    tf32 is float32 in tensor cores, and fp32 is float32 outside of them. Data sheets with numbers "with sparsity" have
    twice these.
    """

    product: str
    source: str
    fp32: float
    tf32: float | None = None
    bf16: float | None = None
    fp16: float | None = None
    fp8: float | None = None

    def flops(self, dtype: str) -> float | None:
        """Returns the operations per second in a dtype: "fp32", "tf32", "bf16", "fp16" or "fp8"."""
        speed: float | None = getattr(self, dtype)
        return speed and speed * 1e12


_NVIDIA = "https://www.nvidia.com/en-us/data-center"
_ADA = "NVIDIA Ada GPU Architecture, whitepaper, appendix A"
_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture, whitepaper, appendix A"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture, whitepaper, appendix A"
_HOPPER = "NVIDIA H100 Tensor Core GPU Architecture, whitepaper, table 2"
_V100, _T4 = f"{_NVIDIA}/v100/", f"{_NVIDIA}/tesla-t4/"
PEAKS = {
    "b200": Peak("B200.*", f"{_NVIDIA}/hgx/, HGX B200, one of eight", 75, 1125, 2250, 2250, 4500),
    "gb200": Peak("GB200.*", f"{_NVIDIA}/gb200-nvl72/, one of 72", 80, 1250, 2500, 2500, 5000),
    "h200": Peak("H200|GH200.*", f"{_NVIDIA}/h200/, SXM", 67, 494.7, 989.4, 989.4, 1978.9),
    "h200-nvl": Peak("H200 NVL", f"{_NVIDIA}/h200/, NVL", 60, 417.5, 835.5, 835.5, 1670.5),
    "h100": Peak("H100 (80GB|64GB|96GB) HBM.*|H800", f"{_NVIDIA}/h100/, SXM", 67, 494.7, 989.4, 989.4, 1978.9),
    "h100-nvl": Peak("H100 NVL", f"{_NVIDIA}/h100/, NVL", 60, 417.5, 835.5, 835.5, 1670.5),
    "h100-pcie": Peak("H100 PCIe", _HOPPER, 51.2, 378, 756, 756, 1513),
    "a100": Peak("A100.*|A800.*", f"{_NVIDIA}/a100/", 19.5, 156, 312, 312),
    "a40": Peak("A40", f"{_NVIDIA}/a40/", 37.4, 74.8, 149.7, 149.7),
    "a10": Peak("A10", f"{_NVIDIA}/products/a10-gpu/", 31.2, 62.5, 125, 125),
    "l40s": Peak("L40S", f"{_NVIDIA}/l40s/", 91.6, 183, 362.05, 362.05, 733),
    "l4": Peak("L4", f"{_NVIDIA}/l4/", 30.3, 60, 121, 121, 242.5),
    "rtx5090": Peak("GeForce RTX 5090", _BLACKWELL, 104.8, 104.8, 209.5, 209.5, 419),
    "rtx4090": Peak("GeForce RTX 4090", _ADA, 82.6, 82.6, 165.2, 165.2, 330.3),
    "rtx3090": Peak("GeForce RTX 3090", _GA102, 35.6, 35.6, 71, 71),
    "v100": Peak("V100-SXM2.*", _V100, 15.7, fp16=125),
    "v100-pcie": Peak("V100-PCIE.*", _V100, 14, fp16=112),
    "t4": Peak("T4", _T4, 8.1, fp16=65),
    "mi300x": Peak(
        *("Instinct MI300X.*", "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html"),
        *(163.4, 653.7, 1307.4, 1307.4, 2614.9),
    ),
}
"""By short name, as in `ddpforge plan --device`."""


def peak_of(product: str | None, dtype: str) -> float | None:
    """Returns the peak operations per second of a device by its driver's name; None if the table has none.

    Slices of a device (MIG) and similar names, e.g. of laptops, have none.
    """
    name = re.sub(r"^(NVIDIA|AMD|Tesla) ", "", product or "")
    if "MIG" in name:
        return None
    return next((one.flops(dtype) for one in PEAKS.values() if re.fullmatch(one.product, name)), None)
