"""
GPUs and what is known of each: memory, bandwidth, dense peaks, links, watts, every figure with the name of its source.

Data alone; plan/machine.py finds a row. A figure without a source is left out: None, or no key in `peak_flops`.

memory_mib is what nvidia-smi prints as memory.total: less than the nominal GiB where ECC or the driver takes a share. Peaks
are dense and accumulate in fp32. GeForce boards, A10G and L40 do that at half the rate of fp16 accumulation: the RTX 4090's
330 TFLOP/s is no peak here. Where no data sheet has the figure, it is SMs x boost clock x FLOP per SM and clock; boards often
run above their boost clock, so a matmul may measure a tenth more.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

SMI = "nvidia-smi, memory.total"
TERA = 10**12


@dataclass(frozen=True)
class GpuSpec:
    """One card of the table."""

    name: str  # short and unique: what a user types
    memory_mib: int  # total as the driver reports it
    bytes_per_s: float  # DRAM bandwidth
    peak_flops: Mapping[str, float] = field(hash=False)  # by "fp32" "tf32" "fp16" "bf16" "fp8" "fp4"; absent: n/a
    capability: tuple[int, int] | None  # None: not NVIDIA
    pcie_gen: int | None  # None: not known, or the host is reached by another link
    pcie_lanes: int | None
    nvlink_bytes_per_s: float | None  # each direction, all links of the card; a bridge may have to be bought
    watts: int  # board power as shipped
    consumer: bool  # GeForce and Titan
    sources: Mapping[str, str] = field(hash=False)  # figure -> where it is from
    driver_names: tuple[str, ...] = ()  # as NVML reports it; variants that differ in memory share one
    aliases: tuple[str, ...] = ()  # what people say when they mean this variant


@dataclass(frozen=True)
class Family:
    """What the boards of one architecture and market share."""

    driver: str  # how the driver's name goes; {} is the row's
    capability: tuple[int, int]
    pcie_gen: int
    flops_per_clock: Mapping[str, int]  # dense, of one SM
    rates: str  # the source of flops_per_clock
    sheet: str  # the source of SMs, boost clock, bandwidth, watts, PCIe and NVLink
    consumer: bool = False


GEFORCE_30 = Family(
    driver="NVIDIA GeForce {}",
    capability=(8, 6),
    pcie_gen=4,
    flops_per_clock={"fp32": 256, "tf32": 256, "fp16": 512, "bf16": 512},
    rates="GA102 architecture white paper, RTX 3090: 35.6 fp32 and tf32, 71 fp16 and bf16 TFLOP/s",
    sheet="NVIDIA, GeForce RTX 30 specifications",
    consumer=True,
)
RTX_A = Family(
    driver="NVIDIA {}",
    capability=(8, 6),
    pcie_gen=4,
    flops_per_clock={"fp32": 256, "tf32": 512, "fp16": 1024, "bf16": 1024},
    rates="GA102 architecture white paper, RTX A6000: 38.7 fp32, 77.4 tf32, 154.8 fp16 and bf16 TFLOP/s",
    sheet="NVIDIA data sheet of the board; boost clock from its TFLOP/s",
)
GEFORCE_40 = Family(
    driver="NVIDIA GeForce {}",
    capability=(8, 9),
    pcie_gen=4,
    flops_per_clock={"fp32": 256, "tf32": 256, "fp16": 512, "bf16": 512, "fp8": 1024},
    rates="Ada architecture white paper, RTX 4090: 82.6 fp32 and tf32, 165.2 fp16 and bf16, 330.3 fp8 TFLOP/s",
    sheet="NVIDIA, GeForce RTX 40 specifications",
    consumer=True,
)
RTX_ADA = Family(
    driver="NVIDIA {} Generation",
    capability=(8, 9),
    pcie_gen=4,
    flops_per_clock={"fp32": 256, "tf32": 512, "fp16": 1024, "bf16": 1024, "fp8": 2048},
    rates="RTX 6000 Ada data sheet: 1457 TFLOP/s fp8 with sparsity; RTX 4000 Ada measured above GeForce's rate: 83 bf16",
    sheet="NVIDIA data sheet of the board; boost clock from its TFLOP/s",
)
GEFORCE_50 = Family(
    driver="NVIDIA GeForce {}",
    capability=(12, 0),
    pcie_gen=5,
    flops_per_clock={"fp32": 256, "tf32": 256, "fp16": 512, "bf16": 512, "fp8": 1024, "fp4": 4096},
    rates="RTX Blackwell architecture white paper, RTX 5090: 104.8 fp32 and tf32, 209.5 bf16, 419 fp8, 1676 fp4 TFLOP/s",
    sheet="NVIDIA, GeForce RTX 50 specifications",
    consumer=True,
)


def board(
    family: Family,
    name: str,
    memory_mib: int,
    gigabytes_per_s: float,
    sms: int,
    boost_mhz: int,
    watts: int,
    *,
    driver: str = "",
    aliases: tuple[str, ...] = (),
    lanes: int = 16,
    nvlink_gigabytes_per_s: float | None = None,
    note: str = "",
) -> GpuSpec:
    """A card whose peaks follow from its SMs and clock. driver: the row's part of the driver's name, where it is not `name`."""
    # rounded to a tenth of a TFLOP/s, as data sheets are
    peaks = {p: float(round(sms * boost_mhz * 10**6 * rate, -11)) for p, rate in family.flops_per_clock.items()}
    derived = f"derived: {sms} SMs x {boost_mhz} MHz x FLOP per SM and clock; {family.rates}"
    return sheet(
        name,
        family.driver.format(driver or name),
        memory_mib,
        gigabytes_per_s,
        {precision: flops / TERA for precision, flops in peaks.items()},
        capability=family.capability,
        pcie=(family.pcie_gen, lanes),
        nvlink_gigabytes_per_s=nvlink_gigabytes_per_s,
        watts=watts,
        consumer=family.consumer,
        aliases=aliases,
        source=family.sheet + (f"; {note}" if note else ""),
        peaks=derived,
    )


def sheet(
    name: str,
    driver: str | tuple[str, ...],
    memory_mib: int,
    gigabytes_per_s: float,
    tflops: Mapping[str, float],
    *,
    capability: tuple[int, int] | None,
    pcie: tuple[int, int] | None,
    watts: int,
    source: str,
    nvlink_gigabytes_per_s: float | None = None,
    peaks: str = "",
    memory: str = SMI,
    power: str = "",
    aliases: tuple[str, ...] = (),
    consumer: bool = False,
) -> GpuSpec:
    """A card as its data sheet has it. peaks, memory, power: their sources, where it is not `source`."""
    sources = {
        "memory_mib": memory,
        "bytes_per_s": source,
        "peak_flops": peaks or source,
        "capability": "NVIDIA, CUDA GPU compute capability" if capability else None,
        "pcie_gen": source if pcie else None,
        "pcie_lanes": source if pcie else None,
        "nvlink_bytes_per_s": source if nvlink_gigabytes_per_s else None,
        "watts": power or source,
    }
    return GpuSpec(
        name=name,
        memory_mib=memory_mib,
        bytes_per_s=gigabytes_per_s * 1e9,
        peak_flops={precision: float(round(figure * TERA)) for precision, figure in tflops.items()},
        capability=capability,
        pcie_gen=pcie[0] if pcie else None,
        pcie_lanes=pcie[1] if pcie else None,
        nvlink_bytes_per_s=nvlink_gigabytes_per_s * 1e9 if nvlink_gigabytes_per_s else None,
        watts=watts,
        consumer=consumer,
        sources={figure: where for figure, where in sources.items() if where},
        driver_names=(driver,) if isinstance(driver, str) else driver,
        aliases=aliases,
    )


# columns: name, MiB, GB/s, SMs, boost MHz, watts
GEFORCE = (
    board(GEFORCE_30, "RTX 3060", 12288, 360.0, 28, 1777, 170, aliases=("RTX 3060 12GB",)),
    board(GEFORCE_30, "RTX 3060 8GB", 8192, 240.0, 28, 1777, 170, driver="RTX 3060"),
    board(GEFORCE_30, "RTX 3060 Ti", 8192, 448.0, 38, 1665, 200, note="GDDR6; boards with GDDR6X have 608 GB/s"),
    board(GEFORCE_30, "RTX 3070", 8192, 448.0, 46, 1725, 220),
    board(GEFORCE_30, "RTX 3070 Ti", 8192, 608.3, 48, 1770, 290),
    board(GEFORCE_30, "RTX 3080", 10240, 760.3, 68, 1710, 320, aliases=("RTX 3080 10GB",)),
    board(GEFORCE_30, "RTX 3080 12GB", 12288, 912.4, 70, 1710, 350, driver="RTX 3080"),
    board(GEFORCE_30, "RTX 3080 Ti", 12288, 912.4, 80, 1665, 350),
    board(GEFORCE_30, "RTX 3090", 24576, 936.2, 82, 1695, 350, nvlink_gigabytes_per_s=56.25),
    board(GEFORCE_30, "RTX 3090 Ti", 24564, 1008.0, 84, 1860, 450, nvlink_gigabytes_per_s=56.25),
    board(GEFORCE_40, "RTX 4060", 8188, 272.0, 24, 2460, 115, lanes=8),
    board(GEFORCE_40, "RTX 4060 Ti 8GB", 8188, 288.0, 34, 2535, 160, driver="RTX 4060 Ti", lanes=8),
    board(GEFORCE_40, "RTX 4060 Ti 16GB", 16380, 288.0, 34, 2535, 165, driver="RTX 4060 Ti", lanes=8),
    board(GEFORCE_40, "RTX 4070", 12282, 504.2, 46, 2475, 200, note="GDDR6X; boards with GDDR6 have 480 GB/s"),
    board(GEFORCE_40, "RTX 4070 SUPER", 12282, 504.2, 56, 2475, 220),
    board(GEFORCE_40, "RTX 4070 Ti", 12282, 504.2, 60, 2610, 285),
    board(GEFORCE_40, "RTX 4070 Ti SUPER", 16376, 672.3, 66, 2610, 285),
    board(GEFORCE_40, "RTX 4080", 16376, 716.8, 76, 2505, 320),
    board(GEFORCE_40, "RTX 4080 SUPER", 16376, 736.3, 80, 2550, 320),
    board(GEFORCE_40, "RTX 4090", 24564, 1008.0, 128, 2520, 450),
    board(GEFORCE_40, "RTX 4090 D", 24564, 1008.0, 114, 2520, 425),
    board(GEFORCE_50, "RTX 5060", 8151, 448.0, 30, 2497, 145, lanes=8),
    board(GEFORCE_50, "RTX 5060 Ti 8GB", 8151, 448.0, 36, 2572, 180, driver="RTX 5060 Ti", lanes=8),
    board(GEFORCE_50, "RTX 5060 Ti 16GB", 16311, 448.0, 36, 2572, 180, driver="RTX 5060 Ti", lanes=8),
    board(GEFORCE_50, "RTX 5070", 12227, 672.0, 48, 2512, 250),
    board(GEFORCE_50, "RTX 5070 Ti", 16303, 896.0, 70, 2452, 300),
    board(GEFORCE_50, "RTX 5080", 16303, 960.0, 84, 2617, 360),
    board(GEFORCE_50, "RTX 5090", 32607, 1792.0, 170, 2407, 575),
    sheet(
        "RTX 5090 D", "NVIDIA GeForce RTX 5090 D", 32607, 1792.0,
        {"fp32": 104.8, "fp16": 209.5, "bf16": 209.5, "fp4": 1187.5},
        capability=(12, 0), pcie=(5, 16), watts=575, consumer=True, source=GEFORCE_50.sheet,
        peaks="the RTX 5090's; fp4 from 2375 AI TOPS, a limit that 16 bits do not reach (RTX 5090 D v2 measured: 232 bf16);"
        " no figure for tf32 and fp8",
    ),
    sheet(
        "TITAN RTX", ("NVIDIA TITAN RTX", "TITAN RTX"), 24576, 672.0, {"fp32": 16.3, "fp16": 130.5},
        capability=(7, 5), pcie=(3, 16), nvlink_gigabytes_per_s=50, watts=280, consumer=True,
        source="Turing architecture white paper, appendix: Titan RTX",
    ),
    sheet(
        "TITAN V", ("NVIDIA TITAN V", "TITAN V"), 12288, 652.8, {"fp32": 14.9, "fp16": 110.0},
        capability=(7, 0), pcie=(3, 16), watts=250, consumer=True,
        source="NVIDIA, TITAN V specifications", memory="nominal: 12 GiB; drivers before 510 print 12066",
        peaks="NVIDIA, TITAN V specifications: 110 tensor TFLOP/s; fp32 derived: 80 SMs x 1455 MHz x 128",
    ),
)  # fmt: skip

WORKSTATION = (
    board(RTX_A, "RTX A2000", 6138, 288.0, 26, 1200, 70, aliases=("RTX A2000 6GB",)),
    board(RTX_A, "RTX A2000 12GB", 12282, 288.0, 26, 1200, 70),
    board(RTX_A, "RTX A4000", 16376, 448.0, 48, 1560, 140),
    board(RTX_A, "RTX A4500", 20470, 640.0, 56, 1650, 200, nvlink_gigabytes_per_s=56.25),
    board(RTX_A, "RTX A5000", 24564, 768.0, 64, 1695, 230, nvlink_gigabytes_per_s=56.25),
    board(RTX_A, "RTX A5500", 24564, 768.0, 80, 1665, 230, nvlink_gigabytes_per_s=56.25),
    board(RTX_A, "RTX A6000", 49140, 768.0, 84, 1800, 300, nvlink_gigabytes_per_s=56.25),
    board(RTX_ADA, "RTX 2000 Ada", 16380, 224.0, 22, 2130, 70, lanes=8),
    board(RTX_ADA, "RTX 4000 SFF Ada", 20475, 280.0, 48, 1560, 70),
    board(RTX_ADA, "RTX 4000 Ada", 20475, 360.0, 48, 2175, 130),
    board(RTX_ADA, "RTX 4500 Ada", 24570, 432.0, 60, 2580, 210),
    board(RTX_ADA, "RTX 5000 Ada", 32760, 576.0, 100, 2550, 250),
    board(RTX_ADA, "RTX 6000 Ada", 49140, 960.0, 142, 2505, 300),
)


def rtx_pro(
    name: str, edition: str, memory_mib: int, gigabytes_per_s: float, ai_tops: int | None, watts: int
) -> GpuSpec:
    """RTX PRO Blackwell. NVIDIA prints AI TOPS, fp4 with sparsity: dense fp4 is a half, fp8 a quarter, bf16 an eighth.

    The white paper's RTX PRO 6000 shows the ratios: 4030 AI TOPS, 503.8 bf16, 251.9 tf32, 126 fp32.
    """
    parts = {"fp32": 32, "tf32": 16, "fp16": 8, "bf16": 8, "fp8": 4, "fp4": 2}
    return sheet(
        name, f"NVIDIA {edition or name}", memory_mib, gigabytes_per_s,
        {precision: round(ai_tops / part, 1) for precision, part in parts.items()} if ai_tops else {},
        capability=(12, 0), pcie=(5, 16), watts=watts, source="NVIDIA data sheet of the board",
        aliases=(name.replace(" Blackwell", ""),),
        peaks=f"derived: {ai_tops} AI TOPS, NVIDIA's figure of the board, in the ratios of the RTX PRO Blackwell white paper"
        if ai_tops else "none: its AI TOPS are not known here",
    )  # fmt: skip


# columns: name, name in the driver if another, MiB, GB/s, AI TOPS, watts
RTX_PRO = (
    rtx_pro("RTX PRO 4000 Blackwell", "", 24467, 672.0, None, 140),
    rtx_pro("RTX PRO 4500 Blackwell", "", 32623, 896.0, 1687, 200),
    rtx_pro("RTX PRO 5000 Blackwell", "", 48935, 1344.0, 2064, 300),
    rtx_pro("RTX PRO 6000 Blackwell Workstation", "RTX PRO 6000 Blackwell Workstation Edition", 97887, 1792.0, 4030, 600),
    rtx_pro("RTX PRO 6000 Blackwell Max-Q", "RTX PRO 6000 Blackwell Max-Q Workstation Edition", 97887, 1792.0, 3511, 300),
    rtx_pro("RTX PRO 6000 Blackwell Server", "RTX PRO 6000 Blackwell Server Edition", 97887, 1597.0, 3753, 600),
)  # fmt: skip

T4_SHEET = "NVIDIA T4 data sheet and product brief"
V100_SHEET = "NVIDIA V100 data sheet"
V100_SXM2 = {"fp32": 15.7, "fp16": 125.0}
V100_PCIE = {"fp32": 14.0, "fp16": 112.0}
A100_SHEET = "NVIDIA A100 data sheet"
A100_PEAKS = {"fp32": 19.5, "tf32": 156.0, "fp16": 312.0, "bf16": 312.0}
H100_SHEET = "NVIDIA H100 data sheet; dense peaks from the H100 architecture white paper"
H100_SXM = {"fp32": 66.9, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4, "fp8": 1978.9}
H100_NVL = {"fp32": 60.0, "tf32": 417.5, "fp16": 835.5, "bf16": 835.5, "fp8": 1670.5}
H200_SHEET = "NVIDIA H200 data sheet; peaks with sparsity halved"
GH200_SHEET = "NVIDIA GH200 data sheet"
GH200_WATTS = "nvidia-smi, power limit; 700 on some hosts; the module with CPU and memory takes up to 1000"
BLACKWELL_SHEET = "NVIDIA Blackwell data sheet, per GPU; peaks with sparsity halved"
B300_SHEET = "NVIDIA HGX B300 specifications, an eighth of the board; peaks with sparsity halved; fp4 as printed dense"

DATA_CENTER = (
    sheet("T4", "Tesla T4", 15360, 320, {"fp32": 8.1, "fp16": 65.0},
          capability=(7, 5), pcie=(3, 16), watts=70, source=T4_SHEET),
    sheet("V100 PCIe 16GB", "Tesla V100-PCIE-16GB", 16384, 900, V100_PCIE,
          capability=(7, 0), pcie=(3, 16), watts=250, source=V100_SHEET),
    sheet("V100 PCIe 32GB", "Tesla V100-PCIE-32GB", 32768, 900, V100_PCIE,
          capability=(7, 0), pcie=(3, 16), watts=250, source=V100_SHEET),
    sheet("V100 SXM2 16GB", "Tesla V100-SXM2-16GB", 16384, 900, V100_SXM2,
          capability=(7, 0), pcie=(3, 16), nvlink_gigabytes_per_s=150, watts=300, source=V100_SHEET),
    sheet("V100 SXM2 32GB", "Tesla V100-SXM2-32GB", 32768, 900, V100_SXM2,
          capability=(7, 0), pcie=(3, 16), nvlink_gigabytes_per_s=150, watts=300, source=V100_SHEET),
    sheet("A10", "NVIDIA A10", 23028, 600, {"fp32": 31.2, "tf32": 62.5, "fp16": 125.0, "bf16": 125.0},
          capability=(8, 6), pcie=(4, 16), watts=150, source="NVIDIA A10 data sheet"),
    sheet("A10G", "NVIDIA A10G", 23028, 600, {"fp32": 35.0, "tf32": 35.0, "fp16": 70.0, "bf16": 70.0},
          capability=(8, 6), pcie=(4, 16), watts=300, source="NVIDIA A10G data sheet, published with AWS G5",
          power="nvidia-smi, power limit on AWS G5"),
    sheet("A30", "NVIDIA A30", 24576, 933, {"fp32": 10.3, "tf32": 82.0, "fp16": 165.0, "bf16": 165.0},
          capability=(8, 0), pcie=(4, 16), nvlink_gigabytes_per_s=100, watts=165, source="NVIDIA A30 data sheet"),
    sheet("A40", "NVIDIA A40", 46068, 696, {"fp32": 37.4, "tf32": 74.8, "fp16": 149.7, "bf16": 149.7},
          capability=(8, 6), pcie=(4, 16), nvlink_gigabytes_per_s=56.25, watts=300, source="NVIDIA A40 data sheet"),
    sheet("A100 PCIe 40GB", "NVIDIA A100-PCIE-40GB", 40960, 1555, A100_PEAKS,
          capability=(8, 0), pcie=(4, 16), nvlink_gigabytes_per_s=300, watts=250, source=A100_SHEET),
    sheet("A100 PCIe 80GB", "NVIDIA A100 80GB PCIe", 81920, 1935, A100_PEAKS,
          capability=(8, 0), pcie=(4, 16), nvlink_gigabytes_per_s=300, watts=300, source=A100_SHEET),
    sheet("A100 SXM 40GB", "NVIDIA A100-SXM4-40GB", 40960, 1555, A100_PEAKS,
          capability=(8, 0), pcie=(4, 16), nvlink_gigabytes_per_s=300, watts=400, source=A100_SHEET),
    sheet("A100 SXM 80GB", "NVIDIA A100-SXM4-80GB", 81920, 2039, A100_PEAKS, aliases=("A100", "A100 80GB"),
          capability=(8, 0), pcie=(4, 16), nvlink_gigabytes_per_s=300, watts=400, source=A100_SHEET),
    sheet("L4", "NVIDIA L4", 23034, 300, {"fp32": 30.3, "tf32": 60.0, "fp16": 121.0, "bf16": 121.0, "fp8": 242.5},
          capability=(8, 9), pcie=(4, 16), watts=72, source="NVIDIA L4 data sheet; peaks with sparsity halved"),
    sheet("L40", "NVIDIA L40", 46068, 864, {"fp32": 90.5, "tf32": 90.5, "fp16": 181.05, "bf16": 181.05, "fp8": 362.0},
          capability=(8, 9), pcie=(4, 16), watts=300, source="NVIDIA L40 data sheet"),
    sheet("L40S", "NVIDIA L40S", 46068, 864, {"fp32": 91.6, "tf32": 183.0, "fp16": 362.05, "bf16": 362.05, "fp8": 733.0},
          capability=(8, 9), pcie=(4, 16), watts=350, source="NVIDIA L40S data sheet"),
    sheet("H100 PCIe", "NVIDIA H100 PCIe", 81559, 2000,
          {"fp32": 51.2, "tf32": 378.0, "fp16": 756.0, "bf16": 756.0, "fp8": 1513.0},
          capability=(9, 0), pcie=(5, 16), nvlink_gigabytes_per_s=300, watts=350, source=H100_SHEET),
    sheet("H100 SXM", "NVIDIA H100 80GB HBM3", 81559, 3350, H100_SXM, aliases=("H100", "H100 80GB"),
          capability=(9, 0), pcie=(5, 16), nvlink_gigabytes_per_s=450, watts=700, source=H100_SHEET),
    sheet("H100 NVL", "NVIDIA H100 NVL", 95830, 3938, H100_NVL,
          capability=(9, 0), pcie=(5, 16), nvlink_gigabytes_per_s=300, watts=400,
          source="NVIDIA H100 NVL product brief; peaks with sparsity halved"),
    sheet("H200 SXM", "NVIDIA H200", 143771, 4800, H100_SXM, aliases=("H200",),
          capability=(9, 0), pcie=(5, 16), nvlink_gigabytes_per_s=450, watts=700, source=H200_SHEET),
    sheet("H200 NVL", "NVIDIA H200 NVL", 143771, 4800, H100_NVL,
          capability=(9, 0), pcie=(5, 16), nvlink_gigabytes_per_s=450, watts=600, source=H200_SHEET),
    sheet("GH200 96GB", ("NVIDIA GH200 480GB", "NVIDIA GH200 120GB"), 97871, 4000, H100_SXM, aliases=("GH200",),
          capability=(9, 0), pcie=None, nvlink_gigabytes_per_s=450, watts=900, source=GH200_SHEET, power=GH200_WATTS),
    sheet("GH200 144GB", "NVIDIA GH200 144G HBM3e", 146831, 4900, H100_SXM,
          capability=(9, 0), pcie=None, nvlink_gigabytes_per_s=450, watts=900, source=GH200_SHEET, power=GH200_WATTS),
    sheet("B200", "NVIDIA B200", 183359, 7700,
          {"fp32": 75.0, "tf32": 1100.0, "fp16": 2250.0, "bf16": 2250.0, "fp8": 4500.0, "fp4": 9000.0},
          capability=(10, 0), pcie=(5, 16), nvlink_gigabytes_per_s=900, watts=1000, source=BLACKWELL_SHEET),
    sheet("GB200", "NVIDIA GB200", 189471, 8000,
          {"fp32": 80.0, "tf32": 1250.0, "fp16": 2500.0, "bf16": 2500.0, "fp8": 5000.0, "fp4": 10000.0},
          capability=(10, 0), pcie=None, nvlink_gigabytes_per_s=900, watts=1200, source=BLACKWELL_SHEET),
    sheet("B300", "NVIDIA B300 SXM6 AC", 275040, 8000,
          {"fp32": 75.0, "tf32": 1125.0, "fp16": 2250.0, "bf16": 2250.0, "fp8": 4500.0, "fp4": 13500.0},
          capability=(10, 3), pcie=None, nvlink_gigabytes_per_s=900, watts=1100, source=B300_SHEET,
          power="nvidia-smi, power limit"),
    sheet("GB10", "NVIDIA GB10", 122548, 273, {"fp4": 500.0}, aliases=("DGX Spark",),
          capability=(12, 1), pcie=None, watts=140, source="NVIDIA DGX Spark specifications",
          memory="Linux, MemTotal of a DGX Spark: CPU and GPU share it, the driver reports none",
          peaks="NVIDIA DGX Spark specifications: 1 PFLOP/s fp4 with sparsity, halved; nothing published for other precisions"),
    sheet("MI300X", "AMD Instinct MI300X", 196592, 5300,
          {"fp32": 163.4, "tf32": 653.7, "fp16": 1307.4, "bf16": 1307.4, "fp8": 2614.9},
          capability=None, pcie=(5, 16), watts=750, source="AMD Instinct MI300X data sheet",
          memory="rocm-smi, VRAM total memory"),
)  # fmt: skip

GPUS: tuple[GpuSpec, ...] = (*GEFORCE, *WORKSTATION, *RTX_PRO, *DATA_CENTER)
