"""Where a step went, from traces as torch.profiler writes them: microseconds, and Kineto's categories and arguments."""

import pytest
from rows import with_rows

from paceline.plan.breakdown import break_down, memory_by_kind

HOST, AUTOGRAD = 100, 101  # threads
ENDS = {"load": 100, "forward": 300, "backward": 500, "reduce": 700, "update": 1000}


def span(category: str, name: str, start: float, end: float, thread: int = HOST, **args: object) -> dict:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start,
        "dur": end - start,
        "pid": 1,
        "tid": thread,
        "args": args,
    }


def op(name: str, start: float, end: float, thread: int = HOST) -> dict:
    return span("cpu_op", name, start, end, thread)


def step(ends: dict[str, float]) -> list[dict]:
    """One step of the profiler, with the ranges of its phases."""
    starts = [0, *ends.values()]
    ranges = [
        span("user_annotation", f"paceline.{name}", *at)
        for name, at in zip(ends, zip(starts, ends.values(), strict=False), strict=True)
    ]
    return [span("user_annotation", "ProfilerStep#4", 0, starts[-1]), *ranges]


def launched(
    number: int, name: str, at: float, start: float, end: float, *, thread: int = HOST, category: str = "kernel"
) -> list[dict]:
    """A kernel, and the call at `at` that launched it."""
    call = span("cuda_runtime", "cudaLaunchKernel", at, at + 2, thread, correlation=number)
    return [call, span(category, name, start, end, 7, correlation=number, stream=7, device=0)]


GPU_STEP = [
    *step(ENDS),
    op("aten::to", 10, 60),
    *launched(1, "Memcpy HtoD (Pinned -> Device)", 20, 50, 90, category="gpu_memcpy"),
    op("aten::linear", 108, 124), op("aten::mm", 110, 120),
    *launched(2, "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN", 112, 120, 320),
    op("aten::scaled_dot_product_attention", 130, 160),
    *launched(3, "void pytorch_flash::flash_fwd_kernel<...>", 140, 320, 370),
    op("_SumOfNats", 170, 200), op("aten::mm", 175, 185),
    *launched(4, "nvjet_tst_192x192_64x4_1x2_h_bz_coopA_TNT", 176, 370, 400),
    op("autograd::engine::evaluate_function: _RMSNormBackward", 310, 330, AUTOGRAD),
    op("aten::mul", 312, 320, AUTOGRAD),
    *launched(5, "void at::native::vectorized_elementwise_kernel<4, ...>", 314, 400, 500, thread=AUTOGRAD),
    op("c10d::_reduce_scatter_base_", 340, 360, AUTOGRAD),
    *launched(6, "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(...)", 345, 450, 600, thread=AUTOGRAD),
    op("aten::sum", 503, 508),
    *launched(7, "void at::native::reduce_kernel<512, 1, ...>", 504, 600, 640),
    span("cuda_runtime", "cudaStreamSynchronize", 510, 650),
    op("aten::_foreach_mul_", 705, 715),
    *launched(8, "void at::native::multi_tensor_apply_kernel<...>", 706, 720, 900),
    op("c10d::_allgather_base_", 730, 740),
    *launched(9, "ncclDevKernel_AllGather_RING_LL(...)", 732, 850, 1000),
]  # fmt: skip


def test_a_gpu_step_is_its_kernels_then_messages_that_nothing_hides_and_what_the_host_did_while_nothing_ran():
    result = break_down(GPU_STEP)
    assert result["parts"] == {
        "matmuls": 0.2, "attention": 0.05, "elementwise": 0.1, "loss": 0.03, "gradients": 0.04, "optimizer": 0.18,
        "gradients sent": 0.1, "weights sent": 0.1, "data": 0.1, "host": pytest.approx(0.04), "synchronizing": 0.06,
    }  # fmt: skip
    assert sum(result["parts"].values()) == pytest.approx(result["step_ms"]) == pytest.approx(1.0)
    assert result["hidden_ms"] == pytest.approx(0.1)
    assert (result["launches"], result["waits"]) == (9, 0)  # the wait of `reduce` is the step's own


def test_several_steps_are_averaged_and_what_runs_outside_them_does_not_count():
    second = [
        {**event, "ts": event["ts"] + 1000, "args": {"correlation": event["args"].get("correlation", -100) + 100}}
        for event in GPU_STEP
    ]
    early = launched(999, "warm_up", -300, -200, 30)
    assert break_down([*GPU_STEP, *second, *early])["step_ms"] == 1.0
    assert sum(break_down([*GPU_STEP, *second])["parts"].values()) == pytest.approx(1.0)


