"""The environment of runs in tests, of their Ray cluster, too."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    # vLLM's engine runs the model itself, and no third process has to import vLLM.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
