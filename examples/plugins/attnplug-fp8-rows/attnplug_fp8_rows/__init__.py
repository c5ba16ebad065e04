"""A KV format of 8-bit floats with a scale for each token and head."""

from attnplug.core.kv_format import KVFormat, Plane
from attnplug.registry import hookimpl

ATTNPLUG_API = (1, 1)

FP8_TOKEN_HEAD = KVFormat(
    name="fp8_token_head",
    dtype="uint8",
    planes=(
        Plane(name="data", dtype="float8_e4m3fn", per_element=1),
        Plane(name="scale", dtype="float32", per_row=1),
    ),
    codec="attnplug_fp8_rows.codec:Fp8TokenHeadCodec",
    rms_error=0.03,
    worst_error=0.0625,
)


@hookimpl
def attnplug_kv_formats() -> tuple[KVFormat, ...]:
    """The format of this package."""
    return (FP8_TOKEN_HEAD,)
