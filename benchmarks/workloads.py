"""The benchmarks: each against what people use today, in the order of the table."""

from benchmarks import bench_tree, competitors
from benchmarks.workload import Row, Workload

WORKLOADS = (
    Workload(
        "pad_left",
        competitors.prepare_pad_left,
        (
            Row(
                "pad_left, 1,024 lists to 4,096, against Python padding + torch.tensor",
                "python",
                "agl_fast",
                20,
            ),
            Row(
                "… against torch.tensor per sequence + pad_sequence + mask",
                "pad_sequence",
                "agl_fast",
                5,
            ),
            Row("… against Hugging Face tokenizer.pad", "tokenizer.pad", "agl_fast", 10),
        ),
        rounds=5,
    ),
    Workload(
        "pad_left_lists",
        competitors.prepare_pad_left_lists,
        (Row("list to list, against Python padding", "python", "agl_fast", 1.2),),
        rounds=15,
    ),
    Workload(
        "single_calls",
        competitors.prepare_single_calls,
        (
            Row(
                "256 rollouts × 1 call, P4096 R2048, lists, fresh memory, against 0.3.0",
                "agentlightning",
                "fresh",
                50,
            ),
            Row("… buffers reused", "agentlightning", "reused", None),
        ),
        rounds=9,
    ),
    Workload(
        "growing",
        competitors.prepare_growing,
        (
            Row(
                "256 × 10 calls growing to 16k, P4096 R34384, lists, buffers reused, against 0.3.0",
                "agentlightning",
                "lists, reused",
                25,
            ),
            Row("… fresh memory", "agentlightning", "lists, fresh", 8),
            Row("… from int32 arrays, buffers reused", "agentlightning", "arrays, reused", 90),
            Row(
                "… from int32 arrays, jagged, buffers reused",
                "agentlightning",
                "arrays, jagged, reused",
                150,
            ),
            Row(
                "… from int32 arrays, jagged, fresh memory",
                "agentlightning",
                "arrays, jagged, fresh",
                None,
            ),
        ),
        rounds=7,
    ),
    Workload(
        "separate_lists",
        competitors.prepare_separate_lists,
        (
            Row(
                "64 × 10 calls, lists that share no int, buffers reused, against 0.3.0",
                "agentlightning",
                "reused",
                None,
            ),
        ),
        rounds=4,
    ),
    Workload(
        "fill",
        competitors.prepare_fill,
        (
            Row(
                "fill alone against memset of the same bytes, warm, 1 thread each",
                "memset",
                "finish",
                1.2,
                at_most=True,
            ),
        ),
        rounds=15,
        threads=1,
    ),
    Workload(
        "jagged",
        competitors.prepare_jagged,
        (
            Row(
                "jagged batch from int32 arrays, buffers reused, against verl's conversion",
                "verl",
                "reused",
                30,
            ),
            Row("… fresh memory", "verl", "fresh", None),
        ),
        rounds=7,
    ),
    Workload(
        "parse",
        competitors.prepare_parse,
        (Row("parse_token_ids, 8k ids, against json.loads", "json.loads", "agl_fast", 10),),
        rounds=200,
    ),
    Workload(
        "traces",
        competitors.prepare_traces,
        (
            Row(
                "real traces, lists, trim=True, fresh memory, against 0.3.0 at the same widths",
                "agentlightning",
                "fresh",
                15,
            ),
            Row("… buffers reused", "agentlightning", "reused", None),
        ),
        rounds=7,
    ),
    *bench_tree.WORKLOADS,
    Workload(
        "cuda",
        competitors.prepare_cuda,
        (
            Row(
                "the batch on the device, against building it on the host and copying it",
                "copied",
                "expanded",
                None,
            ),
        ),
        rounds=7,
        needs_cuda=True,
    ),
)
