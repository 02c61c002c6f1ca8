"""
TorchInductor on a fake card: the graphs that it is asked to compile, and the kernels that it writes for that card.

Compiled functions then run op by op on fake tensors. Binaries are made by Triton, whose wheel contains NVIDIA's assembler.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from gpu_proof.fake_card import CARDS
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import _disable_current_modes

KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str", re.DOTALL)
LAUNCH = re.compile(r"^\s+(triton_\w+)\.run\(", re.MULTILINE)
BUFFER = re.compile(r"empty_strided_cuda\(\(([\d, ]*)\), \([\d, ]*\), torch\.(\w+)\)")
EAGER_OP = re.compile(r"= (torch\.ops\.[\w.]+)\(")
USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")
MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
TEMPLATES = "triton_tem_"  # kernels from a template, such as FlexAttention's


class GraphKeeper:
    """Replaces inductor in this process. names: the function that each graph begins in, in the order of compilation.

    Without `compiles` nothing is compiled, and inductor, whose import takes seconds, stays away.
    """

    def __init__(self, *, compiles: bool = True) -> None:
        self.names: list[str] = []
        self.compiles = compiles
        self.counters: dict[str, Any] = {}  # of dynamo, whose import takes a second
        if not compiles:
            return
        import torch._inductor.compile_fx
        from torch._dynamo.utils import counters

        self.counters = counters
        self.compile_fx = torch._inductor.compile_fx.compile_fx
        torch._inductor.compile_fx.compile_fx = self.compile  # type: ignore[assignment]

    def compile(self, graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Callable[..., Any]:
        """Takes the place of inductor's function of this name."""
        traces = [node.stack_trace for node in graph.graph.nodes if node.stack_trace]
        name = re.findall(r", in (\w+)$", traces[0], re.MULTILINE)[0] if traces else "empty"
        self.names.append(re.sub(r"^torch_dynamo_resume_in_(\w+)_at_\d+$", r"rest of \1", name))
        return graph.forward

    def forget(self) -> None:
        """Drops all graphs, as a new process would."""
        if self.compiles:
            torch._dynamo.reset()
            self.counters.clear()
        self.names.clear()

    @property
    def breaks(self) -> list[str]:
        """The reason of each graph break, its first line."""
        return [
            reason.splitlines()[0]
            for reason, times in self.counters.get("graph_break", {}).items()
            for _ in range(times)
        ]