def test_a_wait_for_the_device_within_a_step_is_counted():
    wait = span("cuda_runtime", "cudaStreamSynchronize", 90, 115)
    result = break_down([*GPU_STEP, wait])
    assert result["waits"] == 1
    assert result["parts"]["synchronizing"] == pytest.approx(0.08)  # and 100 to 120, in which it ended


def test_on_a_cpu_a_message_is_waited_for_where_nothing_runs_until_it_has_come():
    ends = {"load": 50, "forward": 400, "backward": 700, "reduce": 850, "update": 1000}
    result = break_down([
        *step(ends),
        op("aten::mm", 60, 300), op("aten::mul", 410, 440), op("c10d::recv_", 440, 450), op("aten::mul", 450, 600),
        span("user_annotation", "gloo:recv", 450, 800),
        op("aten::add_", 810, 850), op("aten::mul", 860, 1000),
    ])  # fmt: skip
    assert result["parts"] == pytest.approx(
        {
            "matmuls": 0.24,
            "elementwise": 0.18,
            "gradients": 0.04,
            "optimizer": 0.14,
            "gradients sent": 0.12,
            "data": 0.05,
            "host": 0.23,
        }
    )
    assert result["hidden_ms"] == pytest.approx(0.23)


@with_rows(
    ("around", "name", "part"),
    [
        ([], "aten::addmm", "matmuls"),
        (["aten::linear"], "aten::mm", "matmuls"),
        (["autograd::engine::evaluate_function: MmBackward0", "MmBackward0"], "aten::mm", "matmuls"),
        (["_CausalAttention"], "aten::baddbmm", "attention"),
        (["_CausalAttentionBackward"], "aten::copy_", "attention"),
        (["Torch-Compiled Region: 0/0"], "aten::bmm", "attention"),
        (["Torch-Compiled Region: 0/0"], "triton_tem_fused_flex_attention_0", "attention"),
        (["Torch-Compiled Region: 0/0"], "triton_per_fused_mul_pow_2", "elementwise"),
        (["_SumOfNatsBackward"], "aten::mm", "loss"),
        (["_Lookup"], "aten::embedding", "embeddings"),
        (["_LookupBackward", "paceline::embedding_gradient"], "aten::embedding_dense_backward", "embeddings"),
        (["autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"], "aten::copy_", "gradients"),
        (["_RMSNorm"], "aten::mul", "elementwise"),
        (["_RMSNorm"], None, "host"),
        ([], "record_param_comms", "gradients sent"),
    ],
)  # fmt: skip
def test_an_operation_belongs_to_the_function_around_it(around, name, part):
    names = [*around, *([name] if name else [])]
    nested = [op(name, 100 + depth, 300 - depth) for depth, name in enumerate(names)]
    parts = break_down([*step(ENDS), *nested])["parts"]
    assert parts[part] >= (198 - 2 * len(around)) / 1000


def allocation(time: float, size: int, address: int, *, device: int = 0) -> dict:
    args = {"Bytes": size, "Addr": address, "Device Type": device, "Total Allocated": 0}
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": time, "tid": HOST, "args": args}


@pytest.mark.parametrize("device", [0, 1], ids=["cpu", "cuda"])
def test_bytes_are_activations_or_gradients_by_when_they_are_made_and_freed(device):
    events = [
        allocation(120, 100, 1, device=device), allocation(350, -100, 1, device=device),  # from forward to backward
        allocation(130, 50, 2, device=device), allocation(140, -50, 2, device=device),
        allocation(340, 70, 3, device=device),  # stays
        allocation(730, 30, 4, device=device), allocation(740, -30, 4, device=device),
        allocation(745, -9999, 5, device=device),  # made before the profiler began
        *([allocation(135, 1 << 20, 6)] if device else []),  # the host's memory beside a GPU's
    ]  # fmt: skip
    assert memory_by_kind([*step(ENDS), *events]) == {
        "forward": {"activations": 100, "gradients": 0, "rest": 50},
        "backward": {"activations": 100, "gradients": 70, "rest": 0},
        "update": {"activations": 0, "gradients": 70, "rest": 30},
    }
