"""What the status makes of an engine's last words. The texts are those of vLLM 0.32 and huggingface_hub at work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_operator.status.last_words import LIMIT, find_cause

TRACEBACK = """  File "/x/vllm/engine/arg_utils.py", line 2838, in create_engine_config
    config = VllmConfig(
             ^^^^^^^^^^^
"""
CORE_FAILED = """  File "/x/vllm/v1/engine/utils.py", line 1431, in wait_for_engine_startup
    raise RuntimeError(
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}
/x/multiprocessing/resource_tracker.py:224: UserWarning: resource_tracker: There appear to be 2 leaked
  warnings.warn('resource_tracker: There appear to be %d '
"""


@pytest.mark.parametrize(
    ("message", "reason", "words", "remedy"),
    [
        # The connector's plugin writes one line; the kubelet hands it on.
        (
            "RuntimeError: Worker failed with error 'Available memory on node 0 (19.46/23.54 GiB) on kv cache "
            "allocation is less than requested memory for kv (100.0 GiB). Decrease it.', please check the stack trace "
            "above for the root cause",
            "OutOfMemory",
            "Available memory on node 0 (19/23 GiB) on kv cache allocation is less than requested memory for kv (100 "
            "GiB). Decrease it",
            "tensorParallelSize",
        ),
        (
            "ValueError: To serve at least one request with the model's max seq len (512), (0.0 GiB KV cache is "
            "needed, which is larger than the available KV cache memory (0.0 GiB). Based on the available memory, ...",
            "OutOfMemory",
            "max seq len (512)",
            "spec.model.maxLength",
        ),
        (
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
            "OutOfMemory",
            "No available memory",
            "--gpu-memory-utilization",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.31 GiB. GPU 0 has a total capacity of "
            "79.11 GiB of which 1.02 GiB is free. Process 4711 has 78.08 GiB memory in use.",
            "OutOfMemory",
            "allocate 2 GiB. GPU 0 has a total capacity of 79 GiB of which 1 GiB is free. Process ... has 78 GiB",
            "tensorParallelSize",
        ),
        (
            "RuntimeError: Worker failed with error 'vLLM is 0.30: this connector supports 0.32 and 0.33, use an image "
            "of such a version', please check the stack trace above for the root cause",
            "ContainerCrashing",
            "vLLM is 0.30: this connector supports 0.32 and 0.33, use an image of such a version",
            "kubectl logs",
        ),
        (
            "bidikv_runtime.connector.compatibility.UnsupportedEngineError: prefix caching is off: start vLLM with ...",
            "ContainerCrashing",
            "prefix caching is off",
            "change what the sentence names",
        ),
        # The end of the log, where nothing else was written.
        (
            TRACEBACK + "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n"
            "  Value error, Total number of attention heads (4) must be divisible by tensor parallel size (3). "
            "[type=value_error, input_value=ArgsKwargs((), {'model_co... 'shutdown_timeout': 0})]\n"
            "    For further information visit https://errors.pydantic.dev/2.14/v/value_error\n",
            "ContainerCrashing",
            "Total number of attention heads (4) must be divisible by tensor parallel size (3)",
            "kubectl logs",
        ),
        (
            TRACEBACK + "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            "  Value error, User-specified max_model_len (99) is greater than the derived max_model_len (1). [type=",
            "ContainerCrashing",
            "User-specified max_model_len (99)",
            "lower spec.model.maxLength",
        ),
        (
            "[--gdn-prefill-backend {flashinfer,triton}]\n                     [model_tag]\n"
            "api_server.py: error: unrecognized arguments: --no-such-flag\n",
            "ContainerCrashing",
            "unrecognized arguments: --no-such-flag",
            "correct the role's extraArgs",
        ),
        (
            TRACEBACK + "OSError: You are trying to access a gated repo.\n"
            "Make sure to have access to it at https://huggingface.co/org/gated.\n403 Client Error.\n\n"
            "Cannot access gated repo for url http://hub/org/gated/resolve/main/config.json.\n",
            "ModelAccessDenied",
            "You are trying to access a gated repo. Make sure to have access",
            "tokenSecretName",
        ),
        (
            TRACEBACK + "OSError: There was a specific connection error when trying to load org/private:\n"
            "Client error '401 Unauthorized' for url 'http://hub/org/private/resolve/main/config.json'\n\n"
            "Invalid credentials in Authorization header\n",
            "ModelAccessDenied",
            "401 Unauthorized",
            "tokenSecretName",
        ),
        (
            TRACEBACK + "OSError: org/absent is not a local folder and is not a valid model identifier listed on "
            "'https://huggingface.co/models'\nIf this is a private repository, make sure to pass a token\n",
            "ModelNotFound",
            "org/absent is not a local folder",
            "tokenSecretName",
        ),
        (
            TRACEBACK
            + "OSError: abc is not a valid git identifier (branch name, tag name or commit id) that exists for "
            "this model name. Check the model page.\n",
            "ModelNotFound",
            "abc is not a valid git identifier",
            "huggingFace.revision",
        ),
        (
            TRACEBACK + "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or "
            "'namespace/repo_name': '/models/none'. Use `repo_type` argument if needed.\n",
            "ModelNotFound",
            "'/models/none'",
            "that folder of the volume or image",
        ),
        (
            TRACEBACK + "OSError: We couldn't connect to 'http://10.1.2.3:18198' to load the files, and couldn't find "
            "them in the cached files.\n",
            "ModelHubUnreachable",
            "We couldn't connect to",
            "egress policy",
        ),
        (
            "(EngineCore pid=20964) ERROR 11-30 01:59:04 [core.py:1510] ValueError: something new\n",
            "ContainerCrashing",
            "ValueError: something new",
            "kubectl logs",
        ),
        # The kernel killed the engine core, not the container's first process.
        (
            CORE_FAILED.replace("'EngineCore': 1", "'EngineCore_DP0': -9"),
            "OutOfMemory",
            "Failed core proc(s): {'EngineCore_DP0': -9}",
            "the pod's memory",
        ),
    ],
)
def test_causes(message: str, reason: str, words: str, remedy: str) -> None:
    cause = find_cause(message)
    assert cause is not None
    assert cause.reason == reason
    assert words in cause.words
    assert remedy in cause.remedy


@pytest.mark.parametrize("message", ["", CORE_FAILED, "INFO something\nGoodbye\n"])
def test_words_that_do_not_tell(message: str) -> None:
    assert find_cause(message) is None


def test_two_attempts_sound_the_same() -> None:
    first = "(EngineCore pid=1) RuntimeError: at 0x7f12ab34 pid=77 2026-01-01 10:00:00 from 10.0.0.1:43210"
    second = "(EngineCore pid=22) RuntimeError: at 0x7f99cd00 pid=78 2026-01-01 10:05:00 from 10.0.0.1:43999"
    assert find_cause(first) == find_cause(second)


@given(st.text(max_size=3000))
def test_any_text_is_borne(message: str) -> None:
    cause = find_cause(message)
    assert cause is None or (0 < len(cause.words) <= LIMIT and "\n" not in cause.words)