class KernelKeeper(GraphKeeper):
    """Lets inductor write its kernels, and stops it before it loads them.

    programs: what inductor made of each graph, a forward and its backward apart. sources: every kernel, by its text.
    """

    def __init__(self, capability: int) -> None:
        super().__init__()
        set_triton_driver(capability)
        self.programs: list[dict[str, Any]] = []
        self.sources: dict[str, str] = {}
        stop_before_loading(self.keep)

    def compile(self, graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Callable[..., Any]:
        """Takes the place of inductor's function of this name."""
        run = super().compile(graph, inputs, **options)
        mode = detect_fake_mode(inputs)
        assert mode is not None
        with _disable_current_modes(), mode:
            self.compile_fx(graph, inputs, **options)
        return run

    def keep(self, graph: Any) -> None:
        """Called by inductor with each of its graphs, forward or backward, when all else is done."""
        code = graph.codegen()[0].value
        self.sources |= {source.replace("\\\\", "\\"): name for name, source in KERNEL.findall(code)}
        nodes = [node for node in graph.module.graph.nodes if node.op == "call_function"]
        products = [node for node in nodes if getattr(node.target, "__name__", "").partition(".")[0] in MATRIX_PRODUCTS]
        self.programs.append(
            {
                "graph": self.names[-1],
                "launches": LAUNCH.findall(code),
                "products": sorted({str(node.meta["val"].dtype).removeprefix("torch.") for node in products}),
                "num_products": len(products),
                "buffers": sorted(
                    {(prod(map(int, re.findall(r"\d+", shape))), dtype) for shape, dtype in BUFFER.findall(code)}
                ),
                "eager_ops": EAGER_OP.findall(code),
                "bytes": graph.count_bytes()[0],
            }
        )

    def forget(self) -> None:
        """Drops all graphs and kernels, as a new process would."""
        super().forget()
        self.programs.clear()
        self.sources.clear()


def stop_before_loading(keep: Callable[[Any], None]) -> None:
    """Makes inductor call `keep` where it would load its kernels; what it does with values of a card is off."""
    import torch._functorch.config as autograd
    import torch._inductor.config as inductor
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.graph import GraphLowering

    def load(graph: GraphLowering) -> Any:
        keep(graph)
        return SimpleNamespace(call=lambda inputs: None, __file__="none.py", key="none", __loader__=None)

    GraphLowering.compile_to_module = load  # type: ignore[method-assign]
    joint_graph.lazy_init = lambda *args, **options: (
        None
    )  # its patterns of attention and of padded products run on the card
    inductor.joint_graph_constant_folding = False
    inductor.fx_graph_cache = autograd.enable_autograd_cache = False
    autograd.force_non_lazy_backward_lowering = True  # otherwise a backward is compiled when it first runs


def make_binaries(sources: dict[str, str]) -> list[dict[str, Any]]:
    """Compiles kernels for the card; returns what each configuration needs, or why there is no binary.

    Inductor tries several configurations of a kernel on the card and takes the fastest: of a template all must exist, of others the
    first is made.
    """
    from torch._inductor.async_compile import _load_triton_kernel_from_source
    from torch._inductor.runtime import triton_helpers, triton_heuristics

    triton_helpers.set_driver_to_gpu = lambda: None
    triton_heuristics.StaticTritonCompileResult.can_statically_launch = staticmethod(lambda *args, **options: None)
    binaries = []
    for source, name in sources.items():
        kernel = _load_triton_kernel_from_source(name, source)
        for configuration in kernel.configs if TEMPLATES in name else kernel.configs[:1]:
            fact: dict[str, Any] = {"kernel": name, "trigonometry": bool(re.search(r"\b(pow|cos|sin)\(", source))}
            try:
                binary = kernel._precompile_config(configuration).kernel
                registers, stack = resources(binary.asm["cubin"])
                fact |= {
                    "shared_bytes": binary.metadata.shared,
                    "registers": registers,
                    "stack_bytes": stack,
                    "error": None,
                }
            except Exception as error:  # ptxas refuses a kernel by one
                fact["error"] = f"{type(error).__name__}: {error}"
            binaries.append(fact)
    return binaries


def loss_binary(capability: int, dtype: str, *, with_grad: bool) -> dict[str, int]:
    """Compiles the kernel of the loss for a card; returns what a program of it needs. dtype: of the logits, as Triton writes it."""
    from paceline.model.kernels import LOSS_BLOCK, LOSS_WARPS, capped_nats_kernel
    from paceline.model.layers import SOFTCAP

    pointers = {"logits": dtype, "targets": "*i64", "nats": "*fp32", "grad_scale": "*fp32"}
    sizes = dict.fromkeys(("row_stride", "width", "vocab_size"), "i32")
    constants = {"CAP_WIDTH": 2 * SOFTCAP, "WITH_GRAD": with_grad, "HAS_SCALE": True, "BLOCK": LOSS_BLOCK}
    return kernel_binary(capability, capped_nats_kernel, pointers | sizes, constants, warps=LOSS_WARPS)


def cast_binary(capability: int, dtype: str, element: str, *, rows: bool, columns: bool) -> dict[str, int]:
    """Compiles the kernel that casts to fp8. element: e4m3 or e5m2."""
    from paceline.model.formats import SMALLEST_AMAX
    from paceline.model.kernels import CAST_WARPS, TILE, cast_kernel

    codes, largest, normal, mantissa = {
        "e4m3": ("*fp8e4nv", 448.0, 2.0**-6, 3),
        "e5m2": ("*fp8e5", 57_344.0, 2.0**-14, 2),
    }[element]
    arguments = {"x": dtype, "rows": codes, "columns": codes, "amax": "*fp32", "height": "i32", "width": "i32"}
    constants = {"LARGEST": largest, "NORMAL": normal, "MANTISSA": mantissa, "SMALLEST": SMALLEST_AMAX}
    constants |= {"ROWS": rows, "COLUMNS": columns, "TILE": TILE}
    return kernel_binary(capability, cast_kernel, arguments, constants, warps=CAST_WARPS)


def largest_binary(capability: int, dtype: str) -> dict[str, int]:
    """Compiles the kernel that looks for the largest value."""
    from paceline.model.kernels import AMAX_BLOCK, AMAX_BLOCKS, largest_kernel

    arguments = {"x": dtype, "largest": "*i32", "numel": "i64"}
    return kernel_binary(capability, largest_kernel, arguments, {"BLOCK": AMAX_BLOCK, "BLOCKS": AMAX_BLOCKS}, warps=4)


def kernel_binary(
    capability: int, kernel: Any, arguments: dict[str, str], constants: dict[str, Any], *, warps: int
) -> dict[str, int]:
    """Compiles one of paceline's kernels; arguments: their types as Triton writes them, all divisible by 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = [*arguments, *constants]
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in arguments}
    source = ASTSource(
        kernel,
        {**arguments, **dict.fromkeys(constants, "constexpr")},
        {(names.index(name),): value for name, value in constants.items()},
        aligned,
    )
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    registers, stack = resources(binary.asm["cubin"])
    return {
        "registers": registers,
        "stack_bytes": stack,
        "shared_bytes": binary.metadata.shared,
        "threads": 32 * warps,
        "widest_load": widest(binary.asm["ptx"], "ld"),
        "widest_store": widest(binary.asm["ptx"], "st"),
    }


def widest(ptx: str, what: str) -> int:
    """Returns the bytes that one thread loads or stores at most at once."""
    found = re.findall(rf"{what}\.global(?:\.\w+)*\.v(\d)\.b(\d+)", ptx)
    return max((int(count) * int(bits) // 8 for count, bits in found), default=0)


def resources(cubin: bytes) -> tuple[int, int]:
    """Returns the registers of a thread, and the bytes of its stack, where registers are spilled to."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    match = USAGE.search(text)
    assert match, text
    return int(match[1]), int(match[2])


def set_triton_driver(capability: int) -> None:
    """Tells Triton which card is there."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    card = CARDS[capability]
    properties = {
        "max_shared_mem": card.shared_bytes,
        "multiprocessor_count": card.processors,
        "warpSize": 32,
        "max_num_regs": 65_536,
    }
    driver.set_active(
        SimpleNamespace(
            utils=SimpleNamespace(get_device_properties=lambda device: properties),
            launcher_cls=None,
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
            get_current_device=lambda: 0,
            set_current_device=lambda device: None,
            get_current_stream=lambda device: 0,
            get_active_torch_device=lambda: torch.device("cuda", 0),
            get_device_interface=lambda: torch.cuda,
            is_active=lambda: True,
        )
    )
