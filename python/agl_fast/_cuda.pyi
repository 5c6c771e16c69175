"""The CUDA kernels. Addresses are ``Tensor.data_ptr()``, streams ``Stream.cuda_stream``."""

def device_count() -> int: ...
def expand(
    flat: int,
    counts: tuple[int, int, int, int, int],
    prompt_width: int,
    response_width: int,
    pad_token_id: int,
    *,
    outputs: dict[str, int],
    stream: int,
) -> None: ...
def pad(
    values: int,
    offsets: int,
    rows: int,
    width: int,
    pad_token_id: int,
    *,
    left: bool,
    ids: int,
    mask: int,
    stream: int,
) -> None: ...
